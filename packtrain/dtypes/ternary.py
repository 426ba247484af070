"""Types of three values or fewer: packed bit for bit as ggml's reference. Formats: ggml-common.h."""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import block_dtype
from packtrain.dtypes.intrinsics import I32x16, compiled_function, part
from packtrain.dtypes.k import q4_K
from packtrain.dtypes.legacy import q4_0

f32 = np.float32
tq1_0 = block_dtype("tq1_0", 34, 256, 54, smaller=q4_0)
tq2_0 = block_dtype("tq2_0", 35, 256, 66, smaller=q4_0)
q1_0, q2_0 = block_dtype("q1_0", 41, 128, 18), block_dtype("q2_0", 42, 64, 18, smaller=q4_0)
tq1_0.mix("TQ1_0", 36, token_embd=q4_K)
tq2_0.mix("TQ2_0", 37, token_embd=q4_K)
LAST_POWERS = np.repeat(np.array([1, 3, 9, 27], f32), 4)


@part
def digit(q: I32x16) -> I32x16:
    """Return the first digit, -1 to 1, of a fraction of 256 in base three."""
    return ((intrinsics.spread_bits(q) & 255) * 3 >> 8) - 1


@tq1_0.unpack
def unpack_tq1_0(y, block):
    powers = intrinsics.to_bits(intrinsics.load(LAST_POWERS, 0))
    d = intrinsics.half_at(block, 26)
    for i in range(3):  # the first two sixteens take turns, the third is by itself
        q = intrinsics.bytes_at(block, i * 16)
        first, step = (i * 16, 32) if i < 2 else (160, 16)
        for k in range(5):
            intrinsics.store(y, first + k * step, intrinsics.to_floats(digit(q)) * d)
            q = q * 3
    four = intrinsics.spread_bits(intrinsics.word_at(block + 48, 0)) >> (
        (intrinsics.lane_numbers() & 3) << 3
    )
    intrinsics.store(y, 240, intrinsics.to_floats(digit((four & 255) * powers)) * d)


@tq2_0.unpack
def unpack_tq2_0(y, block):
    d = intrinsics.half_at(block, 32)
    for i in range(0, 64, 16):
        q, first_value = intrinsics.bytes_at(block, i), i // 32 * 128 + i % 32
        for k in range(4):
            v = intrinsics.to_floats((q >> (2 * k) & 3) - 1) * d
            intrinsics.store(y, first_value + k * 32, v)


@compiled_function
def max_magnitude(x: int) -> f32:
    """Return the largest magnitude of 256 f32 at address x."""
    magnitudes = intrinsics.splat(0.0)
    for i in range(0, 256, 16):
        magnitudes = intrinsics.maximum(magnitudes, intrinsics.absolute(intrinsics.load(x, i)))
    return intrinsics.largest(magnitudes)


@part
def ternary_codes(x: int, i: int, inverse: f32) -> I32x16:
    """Return codes 0 to 2 of f32 i … i + 15 at x: times inverse, rounded to nearest, ties away from zero, plus one."""
    v = intrinsics.load(x, i) * inverse
    not_above = intrinsics.select_less(-0.5, v, 1.0, 0.0)
    return intrinsics.to_bits(intrinsics.select_less(v, 0.5, not_above, 2.0))


@part
def ternary_fraction(q: I32x16) -> I32x16:
    """Return five digits in base three as a fraction of 256, rounded up."""
    return intrinsics.to_bits(intrinsics.to_floats(intrinsics.spread_bits(q) * 256 + 242) / 243.0)


@tq1_0.pack
def pack_tq1_0(block, src):
    d = max_magnitude(src)
    inverse = intrinsics.reciprocal(d)
    intrinsics.put_half(block, 26, d)
    for i in range(3):
        first_value, step = (i * 16, 32) if i < 2 else (160, 16)
        q = intrinsics.spread_bits(0)
        for k in range(5):
            q = q * 3 + ternary_codes(src, first_value + k * step, inverse)
        intrinsics.put_bytes(block, i * 16, ternary_fraction(q))
    for i in range(4):
        packed_digits = 0
        for k in range(4):
            v = intrinsics.peek(src, 240 + i + 4 * k) * inverse
            packed_digits = packed_digits * 3 + 1 + (v >= f32(0.5)) - (v <= f32(-0.5))
        intrinsics.put_byte(block, 48 + i, (packed_digits * 768 + 242) // 243)


@tq2_0.pack
def pack_tq2_0(block, src):
    d = max_magnitude(src)
    inverse = intrinsics.reciprocal(d)
    intrinsics.put_half(block, 32, d)
    for i in range(0, 64, 16):
        q, first_value = intrinsics.spread_bits(0), i // 32 * 128 + i % 32
        for k in range(4):
            q = q | (ternary_codes(src, first_value + k * 32, inverse) << (2 * k))
        intrinsics.put_bytes(block, i, q)
