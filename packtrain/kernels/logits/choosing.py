"""Find the likeliest tokens of rows of logits, and draw one of them, as `packtrain.inference.sampling` does.

Rows are independent of each other: results depend on no thread and on no neighbour. Sums are in float64, in order.
"""

import math

import numpy as np

from packtrain.kernels.runtime.jit import kernel, parallel, part
from packtrain.kernels.runtime.kernel_types import f32, f64, i64, u64
from packtrain.kernels.simd.simd_f32 import (
    LANES, absolute, largest, load, maximum, peek, poke, scratch, select_less, splat, store, total,
)  # fmt: skip
from packtrain.kernels.simd.simd_i32 import put_word, word_at

# Philox4x64-10 (Salmon et al. 2011): factors, and what is added to the keys
PHILOX_M0, M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
PHILOX_W0, PHILOX_W1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
LOW_WORD, WORD_BITS, UNUSED_BITS = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(11)
PHILOX_ROUNDS = 10
MAX_FLOAT, INFINITY = np.float32(3.4028235e38), np.float32(np.inf)
SPAN = 16
# parts of a row for each candidate, of up to MAX_SPLIT_K; most values that are collected
PARTS_PER_CANDIDATE, MAX_SPLIT_K, MAX_CANDIDATES = 2, 128, 512
ROOMS = MAX_CANDIDATES + SPAN


@kernel("out_ints2, out2, i64, i64, i64")
def sift_down(ids, values, row, at, heap_size):
    """Restore the heap in row `row` below `at`: its root has the smallest value, and of equals the highest id."""
    while True:
        worst_index = at
        for child_index in range(2 * at + 1, min(2 * at + 3, heap_size)):
            v, w = values[row, child_index], values[row, worst_index]
            if v < w or (v == w and ids[row, child_index] > ids[row, worst_index]):
                worst_index = child_index
        if worst_index == at:
            return
        values[row, at], values[row, worst_index] = values[row, worst_index], values[row, at]
        ids[row, at], ids[row, worst_index] = ids[row, worst_index], ids[row, at]
        at = worst_index


@part("f32(f32)")
def finite_or_inf(x):
    """Return x, or infinity if x is not finite."""
    return x if -MAX_FLOAT <= x <= MAX_FLOAT else INFINITY


@part("f32(in2, i64, i64)")
def span_max(x, span_start, span_stop):
    """Return the largest of x[span_start:span_stop], x flat, whole vectors; what is not finite counts as infinity."""
    running_max = splat(-INFINITY)
    for i in range(span_start, span_stop, LANES):
        v = load(x, i)
        running_max = maximum(select_less(absolute(v), INFINITY, v, INFINITY), running_max)
    return largest(running_max)


@kernel("out_ints2, out2, in2, i64, i64, i64, i64")
def push_larger(ids, values, x, row, span_start, span_stop, k):
    """Replace the root of row `row`'s heap of k values by each of x[row, span_start:span_stop] that is greater."""
    for e in range(span_start, span_stop):
        v = finite_or_inf(x[row, e])
        if v > values[row, 0]:
            values[row, 0] = v
            ids[row, 0] = e
            sift_down(ids, values, row, 0, k)


@part("i64(i64, i64, i64, f32)")
def count_less(v, span_start, span_stop, bound):
    """Return how many of the f32 span_start … span_stop - 1 at address v, whole vectors, are less than `bound`."""
    lane_counts = splat(0.0)
    for i in range(span_start, span_stop, LANES):
        lane_counts = lane_counts + select_less(load(v, i), bound, 1.0, 0.0)
    return i64(total(lane_counts))


@kernel("f32(i64, i64, i64)")
def kth_part_max(part_maxima, count, k):
    """Return the largest of `count` f32 at an address that k of them reach; overwrites the 16 places behind them."""
    store(part_maxima, count, splat(INFINITY))
    threshold = f32(-INFINITY)
    for i in range(count):
        v = peek(part_maxima, i)
        is_reached = count_less(part_maxima, 0, count, v) <= count - k
        threshold = max(threshold, v if is_reached else f32(-INFINITY))
    return threshold


@kernel("i64(i64, i64, i64, in2, i64, i64, i64, f32)")
def collect(candidate_ptr, index_ptr, num_candidates, x, row, span_start, span_stop, threshold):
    """Append values >= threshold of x[row, …], and their columns; returns the count, above MAX_CANDIDATES if full."""
    for e in range(span_start, span_stop):
        if num_candidates == MAX_CANDIDATES:
            return MAX_CANDIDATES + 1
        v = finite_or_inf(x[row, e])
        poke(candidate_ptr, num_candidates, v)
        put_word(index_ptr, num_candidates, e)
        num_candidates += i64(v >= threshold)
    return num_candidates


@kernel("out_ints2, out2, i64, i64, i64, i64")
def sort_candidates(ids, top_values, row, candidate_ptr, index_ptr, num_candidates):
    """Write the largest of num_candidates f32 and their columns, from two addresses, to row `row`, in stable order."""
    store(candidate_ptr, num_candidates, splat(-INFINITY))
    for i in range(num_candidates):
        v, span_start = peek(candidate_ptr, i), i // LANES * LANES
        rank_index = span_start - count_less(candidate_ptr, 0, span_start, v)
        for j in range(span_start, span_start + LANES):
            w = peek(candidate_ptr, j)
            rank_index += i64(w > v) + i64((w == v) & (j < i))
        lane_counts = splat(0.0)
        for j in range(span_start + LANES, num_candidates, LANES):
            lane_counts = lane_counts + select_less(v, load(candidate_ptr, j), 1.0, 0.0)
        rank_index += i64(total(lane_counts))
        if rank_index < ids.shape[1]:
            top_values[row, rank_index], ids[row, rank_index] = v, word_at(index_ptr, i)


@kernel("boolean(out_ints2, out2, in2, i64)")
def find_candidates_fast(ids, top_values, x, row):
    """Write the k largest of a long row, k parts of which reach a threshold, so that few other values are looked at.

    Returns False, and writes nothing, if the row is short or too many values are as large.
    """
    k, size = ids.shape[1], x.shape[1]
    step = size // (PARTS_PER_CANDIDATE * max(k, 1)) // SPAN * SPAN
    if step == 0 or k > MAX_SPLIT_K or size // step > MAX_CANDIDATES:
        return False
    part_max, candidates, at = scratch(ROOMS), scratch(ROOMS), scratch(ROOMS)
    count, num_candidates, row_offset = size // step, i64(0), row * size
    for i in range(count):
        poke(part_max, i, span_max(x, row_offset + i * step, row_offset + (i + 1) * step))
    threshold = kth_part_max(part_max, count, k)
    for i in range(count):
        if peek(part_max, i) < threshold:
            continue
        for e in range(i * step, (i + 1) * step, SPAN):
            if span_max(x, row_offset + e, row_offset + e + SPAN) >= threshold:
                num_candidates = collect(
                    candidates, at, num_candidates, x, row, e, e + SPAN, threshold
                )
                if num_candidates > MAX_CANDIDATES:
                    return False
    num_candidates = collect(candidates, at, num_candidates, x, row, count * step, size, threshold)
    if num_candidates > MAX_CANDIDATES:
        return False
    sort_candidates(ids, top_values, row, candidates, at, num_candidates)
    return True


@parallel("out_ints2, out2, in2", lambda x: (x.shape[0], 1), block=1)
def candidates(ids, top_values, x, row_start, row_stop):
    """Write the k largest of each row with their indices, the largest first; on ties the lower index first.

    x                (N, V)  f32; a value that is not finite counts as infinity
    ids, top_values  (N, k)  i32, f32
    """
    k, num_logits = ids.shape[1], x.shape[1]
    for row in range(row_start, row_stop):
        if find_candidates_fast(ids, top_values, x, row):
            continue
        for e in range(k):
            ids[row, e] = e
            top_values[row, e] = finite_or_inf(x[row, e])
        for heap_index in range(k // 2 - 1, -1, -1):
            sift_down(ids, top_values, row, heap_index, k)
        span_end = k + (num_logits - k) // SPAN * SPAN
        for span_start in range(k, span_end, SPAN):  # most have nothing new
            heap_index = row * num_logits + span_start
            if span_max(x, heap_index, heap_index + SPAN) > top_values[row, 0]:
                push_larger(ids, top_values, x, row, span_start, span_start + SPAN, k)
        push_larger(ids, top_values, x, row, span_end, num_logits, k)
        for end in range(k - 1, 0, -1):
            top_values[row, 0], top_values[row, end] = top_values[row, end], top_values[row, 0]
            ids[row, 0], ids[row, end] = ids[row, end], ids[row, 0]
            sift_down(ids, top_values, row, 0, end)


@kernel("u64(u64, u64)")
def multiply_high(a, b):
    """Return the upper 64 of the 128 bits of a * b."""
    a0, a1, b0, b1 = a & LOW_WORD, a >> WORD_BITS, b & LOW_WORD, b >> WORD_BITS
    middle = a1 * b0 + ((a0 * b0) >> WORD_BITS)
    carry_word = a0 * b1 + (middle & LOW_WORD)
    return a1 * b1 + (middle >> WORD_BITS) + (carry_word >> WORD_BITS)


@kernel("f64(i64, i64)")
def uniform(seed, index):
    """Return the first number in [0, 1) of NumPy's Generator(Philox(key=seed, counter=index)).random()."""
    a, b, c, d = u64(index) + u64(1), u64(0), u64(0), u64(0)
    k0, k1 = u64(seed), u64(0)
    for _ in range(PHILOX_ROUNDS):
        h0, l0, h1, l1 = multiply_high(PHILOX_M0, a), PHILOX_M0 * a, multiply_high(M1, c), M1 * c
        a, b, c, d = h1 ^ b ^ k0, l1, h0 ^ d ^ k1, l0
        k0, k1 = k0 + PHILOX_W0, k1 + PHILOX_W1
    return f64(a >> UNUSED_BITS) * 2.0**-53


@kernel("i64(in2, i64, i64, f64, f64)")
def count_after_cutoffs(x, row, num_candidates, top_p, min_p):
    """Return how many of row `row`'s num_candidates sorted candidates, logits x, top-p and min-p leave."""
    if top_p < 1.0:
        exp_sum = 0.0
        for j in range(num_candidates):
            exp_sum += math.exp(f64(x[row, j]) - f64(x[row, 0]))
        cumulative = 0.0
        for j in range(num_candidates):
            cumulative += math.exp(f64(x[row, j]) - f64(x[row, 0])) / exp_sum
            if cumulative >= top_p:
                num_candidates = j + 1
                break
    if min_p > 0.0:
        min_logit = f64(x[row, 0]) + min(math.log(min_p), 0.0)
        while num_candidates > 1 and f64(x[row, num_candidates - 1]) < min_logit:
            num_candidates -= 1
    return num_candidates


@kernel("out_ints1, ints2, in2, doubles2, longs2")
def draw(y, ids, x, sampling_params, counts):
    """Draw one candidate of each row by temperature, top-k, top-p and min-p, see ops.choosing.draw.

    ids, x   (N, k)  i32, f32, the largest first
    sampling_params  (N, 3)  f64: temperature, top-p, min-p
    counts           (N, 3)  i64: top-k (0: all), seed, and which random number of the seed
    y                (N,)    i32: the id drawn; -1 - ids[i, 0] where x[i, 0] is infinite
    """
    for row in range(x.shape[0]):
        if x[row, 0] == INFINITY:
            y[row] = -1 - ids[row, 0]
            continue
        temperature, count = sampling_params[row, 0], x.shape[1]
        if counts[row, 0] > 0:
            count = min(count, counts[row, 0])
        count = count_after_cutoffs(x, row, count, sampling_params[row, 1], sampling_params[row, 2])
        if temperature <= 0.0:
            count = 1
        weight_sum = 0.0
        for j in range(count):
            weight_sum += math.exp((f64(x[row, j]) - f64(x[row, 0])) / temperature) if j else 1.0
        drawn_weight, sum, at = uniform(counts[row, 1], counts[row, 2]) * weight_sum, 0.0, count - 1
        for j in range(count):
            sum += math.exp((f64(x[row, j]) - f64(x[row, 0])) / temperature) if j else 1.0
            if sum > drawn_weight:
                at = j
                break
        y[row] = ids[row, at]
