"""The likeliest tokens of rows of logits, and the draw of one, as `packtrain.inference.sampling` draws it.

Rows are independent of each other: results depend on no thread and on no neighbour. Sums are in float64, in order.
"""

import math

import numpy as np
from numba import types

from packtrain.kernels import simd
from packtrain.kernels.bits import put_word, word_at
from packtrain.kernels.call import kernel, part, spans
from packtrain.kernels.simd import LANES, in2, out2

i64, f32, f64, u64, void = types.int64, types.float32, types.float64, types.uint64, types.void
ids2, out_ids2 = types.Array(types.int32, 2, "C", readonly=True), types.Array(types.int32, 2, "C")
out_ids1 = types.Array(types.int32, 1, "C")
numbers2 = types.Array(f64, 2, "C", readonly=True)
counts2 = types.Array(i64, 2, "C", readonly=True)
# Philox4x64-10 (Salmon et al. 2011): factors, and what is added to the keys
M0, M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
W0, W1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
LOW, HALF, REST = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(11)
ROUNDS = 10
LARGEST, INFINITY = np.float32(3.4028235e38), np.float32(np.inf)
SPAN = 16
SHARES, MOST, ROOM = 2, 128, 512  # parts of a row for each of up to MOST candidates; values kept
ROOMS = ROOM + SPAN


@kernel(void(out_ids2, out2, i64, i64, i64))
def sift(ids, values, row, at, count):
    """Restore the heap below `at`: no child is worse than its parent, smaller or, of equals, of a higher id."""
    while True:
        worst = at
        for child in range(2 * at + 1, min(2 * at + 3, count)):
            v, w = values[row, child], values[row, worst]
            if v < w or (v == w and ids[row, child] > ids[row, worst]):
                worst = child
        if worst == at:
            return
        values[row, at], values[row, worst] = values[row, worst], values[row, at]
        ids[row, at], ids[row, worst] = ids[row, worst], ids[row, at]
        at = worst


@part(f32(f32))
def seen(x):
    """x, or infinity where it is not finite."""
    return x if -LARGEST <= x <= LARGEST else INFINITY


@part(f32(in2, i64, i64))
def largest_of(x, first, stop):
    """Of the values `seen` in some spans."""
    running_max = simd.splat(-INFINITY)
    for i in range(first, stop, LANES):
        v = simd.load(x, i)
        running_max = simd.maximum(
            simd.select_less(simd.absolute(v), INFINITY, v, INFINITY), running_max
        )
    return simd.largest(running_max)


@kernel(void(out_ids2, out2, in2, i64, i64, i64, i64))
def offer(ids, values, x, row, start, stop, k):
    """Put values that are greater than the worst of the heap in its place."""
    for e in range(start, stop):
        v = seen(x[row, e])
        if v > values[row, 0]:
            values[row, 0] = v
            ids[row, 0] = e
            sift(ids, values, row, 0, k)


@part(i64(i64, i64, i64, f32))
def count_less(v, first, stop, than):
    """How many of some spans of values at v are less."""
    counts = simd.splat(0.0)
    for i in range(first, stop, LANES):
        counts = counts + simd.select_less(simd.load(v, i), than, 1.0, 0.0)
    return i64(simd.total(counts))


@kernel(f32(i64, i64, i64))
def reached(most, count, k):
    """The largest of `count` values that k of them reach, and room for a span behind them."""
    simd.store(most, count, simd.splat(INFINITY))
    threshold = f32(-INFINITY)
    for i in range(count):
        v = simd.peek(most, i)
        is_reached = count_less(most, 0, count, v) <= count - k
        threshold = max(threshold, v if is_reached else f32(-INFINITY))
    return threshold


@kernel(i64(i64, i64, i64, in2, i64, i64, i64, f32))
def collect(candidates, at, num_candidates, x, row, first, stop, least):
    """Add values of at least this, and their places, to `num_candidates` others; more than ROOM if they do not fit."""
    for e in range(first, stop):
        if num_candidates == ROOM:
            return ROOM + 1
        v = seen(x[row, e])
        simd.poke(candidates, num_candidates, v)
        put_word(at, num_candidates, e)
        num_candidates += i64(v >= least)
    return num_candidates


@kernel(void(out_ids2, out2, i64, i64, i64, i64))
def put_in_order(ids, values, row, candidates, at, num_candidates):
    """Values to the places that so many greater ones, or equal ones before them, leave them."""
    simd.store(candidates, num_candidates, simd.splat(-INFINITY))
    for i in range(num_candidates):
        v, span_start = simd.peek(candidates, i), i // LANES * LANES
        place = span_start - count_less(candidates, 0, span_start, v)
        for j in range(span_start, span_start + LANES):
            w = simd.peek(candidates, j)
            place += i64(w > v) + i64((w == v) & (j < i))
        over = simd.splat(0.0)
        for j in range(span_start + LANES, num_candidates, LANES):
            over = over + simd.select_less(v, simd.load(candidates, j), 1.0, 0.0)
        place += i64(simd.total(over))
        if place < ids.shape[1]:
            values[row, place], ids[row, place] = v, word_at(at, i)


@kernel(types.boolean(out_ids2, out2, in2, i64))
def candidates_at_once(ids, values, x, row):
    """Of a long row: k of its parts have a value of at least `threshold`, so that few others need be looked at.

    False, and nothing done, if the row is short or too many values are as large.
    """
    k, size = ids.shape[1], x.shape[1]
    step = size // (SHARES * max(k, 1)) // SPAN * SPAN
    if step == 0 or k > MOST or size // step > ROOM:
        return False
    part_max, candidates, at = simd.scratch(ROOMS), simd.scratch(ROOMS), simd.scratch(ROOMS)
    count, num_candidates, first = size // step, i64(0), row * size
    for i in range(count):
        simd.poke(part_max, i, largest_of(x, first + i * step, first + (i + 1) * step))
    threshold = reached(part_max, count, k)
    for i in range(count):
        if simd.peek(part_max, i) < threshold:
            continue
        for e in range(i * step, (i + 1) * step, SPAN):
            if largest_of(x, first + e, first + e + SPAN) >= threshold:
                num_candidates = collect(
                    candidates, at, num_candidates, x, row, e, e + SPAN, threshold
                )
                if num_candidates > ROOM:
                    return False
    num_candidates = collect(candidates, at, num_candidates, x, row, count * step, size, threshold)
    if num_candidates > ROOM:
        return False
    put_in_order(ids, values, row, candidates, at, num_candidates)
    return True


@kernel(void(out_ids2, out2, in2, i64, i64))
def candidate_rows(ids, values, x, start, stop):
    k, size = ids.shape[1], x.shape[1]
    for row in range(start, stop):
        if candidates_at_once(ids, values, x, row):
            continue
        for e in range(k):
            ids[row, e] = e
            values[row, e] = seen(x[row, e])
        for at in range(k // 2 - 1, -1, -1):
            sift(ids, values, row, at, k)
        span_end = k + (size - k) // SPAN * SPAN
        for first in range(k, span_end, SPAN):  # most have nothing new
            at = row * size + first
            if largest_of(x, at, at + SPAN) > values[row, 0]:
                offer(ids, values, x, row, first, first + SPAN, k)
        offer(ids, values, x, row, span_end, size, k)
        for end in range(k - 1, 0, -1):
            values[row, 0], values[row, end] = values[row, end], values[row, 0]
            ids[row, 0], ids[row, end] = ids[row, end], ids[row, 0]
            sift(ids, values, row, 0, end)


@kernel(void(out_ids2, out2, in2))
def candidates(ids, values, x):
    """The k largest of each row with their indices, the largest first; the lower index on ties.

    x            (N, V)  f32; what is not finite counts as infinity
    ids, values  (N, k)  i32, f32
    """
    spans(candidate_rows, (ids, values, x), x.shape[0], 1)


@kernel(u64(u64, u64))
def high_word(a, b):
    """The upper half of a product of 128 bits."""
    a0, a1, b0, b1 = a & LOW, a >> HALF, b & LOW, b >> HALF
    middle = a1 * b0 + ((a0 * b0) >> HALF)
    other = a0 * b1 + (middle & LOW)
    return a1 * b1 + (middle >> HALF) + (other >> HALF)


@kernel(f64(i64, i64))
def uniform(seed, index):
    """The first number of NumPy's Generator(Philox(key=seed, counter=index)).random()."""
    a, b, c, d = u64(index) + u64(1), u64(0), u64(0), u64(0)
    k0, k1 = u64(seed), u64(0)
    for _ in range(ROUNDS):
        h0, l0, h1, l1 = high_word(M0, a), M0 * a, high_word(M1, c), M1 * c
        a, b, c, d = h1 ^ b ^ k0, l1, h0 ^ d ^ k1, l0
        k0, k1 = k0 + W0, k1 + W1
    return f64(a >> REST) * 2.0**-53


@kernel(i64(in2, i64, i64, f64, f64))
def kept(x, row, count, top_p, min_p):
    """How many of the sorted candidates top-p and min-p leave."""
    if top_p < 1.0:
        total = 0.0
        for j in range(count):
            total += math.exp(f64(x[row, j]) - f64(x[row, 0]))
        sum = 0.0
        for j in range(count):
            sum += math.exp(f64(x[row, j]) - f64(x[row, 0])) / total
            if sum >= top_p:
                count = j + 1
                break
    if min_p > 0.0:
        min_logit = f64(x[row, 0]) + min(math.log(min_p), 0.0)
        while count > 1 and f64(x[row, count - 1]) < min_logit:
            count -= 1
    return count


@kernel(void(out_ids1, ids2, in2, numbers2, counts2))
def draw(y, ids, x, numbers, counts):
    """One candidate of each row, see ops.choosing.draw.

    ids, x   (N, k)  i32, f32, the largest first
    numbers  (N, 3)  f64: temperature, top-p, min-p
    counts   (N, 3)  i64: top-k, seed, index
    y        (N,)    i32
    """
    for row in range(x.shape[0]):
        if x[row, 0] == INFINITY:
            y[row] = -1 - ids[row, 0]
            continue
        temp, count = numbers[row, 0], x.shape[1]
        if counts[row, 0] > 0:
            count = min(count, counts[row, 0])
        count = kept(x, row, count, numbers[row, 1], numbers[row, 2])
        if temp <= 0.0:
            count = 1
        total = 0.0
        for j in range(count):
            total += math.exp((f64(x[row, j]) - f64(x[row, 0])) / temp) if j else 1.0
        target, sum, at = uniform(counts[row, 1], counts[row, 2]) * total, 0.0, count - 1
        for j in range(count):
            sum += math.exp((f64(x[row, j]) - f64(x[row, 0])) / temp) if j else 1.0
            if sum > target:
                at = j
                break
        y[row] = ids[row, at]
