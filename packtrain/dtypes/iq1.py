"""Packing iq1_s and iq1_m: three levels, all shifted up or down by an eighth. quantize_row_iq1_s_impl, _iq1_m_ of ggml.

The sorted values of a group are split in three, by all splits in turn, sixteen at once; then its points are put on the
grid. Sums of a split are 16 f32 of w * x * value and 16 of w * value * value for each kind: two with the shift of a
group of 32; four with those of the halves of a group of 16.
"""

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.intrinsics import (
    byte_at,
    code,
    load,
    peek,
    poke,
    put_byte,
    scratch,
    splat,
    store,
)
from packtrain.dtypes.iq import iq1_m, iq1_s
from packtrain.dtypes.lattice import FAR, entry_of, levels_of, nearest_point, put_point
from packtrain.dtypes.weighted_packing import sum_of_squares, weigh

f32 = np.float32
SHIFT = f32(0.125)
ROOM = 48  # f32 of running sums, read sixteen at a time


@code
def put_order(order: int, x: int, n: int) -> None:
    """Numbers of the values, the lowest first, as bytes."""
    ranks = scratch(32)
    for i in range(0, n, 16):
        v, rank, lanes = (
            load(x, i),
            splat(0.0),
            intrinsics.to_floats(intrinsics.lane_numbers()) + f32(i),
        )
        for j in range(n):
            other = splat(peek(x, j))
            before = intrinsics.select_less(v, other, 0.0, 1.0)
            rank = rank + intrinsics.select_less(
                f32(j), lanes, before, intrinsics.select_less(other, v, 1.0, 0.0)
            )
        store(ranks, i, rank)
    for i in range(n):
        put_byte(order, int(peek(ranks, i)), i)


@code
def put_running(running: int, x: int, w: int, order: int, n: int) -> None:
    """Sums of w * x, then of w, of the first values; of a group of 16 for each half."""
    for i in range(0, 4 * ROOM, 16):
        store(running, i, splat(0.0))
    for j in range(n):
        i = byte_at(order, j)
        for half in range(2 if n == 16 else 1):
            ours = n == 32 or i >> 3 == half
            at, weight = running + half * 8 * ROOM, peek(w, i) if ours else f32(0)
            poke(at, j + 1, peek(at, j) + weight * peek(x, i))
            poke(at, ROOM + j + 1, peek(at, ROOM + j) + weight)


@code
def put_two(sums: int, at: int, first: int, second: int) -> None:
    """Sums of splits at `first` and at `second` and those behind."""
    x, w = load(at, second), load(at, ROOM + second)
    first_x, first_w = peek(at, first), peek(at, ROOM + first)
    middle_x, middle_w = x - first_x, w - first_w
    rest_x, rest_w = splat(peek(at, 32)) - x, splat(peek(at, ROOM + 32)) - w
    for kind in range(2):
        middle = SHIFT if kind == 0 else -SHIFT
        low, high = middle - f32(1), middle + f32(1)
        store(sums, kind * 32, middle_x * middle + first_x * low + rest_x * high)
        squares = middle_w * middle * middle + first_w * low * low + rest_w * high * high
        store(sums, kind * 32 + 16, squares)


@code
def put_four(sums: int, running: int, first: int, second: int) -> None:
    """The same for two halves; a sum is that of all as the highest value, less what the others differ by."""
    parts = scratch(128)
    for half in range(2):
        at = running + half * 8 * ROOM
        x, w = load(at, second) + peek(at, first), load(at, ROOM + second)
        for kind in range(2):
            middle = SHIFT if kind == 0 else -SHIFT
            low, high, to = middle - f32(1), middle + f32(1), parts + half * 256 + kind * 128
            store(to, 0, splat(peek(at, 16) * high) - x)
            low_part = peek(at, ROOM + 16) * high * high
            low_part += peek(at, ROOM + first) * (low * low - middle * middle)
            store(to, 16, w * (middle * middle - high * high) + low_part)
    for kind in range(4):
        first_part, second_part = parts + (kind >> 1) * 128, parts + 256 + (kind & 1) * 128
        for i in range(0, 32, 16):
            store(sums, kind * 32 + i, load(first_part, i) + load(second_part, i))


@code
def better(sums: int, kinds: int, lanes: int, best: int) -> int:
    """The last of these splits that is better than those before: lane * 4 + kind, or -1; `best`: score and scale."""
    best_index, lane_bits = -1, 0
    for kind in range(kinds):
        lx, ll = load(sums, kind * 32), load(sums, kind * 32 + 16)
        lane_bits |= intrinsics.set_lanes(
            intrinsics.to_bits(intrinsics.select_less(ll * peek(best, 0), lx * lx, 1.0, 0.0))
        )
    for i in range(lanes * kinds if lane_bits != 0 else 0):
        lane, kind = i // kinds, i % kinds
        lx, ll = peek(sums, kind * 32 + lane), peek(sums, kind * 32 + 16 + lane)
        if ll > 0 and lx * lx > peek(best, 0) * ll:
            best_index = lane * 4 + kind
            poke(best, 1, lx / ll)
            poke(best, 0, lx / ll * lx)
    return best_index


@code
def best_split(running: int, n: int, best: int) -> int:
    """Where the sorted values are split: first + 64 * second + 4096 * kind; -1 if there are no weights."""
    sums, best_code = scratch(128), -1
    poke(best, 0, -FAR)
    for first in range(n + 1):
        for second in range(first, n + 1, 16):
            if n == 32:
                put_two(sums, running, first, second)
            else:
                put_four(sums, running, first, second)
            at = better(sums, 2 if n == 32 else 4, min(16, n + 1 - second), best)
            if at >= 0:
                best_code = first | (second + (at >> 2)) << 6 | (at & 3) << 12
    return best_code


@code
def value_sums(
    x: int, w: int, levels: int, n: int, down: int, times: f32, lx: f32, ll: f32
) -> tuple[f32, f32]:
    """These sums, and those of w * value * x and w * value * value; bits of `down`: points that are shifted down."""
    for i in range(n):
        shift = -SHIFT if down >> (i >> 3) & 1 else SHIFT
        value = (f32(byte_at(levels, i)) - f32(1) + shift) * times
        lx += peek(w, i) * value * peek(x, i)
        ll += peek(w, i) * value * value
    return lx, ll


@code
def fit_thirds(numbers: int, scale_at: int, x: int, w: int, n: int, t: int) -> int:
    """The points (u16) and the scale of a group; returns bits of those that are shifted down."""
    order, running, levels, best = scratch(8), scratch(192), scratch(8), scratch(2)
    for k in range(n // 8):
        intrinsics.put_short(numbers, k, 0)
    poke(scale_at, 0, f32(0))
    max_size = intrinsics.largest(
        intrinsics.maximum(intrinsics.absolute(load(x, 0)), intrinsics.absolute(load(x, n - 16)))
    )
    if max_size < (f32(1e-12) if n == 32 else f32(1e-7)):
        return 0
    put_order(order, x, n)
    put_running(running, x, w, order, n)
    split_code = best_split(running, n, best)
    if split_code < 0:
        return 0
    scale, kind, is_shifted = peek(best, 1), split_code >> 12, False
    down = kind * 15 if n == 32 else (kind >> 1) | ((kind & 1) << 1)
    for j in range(n):
        level = (j >= (split_code & 63)) + (j >= (split_code >> 6 & 63))
        put_byte(levels, byte_at(order, j), 2 - level if scale < 0 else level)
    if scale < 0:
        scale, down = -scale, ~down & (15 if n == 32 else 3)
    for k in range(n // 8):
        entry, place = entry_of(t, levels + 8 * k, 8), 32 * k
        number = entry >> 8
        if entry & 255:
            shift, is_shifted = -SHIFT if down >> k & 1 else SHIFT, True
            args = x + place, w + place, scale, 8, f32(0.5), shift - f32(1.5)
            number = nearest_point(t, entry, *args)
            put_point(levels + 8 * k, t, number, 8)
        intrinsics.put_short(numbers, k, number)
    lx, ll = value_sums(x, w, levels, n if is_shifted else 0, down, f32(1), f32(0), f32(0))
    poke(scale_at, 0, lx / ll if lx > 0 and ll > 0 else scale)
    return down


@iq1_s.snap
def snap_iq1_s(y, x, w, t, n):
    numbers, downs, scales, levels = scratch(16), scratch(2), scratch(16), scratch(4)
    weights = scratch(32)
    for b in range(n):
        to, at, by = y + b * 50, x + b * 1024, w + b * 1024
        spread = f32(2) * sum_of_squares(at, 256) / f32(256)
        store(scales, 0, splat(0.0))
        for i in range(8):
            group = i * 128
            weigh(weights, at + group, by + group, 32, spread)
            down = fit_thirds(numbers + i * 8, scales + i * 4, at + group, weights, 32, t)
            put_byte(downs, i, down & 8)
        d = intrinsics.largest(load(scales, 0)) / f32(15)
        intrinsics.put_half(to, 0, d * f32(1.125))
        intrinsics.put_bytes(
            levels, 0, levels_of(scales, 0, f32(1) / d if d > 0 else f32(0), f32(7))
        )
        for i in range(2):
            intrinsics.put_bytes(to + 2, i * 16, intrinsics.shorts_at(numbers, i * 16))
        for i in range(8):
            high = (byte_at(levels, i) | byte_at(downs, i)) << 12
            for k in range(4):
                high |= intrinsics.short_at(numbers, i * 4 + k) >> 8 << (3 * k)
            intrinsics.put_short(to + 34, i, high)


@code
def put_scale(
    y: int, x: int, w: int, t: int, numbers: int, downs: int, levels: int, spread: f32, d: f32
) -> None:
    """The last eight bytes of an iq1_m block: sixteen scales, and the best unit for them."""
    weights, point, lx, ll, half = scratch(16), scratch(4), f32(0), f32(0), scratch(1)
    for i in range(16):
        group, level = i * 64, byte_at(levels, i)
        weigh(weights, x + group, w + group, 16, spread)
        for k in range(2):
            put_point(point + 8 * k, t, intrinsics.short_at(numbers, 2 * i + k), 8)
        times = f32(2 * level + 1)
        lx, ll = value_sums(x + group, weights, point, 16, byte_at(downs, i), times, lx, ll)
    intrinsics.put_half(half, 0, (lx / ll if ll > 0 else d) * f32(1.1125))
    for i in range(4):
        low = byte_at(levels, 4 * i) | (byte_at(levels, 4 * i + 1) << 3)
        high = byte_at(levels, 4 * i + 2) | (byte_at(levels, 4 * i + 3) << 3)
        unit = intrinsics.short_at(half, 0) >> (4 * i) & 15
        intrinsics.put_short(y + 48, i, low | (high << 6) | (unit << 12))


@iq1_m.snap
def snap_iq1_m(y, x, w, t, n):
    numbers, downs, scales, levels = scratch(16), scratch(4), scratch(16), scratch(4)
    weights = scratch(16)
    for b in range(n):
        to, at, by = y + b * 56, x + b * 1024, w + b * 1024
        spread = f32(2) * sum_of_squares(at, 256) / f32(256)
        for i in range(16):
            group = i * 64
            weigh(weights, at + group, by + group, 16, spread)
            down = fit_thirds(numbers + i * 4, scales + i * 4, at + group, weights, 16, t)
            put_byte(downs, i, down)
            high = (
                intrinsics.short_at(numbers, 2 * i) >> 8
                | intrinsics.short_at(numbers, 2 * i + 1) >> 8 << 4
            )
            put_byte(to + 32, i, high | (down & 1) << 3 | down >> 1 << 7)
        d = intrinsics.largest(load(scales, 0)) / f32(15)
        for i in range(2):
            intrinsics.put_bytes(to, i * 16, intrinsics.shorts_at(numbers, i * 16))
        for i in range(4):
            intrinsics.put_short(to + 48, i, 0)
        if d > 0:
            intrinsics.put_bytes(levels, 0, levels_of(scales, 0, f32(1) / d, f32(7)))
            put_scale(to, at, by, t, numbers, downs, levels, spread, d)
