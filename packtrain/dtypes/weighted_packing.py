"""Pack with a weight for each column of a matrix, as from an importance matrix: ggml's search, bit for bit.

The error of a value counts by its column's weight, more so where the value is large. `w` are the weights of a block,
`spread` is the mean square of its row.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.intrinsics import load, peek, poke, put_bytes, put_half, scratch
from packtrain.dtypes.k import (
    put_scale_bits, q2_K, q3_K, q4_K, q5_K, q6_K, scale_and_min, write_q4_K_codes, write_q5_K_codes, write_q6_K_codes,
)  # fmt: skip
from packtrain.dtypes.k_small import put_q2_K_codes, put_q3_K_codes, put_q3_K_scales, requantize
from packtrain.dtypes.legacy import SMALL_BLOCKS

f32 = np.float32
FIRST, STEP, NUM_TRIALS = f32(-0.9), f32(0.05), 36  # of lines, see kernels.scale_search.sloped


@intrinsics.compiled_function
def sum_of_squares(x: int, n: int) -> f32:
    """Return the sum of squares of n values, added one after the other, as ggml does."""
    sum_squares = f32(0)
    for i in range(n):
        sum_squares += peek(x, i) * peek(x, i)
    return sum_squares


@intrinsics.compiled_function
def put_value_weights(weights: int, x: int, w: int, n: int, spread: f32) -> f32:
    """Write w * sqrt(spread + x * x), the error weights of n f32 at x, to `weights`; returns their sum."""
    weight_sum = f32(0)
    for i in range(0, n, 16):
        v = load(x, i)
        intrinsics.store(weights, i, load(w, i) * intrinsics.sqrt(v * v + spread))
    for i in range(n):
        weight_sum += peek(weights, i)
    return weight_sum


# ---- blocks with one scale ---------------------------------------------------------------------------------------


@intrinsics.part
def put_32_codes(y: int, codes: int) -> int:
    """Write the low four bits of 32 codes, f32 at `codes`, to 16 bytes at y; returns the fifth bits, an i32."""
    first_codes, second = intrinsics.to_bits(load(codes, 0)), intrinsics.to_bits(load(codes, 16))
    put_bytes(y, 0, (first_codes & 15) | ((second & 15) << 4))
    return intrinsics.set_lanes(first_codes & 16) | (intrinsics.set_lanes(second & 16) << 16)


@SMALL_BLOCKS.weigh
def weigh(dtype):
    """Return the function that packs 32 f32 at an address into a block, with weights of their errors."""
    codes_at, fifth_at, max_code = dtype.layout.quads, dtype.layout.high, dtype.layout.num_codes - 1
    zero_code = -(dtype.layout.low or 0)

    def weigh_block(block, src, w, spread):
        weights, codes = scratch(32), scratch(32)
        put_value_weights(weights, src, w, 32, spread)
        if zero_code:
            scale = intrinsics.even(src, weights, 32, zero_code, codes)
        else:
            scale, low = intrinsics.sloped(
                src, weights, 32, max_code, codes, FIRST, STEP, NUM_TRIALS, 0
            )
            put_half(block, 1, low)
        put_half(block, 0, scale)
        fifth_bits = put_32_codes(block + codes_at, codes)
        if fifth_at:
            intrinsics.put_word(block + fifth_at, 0, fifth_bits)

    return weigh_block


# ---- blocks with parts -------------------------------------------------------------------------------------------


@q2_K.weigh
def weigh_q2_K(to, src, w, _):
    weights, codes = scratch(16), scratch(256)
    sums, scales, mins, numbers = scratch(16), scratch(16), scratch(16), scratch(16)
    spread = sum_of_squares(src, 256) / f32(256)
    for i in range(16):
        group = src + i * 64
        poke(sums, i, put_value_weights(weights, group, w + i * 64, 16, spread))
        scale, min_value = intrinsics.sloped(
            group, weights, 16, 3, codes + i * 64, FIRST, STEP, NUM_TRIALS, 0
        )
        poke(scales, i, scale)
        poke(mins, i, -min_value)
    put_half(to, 40, intrinsics.above(scales, sums, 16, 15, numbers))
    put_half(to, 41, intrinsics.above(mins, sums, 16, 15, scales))
    put_bytes(
        to, 0, intrinsics.to_bits(load(numbers, 0)) | (intrinsics.to_bits(load(scales, 0)) << 4)
    )
    put_q2_K_codes(to, src, codes)


@q3_K.weigh
def weigh_q3_K(block, src, w, _):
    weights, codes, sums = scratch(16), scratch(256), scratch(16)
    scales, scale_codes = scratch(16), scratch(16)
    spread = f32(2) * sum_of_squares(src, 256) / f32(256)
    for i in range(16):
        group = src + i * 64
        poke(sums, i, put_value_weights(weights, group, w + i * 64, 16, spread))
        poke(scales, i, intrinsics.even(group, weights, 16, 4, codes + i * 64))
    put_half(block, 54, intrinsics.even(scales, sums, 16, 32, scale_codes))
    put_q3_K_scales(block, scale_codes)
    put_q3_K_codes(block, src, codes)


@intrinsics.compiled_function
def put_weighted_scales(y: int, x: int, w: int, max_code: int, codes: int) -> None:
    """Write the first 16 bytes of a q4_K or q5_K block at y for 256 f32 at x, weights w, and f32 codes to `codes`."""
    weights, sums, scales, mins = scratch(32), scratch(16), scratch(16), scratch(16)
    scale_codes, min_codes = scratch(16), scratch(16)
    spread = f32(2) * sum_of_squares(x, 256) / f32(256)
    for i in range(8):
        group = x + i * 128
        poke(sums, i, put_value_weights(weights, group, w + i * 128, 32, spread))
        scale, min_value = intrinsics.sloped(
            group, weights, 32, max_code, codes + i * 128, FIRST, STEP, NUM_TRIALS, 0
        )
        poke(scales, i, scale)
        poke(mins, i, -min_value)
    put_half(y, 0, intrinsics.above(scales, sums, 8, 63, scale_codes))
    put_half(y, 1, intrinsics.above(mins, sums, 8, 63, min_codes))
    for i in range(4):
        scale, scale_4 = int(peek(scale_codes, i)), int(peek(scale_codes, i + 4))
        put_scale_bits(y, i, scale, int(peek(min_codes, i)), scale_4, int(peek(min_codes, i + 4)))
    for i in range(8):
        d, offset = scale_and_min(y, i)
        for lane in range(0, 128, 64):
            value_index = i * 128 + lane
            requantize(codes + value_index, x + value_index, d, offset, f32(0), f32(max_code))


@q4_K.weigh
def weigh_q4_K(y, x, w, _):
    codes = scratch(256)
    put_weighted_scales(y, x, w, 15, codes)
    write_q4_K_codes(y, codes)


@q5_K.weigh
def weigh_q5_K(y, x, w, _):
    codes = scratch(256)
    put_weighted_scales(y, x, w, 31, codes)
    write_q5_K_codes(y, codes)


@q6_K.weigh
def weigh_q6_K(block, src, w, _):
    codes, scales = scratch(256), scratch(16)
    for i in range(16):
        group = i * 64
        weights = w + group
        poke(scales, i, intrinsics.even(src + group, weights, 16, 32, codes + group))
    extreme_scale = intrinsics.extreme(scales, 16)
    if abs(extreme_scale) < f32(1e-15):
        for i in range(210):
            intrinsics.put_byte(block, i, 0)
        return
    inverse = f32(-128) / extreme_scale
    put_half(block, 104, f32(1) / inverse)
    for i in range(16):
        scale_code = intrinsics.rounded_int(inverse * peek(scales, i), 127)
        intrinsics.put_byte(block, 192 + i, scale_code)
        d = intrinsics.half_at(block, 104) * f32(intrinsics.char_at(block, 192 + i))
        requantize(codes + i * 64, src + i * 64, d, f32(0), f32(-32), f32(31))
    write_q6_K_codes(block, codes)
