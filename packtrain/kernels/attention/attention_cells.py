"""Attention that reads a KV cache: the cells of each query's sequence by position, wherever they lie.

Keys and values are gathered in blocks, counted from the first cell that a query sees, so that results depend neither
on places nor on other sequences. Few queries go one at a time, with the heads that share a kv head, lanes along the
head width; many go in blocks, as in `flash_attention`.
"""

from packtrain.kernels.attention.flash_attention import (
    begin_softmax, finish_softmax, online_softmax, pack_transposed, packed_rows, queries_in_block,
)  # fmt: skip
from packtrain.kernels.attention.key_blocks import (
    KEYS, LOG2E, LOWEST, STATE, WIDEST, clear_rows, exp2, larger, softcap,
)  # fmt: skip
from packtrain.kernels.attention.masks import (
    PLACES, QUERIES, earliest, hide_after, write_cell_ranges,
)  # fmt: skip
from packtrain.kernels.matmul.panels import prefetch_line
from packtrain.kernels.quant.dequantize import unpack_f16, unpack_q8_0
from packtrain.kernels.runtime.jit import each_if_large, kernel, part
from packtrain.kernels.runtime.kernel_types import Tuple, f32, i64, ints1, ints2
from packtrain.kernels.simd.register_tiles import columns_product, on_stack, rows_product
from packtrain.kernels.simd.simd_f32 import (
    INFINITY, LANES, address, fma, keep_first, largest, load_part, peek, poke, scratch, splat, store, store_part, total,
)  # fmt: skip
from packtrain.kernels.simd.f32_ranges import copy

MIN_PARALLEL_PRODUCTS = 1 << 13  # products below which a parallel region costs more than it saves
MAX_SINGLE_QUERIES = 16  # up to this many queries go one at a time
MAX_HEADS = 16  # heads of one query at a time
SCORES_SIZE = MAX_HEADS * KEYS
SUMS_SIZE = 2 * MAX_HEADS
CACHE_LINE = 64
cell_positions_type = Tuple((ints1, ints1, ints2, ints1, ints1))


@kernel("i64, bytes3, i64, i64, ints2, i64, i64, i64")
def gather_heads(target, x, head, width, order, cell_row, cell_start, num_cells):
    """Copy head `head` of cells order[cell_row, cell_start …] of x as f32 (num_cells, width) to address target."""
    head_nbytes, line = x.shape[2], x.shape[1] * x.shape[2]
    for j in range(num_cells):
        head_target = target + 4 * j * width
        source = x.ctypes.data + i64(order[cell_row, cell_start + j]) * line + head * head_nbytes
        if head_nbytes == 4 * width:
            copy(head_target, source, width)
        elif head_nbytes == 2 * width:
            unpack_f16(head_target, source, width)
        else:
            unpack_q8_0(head_target, source, width)


@kernel("bytes3, i64, ints2, i64, i64, i64")
def fetch_heads(x, head, order, cell_row, cell_start, num_cells):
    """Prefetch the bytes that gather_heads will read with these arguments."""
    head_nbytes, cell_stride = x.shape[2], x.shape[1] * x.shape[2]
    for j in range(cell_start, cell_start + num_cells):
        source = x.ctypes.data + i64(order[cell_row, j]) * cell_stride + head * head_nbytes
        for byte_offset in range(0, head_nbytes, CACHE_LINE):
            prefetch_line(source + byte_offset)


@part("i64(ints2, i64, i64, ints1, i64)")
def first_cell_at(order, cell_row, num_cells, k_pos, min_position):
    """Return the first i < num_cells with k_pos[order[cell_row, i]] >= min_position, else num_cells, by bisection."""
    low_index, high_index = i64(0), num_cells
    while low_index < high_index:
        middle = (low_index + high_index) // 2
        if i64(k_pos[order[cell_row, middle]]) < min_position:
            low_index = middle + 1
        else:
            high_index = middle
    return low_index


# ---- few queries


@kernel("i64, i64, i64, i64, i64, i64, f32")
def score_keys(scores, num_heads, q, width, keys_ptr, count, factor):
    """scores (num_heads, KEYS) = factor * q k at addresses; q (num_heads, width) of a query, k (count, width)."""
    for j in range(count):
        for h in range(num_heads):
            dot = splat(0.0)
            for d in range(0, width, LANES):
                num_left = width - d
                key_lanes = load_part(keys_ptr, j * width + d, num_left)
                dot = fma(load_part(q, h * width + d, num_left), key_lanes, dot)
            poke(scores, h * KEYS + j, total(dot) * factor)


@kernel("i64, i64, i64, i64, i64, i64")
def online_softmax_row(scores, count, sums, h, y, width):
    """Do a step of the online softmax with `count` scores of head h: they become powers, earlier results are rescaled.

    scores  (heads, KEYS)   f32 at an address; row h becomes 2**(scores - the new maximum)
    sums    (2, MAX_HEADS)  f32 at an address: maxima and sums so far
    y       (heads, width)  f32 at an address: values so far, weighted
    """
    old_max = peek(sums, h)
    row, top, added = scores + 4 * KEYS * h, splat(old_max), splat(0.0)
    hidden = splat(-INFINITY)
    for j in range(0, count, LANES):
        top = larger(top, keep_first(load_part(row, j, count - j), count - j, hidden))
    new_max = largest(top)
    for j in range(0, count, LANES):
        e = exp2(keep_first(load_part(row, j, count - j), count - j, hidden) - new_max)
        store(row, j, e)
        added = added + e
    decay = exp2(splat(old_max - new_max))
    poke(sums, h, new_max)
    poke(sums, MAX_HEADS + h, total(decay * peek(sums, MAX_HEADS + h) / LANES + added))
    for d in range(0, width, LANES):
        offset = h * width + d
        store_part(y, offset, load_part(y, offset, width - d) * decay, width - d)


@kernel("i64, i64, i64, i64")
def finish_softmax_row(num_heads, sums, y, width):
    """Divide rows y (num_heads, width) by their sums, sums[1]; addresses. Rows are 0 for a query without keys."""
    for h in range(num_heads):
        exp_sum = peek(sums, MAX_HEADS + h)
        inverse_sum = f32(1.0) / exp_sum if exp_sum != 0 else exp_sum
        for d in range(0, width, LANES):
            offset = h * width + d
            store_part(y, offset, load_part(y, offset, width - d) * inverse_sum, width - d)


@kernel("out3, in3, bytes3, bytes3, cell_positions_type, in1, score_rule, i64")
def attend_query(y, q, k, v, cell_positions, sinks, rule, task):
    """Write y of query task // K for the query heads that share KV head task % K; other arguments are attention's:

    cell_positions = (q_pos, q_row, order, counts, k_pos), rule = (scale, window, cap)
    """
    (q_pos, q_row, order, counts, k_pos), (scale, window, cap) = cell_positions, rule
    K, H, D = k.shape[1], q.shape[1], q.shape[2]
    t, head, heads_per_kv = task // K, task % K, H // K
    scores, sums = scratch(SCORES_SIZE), scratch(SUMS_SIZE)
    head_buffer = on_stack(KEYS * D)
    row, position = i64(q_row[t]), i64(q_pos[t])
    num_cells = i64(counts[row])
    cell_start = first_cell_at(order, row, num_cells, k_pos, earliest(position, window))
    cell_stop = first_cell_at(order, row, num_cells, k_pos, position + 1)
    for first in range(head * heads_per_kv, (head + 1) * heads_per_kv, MAX_HEADS):
        num_heads = min(MAX_HEADS, (head + 1) * heads_per_kv - first)
        q_ptr, y_ptr = address(q, (t * H + first) * D), address(y, (t * H + first) * D)
        clear_rows(y_ptr, D, num_heads, D)
        for h in range(num_heads):
            poke(sums, h, f32(sinks[first + h] * LOG2E) if sinks.size else f32(LOWEST))
            poke(sums, MAX_HEADS + h, f32(1.0) if sinks.size else f32(0.0))
        fetch_heads(k, head, order, row, cell_start, min(KEYS, cell_stop - cell_start))
        for start in range(cell_start, cell_stop, KEYS):
            block_keys = min(KEYS, cell_stop - start)
            fetch_heads(v, head, order, row, start, block_keys)
            gather_heads(head_buffer, k, head, D, order, row, start, block_keys)
            fetch_heads(
                k, head, order, row, start + block_keys, min(KEYS, cell_stop - start - block_keys)
            )
            score_keys(scores, num_heads, q_ptr, D, head_buffer, block_keys, f32(scale * LOG2E))
            if cap > 0:
                softcap(scores, num_heads * KEYS, cap * LOG2E)
            for h in range(num_heads):
                online_softmax_row(scores, block_keys, sums, h, y_ptr, D)
            gather_heads(head_buffer, v, head, D, order, row, start, block_keys)
            rows_product(num_heads, D, block_keys, y_ptr, D, scores, KEYS, head_buffer, D, True)
        finish_softmax_row(num_heads, sums, y_ptr, D)


# ---- many queries


@kernel("out3, in3, bytes3, bytes3, cell_positions_type, in1, score_rule, i64, i64, i64")
def attend_run(y, q, k, v, cell_positions, sinks, rule, h, first_query, num_queries):
    """Write y of head h for num_queries queries from first_query on, of one sequence; tuples are as in attend_query."""
    (q_pos, q_row, order, counts, k_pos), (scale, window, cap) = cell_positions, rule
    K, H, D = k.shape[1], q.shape[1], q.shape[2]
    lanes, cell_row, head = -(-num_queries // LANES) * LANES, i64(q_row[first_query]), h // (H // K)
    q_columns, mixed = on_stack(packed_rows(D) * lanes), on_stack(packed_rows(D) * lanes)
    scores, head_buffer = on_stack(KEYS * lanes), on_stack(KEYS * D)
    query_ranges, sums, lse = scratch(PLACES), scratch(STATE), scratch(QUERIES)
    offset = (first_query * H + h) * D
    pack_transposed(q_columns, lanes, address(q, offset), H * D, num_queries, D, f32(scale * LOG2E))
    min_pos, max_pos = write_cell_ranges(query_ranges, q_pos, first_query, num_queries, window)
    begin_softmax(sums, mixed, lanes, D, sinks, h)
    num_cells = i64(counts[cell_row])
    cell_start = first_cell_at(order, cell_row, num_cells, k_pos, earliest(min_pos, window))
    cell_stop = first_cell_at(order, cell_row, num_cells, k_pos, max_pos + 1)
    for block_start in range(cell_start, cell_stop, KEYS):
        block_keys = min(KEYS, cell_stop - block_start)
        gather_heads(head_buffer, k, head, D, order, cell_row, block_start, block_keys)
        rows_product(block_keys, lanes, D, scores, lanes, head_buffer, D, q_columns, lanes, False)
        if cap > 0:
            softcap(scores, block_keys * lanes, cap * LOG2E)
        hide_after(scores, lanes, query_ranges, k_pos, order, cell_row, block_start, block_keys)
        online_softmax(scores, lanes, block_keys, sums, mixed, D)
        gather_heads(head_buffer, v, head, D, order, cell_row, block_start, block_keys)
        columns_product(D, lanes, block_keys, mixed, lanes, head_buffer, D, scores, lanes, True)
    finish_softmax(address(y, offset), H * D, lse, num_queries, sums, mixed, lanes, D)


@kernel("out3, in3, bytes3, bytes3, cell_positions_type, in1, score_rule, i64")
def attend_query_block(y, q, k, v, cell_positions, sinks, rule, task):
    """Write y of a head for a block of queries, sequence by sequence: `task` counts the blocks, head after head."""
    T, D = q.shape[0], q.shape[2]
    q_row, block_size = cell_positions[1], queries_in_block(D)
    num_blocks = -(-T // block_size)
    h, first_query = task // num_blocks, task % num_blocks * block_size
    query_stop = min(first_query + block_size, T)
    while first_query < query_stop:
        run_stop = first_query + 1
        while run_stop < query_stop and q_row[run_stop] == q_row[first_query]:
            run_stop += 1
        attend_run(y, q, k, v, cell_positions, sinks, rule, h, first_query, run_stop - first_query)
        first_query = run_stop


@kernel("out3, in3, bytes3, bytes3, cell_positions_type, in1, score_rule, i64")
def attend_task(y, q, k, v, cell_positions, sinks, rule, task):
    if len(q) <= MAX_SINGLE_QUERIES:
        attend_query(y, q, k, v, cell_positions, sinks, rule, task)
    else:
        attend_query_block(y, q, k, v, cell_positions, sinks, rule, task)


@kernel("out3, in3, bytes3, bytes3, ints1, ints1, ints2, ints1, ints1, in1, f32, i64, f32")
def attention(y, q, k, v, q_pos, q_row, order, counts, k_pos, sinks, scale, window, cap):
    """y_i = sum_j softmax_j(scale * q_i k_j) v_j over cells j of the query's row of `order`.

    Only cells with k_pos[j] <= q_pos[i] count, with a window only q_pos[i] - k_pos[j] < window; cap > 0: scores become
    cap * tanh(scores / cap). Query head h reads kv head h // (H / K).

        q, y          (T, H, D)      f32, D <= 512
        k, v          (S, K, bytes)  u8: heads in f32, f16 or Q8_0, k and v alike
        q_pos, q_row  (T,)           i32: position of each query, and its row of `order`
        order         (R, S)         i32: cells that a query may see, by position
        counts        (R,)           i32: number of cells of each row
        k_pos         (S,)           i32: positions of cells
        sinks         (H,)           f32, or (0,); see flash_attention.attention
    """
    T, H, D = q.shape
    if D > WIDEST:
        raise ValueError("attention: heads are wider than 512")
    num_tasks = H * -(-T // queries_in_block(D))
    if T <= MAX_SINGLE_QUERIES:
        num_tasks = T * k.shape[1]
    max_count = i64(0)
    for cell_row in range(len(counts)):
        max_count = max(max_count, i64(counts[cell_row]))
    task_args = (y, q, k, v, (q_pos, q_row, order, counts, k_pos), sinks, (scale, window, cap))
    is_large = T * H * D * max_count >= MIN_PARALLEL_PRODUCTS
    each_if_large(is_large, attend_task, task_args, num_tasks)
