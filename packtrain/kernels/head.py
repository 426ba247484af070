"""The fused head in bf16 by AMX's tiles, which multiply faster than logits could be kept: they are computed twice.

First the log-sum-exp of each row, then gradients, both by slices of the vocabulary whose logits stay in the L2 cache.
"""

import math

from numba import types

from packtrain.kernels import logits as logit_kernels
from packtrain.kernels import simd
from packtrain.kernels.amx import STEPS, TILE, by_tiles, pack_columns, pack_rows
from packtrain.kernels.call import each, kernel, part
from packtrain.kernels.dequantize import F32, packed2, row
from packtrain.kernels.logits import add_parts, add_to, fill_zero, find_targets, highest, squash
from packtrain.kernels.simd import INFINITY, LANES, address, largest, peek, poke, scratch, splat

MOST_ROWS = 4096  # of a chunk, whatever the workspace
MOST_COLUMNS = 2048  # of x: above, too few rows of w fit
WIDEST, HALF_SLICE = 256, 1 << 16  # rows of w in a slice, f32 of it in bf16
LOGITS = 1 << 16  # of a slice, at once
FLAT, HALF_LOGITS = STEPS * MOST_COLUMNS, LOGITS // 2

i64, f32, void = types.int64, types.float32, types.void
a3, a2, a1, i1 = f32[:, :, ::1], f32[:, ::1], f32[::1], types.int32[::1]
bias1 = types.Array(f32, 1, "C", readonly=True)
# what each task is given: counted, lse, cap, rows, after (whether dw gets more), and the matrix with its bias
asked_rows = types.Tuple((i64, i64, f32, i64, i64, i64, packed2, bias1))


@part(i64(i64))
def line(depth):
    """f32 of a line of tiles."""
    return -(-depth // STEPS) * TILE


@part(i64(i64))
def wide(C):
    """Rows of w in a slice, each of whole tiles."""
    return max(min(WIDEST, HALF_SLICE // max(line(C) // LANES, 1) // STEPS * STEPS), STEPS)


@part(i64(i64))
def high_of(wide):
    """Rows of x at once for so many rows of w: whole tiles."""
    return LOGITS // wide // STEPS * STEPS


@kernel(void(a3, a2, i64, i64, i64))
def pack_x(panels, x, counted, rows, number):
    """32 counted rows to panels (1, rows, C), both whole tiles: to one half as rows of x, to the other as steps of k
    for dw, by blocks of high_of(wide(C)) rows."""
    C, first, flat = x.shape[1], number * STEPS, scratch(FLAT)
    count, block = min(rows - first, STEPS), high_of(wide(C))
    for i in range(count):
        source = address(x, i64(peek(counted, first + i)) * C)
        for j in range(0, C, LANES):
            simd.store_part(flat, i * C + j, simd.load_part(source, j, C - j), C - j)
    pack_rows(address(panels, first // LANES * line(C)), line(C), flat, 0, C, C, count, 1)
    start = first // block * block
    across, size = line(min(rows - start, block)), panels.shape[1] * panels.shape[2]
    at = size // 2 + start * panels.shape[2] // 2 + (first - start) // STEPS * TILE
    pack_columns(address(panels, at), across, flat, 0, C, count, C, 1)


@kernel(void(i64, i64, i64, i64, packed2, i64, i64, i64))
def pack_w(for_logits, for_dx, flat, kind, w, C, start, stop):
    """Rows of w as both products take them, 32 at a time; for_dx may be 0. Others than f32 are dequantized to flat."""
    nbytes, across = w.shape[1], line(stop - start)
    for r in range(start, stop, STEPS):
        count, source = min(stop - r, STEPS), w.ctypes.data + r * nbytes
        if kind != F32:
            for i in range(count):
                row(kind, address(flat, i * C), source + i * nbytes, C)
            source = flat
        target = address(for_logits, (r - start) // LANES * line(C))
        pack_columns(target, line(C), source, 1, C, C, count, 1)
        if for_dx:
            target = address(for_dx, (r - start) // STEPS * TILE)
            pack_columns(target, across, source, 0, C, count, C, 1)


@kernel(void(i64, i64, a3, i64, i64, i64, i64, i64, bias1))
def multiply(logits, ld, panels, first, rows, block, start, size, bias):
    """logits (rows, size) of rows `first` of x on, with a bias, at most (high, wide)."""
    across = panels.shape[2] // STEPS * TILE
    x = address(panels, first // LANES * across)
    by_tiles(rows, size, x, block, across, 0, logits, ld, 1)
    for i in range(rows if bias.size else 0):
        add_to(address(logits, i * ld), address(bias, start), size)


@part(f32(f32, f32))
def capped(x, cap):
    return largest(simd.tanh(splat(x) / cap) * cap) if cap > 0 else x


@kernel(void(i64, i64, i64, i64, i64, f32))
def add_row(tops, sums, at, logits, size, cap):
    """More logits of a row; they are capped then."""
    before, new = peek(tops, at), highest(logits, size)
    if cap > 0:
        squash(logits, size, cap)
    top = before if before > new or math.isnan(before) else new
    max_logit = capped(top, cap)
    sum = logit_kernels.sum_of_exp(logits, size, max_logit)
    if cap > 0 or abs(before) != INFINITY:
        sum += peek(sums, at) * largest(simd.exp(splat(capped(before, cap) - max_logit)))
    poke(tops, at, top)
    poke(sums, at, sum)


@kernel(void(a2, a3, i64, i1, asked_rows, i64))
def scan(part_stats, panels, C, targets, head_args, number):
    """Write to part_stats (2 parts + 1, rows), for one part of the vocabulary, each row's largest logit and its sum of
    exp(logit - largest), both with the cap, and the target's logit without it."""
    (counted, _, cap, rows, _, kind, w, bias), parts = head_args, part_stats.shape[0] // 2
    chunk = part_stats.shape[1]
    block, logits, ld = scratch(HALF_SLICE), scratch(LOGITS), wide(C)
    each_part = -(-w.shape[0] // parts)
    tops, sums = address(part_stats, number * chunk), address(part_stats, (parts + number) * chunk)
    for i in range(rows):
        poke(tops, i, -INFINITY)
        poke(sums, i, f32(0.0))
    end = min((number + 1) * each_part, w.shape[0])
    for start in range(number * each_part, end, ld):
        size = min(end - start, ld)
        pack_w(block, 0, logits, kind, w, C, start, start + size)
        for first in range(0, rows, high_of(ld)):
            count = min(rows - first, high_of(ld))
            multiply(logits, ld, panels, first, count, block, start, size, bias)
            for i in range(count):
                row_logits, at = address(logits, i * ld), first + i
                target = i64(targets[i64(peek(counted, at))]) - start
                if 0 <= target < size:
                    part_stats[2 * parts, at] = peek(row_logits, target)
                add_row(tops, sums, at, row_logits, size, cap)


@kernel(void(a1, a1, a2, i1, asked_rows, i64))
def row_loss(losses, right, part_stats, targets, head_args, at):
    """The loss of a row, whether its target has the largest logit before the cap, and its log-sum-exp."""
    counted, lse, cap, parts, sum = (
        head_args[0],
        head_args[1],
        head_args[2],
        part_stats.shape[0] // 2,
        f32(0.0),
    )
    row, target_logit, top = i64(peek(counted, at)), part_stats[2 * parts, at], part_stats[0, at]
    for number in range(1, parts):
        top = top if top > part_stats[number, at] or math.isnan(top) else part_stats[number, at]
    value = capped(top, cap)
    for number in range(parts if abs(value) != INFINITY else 0):
        sum += part_stats[parts + number, at] * f32(
            math.exp(capped(part_stats[number, at], cap) - value)
        )
    if abs(value) != INFINITY:
        value += f32(math.log(sum))
    poke(lse, at, value)
    losses[row] = value - capped(target_logit, cap)
    if right.size:
        right[row] = f32(target_logit >= top)


@kernel(void(a2, a2, a1, a3, a3, i64, i1, a1, asked_rows, i64))
def part_back(dx, dw, db, sums, panels, C, targets, weights, head_args, number):
    """All that follows from one of the parts of the vocabulary: dw, db, and its share of dx."""
    (counted, lse, cap, rows, after, kind, w, bias), ld = head_args, wide(C)
    for_logits, for_dx, logits = scratch(HALF_SLICE), scratch(HALF_SLICE), scratch(LOGITS)
    d, padded = scratch(HALF_LOGITS), panels.shape[2]
    each_part, size_x = -(-w.shape[0] // sums.shape[0]), panels.shape[1] * padded
    begin, end = number * each_part, min((number + 1) * each_part, w.shape[0])
    for start in range(begin, end, ld):
        size = min(end - start, ld)
        pack_w(for_logits, for_dx if dx.size else 0, logits, kind, w, C, start, start + size)
        for first in range(0, rows, high_of(ld)):
            count = min(rows - first, high_of(ld))
            multiply(logits, ld, panels, first, count, for_logits, start, size, bias)
            for i in range(count if cap > 0 else 0):
                squash(address(logits, i * ld), size, cap)
            of_rows = address(counted, first), address(lse, first), cap, targets, weights
            logit_kernels.slopes(db, logits, ld, count, start, size, *of_rows)
            if dx.size:
                pack_rows(d, line(size), logits, 0, ld, size, count, 1)
                target = address(sums, (number * sums.shape[1] + first) * C)
                by_tiles(count, C, d, for_dx, line(size), start > begin, target, C, 1)
            if dw.size:
                pack_rows(d, line(count), logits, 1, ld, count, size, 1)
                x, add = address(panels, size_x // 2 + first * padded // 2), after or first
                by_tiles(size, C, d, x, line(count), add, address(dw, start * C), C, 1)


@kernel(void(a1, a1, a1, a2, a2, a1, a2, a3, a3, a2, i64, packed2, bias1, i1, a1, f32, i64))
def linear_cross_entropy(
    loss, losses, right, dx, dw, db, part_stats, panels, sums, x, kind, w, bias, targets, weights, cap, half,
):  # fmt: skip
    """As in loss.py, in bf16 (half = 1); logits are not kept.

    part_stats (2 parts of V + 1, rows), panels (1, rows, C), both whole tiles, sums (parts of V, rows, C): workspace
    """
    (N, C), counted, lse = x.shape, scratch(MOST_ROWS), scratch(MOST_ROWS)
    for zeros in (losses, right, db):
        fill_zero(address(zeros, 0), zeros.size)
    fill_zero(address(dx, 0), dx.size)
    after, at, parts = 0, 0, sums.shape[0]
    while at < N:
        rows, at = find_targets(counted, targets, at, min(part_stats.shape[1], MOST_ROWS))
        if rows == 0:
            break
        head_args = counted, lse, cap, rows, after, kind, w, bias
        each(pack_x, (panels, x, counted, rows), -(-rows // STEPS))
        each(scan, (part_stats, panels, C, targets, head_args), parts)
        each(row_loss, (losses, right, part_stats, targets, head_args), rows)
        if dx.size + dw.size + db.size > 0:
            back = dx, dw, db, sums, panels, C, targets, weights, head_args
            each(part_back, back, parts)
        if dx.size:
            each(add_parts, (dx, sums, parts, counted), rows)
        after = 1
    if after == 0:
        fill_zero(address(dw, 0), dw.size)
    logit_kernels.weighted_sum(loss, losses, weights)
