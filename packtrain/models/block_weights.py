"""The weights of one block with their LoRA adapters: products, norms and residual sums, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packtrain.dtypes import RECODABLE, bf16
from packtrain.engine import ops
from packtrain.engine.ops.arrays import noise_stream
from packtrain.engine.ops.mixture import Low
from packtrain.engine.tensor import Tensor, named
from packtrain.models.activation_rounding import matmul_weight
from packtrain.models.config import Config, Rope
from packtrain.models.lora import KEY, A, B

Weights = Mapping[str, Tensor]
Attend = Callable[[int, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
RopeTables = Mapping[Rope | None, tuple[Tensor, Tensor]]


def _no_mixer(*_args: object) -> Tensor:
    raise NotImplementedError("the model has convolutions or scans")


@dataclass(frozen=True, slots=True)
class Mixer:
    """Functions by which tokens of a batch, or of a cache, see earlier tokens: (block index, inputs) -> output.

    attend           attention of queries, keys, values and sinks; keys and values None: another block's are used
    convolve         short convolution of x with filters; `convolve_states` is the convolution before a scan
    scan             scan of x, steps, decays and skips
    delta_rule       gated delta rule of x, decays and betas
    """

    attend: Attend
    convolve: Callable[[int, Tensor, Tensor], Tensor] = _no_mixer
    convolve_states: Callable[[int, Tensor, Tensor], Tensor] = _no_mixer
    scan: Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor] = _no_mixer
    delta_rule: Callable[[int, Tensor, Tensor, Tensor], Tensor] = _no_mixer
    is_cached: bool = False


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The weights of a block by their names within the block, and products with them."""

    config: Config
    w: Weights
    block_index: int

    def weight(self, name: str, suffix: str = "weight") -> Tensor:
        """Return a weight, or its rows in a fused one."""
        full_name, start, num_rows = self.config.fused_slices.get(name, (name, 0, None))
        leaf = self.w[f"blk.{self.block_index}.{full_name}.{suffix}"]
        return leaf if num_rows is None else ops.narrow(leaf, axis=0, start=start, length=num_rows)

    def _fused_name(self, name: str) -> str:
        return self.config.fused_slices.get(name, (name,))[0]

    def project(self, name: str, x: Tensor, acc: Tensor | None = None) -> Tensor:
        """Compute x @ weight.T (+ bias) (+ acc), with the weight's LoRA adapter if there is one."""
        stored = self._project_aware(name, x, acc)
        y = matmul_weight(self.config, x, self.weight(name), acc) if stored is None else stored
        if f"{self._fused_name(name)}.bias" in self.config.optional:
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
        """Multiply by weight plus adapter, rounded to the weight's blocks; None if training is not aware."""
        adapter, lora, w = self.lora_of(name), self.config.lora, self.weight(name)
        if adapter is None or lora is None or not lora.aware or w.dtype not in RECODABLE:
            return None
        (a, b, by, _), row_start = adapter, self.config.fused_slices.get(name, (name, 0, None))[1]
        both = ops.stored_sum(w, a, b, by=by, first=row_start)
        return ops.matmul_stored(x, both, a, b, acc, by=by, precision=self.config.precision)

    def tensor_name(self, name: str) -> str:
        """Return the full name of the tensor that a weight is, or is part of."""
        return f"blk.{self.block_index}.{self._fused_name(name)}.weight"

    def lora_of(self, name: str) -> Low | None:
        """Return A, B, scale and dropout function of a weight's LoRA adapter; None if there is none."""
        full_name = self.tensor_name(name)
        a, lora = self.w.get(full_name + A), self.config.lora
        if a is None or lora is None:
            return None

        def apply_dropout(x: Tensor) -> Tensor:
            p = lora.dropout
            return ops.dropout(x, self.w[KEY], p=p, stream=noise_stream(full_name)) if p else x

        return a, self.weight(name, f"weight{B}"), lora.scale(a.shape[-2]), apply_dropout


def apply_norm(config: Config, w: Weights, name: str, x: Tensor) -> Tensor:
    """Normalize x (..., C) with the weights of a norm: (C,), or (H, C) per head."""
    weight, eps = w.get(f"{name}.weight", w.get(name)), config.rms_eps
    assert weight is not None, name
    if not config.traits.layer_norms:
        if len(weight.shape) > 1:
            return ops.mul(ops.rms_norm(x, eps=eps), weight)
        return ops.rms_norm(x, weight, eps=eps)
    if len(weight.shape) > 1:
        return ops.mul(ops.norm(x, eps=eps), weight)
    return ops.norm(x, weight, w.get(f"{name}.bias"), eps=eps)


@dataclass(frozen=True, slots=True)
class BlockBuilder(BlockWeights):
    """Builds the tensors of one block, and names its activations."""

    def named(self, name: str, tensor: Tensor) -> Tensor:
        return named(f"blk.{self.block_index}.{name}", tensor)

    def linear(self, name: str, x: Tensor, acc: Tensor | None = None) -> Tensor:
        """Compute x @ weight.T (+ bias) (+ acc), named after the weight."""
        return self.named(name, self.project(name, x, acc))

    def saved(self, x: Tensor) -> Tensor:
        """Round x as saved for the backward pass; forward reads the rounded x, so that recompute changes no bit."""
        return ops.cast(ops.cast(x, dtype=bf16)) if self.config.saved == "bf16" else x

    def norm(self, name: str, x: Tensor) -> Tensor:
        y = apply_norm(self.config, self.w, f"blk.{self.block_index}.{name}", x)
        return self.named(name, y)

    def project_heads(self, name: str, x: Tensor, num_heads: int) -> Tensor:
        """Compute x @ weight.T split into heads, (..., num_heads, D)."""
        y = self.linear(name, x)
        if self.config.traits.joint_qk_norms and name != "attn_v":
            y = self.norm(f"{name}_norm", self.saved(y))
        return ops.reshape(y, shape=(*y.shape[:-1], num_heads, y.shape[-1] // num_heads))

    def norm_heads(self, qk: list[Tensor]) -> list[Tensor]:
        """Normalize queries, and keys if there are any, per head."""
        norm_names = ("attn_q_norm", "attn_k_norm")
        return [self.norm(name, self.saved(x)) for name, x in zip(norm_names, qk, strict=False)]

    def add_to_residual(self, name: str, x: Tensor, norm_name: str, h: Tensor) -> Tensor:
        """Add x @ weight.T to h, normalized or scaled before the sum if the model does so."""
        if self.config.residual_scale:
            return ops.add(ops.scale(self.linear(name, x), by=self.config.residual_scale), h)
        if not self.config.traits.post_norms:
            return self.linear(name, x, h)
        return ops.add(self.norm(norm_name, self.saved(self.linear(name, x))), h)
