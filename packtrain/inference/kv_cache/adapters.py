"""Scales of adapters that each sequence of a context has chosen, see models.model_with_adapters."""

from collections.abc import Sequence

import numpy as np

from packtrain.inference.kv_cache.cell_pools import ContextError
from packtrain.models.lora import Lora


class Adapters:
    """`scales` (sequences, adapters): 0, without them, in the beginning. They hold for tokens read from then on."""

    def __init__(self, lora: Lora | None, sequences: int) -> None:
        owners = {} if lora is None else lora.inputs()
        self._owners = {name: np.array(own) for own, name in owners.items()}
        count = 1 + max((int(own.max()) for own in self._owners.values()), default=-1)
        self.scales = np.zeros((sequences, count))

    def set(self, seqs: Sequence[int], scales: Sequence[Sequence[float]]) -> None:
        """Choose the scales of sequences. Raises ContextError if there are more adapters, or fewer."""
        wanted = self.scales.shape[1]
        given = next((len(own) for own in scales if len(own) != wanted), wanted)
        if given != wanted:
            raise ContextError(
                f"{given} scales of adapters are given; there are {wanted} to choose"
            )
        for seq, own in zip(seqs, scales, strict=False):
            self.scales[seq] = own

    def inputs(self, sets: Sequence[tuple[int, ...]], size: int) -> dict[str, np.ndarray]:
        """Of a run of `size` tokens with these sequences: the scales of each token, those of its first sequence."""
        found = np.zeros((size, self.scales.shape[1]), np.float32)
        found[: len(sets)] = self.scales[[own[0] for own in sets]]
        return {name: found[:, own] for name, own in self._owners.items()}
