"""Dot products with values that `kernels.rounded` has rounded to 8 bits, 32 at a time; see there for where things lie.

A block's products are summed by fours in integers, and these sums times both steps in f32. Two sums take turns, as each
waits for the one before.
"""

import numpy as np

from packtrain.types.iq import NL, iq4_nl
from packtrain.types.k import q4_K, q5_K, q6_K, scales_then_lows
from packtrain.types.legacy import q4_0, q4_1, q5_0, q5_1, q8_0
from packtrain.types.words import (
    Eight,
    chars_at,
    codes_at,
    codes_where,
    eight,
    eight_at,
    eight_halves,
    first_eight,
    fma8,
    fours_at,
    half_at,
    last_eight,
    look_up,
    nibbles_at,
    part,
    peek,
    put_eight,
    scratch,
    store,
    times,
    times_less_8,
    times_less_16,
    times_less_32,
    times_signed,
    to_floats,
    total8,
    word_at,
)

f32 = np.float32
NL_LOW, NL_HIGH = map(int, NL.astype(np.int8).view("<i8"))  # as bytes of two words


@part
def steps(x: int, w: int, n: int, i: int) -> Eight:
    """The step of the i-th 32 rounded values times that of a block, its first f16, in all lanes."""
    return eight_halves(w, 0) * peek(x + 2 * n, i // 32)


@part
def lows(x: int, w: int, n: int, i: int) -> f32:
    """What the offset of a block, its second f16, adds."""
    return half_at(w, 1) * peek(x + 2 * n + n // 8, i // 32)


@q4_0.dot_rounded
def dot_q4_0(x, w, n):
    a, b = eight(f32(0)), eight(f32(0))
    for i in range(0, n, 32):
        a, b = b, fma8(times_less_8(nibbles_at(w, 2), x, n, i), steps(x, w, n, i), a)
        w += 18
    return total8(a + b)


@q4_1.dot_rounded
def dot_q4_1(x, w, n):
    a, b, low = eight(f32(0)), eight(f32(0)), f32(0)
    for i in range(0, n, 32):
        a, b = b, fma8(times(nibbles_at(w, 4), x, n, i), steps(x, w, n, i), a)
        low += lows(x, w, n, i)
        w += 20
    return total8(a + b) + low


@q5_0.dot_rounded
def dot_q5_0(x, w, n):
    a, b = eight(f32(0)), eight(f32(0))
    for i in range(0, n, 32):
        q = nibbles_at(w, 6) | codes_where(word_at(w + 2, 0), 16)
        a, b = b, fma8(times_less_16(q, x, n, i), steps(x, w, n, i), a)
        w += 22
    return total8(a + b)


@q5_1.dot_rounded
def dot_q5_1(x, w, n):
    a, b, low = eight(f32(0)), eight(f32(0)), f32(0)
    for i in range(0, n, 32):
        q = nibbles_at(w, 8) | codes_where(word_at(w + 4, 0), 16)
        a, b = b, fma8(times(q, x, n, i), steps(x, w, n, i), a)
        low += lows(x, w, n, i)
        w += 24
    return total8(a + b) + low


@q8_0.dot_rounded
def dot_q8_0(x, w, n):
    a, b = eight(f32(0)), eight(f32(0))
    for i in range(0, n, 32):
        a, b = b, fma8(times_signed(codes_at(w, 2), x, i), steps(x, w, n, i), a)
        w += 34
    return total8(a + b)


@iq4_nl.dot_rounded
def dot_iq4_nl(x, w, n):
    a, b = eight(f32(0)), eight(f32(0))
    for i in range(0, n, 32):
        q = look_up(nibbles_at(w, 2), NL_LOW, NL_HIGH)
        a, b = b, fma8(times_signed(q, x, i), steps(x, w, n, i), a)
        w += 18
    return total8(a + b)


@q4_K.dot_rounded
def dot_q4_K(x, w, n):
    a, b, low, s = eight(f32(0)), eight(f32(0)), eight(f32(0)), scratch(8)
    for p in range(0, n, 256):
        both = scales_then_lows(w)
        low = fma8(last_eight(both), eight_at(x + 2 * n + n // 8, p // 32), low)
        put_eight(s, 0, first_eight(both) * eight_at(x + 2 * n, p // 32))
        for i in range(0, 8, 2):
            q, at = codes_at(w, 16 + i * 16), p + i * 32
            a = fma8(times(q & 15, x, n, at), eight(peek(s, i)), a)
            b = fma8(times(q >> 4, x, n, at + 32), eight(peek(s, i + 1)), b)
        w += 144
    return total8((a + b) + low)


@q5_K.dot_rounded
def dot_q5_K(x, w, n):
    a, b, low, s = eight(f32(0)), eight(f32(0)), eight(f32(0)), scratch(8)
    for p in range(0, n, 256):
        both, top = scales_then_lows(w), codes_at(w, 16)
        low = fma8(last_eight(both), eight_at(x + 2 * n + n // 8, p // 32), low)
        put_eight(s, 0, first_eight(both) * eight_at(x + 2 * n, p // 32))
        for i in range(0, 8, 2):
            q, at = codes_at(w, 48 + i * 16), p + i * 32
            first, second = (q & 15) | ((top << 4) & 16), (q >> 4) | ((top << 3) & 16)
            a = fma8(times(first, x, n, at), eight(peek(s, i)), a)
            b = fma8(times(second, x, n, at + 32), eight(peek(s, i + 1)), b)
            top = top >> 2
        w += 176
    return total8((a + b) + low)


@q6_K.dot_rounded
def dot_q6_K(x, w, n):
    a, b, s = eight(f32(0)), eight(f32(0)), scratch(16)
    for p in range(0, n, 256):
        store(s, 0, to_floats(chars_at(w, 192)) * half_at(w, 104))
        for half in range(2):
            at, i, low = p + half * 128, half * 8, w + half * 64
            q, r, h = codes_at(low, 0), codes_at(low, 32), codes_at(w, 128 + half * 32)
            d = x + 2 * n + at // 8
            v = times_less_32((q & 15) | ((h << 4) & 48), x, n, at)
            a = fma8(v, fours_at(s, i) * peek(d, 0), a)
            v = times_less_32((r & 15) | ((h << 2) & 48), x, n, at + 32)
            b = fma8(v, fours_at(s, i + 2) * peek(d, 1), b)
            v = times_less_32((q >> 4) | (h & 48), x, n, at + 64)
            a = fma8(v, fours_at(s, i + 4) * peek(d, 2), a)
            v = times_less_32((r >> 4) | ((h >> 2) & 48), x, n, at + 96)
            b = fma8(v, fours_at(s, i + 6) * peek(d, 3), b)
        w += 210
    return total8(a + b)
