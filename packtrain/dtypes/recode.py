"""New codes for blocks that keep their scales: `recode`, and for the specification where the bits of codes lie.

The values (f32) are followed, APART bytes behind each, by a part of a step by which its code is moved before it is
rounded to the nearest. A group whose scale is 0 gets the codes of scale 1, which do not matter.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import Dtype
from packtrain.dtypes.intrinsics import (
    Floats,
    Ints,
    byte_at,
    code,
    half_at,
    load,
    part,
    pick,
    put_bytes,
)
from packtrain.dtypes.iq import NL, iq4_nl, iq4_xs
from packtrain.dtypes.k import q2_K, q3_K, q4_K, q5_K, q6_K, scale_and_least
from packtrain.dtypes.legacy import q4_0, q4_1, q5_0, q5_1, q8_0

f32 = np.float32
APART = 1024


# ---- places ----------------------------------------------------------------------------------------------------


def places(block: int, at: int, bits: int, run: int) -> np.ndarray:
    """Numbers of the bits of each code, (block, bits): `run` neighbours lie in `run` bytes, at the same bits.

    The next ones lie further up in the same bytes, then in the bytes that follow, from byte `at` on.
    """
    element, per_byte = np.arange(block), 8 // bits
    inside, slot, far = element % run, element // run % per_byte, element // (run * per_byte)
    return (8 * (at + far * run + inside) + slot * bits)[:, None] + np.arange(bits)


def both(*parts: np.ndarray) -> np.ndarray:
    """The low bits, then those above."""
    return np.concatenate(parts, -1)


HIGH = np.arange(32)[:, None]  # a bit for each of 32 codes, in order
PLACES: dict[Dtype, np.ndarray] = {
    q4_0: places(32, 2, 4, 16),
    q4_1: places(32, 4, 4, 16),
    q5_0: both(places(32, 6, 4, 16), 16 + HIGH),
    q5_1: both(places(32, 8, 4, 16), 32 + HIGH),
    q8_0: places(32, 2, 8, 32),
    q2_K: places(256, 16, 2, 32),
    q3_K: both(places(256, 32, 2, 32), places(256, 0, 1, 32)),
    q4_K: places(256, 16, 4, 32),
    q5_K: both(places(256, 48, 4, 32), places(256, 16, 1, 32)),
    q6_K: both(places(256, 0, 4, 64), places(256, 128, 2, 32)),
    iq4_nl: places(32, 2, 4, 16),
    iq4_xs: places(256, 8, 4, 16),
}
TABLES = {
    iq4_nl: NL,
    iq4_xs: NL,
}  # values of codes in steps, where they are not the codes themselves
UNIT = 8  # the code that stands for 1 in that table


# ---- codes -----------------------------------------------------------------------------------------------------


@part
def nearest(x: int, lane: int, d: f32, low: f32, most: f32) -> Ints:
    """Codes 0 .. most of 16 values, from `lane` on, as code * d + low."""
    d = d if d != 0 else f32(1)
    moved = (load(x, lane) - low) / d + load(x + APART, lane)
    return intrinsics.to_bits(intrinsics.rounded(moved, f32(0), most))


@part
def put_32(y: int, x: int, d: f32, low: f32, most: f32) -> int:
    """The low four bits of 32 codes; returns the fifth ones."""
    first, second = nearest(x, 0, d, low, most), nearest(x, 16, d, low, most)
    put_bytes(y, 0, (first & 15) | ((second & 15) << 4))
    return intrinsics.set_lanes(first & 16) | (intrinsics.set_lanes(second & 16) << 16)


@q4_0.recode
def recode_q4_0(y, x, n):
    for b in range(n):
        to, d = y + b * 18, half_at(y + b * 18, 0)
        put_32(to + 2, x + b * 128, d, d * f32(-8), f32(15))


@q4_1.recode
def recode_q4_1(y, x, n):
    for b in range(n):
        to = y + b * 20
        put_32(to + 4, x + b * 128, half_at(to, 0), half_at(to, 1), f32(15))


@q5_0.recode
def recode_q5_0(y, x, n):
    for b in range(n):
        to, d = y + b * 22, half_at(y + b * 22, 0)
        intrinsics.put_word(to + 2, 0, put_32(to + 6, x + b * 128, d, d * f32(-16), f32(31)))


@q5_1.recode
def recode_q5_1(y, x, n):
    for b in range(n):
        to = y + b * 24
        fifth = put_32(to + 8, x + b * 128, half_at(to, 0), half_at(to, 1), f32(31))
        intrinsics.put_word(to + 4, 0, fifth)


@q8_0.recode
def recode_q8_0(y, x, n):
    for b in range(n):
        to, at = y + b * 34, x + b * 128
        d = half_at(to, 0)
        for lane in range(0, 32, 16):
            put_bytes(to + 2, lane, nearest(at, lane, d, d * f32(-127), f32(254)) - 127)


@part
def code_2(y: int, x: int, i: int) -> Ints:
    """Codes of the i-th 16 values of a q2_K block."""
    scale = byte_at(y, i)
    d, m = half_at(y + 80, 0) * f32(scale & 15), half_at(y + 80, 1) * f32(scale >> 4)
    return nearest(x + i * 64, 0, d, -m, f32(3))


@q2_K.recode
def recode_q2_K(y, x, n):
    for b in range(n):
        to, at = y + b * 84, x + b * 1024
        for half in range(2):
            for lane in range(2):
                i = half * 8 + lane
                low = code_2(to, at, i) | (code_2(to, at, i + 2) << 2)
                high = code_2(to, at, i + 4) | (code_2(to, at, i + 6) << 2)
                put_bytes(to + 16 + half * 32 + lane * 16, 0, low | (high << 4))


@code
def code_3(y: int, x: int, i: int) -> Ints:
    """Codes of the i-th 16 values of a q3_K block; 4 means zero."""
    low, high = byte_at(y, 96 + i % 8) >> (i // 8 * 4), byte_at(y, 104 + i % 4) >> (i // 4 * 2)
    d = half_at(y + 108, 0) * f32(((low & 15) | ((high & 3) << 4)) - 32)
    return nearest(x + i * 64, 0, d, d * f32(-4), f32(7))


@q3_K.recode
def recode_q3_K(y, x, n):
    for b in range(n):
        to, at = y + b * 110, x + b * 1024
        for lane in range(2):
            top = intrinsics.spread_bits(0)
            for half in range(2):
                i, low = half * 8 + lane, intrinsics.spread_bits(0)
                for k in range(4):
                    c = code_3(to, at, i + 2 * k)
                    low = low | ((c & 3) << (2 * k))
                    top = top | ((c >> 2) << (half * 4 + k))
                put_bytes(to + 32 + half * 32 + lane * 16, 0, low)
            put_bytes(to + lane * 16, 0, top)


@q4_K.recode
def recode_q4_K(y, x, n):
    for b in range(n):
        to, at = y + b * 144, x + b * 1024
        for i in range(0, 8, 2):
            d, m = scale_and_least(to, i)
            e, offset = scale_and_least(to, i + 1)
            for lane in range(0, 32, 16):
                first = nearest(at + i * 128, lane, d, -m, f32(15))
                second = nearest(at + i * 128 + 128, lane, e, -offset, f32(15))
                put_bytes(to + 16 + i * 16, lane, first | (second << 4))


@q5_K.recode
def recode_q5_K(y, x, n):
    for b in range(n):
        to, at = y + b * 176, x + b * 1024
        for lane in range(0, 32, 16):
            top = intrinsics.spread_bits(0)
            for i in range(0, 8, 2):
                d, m = scale_and_least(to, i)
                e, offset = scale_and_least(to, i + 1)
                first = nearest(at + i * 128, lane, d, -m, f32(31))
                second = nearest(at + i * 128 + 128, lane, e, -offset, f32(31))
                top = top | (first >> 4 << i) | (second >> 4 << (i + 1))
                put_bytes(to + 48 + i * 16, lane, (first & 15) | ((second & 15) << 4))
            put_bytes(to + 16, lane, top)


@code
def code_6(y: int, x: int, i: int) -> Ints:
    """Codes of the i-th 16 values of a q6_K block; 32 means zero."""
    d = half_at(y + 208, 0) * f32(intrinsics.char_at(y, 192 + i))
    return nearest(x + i * 64, 0, d, d * f32(-32), f32(63))


@q6_K.recode
def recode_q6_K(y, x, n):
    for b in range(n):
        to, at = y + b * 210, x + b * 1024
        for half in range(2):
            for lane in range(2):
                i = half * 8 + lane
                c0, c1 = code_6(to, at, i), code_6(to, at, i + 2)
                c2, c3 = code_6(to, at, i + 4), code_6(to, at, i + 6)
                low, high = to + half * 64 + lane * 16, to + 128 + half * 32 + lane * 16
                put_bytes(low, 0, (c0 & 15) | ((c2 & 15) << 4))
                put_bytes(low, 32, (c1 & 15) | ((c3 & 15) << 4))
                put_bytes(high, 0, (c0 >> 4) | (c1 >> 4 << 2) | (c2 >> 4 << 4) | (c3 >> 4 << 6))


@part
def more_than(limit: f32, v: Floats) -> Floats:
    return intrinsics.select_less(limit, v, f32(1), f32(0))


@code
def nearest_of_table(x: int, lane: int, d: f32) -> Ints:
    """Codes of 16 values in the table of iq4_nl: the lower neighbour, or the next where more than half is left."""
    values, v = load(NL, 0), load(x, lane) / (d if d != 0 else f32(1))
    at = more_than(f32(-104), v) + more_than(f32(-83), v) + more_than(f32(-65), v)
    at = at + more_than(f32(-49), v) + more_than(f32(-35), v) + more_than(f32(-22), v)
    at = at + more_than(f32(-10), v) + more_than(f32(1), v) + more_than(f32(13), v)
    at = at + more_than(f32(25), v) + more_than(f32(38), v) + more_than(f32(53), v)
    at = at + more_than(f32(69), v) + more_than(f32(89), v)
    low = intrinsics.to_bits(at)
    lower_value, next = pick(values, low), pick(values, low + 1)
    return intrinsics.to_bits(
        at + more_than(f32(0.5), (v - lower_value) / (next - lower_value) + load(x + APART, lane))
    )


@iq4_nl.recode
def recode_iq4_nl(y, x, n):
    for b in range(n):
        to, at = y + b * 18, x + b * 128
        d = half_at(to, 0)
        put_bytes(to + 2, 0, nearest_of_table(at, 0, d) | (nearest_of_table(at, 16, d) << 4))


@iq4_xs.recode
def recode_iq4_xs(y, x, n):
    for b in range(n):
        to = y + b * 136
        d, high = half_at(to, 0), intrinsics.short_at(to, 1)
        for i in range(8):
            at, low = x + b * 1024 + i * 128, byte_at(to, 4 + i // 2) >> (i % 2 * 4)
            scale = d * f32(((low & 15) | ((high >> (i * 2) & 3) << 4)) - 32)
            second = nearest_of_table(at, 16, scale)
            put_bytes(to + 8 + i * 16, 0, nearest_of_table(at, 0, scale) | (second << 4))
