"""Rotary positions: a table of cosines and sines, and the rotation by it, forward and back."""

import math

from llvmlite import ir
from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import each, kernel, part, spans
from packtrain.kernels.simd import BITS, LANES, address, fma, in3, load_part, neg, out3

i64, f32, f64, void = types.int64, types.float32, types.float64, types.void
SERIAL = 1 << 14
BLOCK = 1 << 13
frequencies = types.Array(f64, 1, "C", readonly=True)


def picking(lanes, count):
    """An intrinsic that picks lanes of one vector, or of two (the second counts from 16)."""

    def emit(builder, *vectors):
        return builder.shuffle_vector(vectors[0], vectors[-1], ir.Constant(BITS, lanes))

    return simd.lanewise(emit, count)


twice_even = picking([i - i % 2 for i in range(LANES)], 1)
twice_odd = picking([i - i % 2 + 1 for i in range(LANES)], 1)
swap_pairs = picking([i + 1 - i % 2 * 2 for i in range(LANES)], 1)
alternate = picking([i + i % 2 * LANES for i in range(LANES)], 2)
evens = picking([2 * i for i in range(LANES)], 2)
odds = picking([2 * i + 1 for i in range(LANES)], 2)


@kernel(void(out3, simd.ids1, frequencies, f64, f64, i64, i64, i64))
def table_row(t, pos, inv_freq, magnitude, rate, length, offset, i):
    scale = magnitude
    if rate != 0:  # otherwise positions may be negative
        scale *= 1.0 + rate * math.log1p(f64((pos[i] + offset) // length))
    for j in range(inv_freq.size):
        angle = f64(pos[i]) * inv_freq[j]
        t[i, j, 0] = f32(scale * math.cos(angle))
        t[i, j, 1] = f32(scale * math.sin(angle))


@kernel(void(out3, simd.ids1, frequencies, f64, f64, i64, i64))
def table(t, pos, inv_freq, magnitude, rate, length, offset):
    """t[i, j] = scale * (cos, sin)(pos[i] * inv_freq[j]), computed in f64.

    scale = magnitude * (1 + rate * ln(1 + (pos[i] + offset) // length))

    pos       (N,)         i32
    inv_freq  (R / 2,)     f64
    t         (N, R/2, 2)  f32
    """
    if t.size <= SERIAL // 8:
        for i in range(pos.size):
            table_row(t, pos, inv_freq, magnitude, rate, length, offset, i)
    else:
        each(table_row, (t, pos, inv_freq, magnitude, rate, length, offset), pos.size)


@part(void(i64, i64, i64, i64, types.boolean))
def rotate_pairs(y, x, t, width, inverse):
    """One head, pairs (2i, 2i + 1); addresses."""
    for i in range(0, width, LANES):
        left = width - i
        v = load_part(x, i, left)
        w = load_part(t, i, left)
        s = twice_odd(w)
        if inverse:
            s = neg(s)
        simd.store_part(y, i, fma(v, twice_even(w), swap_pairs(v) * alternate(neg(s), s)), left)


@part(void(i64, i64, i64, i64, types.boolean))
def rotate_halves(y, x, t, width, inverse):
    """One head, pairs (i, i + width / 2); addresses."""
    half = width // 2
    for i in range(0, half, LANES):
        left = half - i
        a = load_part(x, i, left)
        b = load_part(x, i + half, left)
        first = load_part(t, 2 * i, 2 * left)
        second = load_part(t, 2 * i + LANES, 2 * left - LANES)
        c = evens(first, second)
        s = odds(first, second)
        if inverse:
            s = neg(s)
        simd.store_part(y, i, fma(a, c, neg(b * s)), left)
        simd.store_part(y, i + half, fma(a, s, b * c), left)


@kernel(void(out3, in3, in3, types.boolean, types.boolean, i64, i64))
def rope_rows(y, x, t, neox, inverse, start, stop):
    heads, width = x.shape[1], x.shape[2]
    rotary_width = 2 * t.shape[1]
    for row in range(start, stop):
        angles = address(t, row * rotary_width)
        for head in range(heads):
            at = (row * heads + head) * width
            if neox:
                rotate_halves(address(y, at), address(x, at), angles, rotary_width, inverse)
            else:
                rotate_pairs(address(y, at), address(x, at), angles, rotary_width, inverse)
            for i in range(rotary_width, width, LANES):
                simd.store_part(y, at + i, load_part(x, at + i, width - i), width - i)


@kernel(void(out3, in3, in3, types.boolean, types.boolean))
def rope(y, x, t, neox, inverse):
    """Rotate the first R of every head's D by the angles of its row; `inverse` by minus the angles.

    x, y  (N, H, D)    f32; y may be x
    t     (N, R/2, 2)  f32 cosines and sines, R <= D

    Pairs are (2i, 2i + 1), or (i, i + R/2) if neox. The inverse is the gradient.
    """
    n = x.shape[0]
    rows = BLOCK // (x.shape[1] * x.shape[2]) if x.size > SERIAL else n
    spans(rope_rows, (y, x, t, neox, inverse), n, rows)
