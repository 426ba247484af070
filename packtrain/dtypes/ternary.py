"""Types of three values or fewer: packed bit for bit as ggml's reference. Formats: ggml-common.h."""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.element_type import packed
from packtrain.dtypes.intrinsics import Ints, code, part
from packtrain.dtypes.k import q4_K
from packtrain.dtypes.legacy import q4_0

f32 = np.float32
tq1_0 = packed("tq1_0", 34, 256, 54, smaller=q4_0)
tq2_0 = packed("tq2_0", 35, 256, 66, smaller=q4_0)
q1_0, q2_0 = packed("q1_0", 41, 128, 18), packed("q2_0", 42, 64, 18, smaller=q4_0)
tq1_0.mix("TQ1_0", 36, embedding=q4_K)
tq2_0.mix("TQ2_0", 37, embedding=q4_K)
LAST_POWERS = np.repeat(np.array([1, 3, 9, 27], f32), 4)


@part
def digit(q: Ints) -> Ints:
    """The first digit, -1 to 1, of a fraction of 256 in base three."""
    return ((intrinsics.spread_bits(q) & 255) * 3 >> 8) - 1


@tq1_0.unpack
def unpack_tq1_0(y, x, n):
    powers = intrinsics.to_bits(intrinsics.load(LAST_POWERS, 0))
    for b in range(n):
        at, out = x + b * 54, b * 256
        d = intrinsics.half_at(at, 26)
        for i in range(3):  # the first two sixteens take turns, the third is by itself
            q = intrinsics.bytes_at(at, i * 16)
            first, step = (i * 16, 32) if i < 2 else (160, 16)
            for k in range(5):
                intrinsics.store(y, out + first + k * step, intrinsics.to_floats(digit(q)) * d)
                q = q * 3
        four = intrinsics.spread_bits(intrinsics.word_at(at + 48, 0)) >> (
            (intrinsics.lane_numbers() & 3) << 3
        )
        intrinsics.store(y, out + 240, intrinsics.to_floats(digit((four & 255) * powers)) * d)


@tq2_0.unpack
def unpack_tq2_0(y, x, n):
    for b in range(n):
        at, out = x + b * 66, b * 256
        d = intrinsics.half_at(at, 32)
        for i in range(0, 64, 16):
            q, first = intrinsics.bytes_at(at, i), out + i // 32 * 128 + i % 32
            for k in range(4):
                intrinsics.store(
                    y, first + k * 32, intrinsics.to_floats((q >> (2 * k) & 3) - 1) * d
                )


@code
def furthest(x: int) -> f32:
    """The largest size of 256 values."""
    size = intrinsics.splat(0.0)
    for i in range(0, 256, 16):
        size = intrinsics.maximum(size, intrinsics.absolute(intrinsics.load(x, i)))
    return intrinsics.largest(size)


@part
def three(x: int, i: int, inverse: f32) -> Ints:
    """0 to 2: values times `inverse`, rounded to nearest, ties away from zero, plus one."""
    v = intrinsics.load(x, i) * inverse
    return intrinsics.to_bits(
        intrinsics.select_less(v, 0.5, intrinsics.select_less(-0.5, v, 1.0, 0.0), 2.0)
    )


@part
def fraction(q: Ints) -> Ints:
    """Five digits in base three as a fraction of 256, rounded up."""
    return intrinsics.to_bits(intrinsics.to_floats(intrinsics.spread_bits(q) * 256 + 242) / 243.0)


@tq1_0.pack
def pack_tq1_0(y, x, n):
    for b in range(n):
        to, at = y + b * 54, x + b * 1024
        d = furthest(at)
        inverse = intrinsics.reciprocal(d)
        intrinsics.put_half(to, 26, d)
        for i in range(3):
            first, step = (i * 16, 32) if i < 2 else (160, 16)
            q = intrinsics.spread_bits(0)
            for k in range(5):
                q = q * 3 + three(at, first + k * step, inverse)
            intrinsics.put_bytes(to, i * 16, fraction(q))
        for i in range(4):
            four = 0
            for k in range(4):
                v = intrinsics.peek(at, 240 + i + 4 * k) * inverse
                four = four * 3 + 1 + (v >= f32(0.5)) - (v <= f32(-0.5))
            intrinsics.put_byte(to, 48 + i, (four * 768 + 242) // 243)


@tq2_0.pack
def pack_tq2_0(y, x, n):
    for b in range(n):
        to, at = y + b * 66, x + b * 1024
        d = furthest(at)
        inverse = intrinsics.reciprocal(d)
        intrinsics.put_half(to, 32, d)
        for i in range(0, 64, 16):
            q, first = intrinsics.spread_bits(0), i // 32 * 128 + i % 32
            for k in range(4):
                q = q | (three(at, first + k * 32, inverse) << (2 * k))
            intrinsics.put_bytes(to, i, q)
