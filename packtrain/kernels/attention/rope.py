"""Rotary position embedding: a table of cosines and sines, and the rotation by it, forward and back."""

import math

from llvmlite import ir

from packtrain.kernels.runtime.jit import each_task, parallel, part
from packtrain.kernels.runtime.kernel_types import f32, f64
from packtrain.kernels.simd.simd_f32 import (
    BITS, LANES, address, fma, lanewise, load_part, neg, store_part,
)  # fmt: skip

SERIAL = 1 << 14


def pick_lanes(lane_order, num_vectors):
    """Return an intrinsic on 1 or 2 vectors: lane i gets lane lane_order[i]; those of the second count from 16."""

    def emit(builder, *vectors):
        return builder.shuffle_vector(vectors[0], vectors[-1], ir.Constant(BITS, lane_order))

    return lanewise(emit, num_vectors)


twice_even = pick_lanes([i - i % 2 for i in range(LANES)], 1)
twice_odd = pick_lanes([i - i % 2 + 1 for i in range(LANES)], 1)
swap_pairs = pick_lanes([i + 1 - i % 2 * 2 for i in range(LANES)], 1)
alternate = pick_lanes([i + i % 2 * LANES for i in range(LANES)], 2)
evens = pick_lanes([2 * i for i in range(LANES)], 2)
odds = pick_lanes([2 * i + 1 for i in range(LANES)], 2)


@each_task(
    "out3, ints1, doubles1, f64, f64, i64, i64", lambda angle_table, pos: (pos.size, 2 * angle_table.shape[1]),
    serial=SERIAL // 8,
)  # fmt: skip
def table(angle_table, pos, inv_freq, magnitude, growth_rate, length, offset, row_index):
    """angle_table[i, j] = scale * (cos, sin)(pos[i] * inv_freq[j]), computed in f64.

    scale = magnitude * (1 + growth_rate * ln(1 + (pos[i] + offset) // length))

    pos          (N,)         i32
    inv_freq     (R / 2,)     f64
    angle_table  (N, R/2, 2)  f32
    """
    scale = magnitude
    if growth_rate != 0:  # otherwise positions may be negative
        scale *= 1.0 + growth_rate * math.log1p(f64((pos[row_index] + offset) // length))
    for j in range(inv_freq.size):
        angle = f64(pos[row_index]) * inv_freq[j]
        angle_table[row_index, j, 0] = f32(scale * math.cos(angle))
        angle_table[row_index, j, 1] = f32(scale * math.sin(angle))


@part("i64, i64, i64, i64, boolean")
def rotate_pairs(y, x, angles, width, inverse):
    """Rotate pairs (2i, 2i + 1) of `width` f32 at address x to y by (cos, sin) at `angles`, or back if `inverse`."""
    for i in range(0, width, LANES):
        num_left = width - i
        v = load_part(x, i, num_left)
        w = load_part(angles, i, num_left)
        s = twice_odd(w)
        if inverse:
            s = neg(s)
        store_part(y, i, fma(v, twice_even(w), swap_pairs(v) * alternate(neg(s), s)), num_left)


@part("i64, i64, i64, i64, boolean")
def rotate_halves(y, x, angles, width, inverse):
    """Rotate pairs (i, i + width / 2) at address x to y by (cos, sin) at `angles`, or back if `inverse`."""
    half_width = width // 2
    for i in range(0, half_width, LANES):
        num_left = half_width - i
        a = load_part(x, i, num_left)
        b = load_part(x, i + half_width, num_left)
        first_angles = load_part(angles, 2 * i, 2 * num_left)
        second_angles = load_part(angles, 2 * i + LANES, 2 * num_left - LANES)
        c = evens(first_angles, second_angles)
        s = odds(first_angles, second_angles)
        if inverse:
            s = neg(s)
        store_part(y, i, fma(a, c, neg(b * s)), num_left)
        store_part(y, i + half_width, fma(a, s, b * c), num_left)


@parallel(
    "out3, in3, in3, boolean, boolean", lambda x: (x.shape[0], x.shape[1] * x.shape[2]), serial=SERIAL,
)  # fmt: skip
def rope(y, x, angle_table, is_neox, inverse, row_start, row_stop):
    """Rotate the first R of every head's D by the angles of its row; `inverse` by minus the angles.

    x, y         (N, H, D)    f32; y may be x
    angle_table  (N, R/2, 2)  f32 cosines and sines, R <= D

    Pairs are (2i, 2i + 1), or (i, i + R/2) if `is_neox`. The inverse is the gradient.
    """
    num_heads, width = x.shape[1], x.shape[2]
    rotary_width = 2 * angle_table.shape[1]
    for row in range(row_start, row_stop):
        angles = address(angle_table, row * rotary_width)
        for head in range(num_heads):
            at = (row * num_heads + head) * width
            if is_neox:
                rotate_halves(address(y, at), address(x, at), angles, rotary_width, inverse)
            else:
                rotate_pairs(address(y, at), address(x, at), angles, rotary_width, inverse)
            for i in range(rotary_width, width, LANES):
                store_part(y, at + i, load_part(x, at + i, width - i), width - i)
