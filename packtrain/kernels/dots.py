"""Dot products of f32 with packed rows, unpacked in registers: what writing one token after the other spends.

A function per type takes (x, w, n): n f32 at an address, and as many packed values at another. n is a multiple of 32
and of the block. Formats: ggml-common.h, as in `dequantize`.
"""

from numba import types

from packtrain.kernels.bits import (
    as_floats,
    bytes_at,
    char_at,
    chars_at,
    half_at,
    halves_at,
    shorts_at,
    to_floats,
)
from packtrain.kernels.call import part
from packtrain.kernels.dequantize import (
    BF16,
    F16,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
    scale_and_least,
)
from packtrain.kernels.simd import fma, load, splat, total

i64, f32 = types.int64, types.float32
FUSED = (F16, Q4_0, Q8_0, Q4_K, Q6_K, BF16)
dotter = part(f32(i64, i64, i64), forceinline=False)


@dotter
def q4_0(x, w, n):
    a, b = splat(0.0), splat(0.0)
    for i in range(0, n, 32):
        d, q = half_at(w, 0), bytes_at(w, 2)
        a = fma(to_floats((q & 15) - 8) * d, load(x, i), a)
        b = fma(to_floats((q >> 4) - 8) * d, load(x, i + 16), b)
        w += 18
    return total(a + b)


@dotter
def q8_0(x, w, n):
    a, b = splat(0.0), splat(0.0)
    for i in range(0, n, 32):
        d = half_at(w, 0)
        a = fma(to_floats(chars_at(w, 2)) * d, load(x, i), a)
        b = fma(to_floats(chars_at(w, 18)) * d, load(x, i + 16), b)
        w += 34
    return total(a + b)


@dotter
def q4_K(x, w, n):
    a, b = splat(0.0), splat(0.0)
    for i in range(0, n, 64):
        part = i // 64 % 4
        (d, m), (e, o) = scale_and_least(w, part * 2), scale_and_least(w, part * 2 + 1)
        m, o = -m, -o
        q, r = bytes_at(w, 16 + part * 32), bytes_at(w, 32 + part * 32)
        a = fma(fma(to_floats(q & 15), d, m), load(x, i), a)
        b = fma(fma(to_floats(r & 15), d, m), load(x, i + 16), b)
        a = fma(fma(to_floats(q >> 4), e, o), load(x, i + 32), a)
        b = fma(fma(to_floats(r >> 4), e, o), load(x, i + 48), b)
        w += 144 if part == 3 else 0
    return total(a + b)


@dotter
def q6_K(x, w, n):
    a, b = splat(0.0), splat(0.0)
    for i in range(0, n, 128):
        half = i // 128 % 2
        low, high, scales, d = (
            w + half * 64,
            w + 128 + half * 32,
            w + 192 + half * 8,
            half_at(w, 104),
        )
        for lane in range(0, 32, 16):
            q, r, h, s = (
                bytes_at(low, lane),
                bytes_at(low, 32 + lane),
                bytes_at(high, lane),
                lane // 16,
            )
            v = to_floats(((q & 15) | ((h & 3) << 4)) - 32) * (d * f32(char_at(scales, s)))
            a = fma(v, load(x, i + lane), a)
            v = to_floats(((r & 15) | ((h & 12) << 2)) - 32) * (d * f32(char_at(scales, 2 + s)))
            b = fma(v, load(x, i + 32 + lane), b)
            v = to_floats(((q >> 4) | (h & 48)) - 32) * (d * f32(char_at(scales, 4 + s)))
            a = fma(v, load(x, i + 64 + lane), a)
            v = to_floats(((r >> 4) | ((h & 192) >> 2)) - 32) * (d * f32(char_at(scales, 6 + s)))
            b = fma(v, load(x, i + 96 + lane), b)
        w += 210 if half else 0
    return total(a + b)


@dotter
def f16(x, w, n):
    a, b = splat(0.0), splat(0.0)
    for i in range(0, n, 32):
        a = fma(halves_at(w, i), load(x, i), a)
        b = fma(halves_at(w, i + 16), load(x, i + 16), b)
    return total(a + b)


@dotter
def bf16(x, w, n):
    a, b = splat(0.0), splat(0.0)
    for i in range(0, n, 32):
        a = fma(as_floats(shorts_at(w, i) << 16), load(x, i), a)
        b = fma(as_floats(shorts_at(w, i + 16) << 16), load(x, i + 16), b)
    return total(a + b)


@part(f32(i64, i64, i64, i64), forceinline=False)
def dot(kind, x, w, n):
    """The dot product for a kind of FUSED."""
    if kind == Q4_0:
        return q4_0(x, w, n)
    if kind == Q8_0:
        return q8_0(x, w, n)
    if kind == Q4_K:
        return q4_K(x, w, n)
    if kind == Q6_K:
        return q6_K(x, w, n)
    if kind == F16:
        return f16(x, w, n)
    return bf16(x, w, n)
