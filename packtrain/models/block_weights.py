"""The weights of one block with their LoRA adapters: products with them, norms and sums, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packtrain.dtypes import RECODABLE, bf16
from packtrain.engine import ops
from packtrain.engine.ops.arrays import noise
from packtrain.engine.ops.mixture import Low
from packtrain.engine.tensor import Tensor, named
from packtrain.models.activation_rounding import product
from packtrain.models.config import Config, Rope
from packtrain.models.lora import KEY, A, B

Weights = Mapping[str, Tensor]
Attend = Callable[[int, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
Tables = Mapping[Rope | None, tuple[Tensor, Tensor]]


def _none(*args: object) -> Tensor:
    raise NotImplementedError("the model has convolutions or scans")


@dataclass(frozen=True, slots=True)
class Mixer:
    """How tokens of a batch, or of a cache, see those before them: in attention, short convolutions and scans.

    attend  of queries, keys and values; without both, those of the block that has them for this one
    filter  the convolution before a scan
    scan    of x, steps, decays and skips
    delta   a gated delta rule of x, decays and betas
    """

    attend: Attend
    convolve: Callable[[int, Tensor, Tensor], Tensor] = _none
    filter: Callable[[int, Tensor, Tensor], Tensor] = _none
    scan: Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor] = _none
    delta: Callable[[int, Tensor, Tensor, Tensor], Tensor] = _none
    cached: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """The weights of a block by their names within it."""

    config: Config
    w: Weights
    number: int

    def weight(self, name: str, kind: str = "weight") -> Tensor:
        """A weight, or its rows in a fused one."""
        full_name, start, length = self.config.slices.get(name, (name, 0, None))
        leaf = self.w[f"blk.{self.number}.{full_name}.{kind}"]
        return leaf if length is None else ops.narrow(leaf, axis=0, start=start, length=length)

    def _within(self, name: str) -> str:
        return self.config.slices.get(name, (name,))[0]

    def product(self, name: str, x: Tensor, acc: Tensor | None = None) -> Tensor:
        """x @ weight.T (+ bias) (+ acc), with the weight's LoRA adapter if it has one."""
        stored = self._stored(name, x, acc)
        y = product(self.config, x, self.weight(name), acc) if stored is None else stored
        if f"{self._within(name)}.bias" in self.config.optional:
            y = ops.add(y, self.weight(name, "bias"))
        return self._added(name, x, y) if stored is None else y

    def _added(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """y plus the output of the weight's LoRA adapter for x, if it has one."""
        adapter, lora = self.low(name), self.config.lora
        if adapter is None or lora is None:
            return y
        a, b, by, drop = adapter
        precision, rows = self.config.precision, self.w.get(lora.input_of(self.whole(name)))
        low = ops.matmul(drop(x), a, precision=precision)
        low = ops.scale(low, by=by) if rows is None else ops.mul(low, rows)
        return ops.matmul(low, b, y, precision=precision)

    def _stored(self, name: str, x: Tensor, acc: Tensor | None) -> Tensor | None:
        """The product with weight and adapter as one matrix in the weight's blocks; None if it is not wanted so."""
        adapter, lora, w = self.low(name), self.config.lora, self.weight(name)
        if adapter is None or lora is None or not lora.aware or w.dtype not in RECODABLE:
            return None
        (a, b, by, _), first = adapter, self.config.slices.get(name, (name, 0, None))[1]
        both = ops.stored_sum(w, a, b, by=by, first=first)
        return ops.matmul_stored(x, both, a, b, acc, by=by, precision=self.config.precision)

    def whole(self, name: str) -> str:
        """The tensor that a weight is, or is part of."""
        return f"blk.{self.number}.{self._within(name)}.weight"

    def low(self, name: str) -> Low | None:
        """A, B and scale of a weight's LoRA adapter, and its dropout function; None if it has none."""
        full_name = self.whole(name)
        a, lora = self.w.get(full_name + A), self.config.lora
        if a is None or lora is None:
            return None

        def drop(x: Tensor) -> Tensor:
            p = lora.dropout
            return ops.dropout(x, self.w[KEY], p=p, stream=noise(full_name)) if p else x

        return a, self.weight(name, f"weight{B}"), lora.scale(a.shape[-2]), drop


def normalized(config: Config, w: Weights, name: str, x: Tensor) -> Tensor:
    """x (..., C) normalized with these weights, (C,) or, of heads, (H, C)."""
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
class Block(Part):
    """Builds one block, and names its activations."""

    def named(self, name: str, tensor: Tensor) -> Tensor:
        return named(f"blk.{self.number}.{name}", tensor)

    def linear(self, name: str, x: Tensor, acc: Tensor | None = None) -> Tensor:
        """x @ weight.T (+ bias) (+ acc)."""
        return self.named(name, self.product(name, x, acc))

    def saved(self, x: Tensor) -> Tensor:
        """x as the backward pass will read it: all read the rounded value, so that recomputation changes no bit."""
        return ops.cast(ops.cast(x, dtype=bf16)) if self.config.saved == "bf16" else x

    def norm(self, name: str, x: Tensor) -> Tensor:
        y = normalized(self.config, self.w, f"blk.{self.number}.{name}", x)
        return self.named(name, y)

    def heads(self, name: str, x: Tensor, count: int) -> Tensor:
        """x @ weight.T by heads, (..., count, D)."""
        y = self.linear(name, x)
        if self.config.traits.whole_norms and name != "attn_v":
            y = self.norm(f"{name}_norm", self.saved(y))
        return ops.reshape(y, shape=(*y.shape[:-1], count, y.shape[-1] // count))

    def norm_heads(self, qk: list[Tensor]) -> list[Tensor]:
        names = ("attn_q_norm", "attn_k_norm")
        return [self.norm(name, self.saved(x)) for name, x in zip(names, qk, strict=False)]

    def join(self, name: str, x: Tensor, norm: str, h: Tensor) -> Tensor:
        """h + x @ weight.T, normalized or scaled before the sum if the model does so."""
        if self.config.residual_scale:
            return ops.add(ops.scale(self.linear(name, x), by=self.config.residual_scale), h)
        if not self.config.traits.post_norms:
            return self.linear(name, x, h)
        return ops.add(self.norm(norm, self.saved(self.linear(name, x))), h)
