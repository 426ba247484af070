"""Momentum: a running sum of gradients, for the optimizers that step along it."""

import numpy as np

from packtrain import kernels
from packtrain.engine.ops.arrays import flatten
from packtrain.engine.ops.shape import narrow, reshape
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, state


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
    """Return number `index` of a step: hyper (N,), y ()."""
    return reshape(narrow(hyper, axis=0, start=index, length=1), shape=())
