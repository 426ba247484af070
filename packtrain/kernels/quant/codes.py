"""Turn values into codes: functions with which dtypes/ packs blocks.

A code is an integer for value = code * scale + offset. Addresses are those of f32 values.
"""

from packtrain.kernels.runtime.jit import kernel, part
from packtrain.kernels.runtime.kernel_types import f32, i64
from packtrain.kernels.simd.simd_f32 import (
    absolute, copysign, lanewise, largest, llvm_op, load, maximum, neg, peek, select_less, total,
)  # fmt: skip
from packtrain.kernels.simd.simd_i32 import put_bytes, set_lanes, to_bits

MIN_INVERTIBLE = 2.9387359e-39  # the reciprocal of smaller values is infinite
ROUND = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer
floor = lanewise(llvm_op("floor"), 1)


@part("f32(f32)")
def reciprocal(x):
    return f32(1) / x if abs(x) > MIN_INVERTIBLE else f32(0)


@part("UniTuple(f32, 2)(i64)")
def bounds(x):
    """Return (minimum, maximum) of 32 f32 at address x."""
    a, b = load(x, 0), load(x, 16)
    return -largest(maximum(neg(a), neg(b))), largest(maximum(a, b))


@kernel("i64(i64, i64, f32, f32, f32, f32)")
def put_codes(y, x, low, inverse, offset, max_code):
    """Write codes (x - low) * inverse + offset, truncated, of 32 f32 at x: four bits to y; returns the fifth bits."""
    a = (load(x, 0) - low) * inverse + offset
    b = (load(x, 16) - low) * inverse + offset
    first_codes = to_bits(select_less(max_code, a, max_code, a))
    second_codes = to_bits(select_less(max_code, b, max_code, b))
    put_bytes(y, 0, (first_codes & 15) | ((second_codes & 15) << 4))
    return set_lanes(first_codes & 16) | (set_lanes(second_codes & 16) << 16)


@part("i64, i64, f32")
def put_rounded(y, x, inverse):
    """Write 16 f32 at x times `inverse` as bytes to y, rounded to nearest, ties away from zero."""
    v = load(x, 0) * inverse
    magnitude = absolute(v)
    floor_size = floor(magnitude)
    put_bytes(y, 0, to_bits(copysign(floor_size + floor((magnitude - floor_size) * 2.0), v)))


@part("f32x16(f32x16, f32, f32)")
def rounded(v, low, max_code):
    """Return v rounded to the nearest integer, ties to even, within low … max_code."""
    return (select_less(v, low, low, select_less(max_code, v, max_code, v)) + ROUND) - ROUND


@part("i64(f32, i64)")
def rounded_int(v, max_code):
    """Round one value to the nearest integer, ties to even, at most `max_code`."""
    return min(i64(f32(v + f32(ROUND)) - f32(ROUND)), max_code)


@part("UniTuple(f32, 2)(f32, f32, f32, f32, f32)")
def fit_line(weight, sum_x, sum_l, sum_ll, sum_lx):
    """Return (scale, low <= 0) of the line scale * code + low, from sums of weights w, w x, w l, w l l, w l x."""
    determinant = weight * sum_ll - sum_l * sum_l
    if not determinant > 0:
        return f32(0), f32(0)
    min_value = (sum_ll * sum_x - sum_l * sum_lx) / determinant
    if min_value > 0:
        return sum_lx / sum_ll, f32(0)
    return (weight * sum_lx - sum_x * sum_l) / determinant, min_value


@kernel("UniTuple(f32, 2)(i64, f32, f32, i64)")
def fit(x, max_code, first_step, num_trials):
    """Return (scale, low <= 0) for 32 f32 at address x as codes 0 … max_code.

    The range of the values gets `max_code` codes, then in trial i max_code + first_step + i / 10; the next trial uses
    the low of a better one. Errors are weighted by the value's magnitude plus the root mean square of all.
    """
    a, b = load(x, 0), load(x, 16)
    average = (total(a * a + b * b) / f32(32)) ** f32(0.5)
    wa, wb = absolute(a) + average, absolute(b) + average
    min_value, max_value = min(-largest(maximum(neg(a), neg(b))), f32(0)), largest(maximum(a, b))
    if not max_value > min_value:
        return f32(0), min_value
    weight, sum_x = total(wa + wb), total(wa * a + wb * b)
    scale, best_error = f32(0), f32(0)
    for trial in range(-1, num_trials + 1):
        num_codes = max_code if trial < 0 else max_code + first_step + f32(0.1) * f32(trial)
        inverse = num_codes / (max_value - min_value)
        la = rounded((a - min_value) * inverse, f32(0), max_code)
        lb = rounded((b - min_value) * inverse, f32(0), max_code)
        if trial < 0:
            new_scale, new_min = (max_value - min_value) / max_code, min_value
        else:
            sum_l, sum_ll = total(wa * la + wb * lb), total(wa * la * la + wb * lb * lb)
            sum_lx = total(wa * la * a + wb * lb * b)
            new_scale, new_min = fit_line(weight, sum_x, sum_l, sum_ll, sum_lx)
        da, db = la * new_scale + new_min - a, lb * new_scale + new_min - b
        error = total(wa * da * da + wb * db * db)
        if trial < 0 or error < best_error:
            best_error, scale, min_value = error, new_scale, new_min
    return scale, min_value


@kernel("f32(i64, i64)")
def extreme(x, n):
    """Return the value furthest from zero of n = 16 or 32 f32 at address x; the first on ties."""
    a, b = load(x, 0), load(x, n - 16)
    max_value, max_negated = largest(maximum(a, b)), largest(maximum(neg(a), neg(b)))
    if max_value != max_negated:
        return max_value if max_value > max_negated else -max_negated
    furthest = peek(x, 0)
    for i in range(1, n):
        if abs(peek(x, i)) > abs(furthest):
            furthest = peek(x, i)
    return furthest
