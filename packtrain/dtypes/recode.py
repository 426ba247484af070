"""Write new codes into blocks that keep their scales (`recode`), and say where the bits of codes lie.

RESIDUAL_OFFSET bytes behind each value (f32) is a part of a step by which its code is moved before it is rounded to the
nearest. A group whose scale is 0 gets the codes of scale 1, which do not matter.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import DTYPES_BY_NAME, Dtype
from packtrain.dtypes.intrinsics import byte_at, half_at, load, part, put_bytes, scratch, store
from packtrain.dtypes.iq import NL, iq4_nl, iq4_xs
from packtrain.dtypes.k import (
    q2_K, q3_K, q4_K, q5_K, q6_K, scale_and_min, write_q4_K_codes, write_q5_K_codes, write_q6_K_codes,
)  # fmt: skip
from packtrain.dtypes.k_small import write_q2_K_codes, write_q3_K_codes
from packtrain.dtypes.legacy import SMALL_BLOCKS, q8_0

f32 = np.float32
RESIDUAL_OFFSET = 1024


# ---- places ----------------------------------------------------------------------------------------------------


def code_bit_numbers(dtype: Dtype) -> np.ndarray:
    """Return the bit numbers of each code in a block, (block, bits): those of the low bits, then those above."""
    layout = dtype.layout
    assert layout is not None
    num_bits = int(layout.num_codes - 1).bit_length()
    low_bits = 8 if num_bits == 8 else layout.num_low_bits
    bit_numbers = _bit_numbers(dtype.block, layout.quads, low_bits, layout.runs)
    if num_bits > low_bits:
        high = _bit_numbers(dtype.block, layout.high, num_bits - low_bits, layout.high_runs)
        bit_numbers = np.concatenate((bit_numbers, high), -1)
    return bit_numbers


def _bit_numbers(block: int, start_byte: int, bits: int, runs: int) -> np.ndarray:
    """Return the numbers of some bits of each code: neighbours lie in neighbouring bytes, at the same bits.

    After a run of bytes, the next codes lie further up in the same bytes, then in the run that follows.
    """
    element, per_byte = np.arange(block), 8 // bits
    run = block // per_byte // runs
    run_offset, slot, far = element % run, element // run % per_byte, element // (run * per_byte)
    return (8 * (start_byte + far * run + run_offset) + slot * bits)[:, None] + np.arange(bits)


CODE_BIT_NUMBERS = {t: code_bit_numbers(t) for t in DTYPES_BY_NAME.values() if t.layout}
# values of codes in steps, where they are not the codes themselves
CODE_VALUES = {iq4_nl: NL, iq4_xs: NL}
UNIT_CODE = 8  # the code that stands for 1 in that table


# ---- codes -----------------------------------------------------------------------------------------------------


@part
def nearest_codes(x: int, lane: int, d: f32, low: f32, max_code: f32) -> intrinsics.F32x16:
    """Return codes 0 … max_code, as f32, of f32 lane … lane + 15 at address x, for value = code * d + low."""
    d = d if d != 0 else f32(1)
    shifted_values = (load(x, lane) - low) / d + load(x + RESIDUAL_OFFSET, lane)
    return intrinsics.rounded(shifted_values, f32(0), max_code)


@part
def put_32(y: int, x: int, d: f32, low: f32, max_code: f32) -> int:
    """Write the low four bits of nearest_codes of 32 f32 at x to 16 bytes at y; returns the fifth bits, an i32."""
    first = intrinsics.to_bits(nearest_codes(x, 0, d, low, max_code))
    second = intrinsics.to_bits(nearest_codes(x, 16, d, low, max_code))
    put_bytes(y, 0, (first & 15) | ((second & 15) << 4))
    return intrinsics.set_lanes(first & 16) | (intrinsics.set_lanes(second & 16) << 16)


@SMALL_BLOCKS.recode
def recode(dtype):
    """Return the function that writes codes of 32 f32 at an address into a block, whose scales stay."""
    codes_at, fifth_at, max_code = dtype.layout.quads, dtype.layout.high, dtype.layout.num_codes - 1
    zero_code = -(dtype.layout.low or 0)

    def recode_block(block, x):
        d = half_at(block, 0)
        low = d * f32(-zero_code) if zero_code else half_at(block, 1)
        fifth_bits = put_32(block + codes_at, x, d, low, f32(max_code))
        if fifth_at:
            intrinsics.put_word(block + fifth_at, 0, fifth_bits)

    return recode_block


@q8_0.recode
def recode_q8_0(block, src):
    d = half_at(block, 0)
    for lane in range(0, 32, 16):
        codes = intrinsics.to_bits(nearest_codes(src, lane, d, d * f32(-127), f32(254)))
        put_bytes(block + 2, lane, codes - 127)


@q2_K.recode
def recode_q2_K(y, x):
    codes = scratch(256)
    for i in range(16):
        scale = byte_at(y, i)
        d, m = half_at(y + 80, 0) * f32(scale & 15), half_at(y + 80, 1) * f32(scale >> 4)
        store(codes, i * 16, nearest_codes(x, i * 16, d, -m, f32(3)))
    write_q2_K_codes(y, codes)


@q3_K.recode
def recode_q3_K(y, x):
    codes = scratch(256)
    for i in range(16):
        low_bits = byte_at(y, 96 + i % 8) >> (i // 8 * 4)
        high_bits = byte_at(y, 104 + i % 4) >> (i // 4 * 2)
        d = half_at(y + 108, 0) * f32(((low_bits & 15) | ((high_bits & 3) << 4)) - 32)
        store(codes, i * 16, nearest_codes(x, i * 16, d, d * f32(-4), f32(7)))
    write_q3_K_codes(y, codes)


@part
def put_group_codes(codes: int, y: int, x: int, max_code: f32) -> None:
    """Write to `codes`, as f32, nearest_codes of 256 f32 at x by the scales of the q4_K or q5_K block at y."""
    for i in range(0, 256, 16):
        d, m = scale_and_min(y, i // 32)
        store(codes, i, nearest_codes(x, i, d, -m, max_code))


@q4_K.recode
def recode_q4_K(y, x):
    codes = scratch(256)
    put_group_codes(codes, y, x, f32(15))
    write_q4_K_codes(y, codes)


@q5_K.recode
def recode_q5_K(y, x):
    codes = scratch(256)
    put_group_codes(codes, y, x, f32(31))
    write_q5_K_codes(y, codes)


@q6_K.recode
def recode_q6_K(y, x):
    codes = scratch(256)
    for i in range(16):
        d = half_at(y + 208, 0) * f32(intrinsics.char_at(y, 192 + i))
        store(codes, i * 16, nearest_codes(x, i * 16, d, d * f32(-32), f32(63)))
    write_q6_K_codes(y, codes)


@part
def is_above(limit: f32, v: intrinsics.F32x16) -> intrinsics.F32x16:
    return intrinsics.select_less(limit, v, f32(1), f32(0))


@intrinsics.compiled_function
def nearest_iq4_codes(x: int, lane: int, d: f32) -> intrinsics.I32x16:
    """Return table codes of f32 lane … lane + 15 at x, scale d: the lower neighbour, or the next above a half."""
    code_values, v = load(NL, 0), load(x, lane) / (d if d != 0 else f32(1))
    num_below = is_above(f32(-104), v) + is_above(f32(-83), v) + is_above(f32(-65), v)
    num_below = num_below + is_above(f32(-49), v) + is_above(f32(-35), v) + is_above(f32(-22), v)
    num_below = num_below + is_above(f32(-10), v) + is_above(f32(1), v) + is_above(f32(13), v)
    num_below = num_below + is_above(f32(25), v) + is_above(f32(38), v) + is_above(f32(53), v)
    num_below = num_below + is_above(f32(69), v) + is_above(f32(89), v)
    lower_code = intrinsics.to_bits(num_below)
    lower_value = intrinsics.pick(code_values, lower_code)
    upper_value = intrinsics.pick(code_values, lower_code + 1)
    share = (v - lower_value) / (upper_value - lower_value)
    num_below = num_below + is_above(f32(0.5), share + load(x + RESIDUAL_OFFSET, lane))
    return intrinsics.to_bits(num_below)


@iq4_nl.recode
def recode_iq4_nl(block, src):
    d = half_at(block, 0)
    put_bytes(block + 2, 0, nearest_iq4_codes(src, 0, d) | (nearest_iq4_codes(src, 16, d) << 4))


@iq4_xs.recode
def recode_iq4_xs(block, x):
    d, high_bits = half_at(block, 0), intrinsics.short_at(block, 1)
    for i in range(8):
        src, low_bits = x + i * 128, byte_at(block, 4 + i // 2) >> (i % 2 * 4)
        scale = d * f32(((low_bits & 15) | ((high_bits >> (i * 2) & 3) << 4)) - 32)
        second_codes = nearest_iq4_codes(src, 16, scale)
        put_bytes(block + 8 + i * 16, 0, nearest_iq4_codes(src, 0, scale) | (second_codes << 4))
