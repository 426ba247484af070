"""Attention by blocks with an online softmax.

Scores are transposed, (keys, queries): a lane is a query, so maxima and sums run down the rows, positions
compare lane by lane, and the head width is only a number of rows. Queries are packed as columns, times
scale * log2(e), for powers of two. Fully masked blocks are skipped.
"""

from packtrain.kernels import online, simd
from packtrain.kernels.call import each, kernel, part
from packtrain.kernels.online import KEYS, STATE, bytes4, f32, i64, in4, out3, out4, places, void
from packtrain.kernels.simd import LANES, address, fma, ids1, in1, load, log, scratch, splat, store
from packtrain.kernels.tile import columns_product, on_stack, rows_product, turn
from packtrain.kernels.visible import NO, PLACES, QUERIES, SOME, hide, ids2, place_queries, sight


@part(i64(i64))
def packed_rows(width):
    """The number of rows that `pack` writes."""
    return -(-width // LANES) * LANES


@part(i64(i64))
def queries_in_block(width):
    """A fixed function of the head width, never 48: products of 16 columns are slower than of 32."""
    return QUERIES if width <= 64 else 2 * LANES if width <= 256 else LANES


@kernel(void(i64, i64, i64, i64, i64, i64, f32))
def pack(columns, lanes, x, stride, rows, width, factor):
    """columns (width, lanes) = factor * x transposed, x (rows, width); lanes beyond the rows are 0."""
    for d in range(0, width, LANES):
        for i in range(0, lanes, LANES):
            to, source = columns + 4 * (d * lanes + i), x + 4 * (i * stride + d)
            turn(to, lanes, LANES, LANES, source, stride, rows - i, width - d)
    for i in range(0, width * lanes, LANES):
        store(columns, i, load(columns, i) * factor)


@kernel(void(i64, i64, i64, i64, i64, i64))
def soften(scores, lanes, count, sums, columns, width):
    """Powers of a block of scores relative to the running maximum; rescales the sums so far.

    top = max(top, scores), scores = 2**(scores - top), fade = 2**(old top - top),
    sum = fade * sum + sum(scores), columns = fade * columns

        scores   (count, lanes)
        sums     (2, QUERIES)    top and sum
        columns  (width, lanes)  the weighted values so far
    """
    for i in range(0, lanes, LANES):
        old = load(sums, i)
        a, b, c, d = old, old, old, old
        for j in range(0, count - 3, 4):
            at = j * lanes + i
            a, b = online.larger(a, load(scores, at)), online.larger(b, load(scores, at + lanes))
            at += 2 * lanes
            c, d = online.larger(c, load(scores, at)), online.larger(d, load(scores, at + lanes))
        for j in range(count // 4 * 4, count):
            a = online.larger(a, load(scores, j * lanes + i))
        top = online.larger(online.larger(a, b), online.larger(c, d))
        fade = online.power(old - top)
        added = load(sums, QUERIES + i) * fade
        for j in range(count):
            e = online.power(load(scores, j * lanes + i) - top)
            store(scores, j * lanes + i, e)
            added = added + e
        store(sums, i, top)
        store(sums, QUERIES + i, added)
        for d in range(width):
            store(columns, d * lanes + i, load(columns, d * lanes + i) * fade)


@kernel(void(i64, i64, i64, i64, in1, i64))
def begin(sums, columns, lanes, width, sinks, h):
    """Before the first key: sums of 0, or of 1 relative to the head's sink; see soften."""
    top = f32(sinks[h] * online.LOG2E) if sinks.size else f32(online.LOWEST)
    for i in range(0, lanes, LANES):
        store(sums, i, splat(top))
        store(sums, QUERIES + i, splat(f32(1.0) if sinks.size else f32(0.0)))
    for i in range(0, width * lanes, LANES):
        store(columns, i, splat(0.0))


@kernel(void(i64, i64, i64, i64, i64, i64, i64, i64))
def finish(y, stride, lse, rows, sums, columns, lanes, width):
    """y = columns transposed / sum, lse = ln(2) * top + log(sum); both 0 for a query without keys.

    y        (rows, width)
    lse      (rows,)
    columns  (width, lanes)
    """
    for i in range(0, lanes, LANES):
        seen = load(sums, QUERIES + i)  # 0, at least 1, or NaN
        top = fma(load(sums, i), online.LN2, log(seen))
        simd.store_part(lse, i, simd.select_less(0.0, seen, top, seen), rows - i)
        by = simd.select_less(0.0, seen, 1.0 / seen, seen)
        for d in range(width):
            store(columns, d * lanes + i, load(columns, d * lanes + i) * by)
        for d in range(0, width, LANES):
            to, source = y + 4 * (i * stride + d), columns + 4 * (d * lanes + i)
            turn(to, stride, rows - i, width - d, source, lanes, LANES, LANES)


@kernel(void(out4, out3, in4, bytes4, bytes4, places, in1, i64, online.rule, i64))
def attend(y, lse, q, k, v, places_of, sinks, keys, rule, task):
    """One block of queries of one head."""
    (q_pos, k_pos, q_seq, k_seq), (scale, window, cap) = places_of, rule
    T, H, D = q.shape[1:]
    S, K = k.shape[1:3]
    block = queries_in_block(D)
    blocks = -(-T // block)
    b, h, first = task // blocks // H, task // blocks % H, task % blocks * block
    rows = min(block, T - first)
    lanes = -(-rows // LANES) * LANES
    columns, mixed = on_stack(packed_rows(D) * lanes), on_stack(packed_rows(D) * lanes)
    scores, head_buffer = on_stack(KEYS * lanes), on_stack(online.spare_of(k, D))
    places, sums = scratch(PLACES), scratch(STATE)
    at = ((b * T + first) * H + h) * D
    pack(columns, lanes, address(q, at), H * D, rows, D, scale * online.LOG2E)
    span = place_queries(places, q_pos, q_seq, b, first, rows, window)
    begin(sums, mixed, lanes, D, sinks, h)
    for start in range(0, keys, KEYS):
        count = min(KEYS, keys - start)
        seen = sight(span, k_pos, k_seq, b, start, count)
        if seen == NO:
            continue
        from_key = ((b * S + start) * K + h // (H // K)) * D
        key, line = online.heads(k, from_key, count, D, head_buffer)
        rows_product(count, lanes, D, scores, lanes, key, line, columns, lanes, False)
        if cap > 0:
            online.squash(scores, count * lanes, cap * online.LOG2E)
        if seen == SOME:
            hide(scores, lanes, places, k_pos, k_seq, b, start, count)
        soften(scores, lanes, count, sums, mixed, D)
        value, line = online.heads(v, from_key, count, D, head_buffer)
        columns_product(D, lanes, count, mixed, lanes, value, line, scores, lanes, True)
    out = address(lse, (b * H + h) * T + first)
    finish(address(y, at), H * D, out, rows, sums, mixed, lanes, D)


@kernel(i64(i64, ids1, i64))
def extent(count, length, width):
    """The number of keys in use; checks that heads fit the scratch."""
    if width > online.WIDEST:
        raise ValueError("attention: heads are wider than 512")
    return max(min(count, i64(length[0])), 0) if length.size else count


@kernel(void(out4, out3, in4, bytes4, bytes4, ids2, ids2, ids2, ids2, ids1, in1, f32, i64, f32))
def attention(y, lse, q, k, v, q_pos, k_pos, q_seq, k_seq, length, sinks, scale, window, cap):
    """Each query averages the values of its visible keys; query head h reads kv head h // (H // K).

    y_i = sum_j p_ij v_j, p_ij = exp(z_ij - lse_i), lse_i = log(sum_j exp(z_ij)), z_ij = scale * q_i k_j
    over keys j < length[0] with k_seq[j] = q_seq[i] and k_pos[j] <= q_pos[i]; without keys, y = lse = 0
    window > 0: only keys with q_pos[i] - k_pos[j] < window; cap > 0: z = cap * tanh(z / cap)

        q, y          (B, T, H, D)  f32, D <= 512
        k, v          (B, S, K, 4 D or 2 D)  the bytes of f32 or f16, both alike
        lse           (B, H, T)     f32
        q_pos, q_seq  (B, T)        i32, or (0, 0): positions are indices (T = S), sequences equal
        k_pos, k_seq  (B, S)        i32, or (0, 0)
        length        (1,)          i32, or (0,): S
        sinks         (H,)          f32, or (0,): logits that every query sees beside those of keys, without values
    """
    B, T, H, D = q.shape
    keys = extent(k.shape[1], length, D)
    places_of, rule = (q_pos, k_pos, q_seq, k_seq), (scale, window, cap)
    tasks = B * H * -(-T // queries_in_block(D))
    if B * T * H * D * keys < online.SERIAL:
        for task in range(tasks):
            attend(y, lse, q, k, v, places_of, sinks, keys, rule, task)
    else:
        each(attend, (y, lse, q, k, v, places_of, sinks, keys, rule), tasks)
