"""ggml's first types: blocks of 32 values with one scale, and an offset in q4_1 and q5_1.

Quantized bit for bit as ggml's reference. Formats: ggml-common.h.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import CodeLayout, DtypeFamily, block_dtype

f32 = np.float32
q4_0 = block_dtype("q4_0", 2, 32, 18, layout=CodeLayout(32, 16, -8, (0,), 2))
q4_1 = block_dtype("q4_1", 3, 32, 20, layout=CodeLayout(32, 16, None, (0, 2), 4))
q5_0 = block_dtype("q5_0", 6, 32, 22, layout=CodeLayout(32, 32, -16, (0,), 6, high=2, high_runs=4))
q5_1_layout = CodeLayout(32, 32, None, (0, 2), 8, high=4, high_runs=4)
q5_1 = block_dtype("q5_1", 7, 32, 24, layout=q5_1_layout)
q8_0 = block_dtype("q8_0", 8, 32, 34, layout=CodeLayout(32, 255, -127, (0,), 2))
q4_0.mix("Q4_0", 2, first_ffn_down_weighted=q4_1)
q4_1.mix("Q4_1", 3)
q5_0.mix("Q5_0", 8, first_ffn_down_weighted=q5_1)
q5_1.mix("Q5_1", 9)
q8_0.mix("Q8_0", 7)
SMALL_BLOCKS = DtypeFamily((q4_0, q4_1, q5_0, q5_1))  # codes of four bits, and perhaps a fifth


@q4_0.unpack
def unpack_q4_0(y, block):
    d, q = intrinsics.half_at(block, 0), intrinsics.bytes_at(block, 2)
    intrinsics.store(y, 0, intrinsics.to_floats((q & 15) - 8) * d)
    intrinsics.store(y, 16, intrinsics.to_floats((q >> 4) - 8) * d)


@SMALL_BLOCKS.pack
def pack(dtype):
    """Return the function that packs 32 f32 at an address into a block of this type."""
    codes_at, fifth_at, max_code = dtype.layout.quads, dtype.layout.high, dtype.layout.num_codes - 1
    zero_code = -(dtype.layout.low or 0)

    def pack_block(block, src):
        if zero_code:
            low, d = f32(0), intrinsics.extreme(src, 32) / f32(-zero_code)
        else:
            low, max_value = intrinsics.bounds(src)
            d = (max_value - low) / f32(max_code)
            intrinsics.put_half(block, 1, low)
        intrinsics.put_half(block, 0, d)
        inverse, offset = intrinsics.reciprocal(d), f32(zero_code + 0.5)
        fifth_bits = intrinsics.put_codes(
            block + codes_at, src, low, inverse, offset, f32(max_code)
        )
        if fifth_at:
            intrinsics.put_word(block + fifth_at, 0, fifth_bits)

    return pack_block


@q4_1.unpack
def unpack_q4_1(y, at):
    d, m, q = intrinsics.half_at(at, 0), intrinsics.half_at(at, 1), intrinsics.bytes_at(at, 4)
    intrinsics.store(y, 0, intrinsics.to_floats(q & 15) * d + m)
    intrinsics.store(y, 16, intrinsics.to_floats(q >> 4) * d + m)


@q5_0.unpack
def unpack_q5_0(y, block):
    d, q = intrinsics.half_at(block, 0), intrinsics.bytes_at(block, 6)
    high = intrinsics.spread_bits(intrinsics.word_at(block + 2, 0)) >> intrinsics.lane_numbers()
    intrinsics.store(y, 0, intrinsics.to_floats(((q & 15) | ((high & 1) << 4)) - 16) * d)
    intrinsics.store(y, 16, intrinsics.to_floats(((q >> 4) | ((high >> 12) & 16)) - 16) * d)


@q5_1.unpack
def unpack_q5_1(y, at):
    d, m, q = intrinsics.half_at(at, 0), intrinsics.half_at(at, 1), intrinsics.bytes_at(at, 8)
    high = intrinsics.spread_bits(intrinsics.word_at(at + 4, 0)) >> intrinsics.lane_numbers()
    intrinsics.store(y, 0, intrinsics.to_floats((q & 15) | ((high & 1) << 4)) * d + m)
    intrinsics.store(y, 16, intrinsics.to_floats((q >> 4) | ((high >> 12) & 16)) * d + m)


@q8_0.unpack
def unpack_q8_0(y, block):
    d = intrinsics.half_at(block, 0)
    intrinsics.store(y, 0, intrinsics.to_floats(intrinsics.chars_at(block, 2)) * d)
    intrinsics.store(y, 16, intrinsics.to_floats(intrinsics.chars_at(block, 18)) * d)


@q8_0.dot
def dot_q8_0(x, w, n):
    total_sums = intrinsics.splat(0.0)
    for p in range(0, n, 256):
        a, b = intrinsics.splat(0.0), intrinsics.splat(0.0)
        for i in range(p, min(p + 256, n), 32):
            d = intrinsics.half_at(w, 0)
            low = intrinsics.to_floats(intrinsics.chars_at(w, 2)) * d
            high = intrinsics.to_floats(intrinsics.chars_at(w, 18)) * d
            a = intrinsics.fma(low, intrinsics.load(x, i), a)
            b = intrinsics.fma(high, intrinsics.load(x, i + 16), b)
            w += 34
        total_sums += a + b
    return intrinsics.total(total_sums)


@q8_0.pack
def pack_q8_0(block, src):
    low, high = intrinsics.load(src, 0), intrinsics.load(src, 16)
    sizes = intrinsics.maximum(intrinsics.absolute(low), intrinsics.absolute(high))
    d = intrinsics.largest(sizes) / f32(127)
    intrinsics.put_half(block, 0, d)
    intrinsics.put_rounded(block + 2, src, intrinsics.reciprocal(d))
    intrinsics.put_rounded(block + 18, src + 64, intrinsics.reciprocal(d))
