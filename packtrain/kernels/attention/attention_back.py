"""The backward pass of attention, by the forward pass's blocks; recomputes probabilities from the log-sum-exp.

A task covers one kv head of one batch row, so that dk and dv are summed in a fixed order, without atomics. If
there are few kv heads, a task is one query head with dk and dv of its own, which `add_heads` adds afterwards.

Worked example: one query q = 1, dy = 2, keys k = [0, ln 3], values v = [4, 8], scale 1. Forward saved y = 7 and
lse = ln(1 + 3) = ln 4; with them each block of keys can be computed by itself:

    scores  z = q k              [0, ln 3]
    p       exp(z - lse)         [0.25, 0.75]
    dv      p dy                 [0.5, 1.5]
    delta   dy y                 14, which is the sum of p dy v: no second pass over the keys
    ds      p (dy v - delta)     [0.25 (8 - 14), 0.75 (16 - 14)] = [-1.5, 1.5], whose sum is 0
    dq      sum of ds k          1.5 ln 3 = 1.648
    dk      ds q                 [-1.5, 1.5]
"""

from packtrain.kernels.attention.flash_attention import (
    num_active_keys, pack_transposed, packed_rows, queries_in_block,
)  # fmt: skip
from packtrain.kernels.attention.key_blocks import (
    KEYS, LOG2E, SERIAL, STATE, clear_rows, exp2, larger, softcap,
)  # fmt: skip
from packtrain.kernels.attention.masks import (
    NONE_VISIBLE, PLACES, QUERIES, SOME_VISIBLE, mask_scores, sight, write_query_ranges,
)  # fmt: skip
from packtrain.kernels.runtime.jit import each, each_if_large, kernel
from packtrain.kernels.simd.register_tiles import columns_product, on_stack, rows_product
from packtrain.kernels.simd.simd_f32 import (
    LANES, address, fma, load, load_part, poke, scratch, splat, store, store_part, total,
)  # fmt: skip


@kernel("i64, i64, i64, i64, i64, i64, i64, i64, f32")
def init_softmax_back(state, dy, y, stride, lse, num_rows, lanes, width, scale):
    """Write to `state` what softmax_back needs of each query: lse in powers of two, and delta = scale * sum(dy * y).

    state  (2, QUERIES)       f32 at an address: lse, then delta; `lanes` of each, whole vectors, 0 from num_rows on
    dy, y  (num_rows, width)  f32 at addresses, rows `stride` f32 apart
    lse    (num_rows,)        f32 at an address
    """
    for i in range(0, lanes, LANES):
        store(state, i, load_part(lse, i, num_rows - i) * LOG2E)
    for i in range(lanes):
        lane_sums = splat(0.0)
        if i < num_rows:
            for d in range(0, width, LANES):
                at, num_left = i * stride + d, width - d
                lane_sums = fma(load_part(dy, at, num_left), load_part(y, at, num_left), lane_sums)
        poke(state, QUERIES + i, total(lane_sums) * scale)


@kernel("i64, i64, i64, i64, i64, f32")
def softmax_back(scores, d_scores, lanes, count, state, cap):
    """Turn scores into p = 2**(scores - lse), d_scores into p * (d_scores - delta); both (count keys, lanes queries).

    These and `state`, by init_softmax_back, are addresses. cap > 0: d_scores also times slope 1 - (scores / cap)**2.
    """
    for i in range(0, lanes, LANES):
        lse, delta = load(state, i), load(state, QUERIES + i)
        for j in range(i, count * lanes, lanes):
            score = load(scores, j)
            p = exp2(score - lse)
            store(scores, j, p)
            d = p * (load(d_scores, j) - delta)
            if cap > 0:
                t = larger(-1.0, score / cap)
                d = d * (1.0 - t * t)
            store(d_scores, j, d)


@kernel(
    "UniTuple(out4, 3), in4, in4, in3, in4, in4, in4, positions4, i64, score_rule, i64, i64, i64"
)
def attend_back(grads, dy, y, lse, q, k, v, positions, keys, rule, b, h, first_query):
    """Compute gradients of the block of queries from `first_query` on, of head h, row b: writes dq, adds to dk, dv.

    grads = (dq, dk, dv), positions = (q_pos, k_pos, q_seq, k_seq), rule = (scale, window, cap); reads keys 0 … keys - 1
    """
    (dq, dk, dv), (scale, window, cap) = grads, rule
    (q_pos, k_pos, q_seq, k_seq), (T, H, D) = positions, q.shape[1:]
    (S, K), G = k.shape[1:3], dk.shape[2]
    num_q = min(queries_in_block(D), T - first_query)
    lanes = -(-num_q // LANES) * LANES
    q_columns, dy_columns = (on_stack(packed_rows(D) * lanes), on_stack(packed_rows(D) * lanes))
    p, ds = on_stack(KEYS * lanes), on_stack(KEYS * lanes)
    query_ranges, state = scratch(PLACES), scratch(STATE)
    offset, q_stride, k_stride = ((b * T + first_query) * H + h) * D, H * D, K * D
    q_rows, dy_rows, dq_rows = address(q, offset), address(dy, offset), address(dq, offset)
    pack_transposed(q_columns, lanes, q_rows, q_stride, num_q, D, scale * LOG2E)
    pack_transposed(dy_columns, lanes, dy_rows, q_stride, num_q, D, scale)
    lse_ptr = address(lse, (b * H + h) * T + first_query)
    init_softmax_back(state, dy_rows, address(y, offset), q_stride, lse_ptr, num_q, lanes, D, scale)
    query_span = write_query_ranges(query_ranges, q_pos, q_seq, b, first_query, num_q, window)
    clear_rows(dq_rows, q_stride, num_q, D)
    for key_start in range(0, keys, KEYS):
        count = min(KEYS, keys - key_start)
        visibility = sight(query_span, k_pos, k_seq, b, key_start, count)
        if visibility == NONE_VISIBLE:
            continue
        offset = ((b * S + key_start) * K + h // (H // K)) * D
        key_ptr, value_ptr = address(k, offset), address(v, offset)
        to = ((b * S + key_start) * G + h // (H // G)) * D
        rows_product(count, lanes, D, p, lanes, key_ptr, k_stride, q_columns, lanes, False)
        rows_product(count, lanes, D, ds, lanes, value_ptr, k_stride, dy_columns, lanes, False)
        if cap > 0:
            softcap(p, count * lanes, cap * LOG2E)
        if visibility == SOME_VISIBLE:
            mask_scores(p, lanes, query_ranges, k_pos, k_seq, b, key_start, count)
        softmax_back(p, ds, lanes, count, state, cap * LOG2E)
        rows_product(count, D, num_q, address(dv, to), G * D, p, lanes, dy_rows, q_stride, True)
        rows_product(count, D, num_q, address(dk, to), G * D, ds, lanes, q_rows, q_stride, True)
        columns_product(num_q, D, count, dq_rows, q_stride, ds, lanes, key_ptr, k_stride, True)


@kernel("UniTuple(out4, 3), in4, in4, in3, in4, in4, in4, positions4, i64, score_rule, i64, i64")
def head_back(grads, dy, y, lse, q, k, v, positions, keys, rule, is_added, task):
    """Compute dk and dv of KV head task % G in batch row task // G, and dq of the query heads that read this head.

    G is the number of heads of dk. dq is written; dk and dv, too, or added to if `is_added`. Tuples: see attend_back.
    """
    T, H, D = q.shape[1:]
    S, G = grads[1].shape[1:3]
    b, head, group_size = task // G, task % G, H // G
    if not is_added:
        for x in grads[1:]:
            clear_rows(address(x, (b * S * G + head) * D), G * D, S, D)
    for h in range(head * group_size, (head + 1) * group_size):
        for first_query in range(0, T, queries_in_block(D)):
            attend_back(grads, dy, y, lse, q, k, v, positions, keys, rule, b, h, first_query)


@kernel("out4, out4, i64, i64")
def add_heads(x, head_grads, is_added, row_index):
    """Sum head_grads (B, S, H, D) over the query heads of each KV head, in order, at place row_index = b S + s.

    The sums are written to x (B, S, K, D), or added to it if `is_added`.
    """
    K, D = x.shape[2:]
    group_size = head_grads.shape[2] // K
    for k in range(K):
        target, source = (row_index * K + k) * D, (row_index * K + k) * group_size * D
        for d in range(0, D, LANES):
            v = load_part(head_grads, source + d, D - d)
            for g in range(1, group_size):
                v = v + load_part(head_grads, source + g * D + d, D - d)
            if is_added:
                v = v + load_part(x, target + d, D - d)
            store_part(x, target + d, v, D - d)


@kernel(
    "*(UniTuple(out4, 5), in4, in4, in3, in4, in4, in4), *(ints2, ints2, ints2, ints2, ints1, f32, i64, f32, i64)"
)
def attention_back(
    outputs, dy, y, lse, q, k, v, q_pos, k_pos, q_seq, k_seq, key_length, scale, window, cap, is_added
):  # fmt: skip
    """Write the gradients of attention at (y, lse), or add dk and dv; zero for a query without keys.

    outputs = (dq, dk, dv, head_dk, head_dv)
    dv_j = sum_i p_ij dy_i, ds_ij = scale * p_ij (dy_i v_j - dy_i y_i), with a cap times 1 - (z_ij / cap)**2,
    dq_i = sum_j ds_ij k_j, dk_j = sum_i ds_ij q_i

        q, y, dy, dq  (B, T, H, D)  f32
        k, v, dk, dv  (B, S, K, D)  f32, zeros if no query sees the key
        head_dk, head_dv  (B, S, H, D)  f32, workspace for dk and dv of each head of q; or dk and dv
        the rest as in attention; dq may be y
    """
    (B, T, H, D), (dq, dk, dv, head_dk, head_dv) = q.shape, outputs
    num_keys = num_active_keys(k.shape[1], key_length, D)
    grads, num_tasks = (dq, head_dk, head_dv), B * head_dk.shape[2]
    has_query_heads = head_dk.shape[2] > dk.shape[2]
    positions, score_params = (q_pos, k_pos, q_seq, k_seq), (scale, window, cap)
    is_large = B * T * H * D * num_keys >= SERIAL
    adds_at_once = is_added if not has_query_heads else 0
    task_args = grads, dy, y, lse, q, k, v, positions, num_keys, score_params, adds_at_once
    each_if_large(is_large, head_back, task_args, num_tasks)
    if has_query_heads:
        each(add_heads, (dk, head_dk, is_added), B * k.shape[1])
        each(add_heads, (dv, head_dv, is_added), B * k.shape[1])
