"""Muon whose momentum, and AdamW's moments beside it, take one byte a value: blocks of 256, each with a scale."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from packtrain import kernels
from packtrain.engine.ops.arrays import flatten
from packtrain.engine.ops.torch_kernels import CHUNK, chunk_bounds, torch
from packtrain.engine.optim import adamw8bit
from packtrain.engine.optim.adamw import AdamW
from packtrain.engine.optim.adamw8bit import BLOCK, AdamW8bit, code_table, coded_leaves, i8
from packtrain.engine.optim.muon import Muon
from packtrain.engine.optim.optimizer import Tensors
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, weight


@dataclass(frozen=True, slots=True)
class Muon8bit(Muon):
    """Muon with blockwise quantized momentum. arXiv 2509.23106."""

    name: ClassVar[str] = "muon8bit"
    note: ClassVar[str] = "keeps Muon's momentum in 8 bits, an eighth of AdamW's moments"
    for_others: ClassVar[type[AdamW]] = AdamW8bit

    def momentum_of(self, w: Tensor) -> Tensors:
        is_small = w.spec.size < adamw8bit.MIN_SIZE
        return Muon.momentum_of(self, w) if is_small else coded_leaves("b", w)

    def add_momentum(self, g: Tensor, states: Tensors, momentum: Tensor, gate: Tensor) -> Tensors:
        if len(states) == 1:
            return Muon.add_momentum(self, g, states, momentum, gate)
        codes, scale = states
        return opt_momentum8bit(g, codes, scale, momentum, gate)


@op(writes=(1, 2))
def opt_momentum8bit(
    g: Tensor, b: Tensor, b_scale: Tensor, momentum: Tensor, gate: Tensor
) -> tuple[Spec, ...]:
    """Update a momentum in 8 bits, b = momentum * b + gate * g; return its handles, and its value before it is rounded,
    or 0 if the gate is not finite. See opt_momentum and opt_moments_adamw8bit.

        g, value        (...)     f32   N values
        b               (B, 256)  i8    B = ceil(N / 256); codes
        b_scale         (B,)      f32   the largest size of a block; a value is scale * level of its code
        momentum, gate  ()        f32
    """
    Spec(g.shape).require(g=g)
    Spec((-(-g.spec.size // BLOCK), BLOCK), i8).require(b=b)
    Spec((b.shape[0],)).require(b_scale=b_scale)
    Spec(()).require(momentum=momentum, gate=gate)
    return b.spec, b_scale.spec, g.spec


def _add_momentum(lib, levels, limits, value, g, b, b_scale, momentum, gate):
    """Write the momentum of gradient g (N,), as codes and scales, and its exact `value` (N,); lib: numpy or torch."""
    gradient = lib.zeros_like(b, dtype=g.dtype)
    gradient.reshape(-1)[: len(g)] = g * gate
    new = momentum * adamw8bit.decode(lib, b, b_scale, levels) + gradient
    codes, scale = adamw8bit.encode(lib, new, limits)
    value[...], is_finite = 0, lib.isfinite(gate)
    for old, new_values in ((value, new.reshape(-1)[: len(g)]), (b, codes), (b_scale, scale)):
        old[...] = lib.where(is_finite, new_values, old)


@opt_momentum8bit.kernel("numpy")
def opt_momentum8bit_numpy(out, g, *inputs):
    _add_momentum(np, *code_table(True)[:2], out[2].reshape(-1), g.reshape(-1), *inputs)


@opt_momentum8bit.kernel("cpu")
def opt_momentum8bit_cpu(out, g, b, b_scale, momentum, gate):
    factors, codes = (float(momentum), float(gate)), flatten(b).view(np.uint8)
    args = flatten(out[2]), flatten(g), codes, b_scale, *factors, *code_table(True)
    kernels.update.momentum8bit(*args)


@opt_momentum8bit.kernel("torch")
def opt_momentum8bit_torch(out, g, b, b_scale, momentum, gate):
    tables = [torch.from_numpy(table).to(g.device) for table in code_table(True)[:2]]
    value, flat_g = out[2].view(-1), g.reshape(-1)
    for start, end in chunk_bounds(len(b), CHUNK // BLOCK, g):
        span, blocks = slice(start * BLOCK, end * BLOCK), (b[start:end], b_scale[start:end])
        _add_momentum(torch, *tables, value[span], flat_g[span], *blocks, momentum, gate)


@opt_momentum8bit.samples
def opt_momentum8bit_samples():
    for n, gate in ((17, 0.5), (256, np.nan), (70_000, 1.0)):
        factors = constant("momentum", np.array(0.9)), constant("gate", np.array(gate))
        leaves = coded_leaves("b", weight("w", (n,)))
        yield from opt_momentum8bit(input("g", (n,)), *leaves, *factors)
