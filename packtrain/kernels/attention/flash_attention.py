"""Compute attention by blocks with an online softmax.

Scores are transposed, (keys, queries): a lane is a query, so maxima and sums run down the rows, positions
compare lane by lane, and the head width is only a number of rows. Queries are packed as columns, times
scale * log2(e), for powers of two. Fully masked blocks are skipped.
"""

from packtrain.kernels.attention.key_blocks import (
    KEYS, LN2, LOG2E, LOWEST, SERIAL, STATE, WIDEST, exp2, head_buffer_size, larger, load_heads, softcap,
)  # fmt: skip
from packtrain.kernels.attention.masks import (
    NONE_VISIBLE, PLACES, QUERIES, SOME_VISIBLE, mask_scores, sight, write_query_ranges,
)  # fmt: skip
from packtrain.kernels.runtime.jit import each_if_large, kernel, part
from packtrain.kernels.runtime.kernel_types import f32, i64
from packtrain.kernels.simd.register_tiles import (
    columns_product, on_stack, rows_product, transpose_tile,
)  # fmt: skip
from packtrain.kernels.simd.simd_f32 import (
    LANES, address, fma, load, log, scratch, select_less, splat, store, store_part,
)  # fmt: skip


@part("i64(i64)")
def packed_rows(head_width):
    """Return the number of rows that pack_transposed writes for heads of head_width values."""
    return -(-head_width // LANES) * LANES


@part("i64(i64)")
def queries_in_block(head_width):
    """Return the queries of a block for a head width, never 48: products of 16 columns are slower than of 32."""
    return QUERIES if head_width <= 64 else 2 * LANES if head_width <= 256 else LANES


@kernel("i64, i64, i64, i64, i64, i64, f32")
def pack_transposed(columns, lanes, x, stride, num_rows, width, factor):
    """columns (width, lanes) = factor * x.T at addresses; x (num_rows, width), rows `stride` f32 apart; then zeros."""
    for d in range(0, width, LANES):
        for i in range(0, lanes, LANES):
            target, source = columns + 4 * (d * lanes + i), x + 4 * (i * stride + d)
            transpose_tile(target, lanes, LANES, LANES, source, stride, num_rows - i, width - d)
    for i in range(0, width * lanes, LANES):
        store(columns, i, load(columns, i) * factor)


@kernel("i64, i64, i64, i64, i64, i64")
def online_softmax(scores, lanes, count, sums, value_columns, width):
    """Do a step of the online softmax: scores become powers relative to the new maximum, sums so far are rescaled.

    max = max(old max, scores), scores = 2**(scores - max), decay = 2**(old max - max),
    sum = decay * sum + sum(scores), value_columns = decay * value_columns

        scores         (count, lanes)  f32 at an address: a row for each key, a lane for each query
        sums           (2, QUERIES)    f32 at an address: maximum and sum
        value_columns  (width, lanes)  f32 at an address: the weighted values so far
    """
    for i in range(0, lanes, LANES):
        old_max = load(sums, i)
        a, b, c, d = old_max, old_max, old_max, old_max
        for j in range(0, count - 3, 4):
            at = j * lanes + i
            a, b = larger(a, load(scores, at)), larger(b, load(scores, at + lanes))
            at += 2 * lanes
            c, d = larger(c, load(scores, at)), larger(d, load(scores, at + lanes))
        for j in range(count // 4 * 4, count):
            a = larger(a, load(scores, j * lanes + i))
        new_max = larger(larger(a, b), larger(c, d))
        decay = exp2(old_max - new_max)
        new_sum = load(sums, QUERIES + i) * decay
        for j in range(count):
            e = exp2(load(scores, j * lanes + i) - new_max)
            store(scores, j * lanes + i, e)
            new_sum = new_sum + e
        store(sums, i, new_max)
        store(sums, QUERIES + i, new_sum)
        for d in range(width):
            store(value_columns, d * lanes + i, load(value_columns, d * lanes + i) * decay)


@kernel("i64, i64, i64, i64, in1, i64")
def begin_softmax(sums, value_columns, lanes, width, sinks, h):
    """Set `sums`, value_columns (see online_softmax) to those of no key, or of head h's sink, which has no value."""
    initial_max = f32(sinks[h] * LOG2E) if sinks.size else f32(LOWEST)
    for i in range(0, lanes, LANES):
        store(sums, i, splat(initial_max))
        store(sums, QUERIES + i, splat(f32(1.0) if sinks.size else f32(0.0)))
    for i in range(0, width * lanes, LANES):
        store(value_columns, i, splat(0.0))


@kernel("i64, i64, i64, i64, i64, i64, i64, i64")
def finish_softmax(y, stride, lse, num_rows, sums, value_columns, lanes, width):
    """y = value_columns transposed / sum, lse = ln(2) * max + log(sum); both 0 for a query without keys.

    y              (num_rows, width)  f32 at an address, rows `stride` f32 apart
    lse            (num_rows,)        f32 at an address
    value_columns  (width, lanes)     f32 at an address, and `sums`: as online_softmax leaves them
    """
    for i in range(0, lanes, LANES):
        exp_sum = load(sums, QUERIES + i)  # 0, at least 1, or NaN
        log_sum = fma(load(sums, i), LN2, log(exp_sum))
        store_part(lse, i, select_less(0.0, exp_sum, log_sum, exp_sum), num_rows - i)
        inverse_sum = select_less(0.0, exp_sum, 1.0 / exp_sum, exp_sum)
        for d in range(width):
            store(value_columns, d * lanes + i, load(value_columns, d * lanes + i) * inverse_sum)
        for d in range(0, width, LANES):
            target, source = y + 4 * (i * stride + d), value_columns + 4 * (d * lanes + i)
            transpose_tile(target, stride, num_rows - i, width - d, source, lanes, LANES, LANES)


@kernel("out4, out3, in4, bytes4, bytes4, positions4, in1, i64, score_rule, i64")
def attend_block(y, lse, q, k, v, positions, sinks, keys, rule, task):
    """Write y and lse of a block of queries: `task` counts the blocks of a head, then heads, then rows of the batch.

    positions = (q_pos, k_pos, q_seq, k_seq), rule = (scale, window, cap); reads keys 0 … keys - 1
    """
    (q_pos, k_pos, q_seq, k_seq), (scale, window, cap) = positions, rule
    T, H, D = q.shape[1:]
    S, K = k.shape[1:3]
    block_size = queries_in_block(D)
    num_blocks = -(-T // block_size)
    b, h, first = task // num_blocks // H, task // num_blocks % H, task % num_blocks * block_size
    num_queries = min(block_size, T - first)
    lanes = -(-num_queries // LANES) * LANES
    q_columns, mixed = on_stack(packed_rows(D) * lanes), on_stack(packed_rows(D) * lanes)
    scores, head_buffer = on_stack(KEYS * lanes), on_stack(head_buffer_size(k, D))
    query_ranges, sums = scratch(PLACES), scratch(STATE)
    offset = ((b * T + first) * H + h) * D
    pack_transposed(q_columns, lanes, address(q, offset), H * D, num_queries, D, scale * LOG2E)
    query_span = write_query_ranges(query_ranges, q_pos, q_seq, b, first, num_queries, window)
    begin_softmax(sums, mixed, lanes, D, sinks, h)
    for key_start in range(0, keys, KEYS):
        block_keys = min(KEYS, keys - key_start)
        visibility = sight(query_span, k_pos, k_seq, b, key_start, block_keys)
        if visibility == NONE_VISIBLE:
            continue
        key_offset = ((b * S + key_start) * K + h // (H // K)) * D
        key, row_stride = load_heads(k, key_offset, block_keys, D, head_buffer)
        rows_product(block_keys, lanes, D, scores, lanes, key, row_stride, q_columns, lanes, False)
        if cap > 0:
            softcap(scores, block_keys * lanes, cap * LOG2E)
        if visibility == SOME_VISIBLE:
            mask_scores(scores, lanes, query_ranges, k_pos, k_seq, b, key_start, block_keys)
        online_softmax(scores, lanes, block_keys, sums, mixed, D)
        value, row_stride = load_heads(v, key_offset, block_keys, D, head_buffer)
        columns_product(D, lanes, block_keys, mixed, lanes, value, row_stride, scores, lanes, True)
    lse_ptr = address(lse, (b * H + h) * T + first)
    finish_softmax(address(y, offset), H * D, lse_ptr, num_queries, sums, mixed, lanes, D)


@kernel("i64(i64, ints1, i64)")
def num_active_keys(count, key_length, head_width):
    """Return how many of `count` keys are in use: key_length[0], or all if empty. ValueError for too wide heads."""
    if head_width > WIDEST:
        raise ValueError("attention: heads are wider than 512")
    return max(min(count, i64(key_length[0])), 0) if key_length.size else count


@kernel("out4, out3, in4, bytes4, bytes4, ints2, ints2, ints2, ints2, ints1, in1, f32, i64, f32")
def attention(y, lse, q, k, v, q_pos, k_pos, q_seq, k_seq, key_length, sinks, scale, window, cap):
    """Each query averages the values of its visible keys; query head h reads kv head h // (H // K).

    y_i = sum_j p_ij v_j, p_ij = exp(z_ij - lse_i), lse_i = log(sum_j exp(z_ij)), z_ij = scale * q_i k_j
    over keys j < key_length[0] with k_seq[j] = q_seq[i] and k_pos[j] <= q_pos[i]; without keys, y = lse = 0
    window > 0: only keys with q_pos[i] - k_pos[j] < window; cap > 0: z = cap * tanh(z / cap)

        q, y          (B, T, H, D)  f32, D <= 512
        k, v          (B, S, K, 4 D or 2 D)  the bytes of f32 or f16, both alike
        lse           (B, H, T)     f32
        q_pos, q_seq  (B, T)        i32, or (0, 0): positions are indices (T = S), sequences equal
        k_pos, k_seq  (B, S)        i32, or (0, 0)
        key_length    (1,)          i32, or (0,): S
        sinks         (H,)          f32, or (0,): logits that every query sees beside those of keys, without values
    """
    B, T, H, D = q.shape
    num_keys = num_active_keys(k.shape[1], key_length, D)
    positions, score_params = (q_pos, k_pos, q_seq, k_seq), (scale, window, cap)
    num_tasks = B * H * -(-T // queries_in_block(D))
    is_large = B * T * H * D * num_keys >= SERIAL
    task_args = y, lse, q, k, v, positions, sinks, num_keys, score_params
    each_if_large(is_large, attend_block, task_args, num_tasks)
