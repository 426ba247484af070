"""Turn rows of logits into log-sum-exps, probabilities or gradients, for losses that store logits or do not."""

import math

from packtrain.kernels.runtime.jit import kernel
from packtrain.kernels.runtime.kernel_types import f32, i64
from packtrain.kernels.simd.simd_f32 import (
    INFINITY, LANES, address, exp, keep_first, largest, load, load_part, maximum, peek, poke, splat, store, store_part,
    tanh, total,
)  # fmt: skip
from packtrain.kernels.simd.f32_ranges import add, fill

TWO_VECTORS = 2 * LANES


@kernel("f32(i64, i64)")
def max_value(row, count):
    """Return the largest of `count` f32 at address `row`."""
    top, other = splat(-INFINITY), splat(-INFINITY)
    vector_end = count // TWO_VECTORS * TWO_VECTORS
    for i in range(0, vector_end, TWO_VECTORS):
        top, other = maximum(load(row, i), top), maximum(load(row, i + LANES), other)
    for i in range(vector_end, count, LANES):
        v = load_part(row, i, count - i)
        top = maximum(keep_first(v, count - i, splat(-INFINITY)), top)
    return largest(maximum(top, other))


@kernel("f32(i64, i64, f32)")
def sum_of_exp(row, count, max_logit):
    """Return sum(exp(row - max_logit)) of `count` f32 at address `row`; 0 if max_logit is -inf."""
    if max_logit == -INFINITY:
        return f32(0.0)
    a, b, c, d = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    vector_end = count // (4 * LANES) * (4 * LANES)
    for i in range(0, vector_end, 4 * LANES):
        a, b = a + exp(load(row, i) - max_logit), b + exp(load(row, i + LANES) - max_logit)
        i += 2 * LANES
        c, d = c + exp(load(row, i) - max_logit), d + exp(load(row, i + LANES) - max_logit)
    for i in range(vector_end, count, LANES):
        e = exp(load_part(row, i, count - i) - max_logit)
        a = a + keep_first(e, count - i, splat(0.0))
    return total((a + b) + (c + d))


@kernel("f32(i64, i64)")
def log_sum_exp(row, count):
    """Return log(sum(exp(row))) of `count` f32 at address `row`."""
    max_logit = max_value(row, count)
    if abs(max_logit) == INFINITY:
        return max_logit
    return max_logit + f32(math.log(sum_of_exp(row, count, max_logit)))


@kernel("i64, i64, i64, f32, f32, f32")
def probabilities(y, x, count, lse, weight, cap):
    """y = weight * exp(x - lse), `count` f32 at addresses; with a cap times the slope of `softcap`; y may be x."""
    vector_end = 0 if cap > 0 else count // TWO_VECTORS * TWO_VECTORS
    for i in range(0, vector_end, TWO_VECTORS):
        a, b = exp(load(x, i) - lse), exp(load(x, i + LANES) - lse)
        store(y, i, a * weight)
        store(y, i + LANES, b * weight)
    for i in range(vector_end, count, LANES):
        v = load_part(x, i, count - i)
        e = exp(v - lse) * weight
        if cap > 0:
            e = e * (1.0 - (v / cap) * (v / cap))
        store_part(y, i, e, count - i)


@kernel("i64, i64, f32")
def softcap(x, count, cap):
    """x = cap * tanh(x / cap), `count` f32 at an address; the slope is then 1 - (x / cap)**2."""
    for i in range(0, count, LANES):
        store_part(x, i, tanh(load_part(x, i, count - i) / cap) * cap, count - i)


@kernel("out1, out1, out1")
def weighted_sum(loss, losses, weights):
    loss_sum = 0.0
    for i in range(losses.shape[0]):
        loss_sum += float(losses[i]) * float(weights[i])
    loss[0] = loss_sum


@kernel("out1, i64, i64, i64, i64, i64, i64, i64, f32, out_ints1, out1")
def slopes(db, logits, ld, num_rows, start, num_columns, row_ids, lse, cap, targets, weights):
    """Overwrite logits (num_rows, num_columns), columns from `start` of the vocabulary, with gradients of the loss.

    Adds columns' sums to db, unless empty. Addresses: logits, rows `ld` f32 apart; row_ids, f32; lse. cap: the softcap.
    """
    for i in range(num_rows):
        at, row = address(logits, i * ld), i64(peek(row_ids, i))
        target, weight = i64(targets[row]) - start, weights[row]
        is_inside = 0 <= target < num_columns
        capped = peek(at, target) / cap if is_inside and cap > 0 else f32(0.0)
        probabilities(at, at, num_columns, peek(lse, i), weight, cap)
        if is_inside:
            poke(at, target, peek(at, target) - weight * (f32(1.0) - capped * capped))
        if db.size:
            add(address(db, start), at, num_columns)


@kernel("out2, out3, i64, i64, i64")
def sum_parts(dx, sums, count, row_ids, i):
    """dx[row_ids[i]] = the sum of sums[:count, i] over its first axis; row_ids are f32 at an address."""
    (chunk_rows, C), row = sums.shape[1:], i64(peek(row_ids, i))
    for j in range(0, C, LANES):
        v = load_part(sums, i * C + j, C - j)
        for part_index in range(1, count):
            v = v + load_part(sums, (part_index * chunk_rows + i) * C + j, C - j)
        store_part(dx, row * C + j, v, C - j)


@kernel("out2, out_ints1, i64")
def zero_without_target(dx, targets, row):
    """dx[row] = 0 if the row has no target (below 0). Done last, as dx may lie over x."""
    C = dx.shape[1]
    if targets[row] < 0:
        fill(address(dx, row * C), C, f32(0.0))


@kernel("UniTuple(i64, 2)(i64, out_ints1, i64, i64)")
def find_targets(row_ids, targets, next_row, max_rows):
    """Write up to max_rows rows with a target, from next_row on, as f32 to row_ids; returns (how many, next row)."""
    count = 0
    while next_row < targets.size and count < max_rows:
        if targets[next_row] >= 0:
            poke(row_ids, count, f32(next_row))  # exact: a step has fewer than 2**24 positions
            count += 1
        next_row += 1
    return count, next_row
