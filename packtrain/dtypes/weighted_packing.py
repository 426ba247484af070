"""Packing with a weight for each column of a matrix, as from an importance matrix: ggml's search, bit for bit.

The error of a value counts by its column's weight, more so where the value is large. `w` are the weights of the n
blocks of a row.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.intrinsics import (
    Ints,
    code,
    load,
    part,
    peek,
    poke,
    put_bytes,
    put_half,
    scratch,
)
from packtrain.dtypes.k import put_scale_bits, q2_K, q3_K, q4_K, q5_K, q6_K, scale_and_least
from packtrain.dtypes.k_small import put_2, put_3, put_six_bits, settle
from packtrain.dtypes.legacy import q4_0, q4_1, q5_0, q5_1

f32 = np.float32
FIRST, STEP, TRIALS = f32(-0.9), f32(0.05), 36  # of lines


@code
def sum_of_squares(x: int, n: int) -> f32:
    """One after the other, as ggml adds them."""
    sum_squares = f32(0)
    for i in range(n):
        sum_squares += peek(x, i) * peek(x, i)
    return sum_squares


@code
def weigh(to: int, x: int, w: int, n: int, spread: f32) -> f32:
    """Weights of n values: w * sqrt(spread + x * x); returns their sum."""
    weight_sum = f32(0)
    for i in range(0, n, 16):
        v = load(x, i)
        intrinsics.store(to, i, load(w, i) * intrinsics.sqrt(v * v + spread))
    for i in range(n):
        weight_sum += peek(to, i)
    return weight_sum


# ---- blocks with one scale ---------------------------------------------------------------------------------------


@part
def put_32(y: int, codes: int) -> int:
    """The low four bits of 32 codes; returns the fifth ones."""
    first, second = intrinsics.to_bits(load(codes, 0)), intrinsics.to_bits(load(codes, 16))
    put_bytes(y, 0, (first & 15) | ((second & 15) << 4))
    return intrinsics.set_lanes(first & 16) | (intrinsics.set_lanes(second & 16) << 16)


@q4_0.weigh
def weigh_q4_0(y, x, w, n):
    weights, codes, spread = scratch(32), scratch(32), sum_of_squares(x, n * 32) / f32(n * 32)
    for b in range(n):
        to, at = y + b * 18, x + b * 128
        weigh(weights, at, w + b * 128, 32, spread)
        put_half(to, 0, intrinsics.even(at, weights, 32, 8, codes))
        put_32(to + 2, codes)


@q5_0.weigh
def weigh_q5_0(y, x, w, n):
    weights, codes, spread = scratch(32), scratch(32), sum_of_squares(x, n * 32) / f32(n * 32)
    for b in range(n):
        to, at = y + b * 22, x + b * 128
        weigh(weights, at, w + b * 128, 32, spread)
        put_half(to, 0, intrinsics.even(at, weights, 32, 16, codes))
        intrinsics.put_word(to + 2, 0, put_32(to + 6, codes))


@q4_1.weigh
def weigh_q4_1(y, x, w, n):
    weights, codes, spread = scratch(32), scratch(32), sum_of_squares(x, n * 32) / f32(n * 32)
    for b in range(n):
        to, at = y + b * 20, x + b * 128
        weigh(weights, at, w + b * 128, 32, spread)
        scale, low = intrinsics.sloped(at, weights, 32, 15, codes, FIRST, STEP, TRIALS, 0)
        put_half(to, 0, scale)
        put_half(to, 1, low)
        put_32(to + 4, codes)


@q5_1.weigh
def weigh_q5_1(y, x, w, n):
    weights, codes, spread = scratch(32), scratch(32), sum_of_squares(x, n * 32) / f32(n * 32)
    for b in range(n):
        to, at = y + b * 24, x + b * 128
        weigh(weights, at, w + b * 128, 32, spread)
        scale, low = intrinsics.sloped(at, weights, 32, 31, codes, FIRST, STEP, TRIALS, 0)
        put_half(to, 0, scale)
        put_half(to, 1, low)
        intrinsics.put_word(to + 4, 0, put_32(to + 8, codes))


# ---- blocks with parts -------------------------------------------------------------------------------------------


@q2_K.weigh
def weigh_q2_K(y, x, w, n):
    weights, codes = scratch(16), scratch(256)
    sums, scales, lows, numbers = scratch(16), scratch(16), scratch(16), scratch(16)
    for b in range(n):
        to, at = y + b * 84, x + b * 1024
        spread = sum_of_squares(at, 256) / f32(256)
        for i in range(16):
            group = at + i * 64
            poke(sums, i, weigh(weights, group, w + b * 1024 + i * 64, 16, spread))
            scale, low = intrinsics.sloped(
                group, weights, 16, 3, codes + i * 64, FIRST, STEP, TRIALS, 0
            )
            poke(scales, i, scale)
            poke(lows, i, -low)
        put_half(to, 40, intrinsics.above(scales, sums, 16, 15, numbers))
        put_half(to, 41, intrinsics.above(lows, sums, 16, 15, scales))
        put_bytes(
            to, 0, intrinsics.to_bits(load(numbers, 0)) | (intrinsics.to_bits(load(scales, 0)) << 4)
        )
        put_2(to, at, codes)


@q3_K.weigh
def weigh_q3_K(y, x, w, n):
    weights, codes, sums = scratch(16), scratch(256), scratch(16)
    scales, numbers = scratch(16), scratch(16)
    for b in range(n):
        to, at = y + b * 110, x + b * 1024
        spread = f32(2) * sum_of_squares(at, 256) / f32(256)
        for i in range(16):
            group = at + i * 64
            poke(sums, i, weigh(weights, group, w + b * 1024 + i * 64, 16, spread))
            poke(scales, i, intrinsics.even(group, weights, 16, 4, codes + i * 64))
        put_half(to, 54, intrinsics.even(scales, sums, 16, 32, numbers))
        put_six_bits(to, numbers)
        put_3(to, at, codes)


@code
def put_weighed_scales(y: int, x: int, w: int, most: int, codes: int) -> None:
    """The first 16 bytes of a q4_K or q5_K block, and its codes to `codes`, as f32."""
    weights, sums, scales, lows = scratch(32), scratch(16), scratch(16), scratch(16)
    numbers, lowest = scratch(16), scratch(16)
    spread = f32(2) * sum_of_squares(x, 256) / f32(256)
    for i in range(8):
        group = x + i * 128
        poke(sums, i, weigh(weights, group, w + i * 128, 32, spread))
        scale, low = intrinsics.sloped(
            group, weights, 32, most, codes + i * 128, FIRST, STEP, TRIALS, 0
        )
        poke(scales, i, scale)
        poke(lows, i, -low)
    put_half(y, 0, intrinsics.above(scales, sums, 8, 63, numbers))
    put_half(y, 1, intrinsics.above(lows, sums, 8, 63, lowest))
    for i in range(4):
        scale, scale_4 = int(peek(numbers, i)), int(peek(numbers, i + 4))
        put_scale_bits(y, i, scale, int(peek(lowest, i)), scale_4, int(peek(lowest, i + 4)))
    for i in range(8):
        d, offset = scale_and_least(y, i)
        for lane in range(0, 128, 64):
            at = i * 128 + lane
            settle(codes + at, x + at, d, offset, f32(0), f32(most))


@part
def sixteen(codes: int, i: int) -> Ints:
    return intrinsics.to_bits(load(codes, i))


@q4_K.weigh
def weigh_q4_K(y, x, w, n):
    codes = scratch(256)
    for b in range(n):
        to = y + b * 144
        put_weighed_scales(to, x + b * 1024, w + b * 1024, 15, codes)
        for i in range(0, 256, 64):
            for lane in range(0, 32, 16):
                low, high = sixteen(codes, i + lane), sixteen(codes, i + 32 + lane)
                put_bytes(to + 16 + i // 2, lane, low | (high << 4))


@q5_K.weigh
def weigh_q5_K(y, x, w, n):
    codes = scratch(256)
    for b in range(n):
        to = y + b * 176
        put_weighed_scales(to, x + b * 1024, w + b * 1024, 31, codes)
        for lane in range(0, 32, 16):
            top = intrinsics.spread_bits(0)
            for i in range(0, 8, 2):
                at = i * 32 + lane
                low, high = sixteen(codes, at), sixteen(codes, at + 32)
                top = top | (low >> 4 << i) | (high >> 4 << (i + 1))
                put_bytes(to + 48 + i * 16, lane, (low & 15) | ((high & 15) << 4))
            put_bytes(to + 16, lane, top)


@code
def put_6(y: int, codes: int) -> None:
    """The codes of a q6_K block."""
    for half in range(2):
        for lane in range(0, 32, 16):
            i = half * 128 + lane
            c0, c1 = sixteen(codes, i), sixteen(codes, i + 32)
            c2, c3 = sixteen(codes, i + 64), sixteen(codes, i + 96)
            low, high = y + half * 64 + lane, y + 128 + half * 32 + lane
            put_bytes(low, 0, (c0 & 15) | ((c2 & 15) << 4))
            put_bytes(low, 32, (c1 & 15) | ((c3 & 15) << 4))
            put_bytes(high, 0, (c0 >> 4) | (c1 >> 4 << 2) | (c2 >> 4 << 4) | (c3 >> 4 << 6))


@q6_K.weigh
def weigh_q6_K(y, x, w, n):
    codes, scales = scratch(256), scratch(16)
    for b in range(n):
        to, at = y + b * 210, x + b * 1024
        for i in range(16):
            group = i * 64
            poke(
                scales, i, intrinsics.even(at + group, w + b * 1024 + group, 16, 32, codes + group)
            )
        furthest = intrinsics.extreme(scales, 16)
        if abs(furthest) < f32(1e-15):
            for i in range(210):
                intrinsics.put_byte(to, i, 0)
            continue
        inverse = f32(-128) / furthest
        put_half(to, 104, f32(1) / inverse)
        for i in range(16):
            intrinsics.put_byte(to, 192 + i, intrinsics.whole(inverse * peek(scales, i), 127))
            d = intrinsics.half_at(to, 104) * f32(intrinsics.char_at(to, 192 + i))
            settle(codes + i * 64, at + i * 64, d, f32(0), f32(-32), f32(31))
        put_6(to, codes)
