"""ggml's first types: blocks of 32 values with one scale, and an offset in q4_1 and q5_1.

Quantized bit for bit as ggml's reference. Formats: ggml-common.h.
"""

import numpy as np

from packtrain.types import words
from packtrain.types.room import Layout, packed

f32 = np.float32
q4_0 = packed("q4_0", 2, 32, 18, layout=Layout(32, 16, -8, (0,), 2))
q4_1 = packed("q4_1", 3, 32, 20, layout=Layout(32, 16, None, (0, 2), 4))
q5_0 = packed("q5_0", 6, 32, 22, layout=Layout(32, 32, -16, (0,), 6, high=2, high_runs=4))
q5_1 = packed("q5_1", 7, 32, 24, layout=Layout(32, 32, None, (0, 2), 8, high=4, high_runs=4))
q8_0 = packed("q8_0", 8, 32, 34, layout=Layout(32, 255, -127, (0,), 2))
q4_0.mix("Q4_0", 2, weighed=q4_1)
q4_1.mix("Q4_1", 3)
q5_0.mix("Q5_0", 8, weighed=q5_1)
q5_1.mix("Q5_1", 9)
q8_0.mix("Q8_0", 7)


@q4_0.unpack
def unpack_q4_0(y, x, n):
    for b in range(n):
        at, out = x + b * 18, b * 32
        d, q = words.half_at(at, 0), words.bytes_at(at, 2)
        words.store(y, out, words.to_floats((q & 15) - 8) * d)
        words.store(y, out + 16, words.to_floats((q >> 4) - 8) * d)


@q4_0.pack
def pack_q4_0(y, x, n):
    for b in range(n):
        to, at = y + b * 18, x + b * 128
        d = words.extreme(at, 32) / f32(-8)
        words.put_half(to, 0, d)
        words.put_codes(to + 2, at, f32(0), words.reciprocal(d), f32(8.5), f32(15))


@q4_1.unpack
def unpack_q4_1(y, x, n):
    for b in range(n):
        at, out = x + b * 20, b * 32
        d, m, q = words.half_at(at, 0), words.half_at(at, 1), words.bytes_at(at, 4)
        words.store(y, out, words.to_floats(q & 15) * d + m)
        words.store(y, out + 16, words.to_floats(q >> 4) * d + m)


@q4_1.pack
def pack_q4_1(y, x, n):
    for b in range(n):
        to, at = y + b * 20, x + b * 128
        low, high = words.bounds(at)
        d = (high - low) / f32(15)
        words.put_half(to, 0, d)
        words.put_half(to, 1, low)
        words.put_codes(to + 4, at, low, words.reciprocal(d), f32(0.5), f32(15))


@q5_0.unpack
def unpack_q5_0(y, x, n):
    for b in range(n):
        at, out = x + b * 22, b * 32
        d, q = words.half_at(at, 0), words.bytes_at(at, 6)
        high = words.spread_bits(words.word_at(at + 2, 0)) >> words.lane_numbers()
        words.store(y, out, words.to_floats(((q & 15) | ((high & 1) << 4)) - 16) * d)
        words.store(y, out + 16, words.to_floats(((q >> 4) | ((high >> 12) & 16)) - 16) * d)


@q5_0.pack
def pack_q5_0(y, x, n):
    for b in range(n):
        to, at = y + b * 22, x + b * 128
        d = words.extreme(at, 32) / f32(-16)
        words.put_half(to, 0, d)
        words.put_word(
            to + 2, 0, words.put_codes(to + 6, at, f32(0), words.reciprocal(d), f32(16.5), f32(31))
        )


@q5_1.unpack
def unpack_q5_1(y, x, n):
    for b in range(n):
        at, out = x + b * 24, b * 32
        d, m, q = words.half_at(at, 0), words.half_at(at, 1), words.bytes_at(at, 8)
        high = words.spread_bits(words.word_at(at + 4, 0)) >> words.lane_numbers()
        words.store(y, out, words.to_floats((q & 15) | ((high & 1) << 4)) * d + m)
        words.store(y, out + 16, words.to_floats((q >> 4) | ((high >> 12) & 16)) * d + m)


@q5_1.pack
def pack_q5_1(y, x, n):
    for b in range(n):
        to, at = y + b * 24, x + b * 128
        low, high = words.bounds(at)
        d = (high - low) / f32(31)
        words.put_half(to, 0, d)
        words.put_half(to, 1, low)
        words.put_word(
            to + 4, 0, words.put_codes(to + 8, at, low, words.reciprocal(d), f32(0.5), f32(31))
        )


@q8_0.unpack
def unpack_q8_0(y, x, n):
    for b in range(n):
        at, out = x + b * 34, b * 32
        d = words.half_at(at, 0)
        words.store(y, out, words.to_floats(words.chars_at(at, 2)) * d)
        words.store(y, out + 16, words.to_floats(words.chars_at(at, 18)) * d)


@q8_0.dot
def dot_q8_0(x, w, n):
    every = words.splat(0.0)
    for p in range(0, n, 256):
        a, b = words.splat(0.0), words.splat(0.0)
        for i in range(p, min(p + 256, n), 32):
            d = words.half_at(w, 0)
            a = words.fma(words.to_floats(words.chars_at(w, 2)) * d, words.load(x, i), a)
            b = words.fma(words.to_floats(words.chars_at(w, 18)) * d, words.load(x, i + 16), b)
            w += 34
        every += a + b
    return words.total(every)


@q8_0.pack
def pack_q8_0(y, x, n):
    for b in range(n):
        to, at = y + b * 34, x + b * 128
        d = words.largest(
            words.maximum(words.absolute(words.load(at, 0)), words.absolute(words.load(at, 16)))
        ) / f32(127)
        words.put_half(to, 0, d)
        words.put_rounded(to + 2, at, words.reciprocal(d))
        words.put_rounded(to + 18, at + 64, words.reciprocal(d))
