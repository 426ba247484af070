"""Stochastic gradient descent, with momentum on request."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from packtrain import kernels
from packtrain.common.options import OPTIMIZER
from packtrain.engine import ops
from packtrain.engine.ops.arrays import flatten, floats
from packtrain.engine.ops.torch_kernels import real, torch
from packtrain.engine.optim import weights
from packtrain.engine.optim.optimizer import Optimizer, StepInputs, Tensors, moment
from packtrain.engine.optim.weights import decay_axes, stored, write
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require, state


@op(writes=(0,))
def opt_momentum(b: Tensor, g: Tensor, momentum: Tensor, gate: Tensor) -> tuple[Spec, ...]:
    """b = momentum * b + gate * g; nothing changes if gate is not finite. Returns the new handle of b.

    b, g            (...)  f32
    momentum, gate  ()     f32
    """
    Spec(g.shape).require(b=b, g=g)
    Spec(()).require(momentum=momentum, gate=gate)
    return (b.spec,)


@opt_momentum.kernel("numpy")
def opt_momentum_numpy(out, b, g, momentum, gate):
    if np.isfinite(gate):
        b[...] = momentum * b + gate * g


@opt_momentum.kernel("cpu")
def opt_momentum_cpu(out, b, g, momentum, gate):
    if np.isfinite(gate):
        kernels.update.momentum(flatten(b), flatten(g), float(momentum), float(gate))


@opt_momentum.kernel("torch")
def opt_momentum_torch(out, b, g, momentum, gate):
    torch.where(gate.isfinite(), (b * momentum).add_(g * gate), b, out=b)


@opt_momentum.samples
def opt_momentum_samples():
    for n, gate in ((1, 1.0), (17, 0.5), (64, np.nan), (70_000, 1.0)):
        factors = constant("momentum", np.array(0.9)), constant("gate", np.array(gate))
        yield from opt_momentum(state("b", (n,)), input("g", (n,)), *factors)


def hyper_number(hyper: Tensor, index: int) -> Tensor:
    """Return number `index` of the step's numbers hyper (N,), as a tensor ()."""
    return ops.reshape(ops.narrow(hyper, axis=0, start=index, length=1), shape=())


@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """Gradient descent with decoupled decay of tensors with some axes; without momentum it has no state. With a
    momentum of u, steps go along b = u b + g, or with Nesterov's along g + u b, as torch.optim.SGD."""

    name: ClassVar[str] = "sgd"
    note: ClassVar[str] = "keeps no moments and needs less memory"
    hyper: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "momentum")
    kernels: ClassVar[tuple[str, ...]] = ("elementwise", "update")
    by_parts: ClassVar[bool] = True

    lr: float = 1e-1
    weight_decay: float = 0.0
    decay_axes: int = decay_axes()
    momentum: float = OPTIMIZER(0.0, "SGD: momentum", min_value=0, max_value=0.9999)
    nesterov: bool = OPTIMIZER(False, "SGD: Nesterov momentum", requires="momentum")

    def numbers(self, t: int, lr: float) -> tuple[float, ...]:
        return lr, self.weight_decay, self.momentum

    def states(self, w: Tensor) -> Tensors:
        return (moment("b", w),) if self.momentum else ()

    def update(self, w: Tensor, g: Tensor, *states: Tensor, step_inputs: StepInputs) -> Tensors:
        gate, handles = step_inputs.gate, tuple[Tensor, ...]()
        for b in states:
            share = hyper_number(step_inputs.hyper, 2)
            handles = opt_momentum(b, g, share, gate)
            (direction,) = handles
            g = ops.add(ops.mul(g, gate), ops.mul(direction, share)) if self.nesterov else direction
            gate = ops.div(gate, gate)  # 1, or NaN
        lr_and_decay = ops.narrow(step_inputs.hyper, axis=0, start=0, length=2)
        op_inputs = w, g, lr_and_decay, gate, step_inputs.key(w)
        return *handles, *opt_step_sgd(
            *op_inputs, decay=len(w.shape) >= self.decay_axes, stream=weights.stream_of(w)
        )

    def without_decay(self) -> Optimizer:
        return replace(self, weight_decay=0.0)


@op(writes=(0,))
def opt_step_sgd(
    w: Tensor, g: Tensor, hyper: Tensor, gate: Tensor, key: Tensor | None = None, *, decay: bool, stream: int = 0,
) -> tuple[Spec, ...]:  # fmt: skip
    """Make one step of gradient descent; return the new handle of w. ggml_opt_step_sgd.

    w = w (1 - lr * weight_decay) - rate * gate * g

        w      (...)  f32, or bf16: stochastic rounding by uniform(seed, step, stream, index)
        g      (...)  f32
        hyper  (2,)   f32   lr, weight_decay; rate = lr, or the third of (3,) numbers
        gate   ()     f32   see clip_gate; nothing changes if it is not finite
        key    (2,)   i64   seed and step, only for bf16
    """
    weights.require_weight(w, key, g)
    fact = f"hyper is {hyper.spec}; it must be f32[2] or f32[3]: lr, weight_decay, rate"
    require(hyper.spec in (Spec((2,)), Spec((3,))), fact)
    Spec(()).require(gate=gate)
    return (w.spec,)


@opt_step_sgd.kernel("numpy")
def opt_step_sgd_numpy(out, w, g, hyper, gate, key, *, decay, stream):
    if np.isfinite(gate):
        (lr, weight_decay), rate = hyper[:2], hyper[2 if len(hyper) == 3 else 0]
        decayed = floats(w) * (1 - lr * weight_decay * decay)
        write(w, decayed - rate * (g * gate), key, stream)


@opt_step_sgd.kernel("cpu")
def opt_step_sgd_cpu(out, w, g, hyper, gate, key, *, decay, stream):
    kind, data, rounding_key = stored(w, key, stream)
    kernels.update.sgd(kind, data, flatten(g), hyper, float(decay), flatten(gate), rounding_key)


@opt_step_sgd.kernel("torch")
def opt_step_sgd_torch(out, w, g, hyper, gate, key, *, decay, stream):
    (lr, weight_decay), rate = hyper[:2], hyper[2 if len(hyper) == 3 else 0]
    fine = gate.isfinite()
    for start, (w_chunk, grad) in weights.parts_of(w, g):
        decayed = real(w_chunk) * (1 - lr * weight_decay * decay)
        weights.write_torch(w_chunk, decayed - (grad * gate).mul_(rate), key, stream, start, fine)


@opt_step_sgd.samples
def opt_step_sgd_samples():
    for numbers in ([1e-2, 0.1], [1e-2, 0.1, 0.02]):
        hyper = constant("hyper", np.array(numbers))
        for w, key, gate, decay in weights.sampled():
            g = input("g", w.shape)
            yield from opt_step_sgd(w, g, hyper, gate, key, decay=decay, stream=7)
