"""The IQ types: codes index tables of values. Formats: ggml-common.h."""

from typing import Any

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import Bytes, Dtype, Layout, packed
from packtrain.dtypes.grids import ONE, THREE_S, THREE_XXS, TWO_S, TWO_XS, TWO_XXS
from packtrain.dtypes.intrinsics import (
    Floats,
    byte_at,
    half_at,
    load,
    part,
    short_at,
    store,
    to_floats,
)
from packtrain.dtypes.iq_points import POINTS
from packtrain.dtypes.k import q2_K, q3_K, q4_K, q5_K

f32 = np.float32
# the sixteen values of iq4_nl and iq4_xs
NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], f32)
# the eighth sign of seven makes the number of set bits even
EVEN = np.array([i | (i.bit_count() % 2) << 7 for i in range(128)], np.int64)


def six_bits(raw: Bytes) -> tuple[np.ndarray]:
    """Scales of iq4_xs: the low four bits of all eight, and in front of them the other two."""
    groups = np.arange(8, dtype=np.uint8)
    low, high = (
        raw[..., 4 + groups // 2] >> groups % 2 * 4,
        raw[..., 2 + groups // 4] >> groups % 4 * 2,
    )
    return (((low & 15) | (high & 3) << 4).astype(f32) - f32(32),)


iq4_nl = packed(*("iq4_nl", 20, 32, 18), richer=q5_K, layout=Layout(32, 16, 0, (0,), 2, table=NL))
iq4_xs = packed(
    *("iq4_xs", 23, 256, 136),
    smaller=iq4_nl,
    richer=q5_K,
    layout=Layout(32, 16, 0, (0,), 8, runs=8, scales=six_bits, table=NL),
)


def on_grid(name: str, number: int, nbytes: int, fallback: Dtype, demanding: str = "") -> Dtype:
    """A type of 256 values whose codes name points of a grid."""
    options: dict[str, Any] = {
        "smaller": iq4_nl,
        "richer": q5_K,
        "instead": fallback,
        "demanding": demanding,
    }
    options["points"] = POINTS[name]
    return packed(name, number, 256, nbytes, **options)


iq1_s, iq1_m = on_grid("iq1_s", 19, 50, q2_K, "always"), on_grid("iq1_m", 29, 56, q2_K, "always")
iq2_xxs = on_grid("iq2_xxs", 16, 66, q2_K, "always")
iq2_xs = on_grid("iq2_xs", 17, 74, q2_K, "always")
iq2_s = on_grid("iq2_s", 22, 82, q2_K, "blocks")
iq3_xxs, iq3_s = on_grid("iq3_xxs", 18, 98, q3_K, "blocks"), on_grid("iq3_s", 21, 110, q4_K)
iq4_nl.mix("IQ4_NL", 25, shared=q5_K, unweighed=q5_K)
iq4_xs.mix("IQ4_XS", 30, shared=q5_K, unweighed=q5_K)
iq3_xxs.mix("IQ3_XXS", 23, shared=q4_K, queries=iq2_s, attended=iq3_s, embedding=iq3_s, head=q5_K)
iq3_s.mix("IQ3_XS", 22, shared=q4_K, queries=iq3_xxs, middle=iq3_xxs)
iq3_s.mix("IQ3_M", 27, values=q4_K, attended=q4_K, weighed=q4_K, unweighed=q4_K, eight=q4_K)
iq3_s.mix("IQ3_S", 26, shared=q4_K)
SMALL: dict[str, Any] = {"small": True, "head": q5_K}
RICHER = dict.fromkeys(("values", "attended", "embedding", "weighed"), iq3_s) | SMALL
POORER = dict.fromkeys(("values", "embedding", "weighed"), q2_K) | SMALL
iq2_xs.mix("IQ2_S", 28, **RICHER)
iq2_s.mix("IQ2_M", 29, **RICHER)
iq2_xxs.mix("IQ2_XXS", 19, **POORER)
iq2_xs.mix("IQ2_XS", 20, **POORER)
iq1_s.mix("IQ1_S", 24, attended=iq2_xxs, **POORER)
iq1_m.mix("IQ1_M", 31, attended=iq2_xxs, **POORER)


@part
def signed(v: Floats, bits: int) -> Floats:
    """Negative in each lane whose bit is set."""
    return intrinsics.put_where(v, bits, intrinsics.neg(v))


@part
def two_signs(bits: int) -> int:
    """The signs of two groups of eight values, of which seven each are written."""
    return EVEN[bits & 127] | (EVEN[bits >> 7 & 127] << 8)


@part
def shifts_of(first: int, second: int) -> Floats:
    """What iq1's levels 0 to 2 are shifted by: -7/8, or -9/8 if the bit of the first or second eight is set."""
    v = intrinsics.splat(f32(-0.875) - f32(0.25) * f32(first & 1))
    return intrinsics.put_where(
        v, 0xFF00, intrinsics.splat(f32(-0.875) - f32(0.25) * f32(second & 1))
    )


@iq1_s.unpack
def unpack_iq1_s(y, x, n):
    for b in range(n):
        at, out = x + b * 50, b * 256
        for i in range(16):
            high = short_at(at + 34, i // 2)
            scale = half_at(at, 0) * f32((high >> 12 & 7) * 2 + 1)
            three = high >> (i % 2 * 6)
            first = ONE[byte_at(at, 2 + 2 * i) | ((three & 7) << 8)]
            second = ONE[byte_at(at, 3 + 2 * i) | ((three >> 3 & 7) << 8)]
            shift = shifts_of(high >> 15, high >> 15)
            store(y, out + i * 16, (to_floats(intrinsics.bytes_of(first, second)) + shift) * scale)


@iq1_m.unpack
def unpack_iq1_m(y, x, n):
    half = intrinsics.scratch(1)
    for b in range(n):
        at, out = x + b * 56, b * 256
        for i in range(4):  # each has four bits of the unit in front of its scales
            intrinsics.put_short(
                half, 0, (short_at(half, 0) >> 4) | (short_at(at, 24 + i) >> 12 << 12)
            )
        for i in range(16):
            three = short_at(at, 24 + i // 4) >> (i % 4 * 3) & 7
            scale, high = half_at(half, 0) * f32(three * 2 + 1), byte_at(at, 32 + i)
            first = ONE[byte_at(at, 2 * i) | ((high & 7) << 8)]
            second = ONE[byte_at(at, 2 * i + 1) | ((high >> 4 & 7) << 8)]
            shift = shifts_of(high >> 3, high >> 7)
            store(y, out + i * 16, (to_floats(intrinsics.bytes_of(first, second)) + shift) * scale)


@iq2_xxs.unpack
def unpack_iq2_xxs(y, x, n):
    for b in range(n):
        at, out = x + b * 66, b * 256
        for i in range(16):
            indices, word = (
                at + 2 + i // 2 * 8 + i % 2 * 2,
                intrinsics.word_at(at + 2 + i // 2 * 8, 1),
            )
            scale = half_at(at, 0) * (f32(word >> 28) + f32(0.5)) * f32(0.25)
            v = intrinsics.bytes_of(TWO_XXS[byte_at(indices, 0)], TWO_XXS[byte_at(indices, 1)])
            store(y, out + i * 16, signed(to_floats(v) * scale, two_signs(word >> (i % 2 * 14))))


@iq2_xs.unpack
def unpack_iq2_xs(y, x, n):
    for b in range(n):
        at, out = x + b * 74, b * 256
        for i in range(16):
            first, second = short_at(at, 1 + 2 * i), short_at(at, 2 + 2 * i)
            scale = byte_at(at, 66 + i // 2) >> (i % 2 * 4) & 15
            scale = half_at(at, 0) * (f32(scale) + f32(0.5)) * f32(0.25)
            v = intrinsics.bytes_of(TWO_XS[first & 511], TWO_XS[second & 511])
            signs = two_signs((first >> 9) | (second >> 9 << 7))
            store(y, out + i * 16, signed(to_floats(v) * scale, signs))


@iq2_s.unpack
def unpack_iq2_s(y, x, n):
    for b in range(n):
        at, out = x + b * 82, b * 256
        for i in range(16):
            high = byte_at(at, 66 + i // 2) >> (i % 2 * 4)
            first = TWO_S[byte_at(at, 2 + 2 * i) | ((high & 3) << 8)]
            second = TWO_S[byte_at(at, 3 + 2 * i) | ((high >> 2 & 3) << 8)]
            nibble = byte_at(at, 74 + i // 2) >> (i % 2 * 4) & 15
            scale = half_at(at, 0) * (f32(nibble) + f32(0.5)) * f32(0.25)
            v = to_floats(intrinsics.bytes_of(first, second)) * scale
            store(y, out + i * 16, signed(v, short_at(at, 17 + i)))


@iq3_xxs.unpack
def unpack_iq3_xxs(y, x, n):
    for b in range(n):
        at, out = x + b * 98, b * 256
        for i in range(16):
            indices, word = at + 2 + i * 4, intrinsics.word_at(at + 66, i // 2)
            scale = half_at(at, 0) * (f32(word >> 28) + f32(0.5)) * f32(0.5)
            first = THREE_XXS[byte_at(indices, 0)] | (THREE_XXS[byte_at(indices, 1)] << 32)
            second = THREE_XXS[byte_at(indices, 2)] | (THREE_XXS[byte_at(indices, 3)] << 32)
            v = to_floats(intrinsics.bytes_of(first, second)) * scale
            store(y, out + i * 16, signed(v, two_signs(word >> (i % 2 * 14))))


@iq3_s.unpack
def unpack_iq3_s(y, x, n):
    values = intrinsics.scratch(4)
    for b in range(n):
        at, out = x + b * 110, b * 256
        d = half_at(at, 0)
        for i in range(16):
            ninth = byte_at(at, 66 + i // 2) >> (i % 2 * 4)
            for four in range(4):
                index = byte_at(at, 2 + i * 4 + four) | ((ninth >> four & 1) << 8)
                intrinsics.put_word(values, four, THREE_S[index])
            signs = (intrinsics.spread_bits(short_at(at + 74, i)) >> intrinsics.lane_numbers()) & 1
            scale = d * f32((byte_at(at, 106 + i // 4) >> (i // 2 % 2 * 4) & 15) * 2 + 1)
            v = to_floats(intrinsics.bytes_at(values, 0)) * scale
            store(y, out + i * 16, v * (to_floats(signs) * -2.0 + 1.0))


@part
def eight_of(at: int, ninth: int) -> int:
    """The eight values, as bytes, of two indices: low bytes at `at`, their upper bits the lowest of `ninth`."""
    first = byte_at(at, 0) | ((ninth & 1) << 8)
    second = byte_at(at, 1) | ((ninth & 2) << 7)
    return THREE_S[first] | (THREE_S[second] << 32)


@iq3_s.dot
def dot_iq3_s(x, w, n):
    a = intrinsics.splat(0.0)
    for b in range(0, n, 256):
        d = half_at(w, 0)
        for i in range(16):
            ninth = byte_at(w, 66 + i // 2) >> (i % 2 * 4)
            at = w + 2 + i * 4
            v = to_floats(intrinsics.bytes_of(eight_of(at, ninth), eight_of(at + 2, ninth >> 2)))
            scale = d * f32((byte_at(w, 106 + i // 4) >> (i // 2 % 2 * 4) & 15) * 2 + 1)
            v = v * scale
            a = intrinsics.fma(
                intrinsics.put_where(v, short_at(w + 74, i), intrinsics.neg(v)),
                load(x, b + i * 16),
                a,
            )
        w += 110
    return intrinsics.total(a)


@iq4_nl.unpack
def unpack_iq4_nl(y, x, n):
    values = load(NL, 0)
    for b in range(n):
        at, out = x + b * 18, b * 32
        d, q = half_at(at, 0), intrinsics.bytes_at(at, 2)
        store(y, out, intrinsics.pick(values, q) * d)
        store(y, out + 16, intrinsics.pick(values, q >> 4) * d)


@iq4_nl.dot
def dot_iq4_nl(x, w, n):
    values, total_sums = load(NL, 0), intrinsics.splat(0.0)
    for p in range(0, n, 256):
        a, b = intrinsics.splat(0.0), intrinsics.splat(0.0)
        for i in range(p, min(p + 256, n), 32):
            d, q = half_at(w, 0), intrinsics.bytes_at(w, 2)
            a = intrinsics.fma(intrinsics.pick(values, q) * d, load(x, i), a)
            b = intrinsics.fma(intrinsics.pick(values, q >> 4) * d, load(x, i + 16), b)
            w += 18
        total_sums += a + b
    return intrinsics.total(total_sums)


@iq4_xs.unpack
def unpack_iq4_xs(y, x, n):
    values = load(NL, 0)
    for b in range(n):
        at, out = x + b * 136, b * 256
        d, high = half_at(at, 0), short_at(at, 1)
        for i in range(8):
            low = byte_at(at, 4 + i // 2) >> (i % 2 * 4)
            scale = d * f32(((low & 15) | ((high >> (i * 2) & 3) << 4)) - 32)
            q = intrinsics.bytes_at(at, 8 + i * 16)
            store(y, out + i * 32, intrinsics.pick(values, q) * scale)
            store(y, out + i * 32 + 16, intrinsics.pick(values, q >> 4) * scale)


@iq4_xs.dot
def dot_iq4_xs(x, w, n):
    values, a, b, scales = (
        load(NL, 0),
        intrinsics.splat(0.0),
        intrinsics.splat(0.0),
        intrinsics.scratch(16),
    )
    for p in range(0, n, 256):
        group = intrinsics.lane_numbers() & 7
        low = (intrinsics.spread_bits(intrinsics.word_at(w + 4, 0)) >> (group << 2)) & 15
        high = (intrinsics.spread_bits(short_at(w, 1)) >> (group << 1)) & 3
        store(scales, 0, to_floats((low | (high << 4)) - 32) * half_at(w, 0))
        for i in range(8):
            v, q = values * intrinsics.peek(scales, i), intrinsics.bytes_at(w, 8 + i * 16)
            a = intrinsics.fma(intrinsics.pick(v, q), load(x, p + i * 32), a)
            b = intrinsics.fma(intrinsics.pick(v, q >> 4), load(x, p + i * 32 + 16), b)
        w += 136
    return intrinsics.total(a + b)
