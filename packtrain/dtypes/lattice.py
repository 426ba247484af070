"""Fit groups of values to points of a grid, by the searches of ggml-quants.c: bit for bit.

A group of n values with one scale is two to eight points of `width` values each. Levels are bytes; level l stands for
2 l + 1. `t` is the address of the grid's table, see neighbours.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.intrinsics import compiled_function, load, peek, scratch, store, word_at
from packtrain.dtypes.weighted_packing import put_value_weights, sum_of_squares

f32 = np.float32
FAR, ROUNDING_SHIFT = f32(np.finfo(f32).max), f32(1.5 * 2**23)
# points that are sought anew with the fitted scale: those off the grid, all if one was, all
OFF, ANY, ALL = 0, 1, 2


@intrinsics.part
def levels_of(x: int, i: int, inverse: f32, max_level: f32) -> intrinsics.I32x16:
    """Return levels 0 … max_level of f32 i … i + 15 at x times `inverse`; too large values lose bits, as in ggml."""
    rounded = intrinsics.as_ints((load(x, i) * inverse - 1.0) * 0.5 + ROUNDING_SHIFT)
    v = intrinsics.to_floats((rounded & 0x007FFFFF) - 0x00400000)
    return intrinsics.to_bits(
        intrinsics.select_less(v, 0.0, 0.0, intrinsics.select_less(max_level, v, max_level, v))
    )


@intrinsics.part
def level_key(levels: int, bits: int) -> int:
    """Return the low `bits` bits of four levels, the bytes of an i32, side by side: a key of the grid's table."""
    level_pairs, low_mask = levels | (levels >> (8 - bits)), (1 << (2 * bits)) - 1
    return (level_pairs & low_mask) | (level_pairs >> (16 - 2 * bits) & (low_mask << (2 * bits)))


@intrinsics.part
def table_entry(t: int, levels: int, width: int) -> int:
    """Return the entry in the table at t (see neighbours) of the point whose `width` levels are bytes at `levels`."""
    if width == 4:
        return word_at(t, level_key(word_at(levels, 0), 3))
    return word_at(t, level_key(word_at(levels, 0), 2) | (level_key(word_at(levels, 1), 2) << 8))


@intrinsics.part
def put_point(to: int, t: int, point_number: int, width: int) -> None:
    """Write the `width` levels of a point, by its number in the table at t, as bytes to address `to`."""
    first_word = (4096 if width == 4 else 65536) + point_number * width // 4
    for i in range(width // 4):
        intrinsics.put_word(to, i, word_at(t, first_word + i))


@compiled_function
def nearest_point(
    t: int, entry: int, x: int, w: int, scale: f32, width: int, by: f32, value_shift: f32
) -> int:
    """Return an entry's point nearest to x, weighted by w; level l means ((2 l + 1) by + value_shift) * scale."""
    nbytes = 32 + 16 * width
    first, best, chunks = t + (entry >> 8) * nbytes, intrinsics.splat(FAR), intrinsics.splat(0.0)
    for chunk in range(entry & 255):
        error = intrinsics.splat(0.0)
        for i in range(width):
            q = (
                intrinsics.to_floats(intrinsics.bytes_at(first, chunk * nbytes + 32 + 16 * i)) * by
                + value_shift
            )
            residual = q * scale - peek(x, i)
            error = error + residual * peek(w, i) * residual
        chunks = intrinsics.select_less(error, best, f32(chunk), chunks)
        best = intrinsics.select_less(error, best, error, best)
    min_error = -intrinsics.largest(intrinsics.neg(best))
    lane_indices = intrinsics.select_less(
        min_error, best, 4096.0, chunks * 16.0 + intrinsics.to_floats(intrinsics.lane_numbers())
    )
    point_index = int(-intrinsics.largest(intrinsics.neg(lane_indices)))
    return intrinsics.short_at(first + (point_index >> 4) * nbytes, point_index & 15)


@compiled_function
def put_levels(
    to: int, x: int, w: int, n: int, width: int, inverse: f32, scale: f32, point_bits: int, t: int
) -> int:
    """Write to `to` grid levels of a group's points whose bit is set; returns bits of those that were off the grid."""
    all_levels, off_grid, max_level = scratch(8), 0, f32(7) if width == 4 else f32(2)
    for i in range(0, n, 16):
        intrinsics.put_bytes(all_levels, i, levels_of(x, i, inverse, max_level))
    for k in range(n // width):
        if point_bits >> k & 1:
            point_levels, value_offset = all_levels + k * width, k * width * 4
            point_entry = table_entry(t, point_levels, width)
            if point_entry & 255:
                off_grid |= 1 << k
                args = x + value_offset, w + value_offset, scale, width, f32(1), f32(0)
                put_point(point_levels, t, nearest_point(t, point_entry, *args), width)
            for i in range(width // 4):
                intrinsics.put_word(to + k * width, i, word_at(point_levels, i))
    return off_grid


@compiled_function
def level_sums(x: int, w: int, levels: int, n: int) -> tuple[f32, f32]:
    """Return the sums of w * x * value and w * value * value of n levels, bytes at `levels`; value = 2 level + 1."""
    products, squares, lx, ll = scratch(32), scratch(32), f32(0), f32(0)
    for i in range(0, n, 16):
        value, weight = intrinsics.to_floats(intrinsics.bytes_at(levels, i)) * 2.0 + 1.0, load(w, i)
        store(products, i, weight * load(x, i) * value)
        store(squares, i, weight * value * value)
    for i in range(n):
        lx += peek(products, i)
        ll += peek(squares, i)
    return lx, ll


@compiled_function
def fit_points(
    levels: int, x: int, w: int, n: int, width: int, scale: f32, largest_x: f32, num_trials: int, step: f32, refit: int,
    t: int,
) -> f32:  # fmt: skip
    """Write levels, as bytes, of n magnitudes at x, weighted by w; returns the scale, the best of 2 num_trials + 1.

    These map largest_x to about the top value, `step` apart; without a good one, `scale` stays. refit: OFF, ANY or ALL
    """
    trial, roots, top_value = scratch(8), scratch(32), f32(15) if width == 4 else f32(5)
    all_points, best_score = (1 << (n // width)) - 1, f32(0)
    off_grid = 0 if refit == OFF else all_points
    for i in range(0, n, 16):
        store(roots, i, intrinsics.sqrt(load(w, i)))
    for i in range(-num_trials, num_trials + 1):
        inverse = (top_value + f32(i) * step) / largest_x
        outside = put_levels(trial, x, roots, n, width, inverse, f32(1) / inverse, all_points, t)
        lx, ll = level_sums(x, w, trial, n)
        if ll > 0 and lx * lx > best_score * ll:
            scale, off_grid = lx / ll, outside
            best_score = scale * lx
            for k in range(n // 4):
                intrinsics.put_word(levels, k, word_at(trial, k))
    if refit == ALL or (refit == ANY and off_grid != 0):
        off_grid = all_points
    if off_grid != 0 and scale > 0:
        put_levels(levels, x, roots, n, width, f32(1) / scale, scale, off_grid, t)
        lx, ll = level_sums(x, w, levels, n)
        if ll > 0:
            scale = lx / ll
    return scale


@compiled_function
def put_magnitudes(magnitudes: int, x: int, w: int, n: int, paired: int) -> int:
    """Write magnitudes of n f32 at x, return bits of negative ones; if `paired`, of each eight one may change its sign.

    Then the number of signs is even: the value whose error weighs least changes, and its magnitude is below zero.
    """
    bits = 0
    for i in range(0, n, 16):
        v = load(x, i)
        store(magnitudes, i, intrinsics.absolute(v))
        bits |= (
            intrinsics.set_lanes(intrinsics.to_bits(intrinsics.select_less(v, 0.0, 1.0, 0.0))) << i
        )
    for group_start in range(0, n if paired else 0, 8):
        parity = bits >> group_start & 255
        parity ^= parity >> 4
        parity ^= parity >> 2
        if (parity ^ (parity >> 1)) & 1:
            flip_index = group_start
            min_cost = peek(w, flip_index) * peek(x, flip_index) * peek(x, flip_index)
            for i in range(group_start + 1, group_start + 8):
                flip_cost = peek(w, i) * peek(x, i) * peek(x, i)
                if flip_cost < min_cost:
                    flip_index, min_cost = i, flip_cost
            intrinsics.poke(magnitudes, flip_index, -peek(magnitudes, flip_index))
            bits ^= 1 << flip_index
    return bits


@compiled_function
def put_point_weights(weights: int, x: int, w: int, n: int, spread: f32) -> None:
    """Write the error weights of n f32 at x; if w is 0 (no weights of columns) squares, for n = 16 plus spread / 4."""
    if w != 0:
        put_value_weights(weights, x, w, n, spread)
    else:
        bias = f32(0.25) * spread if n == 16 else f32(0)
        for i in range(0, n, 16):
            store(weights, i, load(x, i) * load(x, i) + bias)


@compiled_function
def fit_block(
    numbers: int, signs: int, scales: int, x: int, w: int, t: int, n: int, width: int, paired: int, min_magnitude: f32,
    num_trials: int, step: f32, refit: int,
) -> f32:  # fmt: skip
    """Fit 256 values: write point numbers (u16), sign bits, scales (f32) of groups of n; returns the largest scale.

    min_magnitude  a group of smaller values is all zeros
    num_trials     on either side of the plain scale, `step` apart; paired: even signs; refit: OFF, ANY or ALL
    """
    weights, sizes, levels, codes = scratch(32), scratch(32), scratch(16), scratch(32)
    spread_factor, max_scale = f32(1) if paired and width == 8 else f32(2), f32(0)
    spread = spread_factor * sum_of_squares(x, 256) / f32(256)
    store(scales, 0, intrinsics.splat(0.0))
    for i in range(256 // n):
        group_values, place = x + i * n * 4, i * n // width
        put_point_weights(weights, group_values, w + i * n * 4 if w != 0 else 0, n, spread)
        store(levels, 0, intrinsics.splat(0.0))
        sign_bits = put_magnitudes(sizes, group_values, weights, n, paired)
        max_size = intrinsics.largest(intrinsics.maximum(load(sizes, 0), load(sizes, n - 16)))
        is_large, scale = max_size >= min_magnitude, max_size / (f32(15) if width == 4 else f32(5))
        if is_large and refit == ALL:
            scale = intrinsics.above(sizes, weights, n, 4, codes)
            max_size = scale * f32(3)
        if is_large and max_size > 0:
            scale = fit_points(
                levels, sizes, weights, n, width, scale, max_size, num_trials, step, refit, t
            )
        else:
            sign_bits, scale = 0, f32(0)
        if scale < 0:
            sign_bits, scale = ~sign_bits, -scale
        for k in range(n // width):
            intrinsics.put_short(numbers, place + k, table_entry(t, levels + k * width, width) >> 8)
        if n == 16:
            intrinsics.put_short(signs, i, sign_bits)
        else:
            intrinsics.put_word(signs, i, sign_bits)
        intrinsics.poke(scales, i, scale)
        max_scale = max(max_scale, scale)
    return max_scale


@compiled_function
def put_scales(y: int, levels: int, scales: int, max_scale: f32, unit_factor: f32) -> None:
    """Write the scales' unit, times unit_factor, to the f16 at y, and the groups' scales as bytes 0 to 15 to levels."""
    d = max_scale / f32(31)
    intrinsics.put_half(y, 0, d * unit_factor)
    intrinsics.put_bytes(levels, 0, levels_of(scales, 0, f32(1) / d if d > 0 else f32(0), f32(15)))


@compiled_function
def put_nibbles(y: int, levels: int, n: int) -> None:
    """Write the low four bits of n bytes at `levels` to y, two in each byte, the first one lowest."""
    for i in range(n // 2):
        byte_pair = intrinsics.short_at(levels, i)
        intrinsics.put_byte(y, i, (byte_pair & 15) | (byte_pair >> 4 & 240))


@intrinsics.part
def sevens(signs: int) -> int:
    """Return the first seven of each eight of 32 bits, in 28 bits."""
    low_bits = (signs & 127) | (signs >> 1 & (127 << 7))
    return low_bits | (signs >> 2 & (127 << 14)) | (signs >> 3 & (127 << 21))
