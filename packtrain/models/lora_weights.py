"""The weights of a block with their LoRA pairs A and B: products x @ W.T + scale * (x @ A.T) @ B.T, by name."""

from collections.abc import Mapping
from dataclasses import dataclass

from packtrain.dtypes import RECODABLE
from packtrain.engine import ops
from packtrain.engine.ops.arrays import noise_stream
from packtrain.engine.ops.routing import Low
from packtrain.engine.tensor import Tensor
from packtrain.models.activation_rounding import matmul_weight
from packtrain.models.config import Config
from packtrain.models.lora import KEY, A, B

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The weights of a block by their names within the block, and products with them."""

    config: Config
    w: Weights
    block_index: int
    slices: Mapping[str, tuple[str, int, int]]  # parts of fused weights, see Config.fused_slices

    def weight(self, name: str, suffix: str = "weight") -> Tensor:
        """Return a block's weight `name`, such as attn_q, or its rows in a fused weight; `suffix` may be bias."""
        full_name, start, num_rows = self.slices.get(name, (name, 0, None))
        leaf = self.w[f"blk.{self.block_index}.{full_name}.{suffix}"]
        return leaf if num_rows is None else ops.narrow(leaf, axis=0, start=start, length=num_rows)

    def _name_in_file(self, name: str) -> str:
        return self.slices.get(name, (name,))[0]

    def project(self, name: str, x: Tensor, acc: Tensor | None = None) -> Tensor:
        """Compute x @ weight.T (+ bias) (+ acc), with the weight's LoRA adapter if there is one."""
        stored = self._project_aware(name, x, acc)
        y = matmul_weight(self.config, x, self.weight(name), acc) if stored is None else stored
        if f"{self._name_in_file(name)}.bias" in self.config.optional:
            y = ops.add(y, self.weight(name, "bias"))
        return self._add_lora(name, x, y) if stored is None else y

    def _add_lora(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Add to y the output of the weight's LoRA adapter for x, if there is one."""
        adapter, lora = self.lora_of(name), self.config.lora
        if adapter is None or lora is None:
            return y
        a, b, by, dropout = adapter
        precision, rows = self.config.precision, self.w.get(lora.input_of(self.tensor_name(name)))
        lora_output = ops.matmul(dropout(x), a, precision=precision)
        lora_output = ops.scale(lora_output, by=by) if rows is None else ops.mul(lora_output, rows)
        return ops.matmul(lora_output, b, y, precision=precision)

    def _project_aware(self, name: str, x: Tensor, acc: Tensor | None) -> Tensor | None:
        """Compute x @ V.T (+ acc), V = W + adapter rounded as an --aware merge stores it; None without --aware."""
        adapter, lora, w = self.lora_of(name), self.config.lora, self.weight(name)
        if adapter is None or lora is None or not lora.aware or w.dtype not in RECODABLE:
            return None
        (a, b, by, _), row_start = adapter, self.slices.get(name, (name, 0, None))[1]
        both = ops.stored_sum(w, a, b, by=by, first=row_start)
        return ops.matmul_stored(x, both, a, b, acc, by=by, precision=self.config.precision)

    def tensor_name(self, name: str) -> str:
        """Return the full name of the tensor that a weight is, or is part of."""
        return f"blk.{self.block_index}.{self._name_in_file(name)}.weight"

    def lora_of(self, name: str) -> Low | None:
        """Return (A, B, scale, dropout function) of a weight's LoRA adapter; None if there is none."""
        full_name = self.tensor_name(name)
        a, lora = self.w.get(full_name + A), self.config.lora
        if a is None or lora is None:
            return None

        def apply_dropout(x: Tensor) -> Tensor:
            p = lora.dropout
            return ops.dropout(x, self.w[KEY], p=p, stream=noise_stream(full_name)) if p else x

        return a, self.weight(name, f"weight{B}"), lora.scale(a.shape[-2]), apply_dropout
