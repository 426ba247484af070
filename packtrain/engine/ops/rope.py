"""Rotary position embedding: a table of rotations, computed once per step, and the rotation of queries and keys."""

import math
from functools import cache

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32, i32
from packtrain.engine.backends import triton
from packtrain.engine.ops.arrays import run_replayable
from packtrain.engine.ops.costs import Cost
from packtrain.engine.ops.shape import cont, narrow, reshape
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require


def _frequencies(factors, dims, base, divisor, blend):
    """Return the angle per position of each pair of elements, f64 (dims / 2,); see rope_table."""
    frequencies = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    if factors is not None:
        frequencies /= factors
    if blend is None:
        return frequencies / divisor
    blend_start, blend_end = blend
    blend_weights = np.clip((np.arange(dims // 2) - blend_start) / (blend_end - blend_start), 0, 1)
    return frequencies * (1 - blend_weights + blend_weights / divisor)


@op()
def rope_table(
    pos: Tensor, factors: Tensor | None = None, *, dims: int, base: float, divisor: float = 1.0,
    blend: tuple[float, float] | None = None, magnitude: float = 1.0, growth: tuple[float, int, int] = (0.0, 1, 0),
) -> Spec:  # fmt: skip
    """Rotations for positions: t[..., i] = m * (cos, sin)(pos * f[i]), angles in f64.

    f[i] = base**(-2i / dims) / factors[i] / divisor; with `blend` (low, high), pairs up to low are not divided, pairs
    from high on are, linearly between (YaRN: Peng et al. 2023, arXiv 2309.00071). m = magnitude * (1 + rate * ln(1 +
    (pos + offset) // length)), growth = (rate, length, offset), for queries (mistral3, llama4).

        pos      (...)               i32
        factors  (dims / 2,)         f32, or None for 1
        t        (..., dims / 2, 2)  f32
    """
    require(pos.dtype == i32, f"pos is {pos.spec}; it must be i32")
    require(dims > 0 and dims % 2 == 0, f"dims is {dims}; it must be even and positive")
    Spec((dims // 2,)).require(factors=factors)
    require(divisor > 0, f"divisor is {divisor}; it must be above 0")
    require(blend is None or blend[0] < blend[1], f"blend is {blend}; it must rise")
    return Spec((*pos.shape, dims // 2, 2))


@rope_table.kernel("numpy")
def rope_table_numpy(t, pos, factors, *, dims, base, divisor, blend, magnitude, growth):
    rate, length, offset = growth
    angles = pos[..., None].astype(np.float64) * _frequencies(factors, dims, base, divisor, blend)
    factor = magnitude
    if rate:
        factor = magnitude * (1 + rate * np.log1p((pos + offset) // length))[..., None]
    t[..., 0], t[..., 1] = factor * np.cos(angles), factor * np.sin(angles)


@rope_table.kernel("cpu")
def rope_table_cpu(t, pos, factors, *, dims, base, divisor, blend, magnitude, growth):
    frequencies = _frequencies(factors, dims, base, divisor, blend)
    table_args = t.reshape(pos.size, dims // 2, 2), pos.reshape(-1)
    call = run_replayable(kernels.rope.table, *table_args, frequencies, magnitude, *growth)
    return call if factors is None else None


@cache
def _frequencies_on_device(device, *options):
    return torch.tensor(_frequencies(None, *options).tolist(), dtype=torch.float64, device=device)


@rope_table.kernel("torch")
def rope_table_torch(t, pos, factors, *, dims, base, divisor, blend, magnitude, growth):
    pos = pos.cpu() if pos.is_mps else pos  # mps has no f64
    frequencies = _frequencies_on_device(pos.device, dims, base, divisor, blend)
    if factors is not None:
        frequencies = frequencies / factors.to(pos.device)
    rate, length, offset = growth
    angles = pos[..., None].double() * frequencies
    factor = magnitude * (1 + rate * ((pos + offset) // length).double().log1p())[..., None]
    t[..., 0].copy_(angles.cos().mul_(factor))
    t[..., 1].copy_(angles.sin_().mul_(factor))


@rope_table.cost
def rope_table_cost(t, pos, factors, **attrs):
    return Cost({"exp": 16 * t.spec.size})  # cos and sin in f64, one by one


@rope_table.samples
def rope_table_samples():
    pos = constant("pos", np.array([[0, 1, 500], [7, 2, 100_000]]), i32)
    yield rope_table(pos, dims=6, base=10_000.0)
    yield rope_table(constant("pos", np.arange(65), i32), dims=64, base=1e6)
    factors = constant("factors", 1 + np.arange(3) ** 2)
    yield rope_table(pos, factors, dims=6, base=5e5, divisor=4.0, magnitude=1.25)
    blended = {"divisor": 8.0, "blend": (0.0, 2.0), "growth": (0.1, 64, 1)}
    yield rope_table(pos, factors, dims=6, base=1e6, **blended)
    yield rope_table(pos, dims=32, base=1e4, divisor=16.0, blend=(3.0, 11.0), magnitude=0.9)


def grown(pos: Tensor, *, rate: float, length: int, offset: int = 0) -> Tensor:
    """Return 1 + rate * ln(1 + (pos + offset) // length), (..., 1) f32: a factor of queries, growing with position."""
    growth = rate, length, offset
    table = rope_table(pos, dims=2, base=1.0, divisor=math.inf, growth=growth)
    pairs = reshape(table, shape=(*pos.shape, 2))
    return cont(narrow(pairs, axis=len(pos.shape), start=0, length=1))


@op(inplace=(0,))
def rope(x: Tensor, table: Tensor, *, neox: bool = False, inverse: bool = False) -> Spec:
    """Rotate pairs of x by the table: (a, b) -> (a cos - b sin, a sin + b cos).

    Pairs are (2i, 2i + 1), or (i, i + R / 2) with `neox`; elements beyond R pass through. `inverse` rotates back.

        x      (..., H, D)      f32
        table  (..., R / 2, 2)  f32, R <= D, leading axes as x's without H
        y      (..., H, D)      f32
    Su et al. 2021, arXiv 2104.09864; ggml_rope, ggml_rope_ext; `inverse` is ggml_rope_ext_back.
    """
    shape, table_shape = x.spec.shape, table.spec.shape
    Spec(shape).require(x=x)
    fits = len(shape) >= 2 and table_shape[:-2] == shape[:-2] and table_shape[-1:] == (2,)
    fact = f"x is {{}} and table is {{}}; it must be f32{[*shape[:-2], 'R/2', 2]}"
    require(fits and table.spec.dtype == f32, fact, x, table)
    fact = f"table turns {2 * table_shape[-2]} elements, x has {shape[-1]}"
    require(2 * table_shape[-2] <= shape[-1], fact)
    return x.spec


@rope.vjp
def rope_vjp(dy, y, x, table, *, neox, inverse):
    return rope(dy, table, neox=neox, inverse=not inverse), None


@rope.kernel("numpy")
def rope_numpy(y, x, table, *, neox, inverse):
    half = table.shape[-2]
    first_index, second_index = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    if neox:
        first_index, second_index = slice(half), slice(half, 2 * half)
    cos, sin = table[..., None, :, 0], table[..., None, :, 1] * (-1 if inverse else 1)
    a, b = x[..., first_index], x[..., second_index]
    rotated = a * cos - b * sin, a * sin + b * cos
    y[...] = x
    y[..., first_index], y[..., second_index] = rotated


@rope.kernel("cpu")
def rope_cpu(y, x, table, *, neox, inverse):
    n = math.prod(x.shape[:-2])
    heads = (n, *x.shape[-2:])
    arrays = y.reshape(heads), x.reshape(heads), table.reshape(n, *table.shape[-2:])
    return run_replayable(kernels.rope.rope, *arrays, neox, inverse)


@rope.kernel("torch")
def rope_torch(y, x, table, *, neox, inverse):
    half = table.shape[-2]
    pair_shape, axis = ((2, half), -2) if neox else ((half, 2), -1)
    a, b = x[..., : 2 * half].unflatten(-1, pair_shape).unbind(axis)
    cos, sin = table[..., None, :, 0], table[..., None, :, 1]
    sin = -sin if inverse else sin
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), axis)
    y.copy_(x)
    y[..., : 2 * half].unflatten(-1, pair_shape).copy_(rotated)


rope.kernel("cuda")(triton.lazy_kernel("elementwise", "rope"))


@rope.cost
def rope_cost(y, x, table, *, neox, inverse):
    # plus an overhead per head
    return Cost({"exp": 0.3 * x.spec.size + 15 * x.spec.size / x.shape[-1]})


@rope.samples
def rope_samples():
    short_sizes = (1, 1, 2, 2), (3, 2, 16, 16), (17, 3, 64, 64), (5, 2, 65, 32), (15, 1, 8, 6)
    for t, h, d, r in (*short_sizes, (90, 3, 64, 64)):
        table = rope_table(constant("pos", np.arange(t) * 3, i32), dims=r, base=10_000.0)
        for neox in (False, True):
            yield rope(input("x", (t, h, d)), table, neox=neox)
        yield rope(input("x", (t, h, d)), table, inverse=True)
