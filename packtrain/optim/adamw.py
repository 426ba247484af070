"""AdamW: two moments for each value, and decoupled weight decay."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32
from packtrain.ops.arrays import flat, floats
from packtrain.ops.costs import Cost
from packtrain.ops.torch import real, torch
from packtrain.optim.optimizer import Given, Optimizer, moment
from packtrain.optim.weights import (
    decay_axes,
    parts_of,
    sampled,
    stored,
    stream_of,
    want_weight,
    write,
    write_torch,
)
from packtrain.settings import TRAINING
from packtrain.tensor import Spec, Tensor, constant, input, op, state, want

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "1 - beta1**t", "1 - beta2**t")


@dataclass(frozen=True, slots=True)
class AdamW(Optimizer):
    """AdamW with decoupled decay of tensors with some axes. Loshchilov & Hutter, arXiv 1711.05101."""

    name: ClassVar[str] = "adamw"
    hyper: ClassVar[tuple[str, ...]] = HYPER
    kernels: ClassVar[tuple[str, ...]] = ("update",)
    by_parts: ClassVar[bool] = True

    lr: float = 1e-3
    beta1: float = TRAINING(0.9, "AdamW: decay of the first moment", least=0, most=0.9999)
    beta2: float = TRAINING(0.95, "AdamW: decay of the second moment", least=0, most=0.99999)
    eps: float = TRAINING(
        1e-8, "AdamW: added to the root of the second moment", least=1e-16, most=1
    )
    weight_decay: float = 0.1
    decay_axes: int = decay_axes()

    def numbers(self, t: int, lr: float) -> tuple[float, ...]:
        corrections = 1 - self.beta1**t, 1 - self.beta2**t
        return lr, self.beta1, self.beta2, self.eps, self.weight_decay, *corrections

    def states(self, w: Tensor) -> tuple[Tensor, ...]:
        return moment("m", w), moment("v", w)

    def update(self, w: Tensor, g: Tensor, *states: Tensor, given: Given) -> tuple[Tensor, ...]:
        m, v = states
        read = w, g, m, v, given.hyper, given.gate, given.key(w)
        return opt_step_adamw(*read, decay=len(w.shape) >= self.decay_axes, stream=stream_of(w))

    def bare(self) -> Optimizer:
        return replace(self, weight_decay=0.0)


@op(writes=(0, 2, 3))
def opt_step_adamw(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    hyper: Tensor,
    gate: Tensor,
    key: Tensor | None = None,
    *,
    decay: bool,
    stream: int = 0,
) -> tuple[Spec, ...]:
    """One AdamW step in one pass; returns the new handles of w, m and v. ggml_opt_step_adamw.

    g' = gate * g;  m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2
    w = w (1 - lr * weight_decay) - lr (m / c1) / (sqrt(v / c2) + eps)

        w        (...)  f32, or bf16: stochastic rounding by uniform(seed, step, stream, index)
        g, m, v  (...)  f32
        hyper    (7,)   f32   see HYPER: c1 and c2 are inputs, so one plan serves every step
        gate     ()     f32   see clip_gate; nothing changes if it is not finite
        key      (2,)   i64   seed and step, only for bf16
    Loshchilov & Hutter 2019, arXiv 1711.05101.
    """
    want_weight(w, key, g, m, v)
    want(
        hyper.spec == Spec((7,)),
        f"hyper is {hyper.spec}; it must be f32[7]: {', '.join(HYPER)}",
    )
    want(gate.spec == Spec(()), f"gate is {gate.spec}; it must be f32[]")
    return w.spec, m.spec, v.spec


@opt_step_adamw.kernel("numpy")
def opt_step_adamw_numpy(out, w, g, m, v, hyper, gate, key, *, decay, stream):
    if not np.isfinite(gate):
        return
    lr, beta1, beta2, eps, weight_decay, c1, c2 = hyper
    g = g * gate
    m[...] = beta1 * m + (1 - beta1) * g
    v[...] = beta2 * v + (1 - beta2) * g * g
    kept = floats(w) * (1 - lr * weight_decay * decay)
    write(w, kept - lr * (m / c1) / (np.sqrt(v / c2) + eps), key, stream)


@opt_step_adamw.kernel("cpu")
def opt_step_adamw_cpu(out, w, g, m, v, hyper, gate, key, *, decay, stream):
    kind, data, number = stored(w, key, stream)
    given = flat(g), flat(m), flat(v), hyper, float(decay), flat(gate)
    kernels.update.adamw(kind, data, *given, number)


@opt_step_adamw.kernel("torch")
def opt_step_adamw_torch(out, w, g, m, v, hyper, gate, key, *, decay, stream):
    lr, beta1, beta2, eps, weight_decay, c1, c2 = hyper.unbind()
    fine = gate.isfinite()
    for start, (part, slope, first, second) in parts_of(w, g, m, v):
        slope = slope * gate
        torch.where(fine, (first * beta1).add_(slope * (1 - beta1)), first, out=first)
        squares = slope.square_().mul_(1 - beta2)
        torch.where(fine, (second * beta2).add_(squares), second, out=second)
        step = (first / c1).mul_(lr).div_((second / c2).sqrt_().add_(eps))
        kept = real(part) * (1 - lr * weight_decay * decay)
        write_torch(part, kept.sub_(step), key, stream, start, fine)


@opt_step_adamw.cost
def opt_step_adamw_cost(out, w, *given, decay, stream):
    return Cost(
        {"exp": (2 if w.dtype == f32 else 4) * w.spec.size}
    )  # a root, two divisions, a random number


@opt_step_adamw.samples
def opt_step_adamw_samples():
    hyper = constant("hyper", np.array([1e-2, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975]))
    for w, key, gate, decay in sampled():
        g, m, v = input("g", w.shape), state("m", w.shape), state("v", w.shape)
        yield from opt_step_adamw(w, g, m, v, hyper, gate, key, decay=decay, stream=7)
