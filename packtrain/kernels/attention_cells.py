"""Attention that reads a KV cache: the cells of each query's sequence by position, wherever they lie.

Keys and values are gathered in blocks, counted from the first that a query sees, so that results depend neither on
places nor on other sequences. A few queries go one at a time, a group of heads that share a kv head, lanes along the
head width; many go in blocks, like those of `attention`.
"""

from numba import types

from packtrain import dtypes
from packtrain.kernels import online, simd
from packtrain.kernels.attention import begin, finish, pack, packed_rows, queries_in_block, soften
from packtrain.kernels.call import each, kernel, part
from packtrain.kernels.dequantize import UNPACKERS
from packtrain.kernels.online import KEYS, LOG2E, LOWEST, STATE, WIDEST, f32, i64, power, void
from packtrain.kernels.panels import fetch
from packtrain.kernels.simd import INFINITY, LANES, ids1, in1, in3, load_part, out3, poke, scratch
from packtrain.kernels.tile import columns_product, on_stack, rows_product
from packtrain.kernels.visible import PLACES, QUERIES, earliest, hide_after, ids2, put_places

SMALL = 1 << 13  # products below which a parallel region costs more than it saves
FEW = 16  # up to this many queries go one at a time
FEW_HEADS = 16  # heads of one query at a time
FEW_SCORES = FEW_HEADS * KEYS
FEW_STATE = 2 * FEW_HEADS
Q8_0 = dtypes.BLOCK_TYPES["q8_0"]
BLOCK, CACHE_LINE = Q8_0.block, 64
f16, q8_0 = UNPACKERS[dtypes.f16], UNPACKERS[Q8_0]
bytes3 = types.Array(types.uint8, 3, "C", readonly=True)
places = types.Tuple((ids1, ids1, ids2, ids1, ids1))
rule = types.Tuple((f32, i64, f32))


@kernel(void(i64, bytes3, i64, i64, ids2, i64, i64, i64))
def gather(target, x, head, width, order, row, start, count):
    """Heads of cells order[row, start …] as f32 rows (count, width)."""
    nbytes, line = x.shape[2], x.shape[1] * x.shape[2]
    for j in range(count):
        to = target + 4 * j * width
        source = x.ctypes.data + i64(order[row, start + j]) * line + head * nbytes
        if nbytes == 4 * width:
            for d in range(0, width, LANES):
                simd.store_part(to, d, load_part(source, d, width - d), width - d)
        elif nbytes == 2 * width:
            f16(to, source, width)
        else:
            q8_0(to, source, width // BLOCK)


@kernel(void(bytes3, i64, ids2, i64, i64, i64))
def fetch_heads(x, head, order, row, start, count):
    """Prefetch what gather reads."""
    nbytes, line = x.shape[2], x.shape[1] * x.shape[2]
    for j in range(start, start + count):
        source = x.ctypes.data + i64(order[row, j]) * line + head * nbytes
        for at in range(0, nbytes, CACHE_LINE):
            fetch(source + at)


@part(i64(ids2, i64, i64, ids1, i64))
def first_from(order, row, count, pos, since):
    """The first of a row's cells, which are ordered by position, at `since` or later."""
    low, high = i64(0), count
    while low < high:
        middle = (low + high) // 2
        if i64(pos[order[row, middle]]) < since:
            low = middle + 1
        else:
            high = middle
    return low


# ---- few queries


@kernel(void(i64, i64, i64, i64, i64, i64, f32))
def score(scores, group, q, width, key, count, factor):
    """scores (group, KEYS) = factor * q k of a group of heads of one query that share a kv head."""
    for j in range(count):
        for h in range(group):
            dot = simd.splat(0.0)
            for d in range(0, width, LANES):
                left = width - d
                at_key = load_part(key, j * width + d, left)
                dot = simd.fma(load_part(q, h * width + d, left), at_key, dot)
            poke(scores, h * KEYS + j, simd.total(dot) * factor)


@kernel(void(i64, i64, i64, i64, i64, i64))
def soften_one(scores, count, sums, h, y, width):
    """soften for row h of scores, whose values are mixed in place, in row h of y.

    scores  (heads, KEYS)
    sums    (2, FEW_HEADS)  top and sum
    y       (heads, width)
    """
    old = simd.peek(sums, h)
    row, top, added = scores + 4 * KEYS * h, simd.splat(old), simd.splat(0.0)
    hidden = simd.splat(-INFINITY)
    for j in range(0, count, LANES):
        top = online.larger(top, simd.keep_first(load_part(row, j, count - j), count - j, hidden))
    high = simd.largest(top)
    for j in range(0, count, LANES):
        e = power(simd.keep_first(load_part(row, j, count - j), count - j, hidden) - high)
        simd.store(row, j, e)
        added = added + e
    fade = power(simd.splat(old - high))
    poke(sums, h, high)
    poke(sums, FEW_HEADS + h, simd.total(fade * simd.peek(sums, FEW_HEADS + h) / LANES + added))
    for d in range(0, width, LANES):
        at = h * width + d
        simd.store_part(y, at, load_part(y, at, width - d) * fade, width - d)


@kernel(void(i64, i64, i64, i64))
def finish_one(group, sums, y, width):
    """Divide rows y (group, width) by their sums; 0 for a query without keys."""
    for h in range(group):
        seen = simd.peek(sums, FEW_HEADS + h)
        by = f32(1.0) / seen if seen != 0 else seen
        for d in range(0, width, LANES):
            at = h * width + d
            simd.store_part(y, at, load_part(y, at, width - d) * by, width - d)


@kernel(void(out3, in3, bytes3, bytes3, places, in1, rule, i64))
def attend_one(y, q, k, v, places_of, sinks, rule, task):
    """One query for one kv head."""
    (q_pos, q_row, order, counts, k_pos), (scale, window, cap) = places_of, rule
    K, H, D = k.shape[1], q.shape[1], q.shape[2]
    t, head, sharing = task // K, task % K, H // K
    scores, sums = scratch(FEW_SCORES), scratch(FEW_STATE)
    block = on_stack(KEYS * D)
    row, position = i64(q_row[t]), i64(q_pos[t])
    count = i64(counts[row])
    low = first_from(order, row, count, k_pos, earliest(position, window))
    end = first_from(order, row, count, k_pos, position + 1)
    for first in range(head * sharing, (head + 1) * sharing, FEW_HEADS):
        group = min(FEW_HEADS, (head + 1) * sharing - first)
        at_q, at_y = simd.address(q, (t * H + first) * D), simd.address(y, (t * H + first) * D)
        online.clear(at_y, D, group, D)
        for h in range(group):
            poke(sums, h, f32(sinks[first + h] * LOG2E) if sinks.size else f32(LOWEST))
            poke(sums, FEW_HEADS + h, f32(1.0) if sinks.size else f32(0.0))
        fetch_heads(k, head, order, row, low, min(KEYS, end - low))
        for start in range(low, end, KEYS):
            block_keys = min(KEYS, end - start)
            fetch_heads(v, head, order, row, start, block_keys)
            gather(block, k, head, D, order, row, start, block_keys)
            fetch_heads(
                k, head, order, row, start + block_keys, min(KEYS, end - start - block_keys)
            )
            score(scores, group, at_q, D, block, block_keys, f32(scale * LOG2E))
            if cap > 0:
                online.squash(scores, group * KEYS, cap * LOG2E)
            for h in range(group):
                soften_one(scores, block_keys, sums, h, at_y, D)
            gather(block, v, head, D, order, row, start, block_keys)
            rows_product(group, D, block_keys, at_y, D, scores, KEYS, block, D, True)
        finish_one(group, sums, at_y, D)


# ---- many queries


@kernel(void(out3, in3, bytes3, bytes3, places, in1, rule, i64, i64, i64))
def attend_run(y, q, k, v, places_of, sinks, rule, h, first, rows):
    """Queries of one sequence, of one head."""
    (q_pos, q_row, order, counts, k_pos), (scale, window, cap) = places_of, rule
    K, H, D = k.shape[1], q.shape[1], q.shape[2]
    lanes, row, head = -(-rows // LANES) * LANES, i64(q_row[first]), h // (H // K)
    columns, mixed = on_stack(packed_rows(D) * lanes), on_stack(packed_rows(D) * lanes)
    scores, block = on_stack(KEYS * lanes), on_stack(KEYS * D)
    spots, sums, lse = scratch(PLACES), scratch(STATE), scratch(QUERIES)
    at = (first * H + h) * D
    pack(columns, lanes, simd.address(q, at), H * D, rows, D, f32(scale * LOG2E))
    low_pos, high_pos = put_places(spots, q_pos, first, rows, window)
    begin(sums, mixed, lanes, D, sinks, h)
    count = i64(counts[row])
    low = first_from(order, row, count, k_pos, earliest(low_pos, window))
    end = first_from(order, row, count, k_pos, high_pos + 1)
    for start in range(low, end, KEYS):
        block_keys = min(KEYS, end - start)
        gather(block, k, head, D, order, row, start, block_keys)
        rows_product(block_keys, lanes, D, scores, lanes, block, D, columns, lanes, False)
        if cap > 0:
            online.squash(scores, block_keys * lanes, cap * LOG2E)
        hide_after(scores, lanes, spots, k_pos, order, row, start, block_keys)
        soften(scores, lanes, block_keys, sums, mixed, D)
        gather(block, v, head, D, order, row, start, block_keys)
        columns_product(D, lanes, block_keys, mixed, lanes, block, D, scores, lanes, True)
    finish(simd.address(y, at), H * D, lse, rows, sums, mixed, lanes, D)


@kernel(void(out3, in3, bytes3, bytes3, places, in1, rule, i64))
def attend_block(y, q, k, v, places_of, sinks, rule, task):
    """A block of queries of one head, sequence by sequence."""
    T, D = q.shape[0], q.shape[2]
    q_row, size = places_of[1], queries_in_block(D)
    blocks = -(-T // size)
    h, first = task // blocks, task % blocks * size
    end = min(first + size, T)
    while first < end:
        stop = first + 1
        while stop < end and q_row[stop] == q_row[first]:
            stop += 1
        attend_run(y, q, k, v, places_of, sinks, rule, h, first, stop - first)
        first = stop


@kernel(void(out3, in3, bytes3, bytes3, places, in1, rule, i64))
def attend_task(y, q, k, v, places_of, sinks, rule, task):
    if len(q) <= FEW:
        attend_one(y, q, k, v, places_of, sinks, rule, task)
    else:
        attend_block(y, q, k, v, places_of, sinks, rule, task)


@kernel(void(out3, in3, bytes3, bytes3, ids1, ids1, ids2, ids1, ids1, in1, f32, i64, f32))
def attention(y, q, k, v, q_pos, q_row, order, counts, k_pos, sinks, scale, window, cap):
    """y_i = sum_j softmax_j(scale * q_i k_j) v_j over cells j of the query's row of `order`.

    Of those, over k_pos[j] <= q_pos[i], and with a window q_pos[i] - k_pos[j] < window; cap > 0: scores are
    cap * tanh(scores / cap). Query head h reads kv head h // (H / K).

        q, y          (T, H, D)      f32, D <= 512
        k, v          (S, K, bytes)  of heads in f32, f16 or Q8_0, both alike
        q_pos, q_row  (T,)           i32
        order         (R, S)         i32, cells by position
        counts        (R,)           i32, how many of each row
        k_pos         (S,)           i32, of cells
        sinks         (H,)           f32, or (0,); see attention
    """
    T, H, D = q.shape
    if D > WIDEST:
        raise ValueError("attention: heads are wider than 512")
    tasks = H * -(-T // queries_in_block(D))
    if T <= FEW:
        tasks = T * k.shape[1]
    max_count = i64(0)
    for row in range(len(counts)):
        max_count = max(max_count, i64(counts[row]))
    task_args = (y, q, k, v, (q_pos, q_row, order, counts, k_pos), sinks, (scale, window, cap))
    if T * H * D * max_count < SMALL:
        for task in range(tasks):
            attend_task(*task_args, task)
    else:
        each(attend_task, task_args, tasks)
