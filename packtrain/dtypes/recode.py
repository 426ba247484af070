"""Write new codes into blocks that keep their scales (`recode`), and say where the bits of codes lie.

RESIDUAL_OFFSET bytes behind each value (f32) is a part of a step by which its code is moved before it is rounded to the
nearest. A group whose scale is 0 gets the codes of scale 1, which do not matter.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import Dtype
from packtrain.dtypes.intrinsics import (
    F32x16,
    I32x16,
    byte_at,
    compiled_function,
    half_at,
    load,
    part,
    pick,
    put_bytes,
)
from packtrain.dtypes.iq import NL, iq4_nl, iq4_xs
from packtrain.dtypes.k import q2_K, q3_K, q4_K, q5_K, q6_K, scale_and_min
from packtrain.dtypes.legacy import q4_0, q4_1, q5_0, q5_1, q8_0

f32 = np.float32
RESIDUAL_OFFSET = 1024


# ---- places ----------------------------------------------------------------------------------------------------


def code_bit_numbers(block: int, start_byte: int, bits: int, run: int) -> np.ndarray:
    """Return the bit numbers of each code, (block, bits): `run` neighbours lie in `run` bytes, at the same bits.

    The next ones lie further up in the same bytes, then in the bytes that follow, from byte `start_byte` on.
    """
    element, per_byte = np.arange(block), 8 // bits
    run_offset, slot, far = element % run, element // run % per_byte, element // (run * per_byte)
    return (8 * (start_byte + far * run + run_offset) + slot * bits)[:, None] + np.arange(bits)


def join_bits(*bit_numbers: np.ndarray) -> np.ndarray:
    """Return the bit numbers of the low bits, then those of the bits above."""
    return np.concatenate(bit_numbers, -1)


FIFTH_BITS = np.arange(32)[:, None]  # a bit for each of 32 codes, in order
CODE_BIT_NUMBERS: dict[Dtype, np.ndarray] = {
    q4_0: code_bit_numbers(32, 2, 4, 16),
    q4_1: code_bit_numbers(32, 4, 4, 16),
    q5_0: join_bits(code_bit_numbers(32, 6, 4, 16), 16 + FIFTH_BITS),
    q5_1: join_bits(code_bit_numbers(32, 8, 4, 16), 32 + FIFTH_BITS),
    q8_0: code_bit_numbers(32, 2, 8, 32),
    q2_K: code_bit_numbers(256, 16, 2, 32),
    q3_K: join_bits(code_bit_numbers(256, 32, 2, 32), code_bit_numbers(256, 0, 1, 32)),
    q4_K: code_bit_numbers(256, 16, 4, 32),
    q5_K: join_bits(code_bit_numbers(256, 48, 4, 32), code_bit_numbers(256, 16, 1, 32)),
    q6_K: join_bits(code_bit_numbers(256, 0, 4, 64), code_bit_numbers(256, 128, 2, 32)),
    iq4_nl: code_bit_numbers(32, 2, 4, 16),
    iq4_xs: code_bit_numbers(256, 8, 4, 16),
}
# values of codes in steps, where they are not the codes themselves
CODE_VALUES = {iq4_nl: NL, iq4_xs: NL}
UNIT_CODE = 8  # the code that stands for 1 in that table


# ---- codes -----------------------------------------------------------------------------------------------------


@part
def nearest_codes(x: int, lane: int, d: f32, low: f32, max_code: f32) -> I32x16:
    """Return codes 0 … max_code of 16 values, from `lane` on, for value = code * d + low."""
    d = d if d != 0 else f32(1)
    shifted_values = (load(x, lane) - low) / d + load(x + RESIDUAL_OFFSET, lane)
    return intrinsics.to_bits(intrinsics.rounded(shifted_values, f32(0), max_code))


@part
def put_32(y: int, x: int, d: f32, low: f32, max_code: f32) -> int:
    """Write the low four bits of the codes of 32 values; returns the fifth bits."""
    first, second = nearest_codes(x, 0, d, low, max_code), nearest_codes(x, 16, d, low, max_code)
    put_bytes(y, 0, (first & 15) | ((second & 15) << 4))
    return intrinsics.set_lanes(first & 16) | (intrinsics.set_lanes(second & 16) << 16)


@q4_0.recode
def recode_q4_0(y, x, n):
    for b in range(n):
        block, d = y + b * 18, half_at(y + b * 18, 0)
        put_32(block + 2, x + b * 128, d, d * f32(-8), f32(15))


@q4_1.recode
def recode_q4_1(y, x, n):
    for b in range(n):
        block = y + b * 20
        put_32(block + 4, x + b * 128, half_at(block, 0), half_at(block, 1), f32(15))


@q5_0.recode
def recode_q5_0(y, x, n):
    for b in range(n):
        block, d = y + b * 22, half_at(y + b * 22, 0)
        intrinsics.put_word(block + 2, 0, put_32(block + 6, x + b * 128, d, d * f32(-16), f32(31)))


@q5_1.recode
def recode_q5_1(y, x, n):
    for b in range(n):
        block = y + b * 24
        fifth_bits = put_32(block + 8, x + b * 128, half_at(block, 0), half_at(block, 1), f32(31))
        intrinsics.put_word(block + 4, 0, fifth_bits)


@q8_0.recode
def recode_q8_0(y, x, n):
    for b in range(n):
        block, src = y + b * 34, x + b * 128
        d = half_at(block, 0)
        for lane in range(0, 32, 16):
            put_bytes(block + 2, lane, nearest_codes(src, lane, d, d * f32(-127), f32(254)) - 127)


@part
def code_2(y: int, x: int, i: int) -> I32x16:
    """Return the codes of the i-th 16 values of a q2_K block."""
    scale = byte_at(y, i)
    d, m = half_at(y + 80, 0) * f32(scale & 15), half_at(y + 80, 1) * f32(scale >> 4)
    return nearest_codes(x + i * 64, 0, d, -m, f32(3))


@q2_K.recode
def recode_q2_K(y, x, n):
    for b in range(n):
        block, src = y + b * 84, x + b * 1024
        for half_index in range(2):
            for lane in range(2):
                i = half_index * 8 + lane
                low_codes = code_2(block, src, i) | (code_2(block, src, i + 2) << 2)
                high = code_2(block, src, i + 4) | (code_2(block, src, i + 6) << 2)
                put_bytes(block + 16 + half_index * 32 + lane * 16, 0, low_codes | (high << 4))


@compiled_function
def nearest_q3_K_codes(y: int, x: int, i: int) -> I32x16:
    """Return the codes of the i-th 16 values of a q3_K block; 4 means zero."""
    low_bits, high = byte_at(y, 96 + i % 8) >> (i // 8 * 4), byte_at(y, 104 + i % 4) >> (i // 4 * 2)
    d = half_at(y + 108, 0) * f32(((low_bits & 15) | ((high & 3) << 4)) - 32)
    return nearest_codes(x + i * 64, 0, d, d * f32(-4), f32(7))


@q3_K.recode
def recode_q3_K(y, x, n):
    for b in range(n):
        block, src = y + b * 110, x + b * 1024
        for lane in range(2):
            top_bits = intrinsics.spread_bits(0)
            for half_index in range(2):
                i, low_codes = half_index * 8 + lane, intrinsics.spread_bits(0)
                for k in range(4):
                    c = nearest_q3_K_codes(block, src, i + 2 * k)
                    low_codes = low_codes | ((c & 3) << (2 * k))
                    top_bits = top_bits | ((c >> 2) << (half_index * 4 + k))
                put_bytes(block + 32 + half_index * 32 + lane * 16, 0, low_codes)
            put_bytes(block + lane * 16, 0, top_bits)


@q4_K.recode
def recode_q4_K(y, x, n):
    for b in range(n):
        block, src = y + b * 144, x + b * 1024
        for i in range(0, 8, 2):
            d, m = scale_and_min(block, i)
            e, offset = scale_and_min(block, i + 1)
            for lane in range(0, 32, 16):
                first_codes = nearest_codes(src + i * 128, lane, d, -m, f32(15))
                second_codes = nearest_codes(src + i * 128 + 128, lane, e, -offset, f32(15))
                put_bytes(block + 16 + i * 16, lane, first_codes | (second_codes << 4))


@q5_K.recode
def recode_q5_K(y, x, n):
    for b in range(n):
        block, src = y + b * 176, x + b * 1024
        for lane in range(0, 32, 16):
            top_bits = intrinsics.spread_bits(0)
            for i in range(0, 8, 2):
                d, m = scale_and_min(block, i)
                e, offset = scale_and_min(block, i + 1)
                first_codes = nearest_codes(src + i * 128, lane, d, -m, f32(31))
                second = nearest_codes(src + i * 128 + 128, lane, e, -offset, f32(31))
                top_bits = top_bits | (first_codes >> 4 << i) | (second >> 4 << (i + 1))
                put_bytes(block + 48 + i * 16, lane, (first_codes & 15) | ((second & 15) << 4))
            put_bytes(block + 16, lane, top_bits)


@compiled_function
def code_6(y: int, x: int, i: int) -> I32x16:
    """Return the codes of the i-th 16 values of a q6_K block; 32 means zero."""
    d = half_at(y + 208, 0) * f32(intrinsics.char_at(y, 192 + i))
    return nearest_codes(x + i * 64, 0, d, d * f32(-32), f32(63))


@q6_K.recode
def recode_q6_K(y, x, n):
    for b in range(n):
        block, src = y + b * 210, x + b * 1024
        for half in range(2):
            for lane in range(2):
                i = half * 8 + lane
                c0, c1 = code_6(block, src, i), code_6(block, src, i + 2)
                c2, c3 = code_6(block, src, i + 4), code_6(block, src, i + 6)
                low, high = block + half * 64 + lane * 16, block + 128 + half * 32 + lane * 16
                put_bytes(low, 0, (c0 & 15) | ((c2 & 15) << 4))
                put_bytes(low, 32, (c1 & 15) | ((c3 & 15) << 4))
                put_bytes(high, 0, (c0 >> 4) | (c1 >> 4 << 2) | (c2 >> 4 << 4) | (c3 >> 4 << 6))


@part
def is_above(limit: f32, v: F32x16) -> F32x16:
    return intrinsics.select_less(limit, v, f32(1), f32(0))


@compiled_function
def nearest_iq4_codes(x: int, lane: int, d: f32) -> I32x16:
    """Return the table codes of 16 values: the lower neighbour, or the next one where more than half is left."""
    code_values, v = load(NL, 0), load(x, lane) / (d if d != 0 else f32(1))
    num_below = is_above(f32(-104), v) + is_above(f32(-83), v) + is_above(f32(-65), v)
    num_below = num_below + is_above(f32(-49), v) + is_above(f32(-35), v) + is_above(f32(-22), v)
    num_below = num_below + is_above(f32(-10), v) + is_above(f32(1), v) + is_above(f32(13), v)
    num_below = num_below + is_above(f32(25), v) + is_above(f32(38), v) + is_above(f32(53), v)
    num_below = num_below + is_above(f32(69), v) + is_above(f32(89), v)
    lower_code = intrinsics.to_bits(num_below)
    lower_value, upper_value = pick(code_values, lower_code), pick(code_values, lower_code + 1)
    share = (v - lower_value) / (upper_value - lower_value)
    num_below = num_below + is_above(f32(0.5), share + load(x + RESIDUAL_OFFSET, lane))
    return intrinsics.to_bits(num_below)


@iq4_nl.recode
def recode_iq4_nl(y, x, n):
    for b in range(n):
        block, src = y + b * 18, x + b * 128
        d = half_at(block, 0)
        put_bytes(block + 2, 0, nearest_iq4_codes(src, 0, d) | (nearest_iq4_codes(src, 16, d) << 4))


@iq4_xs.recode
def recode_iq4_xs(y, x, n):
    for b in range(n):
        block = y + b * 136
        d, high_bits = half_at(block, 0), intrinsics.short_at(block, 1)
        for i in range(8):
            src, low_bits = x + b * 1024 + i * 128, byte_at(block, 4 + i // 2) >> (i % 2 * 4)
            scale = d * f32(((low_bits & 15) | ((high_bits >> (i * 2) & 3) << 4)) - 32)
            second_codes = nearest_iq4_codes(src, 16, scale)
            put_bytes(block + 8 + i * 16, 0, nearest_iq4_codes(src, 0, scale) | (second_codes << 4))
