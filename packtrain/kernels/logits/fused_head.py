"""The fused head in bf16 by AMX's tiles, which multiply faster than logits could be stored: they are computed twice.

First the log-sum-exp of each row, then gradients, both by slices of the vocabulary whose logits stay in the L2 cache.
Logits, weights and gradients moved 1.1 GB in a step of `15m`; computing logits twice takes 54 instead of 75 ms and
frees 18 MiB. In f32, and in bf16x3 where the processor slows tiles down, the extra product costs more than the traffic.
"""

import math

from packtrain.kernels.logits import log_sum_exp as logit_kernels
from packtrain.kernels.logits.log_sum_exp import find_targets, max_value, softcap, sum_parts
from packtrain.kernels.matmul.amx import STEPS, TILE, by_tiles, pack_columns, pack_rows
from packtrain.kernels.quant.dequantize import F32, row
from packtrain.kernels.runtime.jit import each, kernel, part
from packtrain.kernels.runtime.kernel_types import Tuple, bytes2, f32, i64, in1
from packtrain.kernels.simd.simd_f32 import (
    INFINITY, LANES, address, exp, largest, peek, poke, scratch, splat, tanh,
)  # fmt: skip
from packtrain.kernels.simd.f32_ranges import add, copy, fill

MOST_ROWS = 4096  # most rows of a chunk, whatever the workspace
MOST_COLUMNS = 2048  # most columns of x: above, too few rows of w fit
WIDEST, SLICE_BUFFER = 256, 1 << 16  # most rows of w in a slice; f32 that a slice in bf16 takes
LOGITS = 1 << 16  # logits of a slice at once
FLAT_BUFFER, BF16_LOGITS_BUFFER = STEPS * MOST_COLUMNS, LOGITS // 2

# arguments of each task: row_ids, lse, cap, num_rows, is_later (whether dw is added to), qtype, w and bias
chunk_args_type = Tuple((i64, i64, f32, i64, i64, i64, bytes2, in1))


@part("i64(i64)")
def line(depth):
    """Return how many f32 a packed line (16 rows or columns) of `depth` steps of k takes; see matmul/amx.py."""
    return -(-depth // STEPS) * TILE


@part("i64(i64)")
def slice_rows(C):
    """Return how many rows of w, each of C columns, make a slice: whole tiles that fit the buffer of a packed slice."""
    return max(min(WIDEST, SLICE_BUFFER // max(line(C) // LANES, 1) // STEPS * STEPS), STEPS)


@part("i64(i64)")
def max_x_rows(num_w_rows):
    """Return how many rows of x meet num_w_rows rows of w at once: whole tiles, for at most LOGITS logits."""
    return LOGITS // num_w_rows // STEPS * STEPS


@kernel("out3, out2, i64, i64, i64")
def pack_x(panels, x, row_ids, num_rows, tile_index):
    """Pack 32 of the listed rows, from 32 tile_index on, twice: as rows of x, and as steps of k for dw (by max_x_rows).

    panels   (1, rows, C)  in whole tiles, a half for each
    row_ids  (num_rows,)   numbers of rows of x, as f32 at an address
    """
    C, first_row, flat_ptr = x.shape[1], tile_index * STEPS, scratch(FLAT_BUFFER)
    count, block_rows = min(num_rows - first_row, STEPS), max_x_rows(slice_rows(C))
    for i in range(count):
        x_row = address(x, i64(peek(row_ids, first_row + i)) * C)
        copy(address(flat_ptr, i * C), x_row, C)
    pack_rows(address(panels, first_row // LANES * line(C)), line(C), flat_ptr, 0, C, C, count, 1)
    start = first_row // block_rows * block_rows
    line_stride, size = (line(min(num_rows - start, block_rows)), panels.shape[1] * panels.shape[2])
    panel_offset = size // 2 + start * panels.shape[2] // 2 + (first_row - start) // STEPS * TILE
    pack_columns(address(panels, panel_offset), line_stride, flat_ptr, 0, C, count, C, 1)


@kernel("i64, i64, i64, i64, bytes2, i64, i64, i64")
def pack_w(for_logits, for_dx, flat_ptr, qtype, w, C, slice_start, slice_stop):
    """Pack a slice of rows of w to address for_logits and, unless it is 0, to for_dx; flat_ptr: 32 rows of scratch."""
    row_nbytes, line_stride = w.shape[1], line(slice_stop - slice_start)
    for r in range(slice_start, slice_stop, STEPS):
        num_rows, w_source = min(slice_stop - r, STEPS), w.ctypes.data + r * row_nbytes
        if qtype != F32:
            for i in range(num_rows):
                row(qtype, address(flat_ptr, i * C), w_source + i * row_nbytes, C)
            w_source = flat_ptr
        target = address(for_logits, (r - slice_start) // LANES * line(C))
        pack_columns(target, line(C), w_source, 1, C, C, num_rows, 1)
        if for_dx:
            target = address(for_dx, (r - slice_start) // STEPS * TILE)
            pack_columns(target, line_stride, w_source, 0, C, num_rows, C, 1)


@kernel("i64, i64, out3, i64, i64, i64, i64, i64, in1")
def slice_logits(logits_ptr, ld, panels, first, num_rows, block, slice_start, num_columns, bias):
    """Write logits (num_rows, num_columns), rows ld apart, of packed rows `first` … of x and `block`, a slice of w."""
    line_stride = panels.shape[2] // STEPS * TILE
    x = address(panels, first // LANES * line_stride)
    by_tiles(num_rows, num_columns, x, block, line_stride, 0, logits_ptr, ld, 1)
    for i in range(num_rows if bias.size else 0):
        add(address(logits_ptr, i * ld), address(bias, slice_start), num_columns)


@part("f32(f32, f32)")
def capped(x, cap):
    """Return cap * tanh(x / cap), or x if there is no cap."""
    return largest(tanh(splat(x) / cap) * cap) if cap > 0 else x


@kernel("i64, i64, i64, i64, i64, f32")
def add_row_logits(max_ptr, sums_ptr, at, logits_ptr, num_columns, cap):
    """Add num_columns logits of row `at` to its running maximum and sum of exponentials; caps the logits in place."""
    old_max, slice_max = peek(max_ptr, at), max_value(logits_ptr, num_columns)
    if cap > 0:
        softcap(logits_ptr, num_columns, cap)
    new_max = old_max if old_max > slice_max or math.isnan(old_max) else slice_max
    max_logit = capped(new_max, cap)
    exp_sum = logit_kernels.sum_of_exp(logits_ptr, num_columns, max_logit)
    if cap > 0 or abs(old_max) != INFINITY:
        exp_sum += peek(sums_ptr, at) * largest(exp(splat(capped(old_max, cap) - max_logit)))
    poke(max_ptr, at, new_max)
    poke(sums_ptr, at, exp_sum)


@kernel("out2, out3, i64, out_ints1, chunk_args_type, i64")
def scan_vocab_part(part_stats, panels, C, targets, head_args, number):
    """Write each row's statistics over part `number` of the vocabulary, for `row_loss`; head_args: see chunk_args_type.

    part_stats  (2 parts + 1, rows): largest logits; sums of exp(logit - largest), with the cap; the target's logit
    """
    (row_ids, _, cap, num_rows, _, qtype, w, bias), parts = head_args, part_stats.shape[0] // 2
    chunk = part_stats.shape[1]
    block_ptr, logits_ptr, ld = scratch(SLICE_BUFFER), scratch(LOGITS), slice_rows(C)
    part_columns = -(-w.shape[0] // parts)
    tops, sums = address(part_stats, number * chunk), address(part_stats, (parts + number) * chunk)
    for i in range(num_rows):
        poke(tops, i, -INFINITY)
        poke(sums, i, f32(0.0))
    part_stop = min((number + 1) * part_columns, w.shape[0])
    for col0 in range(number * part_columns, part_stop, ld):
        width = min(part_stop - col0, ld)
        pack_w(block_ptr, 0, logits_ptr, qtype, w, C, col0, col0 + width)
        for row0 in range(0, num_rows, max_x_rows(ld)):
            block_rows = min(num_rows - row0, max_x_rows(ld))
            slice_logits(logits_ptr, ld, panels, row0, block_rows, block_ptr, col0, width, bias)
            for i in range(block_rows):
                row_logits, row_index = address(logits_ptr, i * ld), row0 + i
                target = i64(targets[i64(peek(row_ids, row_index))]) - col0
                if 0 <= target < width:
                    part_stats[2 * parts, row_index] = peek(row_logits, target)
                add_row_logits(tops, sums, row_index, row_logits, width, cap)


@kernel("out1, out1, out2, out_ints1, chunk_args_type, i64")
def row_loss(losses, right, part_stats, targets, head_args, at):
    """Write loss, log-sum-exp and `right` (1 if the target's logit was largest before the cap) of row row_ids[at]."""
    (row_ids, lse, cap, _, _, _, _, _), parts = head_args, part_stats.shape[0] // 2
    exp_sum = f32(0.0)
    row, target_logit, top = i64(peek(row_ids, at)), part_stats[2 * parts, at], part_stats[0, at]
    for number in range(1, parts):
        top = top if top > part_stats[number, at] or math.isnan(top) else part_stats[number, at]
    row_lse = capped(top, cap)
    for number in range(parts if abs(row_lse) != INFINITY else 0):
        exp_sum += part_stats[parts + number, at] * f32(
            math.exp(capped(part_stats[number, at], cap) - row_lse)
        )
    if abs(row_lse) != INFINITY:
        row_lse += f32(math.log(exp_sum))
    poke(lse, at, row_lse)
    losses[row] = row_lse - capped(target_logit, cap)
    if right.size:
        right[row] = f32(target_logit >= top)


@kernel("out2, out2, out1, out3, out3, i64, out_ints1, out1, chunk_args_type, i64")
def part_back(dx, dw, db, sums, panels, C, targets, weights, head_args, number):
    """Compute gradients from part `number` of the vocabulary: dw, db, and its share of dx, sums[number]."""
    (row_ids, lse, cap, num_rows, is_later, qtype, w, bias), ld = head_args, slice_rows(C)
    for_logits, for_dx, logits_ptr = scratch(SLICE_BUFFER), scratch(SLICE_BUFFER), scratch(LOGITS)
    d, padded_width = scratch(BF16_LOGITS_BUFFER), panels.shape[2]
    part_columns, size_x = -(-w.shape[0] // sums.shape[0]), panels.shape[1] * padded_width
    part_start, part_stop = number * part_columns, min((number + 1) * part_columns, w.shape[0])
    for col0 in range(part_start, part_stop, ld):
        width = min(part_stop - col0, ld)
        pack_w(for_logits, for_dx if dx.size else 0, logits_ptr, qtype, w, C, col0, col0 + width)
        for row0 in range(0, num_rows, max_x_rows(ld)):
            block_rows = min(num_rows - row0, max_x_rows(ld))
            slice_logits(logits_ptr, ld, panels, row0, block_rows, for_logits, col0, width, bias)
            for i in range(block_rows if cap > 0 else 0):
                softcap(address(logits_ptr, i * ld), width, cap)
            row_args = address(row_ids, row0), address(lse, row0), cap, targets, weights
            logit_kernels.slopes(db, logits_ptr, ld, block_rows, col0, width, *row_args)
            if dx.size:
                pack_rows(d, line(width), logits_ptr, 0, ld, width, block_rows, 1)
                target = address(sums, (number * sums.shape[1] + row0) * C)
                by_tiles(block_rows, C, d, for_dx, line(width), col0 > part_start, target, C, 1)
            if dw.size:
                pack_rows(d, line(block_rows), logits_ptr, 1, ld, block_rows, width, 1)
                x, add = (address(panels, size_x // 2 + row0 * padded_width // 2), is_later or row0)
                by_tiles(width, C, d, x, line(block_rows), add, address(dw, col0 * C), C, 1)


@kernel(
    "out1, out1, out1, out2, out2, out1, out2, out3, out3, out2, i64, bytes2, in1, out_ints1, out1, f32, i64"
)
def linear_cross_entropy(
    loss, losses, right, dx, dw, db, part_stats, panels, sums, x, qtype, w, bias, targets, weights, cap, bf16,
):  # fmt: skip
    """Compute loss.linear_cross_entropy in bf16 (bf16 = 1) without storing logits.

    Workspace: part_stats (2 parts of V + 1, rows), panels (1, rows, C) in whole tiles, sums (parts of V, rows, C)
    """
    (N, C), row_ids, lse = x.shape, scratch(MOST_ROWS), scratch(MOST_ROWS)
    for zeros in (losses, right, db):
        fill(address(zeros, 0), zeros.size, f32(0.0))
    is_later, at, num_parts = 0, 0, sums.shape[0]
    while at < N:
        num_rows, at = find_targets(row_ids, targets, at, min(part_stats.shape[1], MOST_ROWS))
        if num_rows == 0:
            break
        head_args = row_ids, lse, cap, num_rows, is_later, qtype, w, bias
        each(pack_x, (panels, x, row_ids, num_rows), -(-num_rows // STEPS))
        each(scan_vocab_part, (part_stats, panels, C, targets, head_args), num_parts)
        each(row_loss, (losses, right, part_stats, targets, head_args), num_rows)
        if dx.size + dw.size + db.size > 0:
            back_args = dx, dw, db, sums, panels, C, targets, weights, head_args
            each(part_back, back_args, num_parts)
        if dx.size:
            each(sum_parts, (dx, sums, num_parts, row_ids), num_rows)
        is_later = 1
    if dx.size:
        each(logit_kernels.zero_without_target, (dx, targets), N)
    if is_later == 0:
        fill(address(dw, 0), dw.size, f32(0.0))
    logit_kernels.weighted_sum(loss, losses, weights)
