"""Gated activations, rotations of queries and keys, and f32 as the sum of two bf16."""

from functools import partial

import torch
import triton
import triton.language as tl

from packtrain.engine.backends.triton import blocks, launch

BLOCK = 1024


@triton.jit
def _activation(x, TANH: tl.constexpr):
    """Return f(x) and its slope f'(x): silu, or gelu in its tanh form."""
    if TANH:
        tanh_argument = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        t = 1 - 2 / (tl.exp(2 * tanh_argument) + 1)
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * x * x)
        return 0.5 * x * (1 + t), slope
    s = 1 / (1 + tl.exp(-x))
    return x * s, s * (1 + x * (1 - s))


@triton.jit
def _gated(y, gate, up, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    """y = activation(gate) * up for a block of n elements: silu, or gelu if TANH."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    f, _ = _activation(tl.load(gate + offsets, mask=mask, other=0.0), TANH)
    tl.store(y + offsets, f * tl.load(up + offsets, mask=mask, other=0.0), mask=mask)


@triton.jit
def _gated_back(dgate, dup, dy, gate, up, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradients dgate, dup of _gated for a block of n elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    f, slope = _activation(tl.load(gate + offsets, mask=mask, other=0.0), TANH)
    d = tl.load(dy + offsets, mask=mask, other=0.0)
    gate_grad = d * tl.load(up + offsets, mask=mask, other=0.0) * slope
    tl.store(dgate + offsets, gate_grad, mask=mask)
    tl.store(dup + offsets, d * f, mask=mask)


@triton.jit
def _rotate(
    y, x, table, heads: tl.constexpr, width: tl.constexpr, half: tl.constexpr,
    NEOX: tl.constexpr, INVERSE: tl.constexpr, HAS_TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate a block of one row's pairs of x (heads, width) to y by the angles' (cos, sin) in `table` (half, 2)."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, head, i = offsets < heads * half, offsets // half, offsets % half
    first = row * heads * width + head * width + (i if NEOX else 2 * i)
    second = first + (half if NEOX else 1)
    cos = tl.load(table + row * half * 2 + 2 * i, mask=mask, other=0.0)
    sin = tl.load(table + row * half * 2 + 2 * i + 1, mask=mask, other=0.0)
    sin = -sin if INVERSE else sin
    a, b = tl.load(x + first, mask=mask, other=0.0), tl.load(x + second, mask=mask, other=0.0)
    tl.store(y + first, a * cos - b * sin, mask=mask)
    tl.store(y + second, a * sin + b * cos, mask=mask)
    if HAS_TAIL:
        left = width - 2 * half
        for start in range(tl.program_id(1) * BLOCK, heads * left, tl.num_programs(1) * BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            tail_offsets = row * heads * width + offsets // left * width + 2 * half + offsets % left
            tail_mask = offsets < heads * left
            tail = tl.load(x + tail_offsets, mask=tail_mask, other=0.0)
            tl.store(y + tail_offsets, tail, mask=tail_mask)


@triton.jit
def _split_bf16(high, low, x, n, BLOCK: tl.constexpr):
    """Write x as two bf16 of a block of n: x rounded to `high`, the rest rounded to `low`."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n, other=0.0)
    high_value = value.to(tl.bfloat16)
    tl.store(high + offsets, high_value, mask=offsets < n)
    tl.store(low + offsets, (value - high_value.to(tl.float32)).to(tl.bfloat16), mask=offsets < n)


def split_bf16(x):
    """Return two bf16 tensors that add up to about x (f32, a matrix or a transposed one): x rounded, and the rest."""
    if not x.is_contiguous() and x.mT.is_contiguous():
        return tuple(half.mT for half in split_bf16(x.mT))
    x = x.contiguous()
    high, low = (torch.empty_like(x, dtype=torch.bfloat16) for _ in range(2))
    launch(_split_bf16, (blocks(x.numel(), BLOCK),), high, low, x, x.numel(), BLOCK=BLOCK)
    return high, low


def _launch_gated(y, gate, up, tanh):
    n = y.numel()
    launch(_gated, (blocks(n, BLOCK),), y, gate, up, n, TANH=tanh, BLOCK=BLOCK)


def _launch_gated_back(out, dy, gate, up, tanh):
    n = dy.numel()
    launch(_gated_back, (blocks(n, BLOCK),), *out, dy, gate, up, n, TANH=tanh, BLOCK=BLOCK)


swiglu, geglu = (partial(_launch_gated, tanh=tanh) for tanh in (False, True))
swiglu_back, geglu_back = (partial(_launch_gated_back, tanh=tanh) for tanh in (False, True))


def rope(y, x, table, *, neox, inverse):
    (heads, width), half = x.shape[-2:], table.shape[-2]
    rows = x.numel() // max(heads * width, 1)
    options = {"NEOX": neox, "INVERSE": inverse, "HAS_TAIL": width > 2 * half, "BLOCK": 256}
    launch(_rotate, (rows, blocks(heads * half, 256)), y, x, table, heads, width, half, **options)
