"""Builds the tensors of one block from its weights: norms and residual sums; and how its tokens see each other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packtrain.dtypes import bf16
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, named
from packtrain.models.config import Config, Rope
from packtrain.models.lora_weights import BlockWeights, Weights

Attend = Callable[[int, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
RopeTables = Mapping[Rope | None, tuple[Tensor, Tensor]]


def _no_mixer(*_args: object) -> Tensor:
    raise NotImplementedError("the model has convolutions or scans")


@dataclass(frozen=True, slots=True)
class Mixer:
    """Functions by which tokens of a batch, or of a cache, see earlier tokens: (block index, inputs) -> output.

    attend           attention of queries, keys, values and sinks; keys and values None: those of block source_of(i)
    convolve         short convolution of x with filters; `convolve_states` is the convolution before a scan
    scan             scan of x, steps, decays and skips
    delta_rule       gated delta rule of x, decays and betas
    compute          computes blocks in place of `block.compute_block`, see tiled_block
    """

    attend: Attend
    convolve: Callable[[int, Tensor, Tensor], Tensor] = _no_mixer
    convolve_states: Callable[[int, Tensor, Tensor], Tensor] = _no_mixer
    scan: Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor] = _no_mixer
    delta_rule: Callable[[int, Tensor, Tensor, Tensor], Tensor] = _no_mixer
    is_cached: bool = False
    compute: "Callable[[BlockBuilder, Tensor, RopeTables, Mixer], Tensor] | None" = None


def apply_norm(config: Config, w: Weights, name: str, x: Tensor) -> Tensor:
    """Normalize x (..., C) with the weights of the norm `name`: (C,), or (H, C) per head."""
    weight, eps = w.get(f"{name}.weight", w.get(name)), config.rms_eps
    assert weight is not None, name
    if len(weight.shape) > 1:
        norm_op = ops.norm if config.traits.layer_norms else ops.rms_norm
        return ops.mul(norm_op(x, eps=eps), weight)
    if not config.traits.layer_norms:
        return ops.rms_norm(x, weight, eps=eps)
    return ops.norm(x, weight, w.get(f"{name}.bias"), eps=eps)


@dataclass(frozen=True, slots=True)
class BlockBuilder(BlockWeights):
    """Builds the tensors of one block, and names its activations."""

    def named(self, name: str, tensor: Tensor) -> Tensor:
        return named(f"blk.{self.block_index}.{name}", tensor)

    def linear(self, name: str, x: Tensor, acc: Tensor | None = None) -> Tensor:
        """Compute x @ weight.T (+ bias) (+ acc) for the weight `name` (rows, width): (..., width) -> (..., rows)."""
        return self.named(name, self.project(name, x, acc))

    def saved(self, x: Tensor) -> Tensor:
        """Round x to bf16 if config.saved says so, for forward as well as backward: recomputing changes no bit."""
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
        """Normalize queries and keys, [q, k] or [q] (..., heads, D), over each head's D numbers."""
        norm_names = ("attn_q_norm", "attn_k_norm")
        return [self.norm(name, self.saved(x)) for name, x in zip(norm_names, qk, strict=False)]

    def add_to_residual(self, name: str, x: Tensor, norm_name: str, h: Tensor) -> Tensor:
        """Return h + x @ weight.T; some models first normalize the product by `norm_name`, or scale it."""
        if self.config.residual_scale:
            return ops.add(ops.scale(self.linear(name, x), by=self.config.residual_scale), h)
        if not self.config.traits.post_norms:
            return self.linear(name, x, h)
        return ops.add(self.norm(norm_name, self.saved(self.linear(name, x))), h)
