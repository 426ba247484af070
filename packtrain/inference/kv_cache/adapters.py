"""The scales of LoRA adapters that each sequence of a context has chosen, see models.model_with_adapters."""

from collections.abc import Sequence

import numpy as np

from packtrain.inference.kv_cache.cell_pools import ContextError
from packtrain.models.lora import Lora


class AdapterScales:
    """The scale of each adapter for each sequence, `scales` (sequences, adapters), 0 at first."""

    def __init__(self, lora: Lora | None, sequences: int) -> None:
        input_names = {} if lora is None else lora.scale_inputs()
        self._owners = {name: np.array(indices) for indices, name in input_names.items()}
        count = 1 + max((int(indices.max()) for indices in self._owners.values()), default=-1)
        self.scales = np.zeros((sequences, count))

    def set(self, seqs: Sequence[int], scales_by_seq: Sequence[Sequence[float]]) -> None:
        """Set the scales of sequences. Raises ContextError unless there is a scale for each adapter."""
        num_adapters = self.scales.shape[1]
        for num_scales in map(len, scales_by_seq):
            if num_scales != num_adapters:
                fact = f"{num_scales} scales of adapters are given"
                raise ContextError(f"{fact}; there are {num_adapters} to choose")
        for seq, seq_scales in zip(seqs, scales_by_seq, strict=False):
            self.scales[seq] = seq_scales

    def inputs(self, sets: Sequence[tuple[int, ...]], size: int) -> dict[str, np.ndarray]:
        """Return inputs of a run of `size` tokens, by name: each token's scales, of its first sequence in `sets`."""
        token_scales = np.zeros((size, self.scales.shape[1]), np.float32)
        token_scales[: len(sets)] = self.scales[[indices[0] for indices in sets]]
        return {name: token_scales[:, indices] for name, indices in self._owners.items()}
