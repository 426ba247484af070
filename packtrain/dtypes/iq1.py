"""Pack iq1_s and iq1_m: three levels, all shifted up or down by an eighth. quantize_row_iq1_s_impl, _iq1_m_ of ggml.

The sorted values of a group are split in three, by all splits in turn, sixteen at once; then its points are put on the
grid. Sums of a split are 16 f32 of w * x * value and 16 of w * value * value for each kind: two with the shift of a
group of 32; four with those of the halves of a group of 16.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.intrinsics import byte_at, compiled_function, load, peek, poke, scratch, store
from packtrain.dtypes.iq import iq1_m, iq1_s
from packtrain.dtypes.lattice import FAR, levels_of, nearest_point, put_point, table_entry
from packtrain.dtypes.weighted_packing import put_value_weights, sum_of_squares

f32 = np.float32
LEVEL_SHIFT = f32(0.125)
SUMS_LENGTH = 48  # f32 of running sums, read sixteen at a time


@compiled_function
def put_sort_order(order: int, x: int, n: int) -> None:
    """Write the numbers of n f32 at address x, the lowest value first, as bytes to address `order`."""
    ranks = scratch(32)
    for i in range(0, n, 16):
        v, rank = load(x, i), intrinsics.splat(0.0)
        lanes = intrinsics.to_floats(intrinsics.lane_numbers()) + f32(i)
        for j in range(n):
            other_value = intrinsics.splat(peek(x, j))
            not_above = intrinsics.select_less(v, other_value, 0.0, 1.0)
            below = intrinsics.select_less(other_value, v, 1.0, 0.0)
            rank = rank + intrinsics.select_less(f32(j), lanes, not_above, below)
        store(ranks, i, rank)
    for i in range(n):
        intrinsics.put_byte(order, int(peek(ranks, i)), i)


@compiled_function
def put_running_sums(running_sums: int, x: int, w: int, order: int, n: int) -> None:
    """Write sums of w * x, then of w, of the first j values in order, j = 0 … n, to running_sums; n = 16: by half."""
    for i in range(0, 4 * SUMS_LENGTH, 16):
        store(running_sums, i, intrinsics.splat(0.0))
    for j in range(n):
        i = byte_at(order, j)
        for half in range(2 if n == 16 else 1):
            is_in_half = n == 32 or i >> 3 == half
            at, weight = running_sums + half * 8 * SUMS_LENGTH, peek(w, i) if is_in_half else f32(0)
            poke(at, j + 1, peek(at, j) + weight * peek(x, i))
            poke(at, SUMS_LENGTH + j + 1, peek(at, SUMS_LENGTH + j) + weight)


@compiled_function
def put_two_sums(sums: int, at: int, first_split: int, second_split: int) -> None:
    """Write sums of 16 splits of a group of 32, at first_split and second_split + 0 … 15; `at`: running sums."""
    x, w = load(at, second_split), load(at, SUMS_LENGTH + second_split)
    first_x, first_w = peek(at, first_split), peek(at, SUMS_LENGTH + first_split)
    middle_x, middle_w = x - first_x, w - first_w
    rest_x = intrinsics.splat(peek(at, 32)) - x
    rest_w = intrinsics.splat(peek(at, SUMS_LENGTH + 32)) - w
    for split_kind in range(2):
        middle = LEVEL_SHIFT if split_kind == 0 else -LEVEL_SHIFT
        low, high = middle - f32(1), middle + f32(1)
        store(sums, split_kind * 32, middle_x * middle + first_x * low + rest_x * high)
        squares = middle_w * middle * middle + first_w * low * low + rest_w * high * high
        store(sums, split_kind * 32 + 16, squares)


@compiled_function
def put_four_sums(sums: int, running_sums: int, first_split: int, second_split: int) -> None:
    """Write to `sums` those of 16 splits of a group of 16, by half, at first_split and second_split + 0 … 15."""
    part_sums = scratch(128)
    for half in range(2):
        at = running_sums + half * 8 * SUMS_LENGTH
        x, w = load(at, second_split) + peek(at, first_split), load(at, SUMS_LENGTH + second_split)
        for kind in range(2):
            middle = LEVEL_SHIFT if kind == 0 else -LEVEL_SHIFT
            low, high, to = middle - f32(1), middle + f32(1), part_sums + half * 256 + kind * 128
            store(to, 0, intrinsics.splat(peek(at, 16) * high) - x)
            low_part = peek(at, SUMS_LENGTH + 16) * high * high
            low_part += peek(at, SUMS_LENGTH + first_split) * (low * low - middle * middle)
            store(to, 16, w * (middle * middle - high * high) + low_part)
    for kind in range(4):
        first_part, second_part = part_sums + (kind >> 1) * 128, part_sums + 256 + (kind & 1) * 128
        for i in range(0, 32, 16):
            store(sums, kind * 32 + i, load(first_part, i) + load(second_part, i))


@compiled_function
def better_split(sums: int, num_kinds: int, num_lanes: int, best_score: int) -> int:
    """Return the last split in `sums` that beats best_score (score, scale), as lane * 4 + kind, or -1; updates it."""
    best_index, lane_bits = -1, 0
    for split_kind in range(num_kinds):
        lx, ll = load(sums, split_kind * 32), load(sums, split_kind * 32 + 16)
        is_better = intrinsics.select_less(ll * peek(best_score, 0), lx * lx, 1.0, 0.0)
        lane_bits |= intrinsics.set_lanes(intrinsics.to_bits(is_better))
    for i in range(num_lanes * num_kinds if lane_bits != 0 else 0):
        lane, split_kind = i // num_kinds, i % num_kinds
        lx, ll = peek(sums, split_kind * 32 + lane), peek(sums, split_kind * 32 + 16 + lane)
        if ll > 0 and lx * lx > peek(best_score, 0) * ll:
            best_index = lane * 4 + split_kind
            poke(best_score, 1, lx / ll)
            poke(best_score, 0, lx / ll * lx)
    return best_index


@compiled_function
def best_split(running_sums: int, n: int, best_score: int) -> int:
    """Return the best split of n values, first + 64 * second + 4096 * kind, or -1; best_score gets (score, scale)."""
    sums, best_code = scratch(128), -1
    poke(best_score, 0, -FAR)
    for first_split in range(n + 1):
        for second_split in range(first_split, n + 1, 16):
            if n == 32:
                put_two_sums(sums, running_sums, first_split, second_split)
            else:
                put_four_sums(sums, running_sums, first_split, second_split)
            at = better_split(sums, 2 if n == 32 else 4, min(16, n + 1 - second_split), best_score)
            if at >= 0:
                best_code = first_split | (second_split + (at >> 2)) << 6 | (at & 3) << 12
    return best_code


@compiled_function
def value_sums(
    x: int, w: int, levels: int, n: int, down_bits: int, value_scale: f32, lx: f32, ll: f32
) -> tuple[f32, f32]:
    """Return lx and ll plus sums of w * value * x and w * value**2 of n levels; down_bits: which eights shift down."""
    for i in range(n):
        shift = -LEVEL_SHIFT if down_bits >> (i >> 3) & 1 else LEVEL_SHIFT
        value = (f32(byte_at(levels, i)) - f32(1) + shift) * value_scale
        lx += peek(w, i) * value * peek(x, i)
        ll += peek(w, i) * value * value
    return lx, ll


@compiled_function
def fit_thirds(numbers: int, scale_at: int, x: int, w: int, n: int, t: int) -> int:
    """Write a group's points to numbers (u16), its scale to scale_at; returns bits of points that are shifted down."""
    order, running_sums, levels, best_score = scratch(8), scratch(192), scratch(8), scratch(2)
    for k in range(n // 8):
        intrinsics.put_short(numbers, k, 0)
    poke(scale_at, 0, f32(0))
    first, last = intrinsics.absolute(load(x, 0)), intrinsics.absolute(load(x, n - 16))
    max_size = intrinsics.largest(intrinsics.maximum(first, last))
    if max_size < (f32(1e-12) if n == 32 else f32(1e-7)):
        return 0
    put_sort_order(order, x, n)
    put_running_sums(running_sums, x, w, order, n)
    split_code = best_split(running_sums, n, best_score)
    if split_code < 0:
        return 0
    scale, split_kind, is_shifted = peek(best_score, 1), split_code >> 12, False
    down_bits = split_kind * 15 if n == 32 else (split_kind >> 1) | ((split_kind & 1) << 1)
    for j in range(n):
        level = (j >= (split_code & 63)) + (j >= (split_code >> 6 & 63))
        intrinsics.put_byte(levels, byte_at(order, j), 2 - level if scale < 0 else level)
    if scale < 0:
        scale, down_bits = -scale, ~down_bits & (15 if n == 32 else 3)
    for k in range(n // 8):
        entry, value_offset = table_entry(t, levels + 8 * k, 8), 32 * k
        point_number = entry >> 8
        if entry & 255:
            shift, is_shifted = -LEVEL_SHIFT if down_bits >> k & 1 else LEVEL_SHIFT, True
            args = x + value_offset, w + value_offset, scale, 8, f32(0.5), shift - f32(1.5)
            point_number = nearest_point(t, entry, *args)
            put_point(levels + 8 * k, t, point_number, 8)
        intrinsics.put_short(numbers, k, point_number)
    lx, ll = value_sums(x, w, levels, n if is_shifted else 0, down_bits, f32(1), f32(0), f32(0))
    poke(scale_at, 0, lx / ll if lx > 0 and ll > 0 else scale)
    return down_bits


@iq1_s.snap
def snap_iq1_s(block, src, column_weights, table):
    numbers, group_down_bits, scales, levels = scratch(16), scratch(2), scratch(16), scratch(4)
    weights = scratch(32)
    spread = f32(2) * sum_of_squares(src, 256) / f32(256)
    store(scales, 0, intrinsics.splat(0.0))
    for i in range(8):
        group = i * 128
        put_value_weights(weights, src + group, column_weights + group, 32, spread)
        down_bits = fit_thirds(numbers + i * 8, scales + i * 4, src + group, weights, 32, table)
        intrinsics.put_byte(group_down_bits, i, down_bits & 8)
    d = intrinsics.largest(load(scales, 0)) / f32(15)
    intrinsics.put_half(block, 0, d * f32(1.125))
    intrinsics.put_bytes(levels, 0, levels_of(scales, 0, f32(1) / d if d > 0 else f32(0), f32(7)))
    for i in range(2):
        intrinsics.put_bytes(block + 2, i * 16, intrinsics.shorts_at(numbers, i * 16))
    for i in range(8):
        high_bits = (byte_at(levels, i) | byte_at(group_down_bits, i)) << 12
        for k in range(4):
            high_bits |= intrinsics.short_at(numbers, i * 4 + k) >> 8 << (3 * k)
        intrinsics.put_short(block + 34, i, high_bits)


@compiled_function
def put_scale(
    y: int, x: int, w: int, t: int, numbers: int, downs: int, levels: int, spread: f32, d: f32
) -> None:
    """Write an iq1_m block's scales: by group from `levels`, and the unit that suits `numbers` and `downs`, or d."""
    weights, point, lx, ll, unit_half = scratch(16), scratch(4), f32(0), f32(0), scratch(1)
    for i in range(16):
        group, level = i * 64, byte_at(levels, i)
        put_value_weights(weights, x + group, w + group, 16, spread)
        for k in range(2):
            put_point(point + 8 * k, t, intrinsics.short_at(numbers, 2 * i + k), 8)
        value_scale = f32(2 * level + 1)
        lx, ll = value_sums(x + group, weights, point, 16, byte_at(downs, i), value_scale, lx, ll)
    intrinsics.put_half(unit_half, 0, (lx / ll if ll > 0 else d) * f32(1.1125))
    for i in range(4):
        low_scales = byte_at(levels, 4 * i) | (byte_at(levels, 4 * i + 1) << 3)
        high_scales = byte_at(levels, 4 * i + 2) | (byte_at(levels, 4 * i + 3) << 3)
        unit = intrinsics.short_at(unit_half, 0) >> (4 * i) & 15
        intrinsics.put_short(y + 48, i, low_scales | (high_scales << 6) | (unit << 12))


@iq1_m.snap
def snap_iq1_m(block, src, column_weights, table):
    numbers, group_down_bits, scales, levels = scratch(16), scratch(4), scratch(16), scratch(4)
    weights = scratch(16)
    spread = f32(2) * sum_of_squares(src, 256) / f32(256)
    for i in range(16):
        group = i * 64
        put_value_weights(weights, src + group, column_weights + group, 16, spread)
        down_bits = fit_thirds(numbers + i * 4, scales + i * 4, src + group, weights, 16, table)
        intrinsics.put_byte(group_down_bits, i, down_bits)
        high_bits = (
            intrinsics.short_at(numbers, 2 * i) >> 8
            | intrinsics.short_at(numbers, 2 * i + 1) >> 8 << 4
        )
        intrinsics.put_byte(block + 32, i, high_bits | (down_bits & 1) << 3 | down_bits >> 1 << 7)
    d = intrinsics.largest(load(scales, 0)) / f32(15)
    for i in range(2):
        intrinsics.put_bytes(block, i * 16, intrinsics.shorts_at(numbers, i * 16))
    for i in range(4):
        intrinsics.put_short(block + 48, i, 0)
    if d > 0:
        intrinsics.put_bytes(levels, 0, levels_of(scales, 0, f32(1) / d, f32(7)))
        put_scale(block, src, column_weights, table, numbers, group_down_bits, levels, spread, d)
