"""Rows of f32 to blocks of 256 with scales of their own parts: q4_K, q5_K, q6_K, after ggml's published search.

A part's scale (and offset) is the weighted least-squares fit to the codes that trial scales give, the best of about
twenty. Then the scales are packed themselves, and codes chosen for what was kept of them.
"""

from numba import types

from packtrain.kernels.bits import (
    char_at,
    half_at,
    i32x16,
    put_byte,
    put_bytes,
    put_half,
    spread_bits,
    to_bits,
)
from packtrain.kernels.call import kernel, part
from packtrain.kernels.dequantize import scale_and_least
from packtrain.kernels.simd import (
    absolute,
    f32x16,
    largest,
    load,
    maximum,
    neg,
    peek,
    poke,
    scratch,
    select_less,
    total,
)

i64, f32, void = types.int64, types.float32, types.void
PARTS = 8  # of 32 values; q6_K has twice as many of 16
NOTHING = 1e-15  # q6_K: where no value is larger there are zeros
ROUND = 12582912.0  # 1.5 * 2**23: a sum with it has no digits behind the point
packer = kernel(void(i64, i64, i64))


@part(f32x16(f32x16, f32, f32))
def rounded(v, low, high):
    """To the nearest whole number, ties to even, within bounds."""
    return (select_less(v, low, low, select_less(high, v, high, v)) + ROUND) - ROUND


@part(i64(f32, i64))
def whole(v, high):
    """The same for one value."""
    return min(i64(f32(v + f32(ROUND)) - f32(ROUND)), high)


@part(types.UniTuple(f32, 2)(f32, f32, f32, f32, f32))
def line(weight, sum_x, sum_l, sum_ll, sum_lx):
    """Scale and least value, at most 0, of the weighted line through codes l and values x; scale 0: there is none."""
    determinant = weight * sum_ll - sum_l * sum_l
    if not determinant > 0:
        return f32(0), f32(0)
    low = (sum_ll * sum_x - sum_l * sum_lx) / determinant
    if low > 0:
        return sum_lx / sum_ll, f32(0)
    return (weight * sum_lx - sum_x * sum_l) / determinant, low


@kernel(types.UniTuple(f32, 2)(i64, f32, f32, i64))
def fit(x, most, first, trials):
    """Scale and least value, at most 0, of 32 values as codes 0 .. most.

    The span of the values gets `most` codes, then in trial i most + first + i / 10; a better trial's least value
    counts for the next. An error weighs as much as its value and the average of all.
    """
    a, b = load(x, 0), load(x, 16)
    average = (total(a * a + b * b) / f32(32)) ** f32(0.5)
    wa, wb = absolute(a) + average, absolute(b) + average
    low, high = min(-largest(maximum(neg(a), neg(b))), f32(0)), largest(maximum(a, b))
    if not high > low:
        return f32(0), low
    weight, sum_x = total(wa + wb), total(wa * a + wb * b)
    scale, best = f32(0), f32(0)
    for trial in range(-1, trials + 1):
        codes = most if trial < 0 else most + first + f32(0.1) * f32(trial)
        inverse = codes / (high - low)
        la, lb = (
            rounded((a - low) * inverse, f32(0), most),
            rounded((b - low) * inverse, f32(0), most),
        )
        if trial < 0:
            new_scale, new_low = (high - low) / most, low
        else:
            sum_l, sum_ll = total(wa * la + wb * lb), total(wa * la * la + wb * lb * lb)
            sum_lx = total(wa * la * a + wb * lb * b)
            new_scale, new_low = line(weight, sum_x, sum_l, sum_ll, sum_lx)
        da, db = la * new_scale + new_low - a, lb * new_scale + new_low - b
        error = total(wa * da * da + wb * db * db)
        if trial < 0 or error < best:
            best, scale, low = error, new_scale, new_low
    return scale, low


@kernel(void(i64, i64, f32, f32, i64))
def put_scales(y, x, most, first, trials):
    """The first 16 bytes of a q4_K or q5_K block: see scale_and_least, which reads them."""
    scales, lows = scratch(8), scratch(8)
    largest_scale, lowest = f32(0), f32(0)
    for i in range(PARTS):
        scale, low = fit(x + i * 128, most, first, trials)
        poke(scales, i, scale)
        poke(lows, i, low)
        largest_scale, lowest = max(largest_scale, scale), min(lowest, low)
    put_half(y, 0, largest_scale / f32(63))
    put_half(y, 1, -lowest / f32(63))
    by_scale = f32(63) / largest_scale if largest_scale > 0 else f32(0)
    by_low = f32(63) / lowest if lowest < 0 else f32(0)
    for i in range(PARTS // 2):
        scale, least = whole(by_scale * peek(scales, i), 63), whole(by_low * peek(lows, i), 63)
        scale_4 = whole(by_scale * peek(scales, i + 4), 63)
        least_4 = whole(by_low * peek(lows, i + 4), 63)
        put_byte(y, 4 + i, scale | (scale_4 >> 4 << 6))
        put_byte(y, 8 + i, least | (least_4 >> 4 << 6))
        put_byte(y, 12 + i, (scale_4 & 15) | ((least_4 & 15) << 4))


@part(i32x16(i64, i64, i64, i64, f32))
def codes(y, x, part, lane, most):
    """Of 16 values, from `lane` on in a part, whose scale has been packed."""
    d, least = scale_and_least(y, part)
    d = d if d > 0 else f32(1)  # where it is 0 codes do not count
    return to_bits(rounded((load(x + part * 128, lane) + least) / d, f32(0), most))


@packer
def q4_K(y, x, n):
    for b in range(n):
        to, at = y + b * 144, x + b * 1024
        put_scales(to, at, f32(15), f32(-1), 20)
        for i in range(0, PARTS, 2):
            for lane in range(0, 32, 16):
                first = codes(to, at, i, lane, f32(15))
                second = codes(to, at, i + 1, lane, f32(15))
                put_bytes(to + 16 + i * 16, lane, first | (second << 4))


@packer
def q5_K(y, x, n):
    for b in range(n):
        to, at = y + b * 176, x + b * 1024
        put_scales(to, at, f32(31), f32(-0.5), 15)
        for lane in range(0, 32, 16):
            top = spread_bits(0)
            for i in range(0, PARTS, 2):
                first = codes(to, at, i, lane, f32(31))
                second = codes(to, at, i + 1, lane, f32(31))
                top = top | (first >> 4 << i) | (second >> 4 << (i + 1))
                put_bytes(to + 48 + i * 16, lane, (first & 15) | ((second & 15) << 4))
            put_bytes(to + 16, lane, top)


@kernel(f32(i64, i64))
def extreme(x, n):
    """Of n values the one furthest from zero; the first of equals."""
    found = peek(x, 0)
    for i in range(1, n):
        if abs(peek(x, i)) > abs(found):
            found = peek(x, i)
    return found


@kernel(f32(i64))
def fit_even(x):
    """Scale of 16 values as codes -32 .. 31: a trial gives the extreme one 31.1 .. 32.9; errors weigh as squares."""
    furthest, scale, best = extreme(x, 16), f32(0), f32(0)
    if abs(furthest) < NOTHING:
        return f32(0)
    v = load(x, 0)
    w = v * v
    for trial in range(-9, 10):
        inverse = -(f32(32) + f32(0.1) * f32(trial)) / furthest
        code = rounded(v * inverse, f32(-32), f32(31))
        sum_lx, sum_ll = total(w * v * code), total(w * code * code)
        if sum_lx * sum_lx > best * sum_ll:
            scale = sum_lx / sum_ll
            best = scale * sum_lx
    return scale


@kernel(void(i64, i64))
def put_even_scales(y, x):
    """The last 18 bytes of a q6_K block: sixteen scales and what they count in."""
    scales, furthest = scratch(16), f32(0)
    for i in range(2 * PARTS):
        poke(scales, i, fit_even(x + i * 64))
    furthest = extreme(scales, 16)
    inverse = f32(-128) / furthest if abs(furthest) >= NOTHING else f32(0)
    put_half(y, 104, furthest / f32(-128))
    for i in range(2 * PARTS):
        put_byte(y, 192 + i, whole(inverse * peek(scales, i), 127))


@kernel(i32x16(i64, i64, i64))
def even_codes(y, x, i):
    """Of the i-th 16 values, whose scale has been packed; 32 stands for zero."""
    d = half_at(y, 104) * f32(char_at(y, 192 + i))
    d = d if d != 0 else f32(1)
    return to_bits(rounded(load(x + i * 64, 0) / d, f32(-32), f32(31)) + 32.0)


@packer
def q6_K(y, x, n):
    for b in range(n):
        to, at = y + b * 210, x + b * 1024
        put_even_scales(to, at)
        for half in range(2):
            for lane in range(2):
                i = half * 8 + lane
                c0, c1 = even_codes(to, at, i), even_codes(to, at, i + 2)
                c2, c3 = even_codes(to, at, i + 4), even_codes(to, at, i + 6)
                low, high = to + half * 64 + lane * 16, to + 128 + half * 32 + lane * 16
                put_bytes(low, 0, (c0 & 15) | ((c2 & 15) << 4))
                put_bytes(low, 32, (c1 & 15) | ((c3 & 15) << 4))
                put_bytes(high, 0, (c0 >> 4) | (c1 >> 4 << 2) | (c2 >> 4 << 4) | (c3 >> 4 << 6))
