"""Search the scale of a group of values as ggml-quants.c does, in its order of sums: llama-quantize's bits.

A group is n values at the address x with weights at w (f32); its codes are written to `codes`, as f32, too. `even`,
`even_by_turns`: value = code * scale, codes -max_code … max_code - 1 written with `max_code` added; `above`: value =
code * scale, codes 0 … max_code; `sloped`: value = code * scale + low, codes 0 … max_code.
"""

import numpy as np

from packtrain.kernels.runtime.jit import kernel, part
from packtrain.kernels.runtime.kernel_types import f32, i64
from packtrain.kernels.simd.simd_f32 import (
    INFINITY, LANES, absolute, load, maximum, neg, peek, poke, scratch, select_less, splat, store,
)  # fmt: skip

MIN_MAGNITUDE = np.float32(1e-15)  # a group without larger values is all zeros
ROUND = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, in the low bits
MAX_CODE = 1 << 22
MAX_PASSES = 5  # most passes through all codes of a group
group_types = (i64, i64, i64, i64, i64)  # x, w, n, max_code, codes


@part("f32x16()")
def lanes():
    """Return a vector of the lane numbers 0 … 15 as f32."""
    lane_indices = scratch(16)
    for lane in range(LANES):
        poke(lane_indices, lane, f32(lane))
    return load(lane_indices, 0)


@part("i64(f32)")
def round_nearest(v):
    """Round to the nearest integer, ties to even; numbers beyond 22 bits lose their upper bits, as in ggml."""
    float_bits = np.float32(v + f32(ROUND)).view(np.int32)
    return (i64(float_bits) & 0x007FFFFF) - 0x00400000


@part("f32(f32, i64, i64)")
def clamped_code(v, min_code, max_code):
    """Return v rounded to the nearest integer within min_code … max_code, as f32."""
    return f32(min(max(round_nearest(v), min_code), max_code))


@part("f32(f32)")
def wrapped_byte(code):
    """Return a code as ggml stores it: below zero it wraps around to a byte."""
    return code + f32(256) if code < 0 else code


@kernel("f32(i64, i64)")
def extreme_value(x, n):
    """Return the value furthest from zero of n f32 at x, the first on ties; 0 if all are below MIN_MAGNITUDE."""
    extreme = f32(0)
    for i in range(n):
        if abs(peek(x, i)) > abs(extreme):
            extreme = peek(x, i)
    return extreme if abs(extreme) >= MIN_MAGNITUDE else f32(0)


@part("i64, i64")
def put_zeros(codes, n):
    for i in range(n):
        poke(codes, i, f32(0))


@kernel("UniTuple(f32, 2)(*group_types, f32)")
def code_products(x, w, n, max_code, codes, inverse):
    """Write codes + max_code of a group for the factor `inverse`; returns the sums of w * x * code, w * code**2."""
    sum_lx, sum_ll, code_offset = f32(0), f32(0), f32(max_code)
    for i in range(n):
        v, weight = peek(x, i), peek(w, i)
        code = clamped_code(inverse * v, -max_code, max_code - 1)
        poke(codes, i, code + code_offset)
        sum_lx += weight * v * code
        sum_ll += weight * code * code
    return sum_lx, sum_ll


@part("f32x16(f32x16, f32, f32)")
def clamped_codes(v, min_code, max_code):
    """Return each lane of v rounded to the nearest integer within min_code … max_code."""
    return neg(maximum(-max_code, neg(maximum(v + ROUND - ROUND, min_code))))


@part("i64, i64, i64, i64, i64, f32x16")
def lane_products(x, w, n, max_code, result_sums, inverses):
    """Write sums of w * x * code and w * code**2 for 16 factors `inverses`, one a lane, to address result_sums."""
    sum_lx, sum_ll = splat(0.0), splat(0.0)
    for i in range(n):
        code = clamped_codes(inverses * peek(x, i), f32(-max_code), f32(max_code - 1))
        sum_lx += code * (peek(w, i) * peek(x, i))
        sum_ll += code * peek(w, i) * code
    store(result_sums, 0, sum_lx)
    store(result_sums, LANES, sum_ll)


@kernel("f32(*group_types)")
def even(x, w, n, max_code, codes):
    """Choose the scale of n f32 at x, weighted by w, by 19 trials; writes signed codes. ggml: make_qx_quants."""
    extreme, trial_sums = extreme_value(x, n), scratch(32)
    if extreme == 0:
        put_zeros(codes, n)
        return f32(0)
    first_inverse = inverse = f32(-max_code) / extreme
    sum_lx, sum_ll = code_products(x, w, n, max_code, codes, first_inverse)
    scale = sum_lx / sum_ll if sum_ll != 0 else f32(0)
    best_score = scale * sum_lx
    for first_trial in (-9, 1):
        inverses = neg((lanes() + f32(first_trial)) * f32(0.1) + f32(max_code)) / extreme
        lane_products(x, w, n, max_code, trial_sums, inverses)
        for lane in range(9):
            sum_lx, sum_ll = peek(trial_sums, lane), peek(trial_sums, LANES + lane)
            if sum_ll > 0 and sum_lx * sum_lx > best_score * sum_ll:
                scale = sum_lx / sum_ll
                best_score = scale * sum_lx
                inverse = -(f32(max_code) + f32(0.1) * f32(first_trial + lane)) / extreme
    if inverse != first_inverse:
        code_products(x, w, n, max_code, codes, inverse)
    return scale


@kernel("f32(*group_types)")
def even_by_turns(x, w, n, max_code, codes):
    """Choose the scale of n f32 at x, weighted by w, then change single codes while that helps. make_q3_quants."""
    extreme, code_offset = extreme_value(x, n), f32(max_code)
    if extreme == 0:
        put_zeros(codes, n)
        return f32(0)
    sum_lx, sum_ll = code_products(x, w, n, max_code, codes, f32(-max_code) / extreme)
    for _ in range(MAX_PASSES):
        has_changed = False
        for i in range(n):
            v, weight, code = peek(x, i), peek(w, i), peek(codes, i) - code_offset
            lx = sum_lx - weight * v * code
            if lx > 0:
                ll = sum_ll - weight * code * code
                new_code = clamped_code(v * ll / lx, -max_code, max_code - 1)
                if new_code != code:
                    lx += weight * v * new_code
                    ll += weight * new_code * new_code
                    if ll > 0 and lx * lx * sum_ll > sum_lx * sum_lx * ll:
                        poke(codes, i, new_code + code_offset)
                        sum_lx, sum_ll, has_changed = lx, ll, True
        if not has_changed:
            break
    return sum_lx / sum_ll if sum_ll > 0 else f32(0)


@kernel("f32(i64, i64, i64, i64, f32)")
def best_inverse(x, w, n, max_code, max_value):
    """Return which of ten factors turns n f32 at x into codes up to max_code with the least error, weighted by w."""
    inverse, best_error = f32(max_code) / max_value, f32(0)
    for trial in range(-5, 5):
        if trial != 0:  # trial -5 takes the factor of trial 0
            trial_inverse = (f32(0.1) * f32(trial) + f32(max_code)) / max_value
            if trial == -5:
                trial_inverse = inverse
            error, scale = f32(0), f32(1) / trial_inverse
            for i in range(n):
                code = clamped_code(trial_inverse * peek(x, i), -MAX_CODE, max_code)
                residual = peek(x, i) - scale * (wrapped_byte(code) if trial == -5 else code)
                error += peek(w, i) * residual * residual
            if trial == -5 or error < best_error:
                best_error, inverse = error, trial_inverse
    return inverse


@kernel("f32(*group_types)")
def above(x, w, n, max_code, codes):
    """Choose the scale of n f32 above 0 at x, weighted by w, by ten trials; writes codes >= 0. make_qp_quants."""
    max_value, min_code = f32(0), -MAX_CODE
    for i in range(n):
        max_value = max(max_value, peek(x, i))
    if max_value < MIN_MAGNITUDE:
        put_zeros(codes, n)
        return f32(0)
    inverse = best_inverse(x, w, n, max_code, max_value)
    sum_lx, sum_ll = f32(0), f32(0)
    for i in range(n):
        v, weight = peek(x, i), peek(w, i)
        code = clamped_code(inverse * v, min_code, max_code)
        poke(codes, i, wrapped_byte(code))
        sum_lx += weight * v * code
        sum_ll += weight * code * code
    for _ in range(MAX_PASSES):
        has_changed = False
        for i in range(n):
            v, weight, code = peek(x, i), peek(w, i), peek(codes, i)
            lx, ll = sum_lx - weight * v * code, sum_ll - weight * code * code
            if lx > 0 and ll > 0:
                new_code = clamped_code(v * ll / lx, min_code, max_code)
                if new_code != code:
                    lx += weight * v * new_code
                    ll += weight * new_code * new_code
                    if lx * lx * sum_ll > sum_lx * sum_lx * ll:
                        poke(codes, i, wrapped_byte(new_code))
                        sum_lx, sum_ll, has_changed = lx, ll, True
        if not has_changed:
            break
    return sum_lx / sum_ll if sum_ll > 0 else f32(0)


@kernel("f32(i64, i64, i64, i64, f32, f32, i64)")
def weighted_error(x, w, n, codes, scale, low, use_absolute):
    """Return the squared (if `use_absolute`: absolute) errors of codes * scale + low for x, summed with weights w."""
    error = f32(0)
    for i in range(n):
        residual = scale * peek(codes, i) + low - peek(x, i)
        error += peek(w, i) * (abs(residual) if use_absolute else residual * residual)
    return error


@part("f32x16(i64, i64, i64, i64, f32x16, f32x16, i64)")
def weighted_errors(x, w, n, codes, scales, min_values, use_absolute):
    """Return weighted_error of 16 trials, one a lane; codes (n, 16), at an address, are those of the trials."""
    errors = splat(0.0)
    for i in range(n):
        residual = scales * load(codes, i * LANES) + min_values - peek(x, i)
        errors += splat(peek(w, i)) * (absolute(residual) if use_absolute else residual * residual)
    return errors


@part("*group_types, f32, f32x16, f32, f32, i64")
def try_lines(x, w, n, max_code, trial_results, low, inverses, weight, sum_x, use_absolute):
    """Fit a line in each of 16 lanes to the codes for (x - low) * inverses; writes errors, scales, lows and codes.

    trial_results, f32 (3 + n, 16) at an address, gets these; weight and sum_x are the sums of w and w * x
    """
    sum_l, sum_ll, sum_lx = splat(0.0), splat(0.0), splat(0.0)
    codes = trial_results + 3 * LANES * 4
    for i in range(n):
        code = clamped_codes(inverses * (peek(x, i) - low), f32(0), f32(max_code))
        store(codes, i * LANES, code)
        weighted_code = code * peek(w, i)
        sum_l += weighted_code
        sum_ll += weighted_code * code
        sum_lx += weighted_code * peek(x, i)
    determinant = sum_ll * weight - sum_l * sum_l
    scales = (sum_lx * weight - sum_l * sum_x) / determinant
    min_values = (sum_ll * sum_x - sum_l * sum_lx) / determinant
    scales = select_less(0.0, min_values, sum_lx / sum_ll, scales)
    min_values = select_less(0.0, min_values, 0.0, min_values)
    errors = weighted_errors(x, w, n, codes, scales, min_values, use_absolute)
    store(trial_results, 0, select_less(0.0, determinant, errors, INFINITY))
    store(trial_results, LANES, scales)
    store(trial_results, 2 * LANES, min_values)


@kernel("UniTuple(f32, 2)(*group_types, f32, f32, i64, i64)")
def sloped(x, w, n, max_code, codes, first_step, step, num_trials, use_absolute):
    """Return (scale, low <= 0) of n f32 at x, weights w; writes codes. make_qkx2_quants and make_qkx3_quants.

    The range of the values gets `max_code` codes, then in trial i max_code + first_step + i * step. A line is fitted to
    the codes of each trial; the best line has the least weighted squared (with `use_absolute`: absolute) errors.
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
    inverse = f32(max_code) / (high - low)
    for i in range(n):
        poke(codes, i, clamped_code(inverse * (peek(x, i) - low), 0, max_code))
    scale = f32(1) / inverse
    best_error = weighted_error(x, w, n, codes, scale, low, use_absolute)
    trial_index = 0
    while trial_index <= num_trials:
        inverses = ((lanes() + f32(trial_index)) * step + first_step + f32(max_code)) / (high - low)
        try_lines(x, w, n, max_code, trial_results, low, inverses, weight, sum_x, use_absolute)
        lane, num_lanes = 0, min(num_trials + 1 - trial_index, LANES)
        while lane < num_lanes and not peek(trial_results, lane) < best_error:
            lane += 1
        trial_index += lane
        if lane < num_lanes:  # later trials begin from its lowest value
            trial_index += 1
            best_error, scale = peek(trial_results, lane), peek(trial_results, LANES + lane)
            low = peek(trial_results, 2 * LANES + lane)
            for i in range(n):
                poke(codes, i, peek(trial_results, (3 + i) * LANES + lane))
    return scale, low
