"""The searches for scales of ggml-quants.c, in its order of sums: the same bits as llama-quantize.

A group is n values at the address x with weights at w (f32); its codes are written to `codes`, as f32, too. `even`,
`even_by_turns`: value = code * scale, codes -most .. most - 1 written with `most` added; `above`: value = code * scale,
codes 0 .. most; `sloped`: value = code * scale + low, codes 0 .. most.
"""

import numpy as np
from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import kernel, part
from packtrain.kernels.simd import INFINITY, LANES, f32x16, neg, peek, poke, scratch, splat, store

i64, f32, void = types.int64, types.float32, types.void
NOTHING = np.float32(1e-15)  # a group without larger values is all zeros
ROUND = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, in the low bits
LARGEST = 1 << 22
TURNS = 5  # at most, each through all codes of a group
group = (i64, i64, i64, i64, i64)  # x, w, n, most, codes


@part(f32x16())
def lanes():
    """0 .. 15."""
    numbers = scratch(16)
    for lane in range(LANES):
        poke(numbers, lane, f32(lane))
    return simd.load(numbers, 0)


@part(i64(f32))
def nearest(v):
    """Round to the nearest integer, ties to even; numbers beyond 22 bits lose their upper bits, as there."""
    bits = np.float32(v + f32(ROUND)).view(np.int32)
    return (i64(bits) & 0x007FFFFF) - 0x00400000


@part(f32(f32, i64, i64))
def code_of(v, low, high):
    return f32(min(max(nearest(v), low), high))


@part(f32(f32))
def as_byte(code):
    """A code as ggml keeps it: below zero it wraps around."""
    return code + f32(256) if code < 0 else code


@kernel(f32(i64, i64))
def furthest(x, n):
    """The value furthest from zero, the first on ties; 0 if all are next to nothing."""
    extreme = f32(0)
    for i in range(n):
        if abs(peek(x, i)) > abs(extreme):
            extreme = peek(x, i)
    return extreme if abs(extreme) >= NOTHING else f32(0)


@part(void(i64, i64))
def put_zeros(codes, n):
    for i in range(n):
        poke(codes, i, f32(0))


@kernel(types.UniTuple(f32, 2)(*group, f32))
def products(x, w, n, most, codes, inverse):
    """Codes for one scale, written with `most` added, and the sums of w * x * code and w * code * code."""
    sum_lx, sum_ll, high = f32(0), f32(0), f32(most)
    for i in range(n):
        v, weight = peek(x, i), peek(w, i)
        code = code_of(inverse * v, -most, most - 1)
        poke(codes, i, code + high)
        sum_lx += weight * v * code
        sum_ll += weight * code * code
    return sum_lx, sum_ll


@part(f32x16(f32x16, f32, f32))
def codes_of(v, low, high):
    return neg(simd.maximum(-high, neg(simd.maximum(v + ROUND - ROUND, low))))


@part(void(i64, i64, i64, i64, i64, f32x16))
def all_products(x, w, n, most, result_sums, inverses):
    """`products` of a scale in each lane, without the codes."""
    sum_lx, sum_ll = splat(0.0), splat(0.0)
    for i in range(n):
        code = codes_of(inverses * peek(x, i), f32(-most), f32(most - 1))
        sum_lx += code * (peek(w, i) * peek(x, i))
        sum_ll += code * peek(w, i) * code
    store(result_sums, 0, sum_lx)
    store(result_sums, LANES, sum_ll)


@kernel(f32(*group))
def even(x, w, n, most, codes):
    """The scale of a group; eighteen trials map its extreme to most - 0.9 .. most + 0.9. make_qx_quants."""
    extreme, trial_sums = furthest(x, n), scratch(32)
    if extreme == 0:
        put_zeros(codes, n)
        return f32(0)
    first = inverse = f32(-most) / extreme
    sum_lx, sum_ll = products(x, w, n, most, codes, first)
    scale = sum_lx / sum_ll if sum_ll != 0 else f32(0)
    best = scale * sum_lx
    for begin in (-9, 1):
        inverses = neg((lanes() + f32(begin)) * f32(0.1) + f32(most)) / extreme
        all_products(x, w, n, most, trial_sums, inverses)
        for lane in range(9):
            sum_lx, sum_ll = peek(trial_sums, lane), peek(trial_sums, LANES + lane)
            if sum_ll > 0 and sum_lx * sum_lx > best * sum_ll:
                scale = sum_lx / sum_ll
                best = scale * sum_lx
                inverse = -(f32(most) + f32(0.1) * f32(begin + lane)) / extreme
    if inverse != first:
        products(x, w, n, most, codes, inverse)
    return scale


@kernel(f32(*group))
def even_by_turns(x, w, n, most, codes):
    """The scale of a group; from the extreme on -most, codes change one by one while that helps. make_q3_quants."""
    extreme, high = furthest(x, n), f32(most)
    if extreme == 0:
        put_zeros(codes, n)
        return f32(0)
    sum_lx, sum_ll = products(x, w, n, most, codes, f32(-most) / extreme)
    for _ in range(TURNS):
        changed = False
        for i in range(n):
            v, weight, code = peek(x, i), peek(w, i), peek(codes, i) - high
            lx = sum_lx - weight * v * code
            if lx > 0:
                ll = sum_ll - weight * code * code
                new = code_of(v * ll / lx, -most, most - 1)
                if new != code:
                    lx += weight * v * new
                    ll += weight * new * new
                    if ll > 0 and lx * lx * sum_ll > sum_lx * sum_lx * ll:
                        poke(codes, i, new + high)
                        sum_lx, sum_ll, changed = lx, ll, True
        if not changed:
            break
    return sum_lx / sum_ll if sum_ll > 0 else f32(0)


@kernel(f32(i64, i64, i64, i64, f32))
def best_of_nine(x, w, n, most, highest):
    """The factor for values that makes the least errors as codes, of those that map the highest near `most`."""
    inverse, best = f32(most) / highest, f32(0)
    for trial in range(-5, 5):
        if trial != 0:  # the first one is that of the plain scale
            by = (f32(0.1) * f32(trial) + f32(most)) / highest
            if trial == -5:
                by = inverse
            error, scale = f32(0), f32(1) / by
            for i in range(n):
                code = code_of(by * peek(x, i), -LARGEST, most)
                residual = peek(x, i) - scale * (as_byte(code) if trial == -5 else code)
                error += peek(w, i) * residual * residual
            if trial == -5 or error < best:
                best, inverse = error, by
    return inverse


@kernel(f32(*group))
def above(x, w, n, most, codes):
    """The scale of a group of values above zero (hardly below), from nine trials, then by turns. make_qp_quants."""
    highest, min_code = f32(0), -LARGEST
    for i in range(n):
        highest = max(highest, peek(x, i))
    if highest < NOTHING:
        put_zeros(codes, n)
        return f32(0)
    inverse = best_of_nine(x, w, n, most, highest)
    sum_lx, sum_ll = f32(0), f32(0)
    for i in range(n):
        v, weight = peek(x, i), peek(w, i)
        code = code_of(inverse * v, min_code, most)
        poke(codes, i, as_byte(code))
        sum_lx += weight * v * code
        sum_ll += weight * code * code
    for _ in range(TURNS):
        changed = False
        for i in range(n):
            v, weight, code = peek(x, i), peek(w, i), peek(codes, i)
            lx, ll = sum_lx - weight * v * code, sum_ll - weight * code * code
            if lx > 0 and ll > 0:
                new = code_of(v * ll / lx, min_code, most)
                if new != code:
                    lx += weight * v * new
                    ll += weight * new * new
                    if lx * lx * sum_ll > sum_lx * sum_lx * ll:
                        poke(codes, i, as_byte(new))
                        sum_lx, sum_ll, changed = lx, ll, True
        if not changed:
            break
    return sum_lx / sum_ll if sum_ll > 0 else f32(0)


@kernel(f32(i64, i64, i64, i64, f32, f32, i64))
def misfit(x, w, n, codes, scale, low, sizes):
    """The weighted sum of squared differences, or of their sizes."""
    error = f32(0)
    for i in range(n):
        residual = scale * peek(codes, i) + low - peek(x, i)
        error += peek(w, i) * (abs(residual) if sizes else residual * residual)
    return error


@part(f32x16(i64, i64, i64, i64, f32x16, f32x16, i64))
def misfits(x, w, n, codes, scales, lows, sizes):
    """`misfit` of a trial in each lane."""
    errors = splat(0.0)
    for i in range(n):
        residual = scales * simd.load(codes, i * LANES) + lows - peek(x, i)
        errors += splat(peek(w, i)) * (simd.absolute(residual) if sizes else residual * residual)
    return errors


@part(void(*group, f32, f32x16, f32, f32, i64))
def tried(x, w, n, most, trial_results, low, inverses, weight, sum_x, sizes):
    """A trial in each lane: writes errors, scales and lows, and then the codes of each value, to `trial_results`."""
    sum_l, sum_ll, sum_lx = splat(0.0), splat(0.0), splat(0.0)
    codes = trial_results + 3 * LANES * 4
    for i in range(n):
        code = codes_of(inverses * (peek(x, i) - low), f32(0), f32(most))
        store(codes, i * LANES, code)
        part = code * peek(w, i)
        sum_l += part
        sum_ll += part * code
        sum_lx += part * peek(x, i)
    determinant = sum_ll * weight - sum_l * sum_l
    scales = (sum_lx * weight - sum_l * sum_x) / determinant
    lows = (sum_ll * sum_x - sum_l * sum_lx) / determinant
    scales = simd.select_less(0.0, lows, sum_lx / sum_ll, scales)
    lows = simd.select_less(0.0, lows, 0.0, lows)
    errors = misfits(x, w, n, codes, scales, lows, sizes)
    store(trial_results, 0, simd.select_less(0.0, determinant, errors, INFINITY))
    store(trial_results, LANES, scales)
    store(trial_results, 2 * LANES, lows)


@kernel(types.UniTuple(f32, 2)(*group, f32, f32, i64, i64))
def sloped(x, w, n, most, codes, first, step, trials, sizes):
    """Scale and least value, at most 0. make_qkx2_quants and make_qkx3_quants.

    The range of the values gets `most` codes, then in trial i most + first + i * step; of these lines through codes and
    values the one with the least weighted errors, or their sizes, is kept.
    """
    low, high, weight, sum_x, trial_results = peek(x, 0), peek(x, 0), f32(0), f32(0), scratch(560)
    for i in range(n):
        low, high = min(low, peek(x, i)), max(high, peek(x, i))
        weight += peek(w, i)
        sum_x += peek(w, i) * peek(x, i)
    low = min(low, f32(0))
    if not high > low:
        put_zeros(codes, n)
        return f32(0), low
    inverse = f32(most) / (high - low)
    for i in range(n):
        poke(codes, i, code_of(inverse * (peek(x, i) - low), 0, most))
    scale = f32(1) / inverse
    best = misfit(x, w, n, codes, scale, low, sizes)
    number = 0
    while number <= trials:
        inverses = ((lanes() + f32(number)) * step + first + f32(most)) / (high - low)
        tried(x, w, n, most, trial_results, low, inverses, weight, sum_x, sizes)
        lane, ahead = 0, min(trials + 1 - number, LANES)
        while lane < ahead and not peek(trial_results, lane) < best:
            lane += 1
        number += lane
        if lane < ahead:  # later trials begin from its lowest value
            number += 1
            best, scale = peek(trial_results, lane), peek(trial_results, LANES + lane)
            low = peek(trial_results, 2 * LANES + lane)
            for i in range(n):
                poke(codes, i, peek(trial_results, (3 + i) * LANES + lane))
    return scale, low
