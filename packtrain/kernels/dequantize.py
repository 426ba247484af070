"""Packed rows to f32, by block types: what `row` reads at an address, bit for bit as ggml's reference does.

Kinds are ggml's type numbers. A function per type takes (target, source, n): n blocks of bytes at `source` become
32 or 256 f32 each at `target`; scalars take elements. Formats: ggml-common.h.
"""

import numpy as np
from numba import types

from packtrain.kernels.bits import (
    as_floats,
    byte_at,
    bytes_at,
    char_at,
    chars_at,
    half_at,
    halves_at,
    lane_numbers,
    pick,
    short_at,
    shorts_at,
    spread_bits,
    to_floats,
    word_at,
)
from packtrain.kernels.call import each, kernel, part
from packtrain.kernels.simd import (
    LANES,
    address,
    load,
    load_part,
    out2,
    poke,
    store,
    store_part,
)

i64, f32, void = types.int64, types.float32, types.void
KINDS = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_K": 10, "q3_K": 11, "q4_K": 12,
    "q5_K": 13, "q6_K": 14, "iq4_nl": 20, "iq4_xs": 23, "bf16": 30, "mxfp4": 39,
}  # fmt: skip
F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, BF16, MXFP4 = (
    KINDS.values()
)  # fmt: skip
# the sixteen values that iq4_nl, iq4_xs and mxfp4 (doubled) choose from
NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
packed2 = types.Array(types.uint8, 2, "C", readonly=True)
unpacker = part(void(i64, i64, i64), forceinline=False)


@unpacker
def f32_copy(y, x, n):
    for i in range(0, n, LANES):
        store_part(y, i, load_part(x, i, n - i), n - i)


@unpacker
def f16(y, x, n):
    for i in range(0, n - LANES + 1, LANES):
        store(y, i, halves_at(x, i))
    for i in range(n // LANES * LANES, n):
        poke(y, i, half_at(x, i))


@unpacker
def bf16(y, x, n):
    for i in range(0, n - LANES + 1, LANES):
        store(y, i, as_floats(shorts_at(x, i) << 16))
    for i in range(n // LANES * LANES, n):
        store_part(y, i, as_floats(spread_bits(short_at(x, i)) << 16), 1)


@unpacker
def q4_0(y, x, n):
    for b in range(n):
        at, out = x + b * 18, b * 32
        d, q = half_at(at, 0), bytes_at(at, 2)
        store(y, out, to_floats((q & 15) - 8) * d)
        store(y, out + 16, to_floats((q >> 4) - 8) * d)


@unpacker
def q4_1(y, x, n):
    for b in range(n):
        at, out = x + b * 20, b * 32
        d, m, q = half_at(at, 0), half_at(at, 1), bytes_at(at, 4)
        store(y, out, to_floats(q & 15) * d + m)
        store(y, out + 16, to_floats(q >> 4) * d + m)


@unpacker
def q5_0(y, x, n):
    for b in range(n):
        at, out = x + b * 22, b * 32
        d, q = half_at(at, 0), bytes_at(at, 6)
        high = spread_bits(word_at(at + 2, 0)) >> lane_numbers()
        store(y, out, to_floats(((q & 15) | ((high & 1) << 4)) - 16) * d)
        store(y, out + 16, to_floats(((q >> 4) | ((high >> 12) & 16)) - 16) * d)


@unpacker
def q5_1(y, x, n):
    for b in range(n):
        at, out = x + b * 24, b * 32
        d, m, q = half_at(at, 0), half_at(at, 1), bytes_at(at, 8)
        high = spread_bits(word_at(at + 4, 0)) >> lane_numbers()
        store(y, out, to_floats((q & 15) | ((high & 1) << 4)) * d + m)
        store(y, out + 16, to_floats((q >> 4) | ((high >> 12) & 16)) * d + m)


@unpacker
def q8_0(y, x, n):
    for b in range(n):
        at, out = x + b * 34, b * 32
        d = half_at(at, 0)
        store(y, out, to_floats(chars_at(at, 2)) * d)
        store(y, out + 16, to_floats(chars_at(at, 18)) * d)


@unpacker
def q2_K(y, x, n):
    for b in range(n):
        at, out = x + b * 84, b * 256
        d, m = half_at(at + 80, 0), half_at(at + 80, 1)
        for i in range(16):
            scale = byte_at(at, i)
            q = bytes_at(at, 16 + i // 8 * 32 + i % 2 * 16) >> (i % 8 // 2 * 2)
            store(y, out + i * 16, to_floats(q & 3) * (d * f32(scale & 15)) - m * f32(scale >> 4))


@unpacker
def q3_K(y, x, n):
    for b in range(n):
        at, out = x + b * 110, b * 256
        d = half_at(at + 108, 0)
        for i in range(16):
            low, high = (
                byte_at(at, 96 + i % 8) >> (i // 8 * 4),
                byte_at(at, 104 + i % 4) >> (i // 4 * 2),
            )
            scale = ((low & 15) | ((high & 3) << 4)) - 32
            q = (bytes_at(at, 32 + i // 8 * 32 + i % 2 * 16) >> (i % 8 // 2 * 2)) & 3
            top = (bytes_at(at, i % 2 * 16) >> (i // 2)) & 1  # set where nothing is taken off
            store(y, out + i * 16, to_floats((q | (top << 2)) - 4) * (d * f32(scale)))


@part(types.UniTuple(f32, 2)(i64, i64))
def scale_and_least(at, i):
    """Scale and offset of the i-th 32 of a q4_K or q5_K block: six bits each, the last four's spread over two bytes."""
    d, m = half_at(at, 0), half_at(at, 1)
    if i < 4:
        scale, least = byte_at(at, 4 + i) & 63, byte_at(at, 8 + i) & 63
    else:
        low = byte_at(at, 8 + i)
        scale = (low & 15) | (byte_at(at, i) >> 6 << 4)
        least = (low >> 4) | (byte_at(at, 4 + i) >> 6 << 4)
    return d * f32(scale), m * f32(least)


@unpacker
def q4_K(y, x, n):
    for b in range(n):
        at, out = x + b * 144, b * 256
        for i in range(8):
            d, m = scale_and_least(at, i)
            for half in range(0, 32, 16):
                q = (bytes_at(at, 16 + i // 2 * 32 + half) >> (i % 2 * 4)) & 15
                store(y, out + i * 32 + half, to_floats(q) * d - m)


@unpacker
def q5_K(y, x, n):
    for b in range(n):
        at, out = x + b * 176, b * 256
        for i in range(8):
            d, m = scale_and_least(at, i)
            for half in range(0, 32, 16):
                q = (bytes_at(at, 48 + i // 2 * 32 + half) >> (i % 2 * 4)) & 15
                top = (bytes_at(at, 16 + half) >> i) & 1
                store(y, out + i * 32 + half, to_floats(q | (top << 4)) * d - m)


@unpacker
def q6_K(y, x, n):
    for b in range(n):
        at, out = x + b * 210, b * 256
        d = half_at(at + 208, 0)
        for i in range(16):
            half, part, lane = i // 8, i % 8 // 2, i % 2 * 16
            q = (bytes_at(at, half * 64 + part % 2 * 32 + lane) >> (part // 2 * 4)) & 15
            top = (bytes_at(at, 128 + half * 32 + lane) >> (part * 2)) & 3
            scale = d * f32(char_at(at, 192 + i))
            store(y, out + i * 16, to_floats((q | (top << 4)) - 32) * scale)


@unpacker
def iq4_nl(y, x, n):
    values = load(NL, 0)
    for b in range(n):
        at, out = x + b * 18, b * 32
        d, q = half_at(at, 0), bytes_at(at, 2)
        store(y, out, pick(values, q) * d)
        store(y, out + 16, pick(values, q >> 4) * d)


@unpacker
def iq4_xs(y, x, n):
    values = load(NL, 0)
    for b in range(n):
        at, out = x + b * 136, b * 256
        d, high = half_at(at, 0), short_at(at, 1)
        for i in range(8):
            low = byte_at(at, 4 + i // 2) >> (i % 2 * 4)
            scale = d * f32(((low & 15) | ((high >> (i * 2) & 3) << 4)) - 32)
            q = bytes_at(at, 8 + i * 16)
            store(y, out + i * 32, pick(values, q) * scale)
            store(y, out + i * 32 + 16, pick(values, q >> 4) * scale)


@unpacker
def mxfp4(y, x, n):
    values = load(E2M1, 0)
    for b in range(n):
        at, out = x + b * 17, b * 32
        power, q = byte_at(at, 0), bytes_at(at, 1)
        # half of 2 ** (power - 127): denormal below 2
        d = as_floats(spread_bits(0x200000 << power if power < 2 else (power - 1) << 23))
        store(y, out, pick(values, q) * d)
        store(y, out + 16, pick(values, q >> 4) * d)


@kernel(void(i64, i64, i64, i64))
def row(kind, target, source, count):
    """`count` f32, whole blocks, at `target` from the packed bytes at `source`."""
    if kind == Q4_0:
        q4_0(target, source, count // 32)
    elif kind == Q4_1:
        q4_1(target, source, count // 32)
    elif kind == Q5_0:
        q5_0(target, source, count // 32)
    elif kind == Q5_1:
        q5_1(target, source, count // 32)
    elif kind == Q8_0:
        q8_0(target, source, count // 32)
    elif kind == Q2_K:
        q2_K(target, source, count // 256)
    elif kind == Q3_K:
        q3_K(target, source, count // 256)
    elif kind == Q4_K:
        q4_K(target, source, count // 256)
    elif kind == Q5_K:
        q5_K(target, source, count // 256)
    elif kind == Q6_K:
        q6_K(target, source, count // 256)
    elif kind == IQ4_NL:
        iq4_nl(target, source, count // 32)
    elif kind == IQ4_XS:
        iq4_xs(target, source, count // 256)
    elif kind == MXFP4:
        mxfp4(target, source, count // 32)
    elif kind == F16:
        f16(target, source, count)
    elif kind == BF16:
        bf16(target, source, count)
    else:
        f32_copy(target, source, count)


@kernel(void(i64, out2, packed2, i64))
def row_of(kind, y, x, i):
    width = y.shape[1]
    row(kind, address(y, i * width), x.ctypes.data + i * x.shape[1], width)


@kernel(void(i64, out2, packed2))
def rows(kind, y, x):
    """Every row of an array.

    x  (N, row bytes)  u8
    y  (N, width)      f32
    """
    each(row_of, (kind, y, x), len(y))
