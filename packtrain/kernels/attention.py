"""Attention by blocks with an online softmax.

Scores are held transposed, (keys, queries): a lane is a query, so maxima and sums run down the
rows, positions compare lane by lane, and any head width is only a number of rows. Queries are packed
as columns, times scale * log2(e): powers are of two. Blocks in which no query sees a key are skipped.
"""

import math

from numba import types

from packtrain.kernels.call import each, kernel, part
from packtrain.kernels.dequantize import f16
from packtrain.kernels.simd import (
    INFINITY,
    LANES,
    address,
    f32x16,
    fma,
    ids1,
    keep_first,
    lanewise,
    largest,
    load,
    load_part,
    log,
    peek,
    poke,
    rank,
    scaled,
    scratch,
    select_less,
    splat,
    store,
    store_part,
    tanh,
    total,
)
from packtrain.kernels.tile import columns_product, room, rows_product, turn
from packtrain.kernels.visible import (
    NO,
    PLACES,
    QUERIES,
    SOME,
    earliest,
    hide,
    ids2,
    place_queries,
    sight,
)

KEYS = 64  # keys in a block
STATE = 2 * QUERIES
WIDEST = 512  # the widest head
SERIAL = 1 << 16  # products below which a parallel region costs more than it saves
FEW = 3  # queries that are not worth lanes of their own
FEW_HEADS = 16  # heads of one query at a time
FEW_SCORES = FEW_HEADS * KEYS
FEW_STATE = 2 * FEW_HEADS
LOWEST = -1e30  # the running maximum of a query that has seen no key
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

i64, f32, void = types.int64, types.float32, types.void
in3, in4 = rank(3, readonly=True), rank(4, readonly=True)
out3, out4 = rank(3), rank(4)
bytes4 = types.Array(types.uint8, 4, "C", readonly=True)
places, rule = types.UniTuple(ids2, 4), types.Tuple((f32, i64, f32))


def emit_larger(builder, a, b):
    """One instruction on x86, unlike maximum; a NaN in b wins."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


larger = lanewise(emit_larger, 2)


@part(f32x16(f32x16))
def power(x):
    """2**x to 1.7e-7 for x < 128, 0 below -127."""
    x = larger(-127.0, x)
    t = x + 12582912.0
    r = x - (t - 12582912.0)
    p = fma(r, 0.0013264726298940486, 0.009671513009988097)
    p = fma(p, r, 0.05550733749092541)
    p = fma(p, r, 0.24022242079184578)
    p = fma(p, r, 0.6931469775938083)
    return scaled(fma(p, r, 1.0), t)


@kernel(void(i64, i64, f32))
def squash(scores, count, cap):
    """scores = cap * tanh(scores / cap), `count` of them, whole vectors; -inf stays."""
    for i in range(0, count, LANES):
        x = load(scores, i)
        store(scores, i, select_less(x, LOWEST, x, tanh(x / cap) * cap))


@kernel(void(i64, i64, i64, i64))
def clear(x, stride, rows, width):
    for i in range(rows):
        for d in range(0, width, LANES):
            store_part(x, i * stride + d, splat(0.0), width - d)


@part(i64(i64))
def packed_rows(width):
    """Rows that `pack` writes."""
    return -(-width // LANES) * LANES


@part(i64(i64))
def queries_in_block(width):
    """A fixed function of the head width, never 48: products of 16 columns are slower than of 32."""
    return QUERIES if width <= 64 else 2 * LANES if width <= 256 else LANES


@kernel(void(i64, i64, i64, i64, i64, i64, f32))
def pack(columns, lanes, x, stride, rows, width, factor):
    """columns (width, lanes) = factor * x transposed, x (rows, width); lanes behind the rows are 0."""
    for d in range(0, width, LANES):
        for i in range(0, lanes, LANES):
            to, source = columns + 4 * (d * lanes + i), x + 4 * (i * stride + d)
            turn(to, lanes, LANES, LANES, source, stride, rows - i, width - d)
    for i in range(0, width * lanes, LANES):
        store(columns, i, load(columns, i) * factor)


@kernel(void(i64, i64, i64, i64, i64, i64))
def soften(scores, lanes, count, sums, columns, width):
    """Powers of a block of scores, under a running maximum that all sums so far are brought under.

    top = max(top, scores), scores = 2**(scores - top), fade = 2**(old top - top),
    sum = fade * sum + sum(scores), columns = fade * columns

        scores   (count, lanes)
        sums     (2, QUERIES)    top and sum
        columns  (width, lanes)  the values mixed so far
    """
    for i in range(0, lanes, LANES):
        old = load(sums, i)
        a, b, c, d = old, old, old, old
        for j in range(0, count - 3, 4):
            at = j * lanes + i
            a, b = larger(a, load(scores, at)), larger(b, load(scores, at + lanes))
            at += 2 * lanes
            c, d = larger(c, load(scores, at)), larger(d, load(scores, at + lanes))
        for j in range(count // 4 * 4, count):
            a = larger(a, load(scores, j * lanes + i))
        top = larger(larger(a, b), larger(c, d))
        fade = power(old - top)
        added = load(sums, QUERIES + i) * fade
        for j in range(count):
            e = power(load(scores, j * lanes + i) - top)
            store(scores, j * lanes + i, e)
            added = added + e
        store(sums, i, top)
        store(sums, QUERIES + i, added)
        for d in range(width):
            store(columns, d * lanes + i, load(columns, d * lanes + i) * fade)


@kernel(void(i64, i64, i64, i64, i64, i64, i64, i64))
def finish(y, stride, lse, rows, sums, columns, lanes, width):
    """y = columns transposed / sum, lse = ln(2) * top + log(sum); both 0 where nothing was seen.

    y        (rows, width)
    lse      (rows,)
    columns  (width, lanes)
    """
    for i in range(0, lanes, LANES):
        seen = load(sums, QUERIES + i)  # 0, or at least 1, or NaN
        top = fma(load(sums, i), LN2, log(seen))
        store_part(lse, i, select_less(0.0, seen, top, seen), rows - i)
        by = select_less(0.0, seen, 1.0 / seen, seen)
        for d in range(width):
            store(columns, d * lanes + i, load(columns, d * lanes + i) * by)
        for d in range(0, width, LANES):
            to, source = y + 4 * (i * stride + d), columns + 4 * (d * lanes + i)
            turn(to, stride, rows - i, width - d, source, lanes, LANES, LANES)


@part(i64(bytes4, i64))
def spare_of(x, width):
    """How many f32 `heads` needs to unpack a block."""
    return KEYS * width if x.shape[3] < 4 * width else 0


@kernel(types.UniTuple(i64, 2)(bytes4, i64, i64, i64, i64))
def heads(x, at, count, width, spare):
    """Address and line of `count` heads from element `at` on, as f32: in place, or unpacked to `spare`."""
    base, line = x.ctypes.data, x.shape[2] * width
    if x.shape[3] == 4 * width:
        return base + 4 * at, line
    for j in range(count):
        f16(spare + 4 * j * width, base + 2 * (at + j * line), width)
    return spare, width


@kernel(void(out4, out3, in4, bytes4, bytes4, places, i64, rule, i64))
def attend(y, lse, q, k, v, places_of, keys, rule, task):
    """One block of queries of one head."""
    (q_pos, k_pos, q_seq, k_seq), (scale, window, cap) = places_of, rule
    T, H, D = q.shape[1:]
    S, K = k.shape[1:3]
    block = queries_in_block(D)
    blocks = -(-T // block)
    b, h, first = task // blocks // H, task // blocks % H, task % blocks * block
    rows = min(block, T - first)
    lanes = -(-rows // LANES) * LANES
    columns, mixed = room(packed_rows(D) * lanes), room(packed_rows(D) * lanes)
    scores, spare = room(KEYS * lanes), room(spare_of(k, D))
    places, sums = scratch(PLACES), scratch(STATE)
    at = ((b * T + first) * H + h) * D
    pack(columns, lanes, address(q, at), H * D, rows, D, scale * LOG2E)
    span = place_queries(places, q_pos, q_seq, b, first, rows, window)
    for i in range(0, lanes, LANES):
        store(sums, i, splat(LOWEST))
        store(sums, QUERIES + i, splat(0.0))
    for i in range(0, D * lanes, LANES):
        store(mixed, i, splat(0.0))
    for start in range(0, keys, KEYS):
        count = min(KEYS, keys - start)
        seen = sight(span, k_pos, k_seq, b, start, count)
        if seen == NO:
            continue
        from_key = ((b * S + start) * K + h // (H // K)) * D
        key, line = heads(k, from_key, count, D, spare)
        rows_product(count, lanes, D, scores, lanes, key, line, columns, lanes, False)
        if cap > 0:
            squash(scores, count * lanes, cap * LOG2E)
        if seen == SOME:
            hide(scores, lanes, places, k_pos, k_seq, b, start, count)
        soften(scores, lanes, count, sums, mixed, D)
        value, line = heads(v, from_key, count, D, spare)
        columns_product(D, lanes, count, mixed, lanes, value, line, scores, lanes, True)
    out = address(lse, (b * H + h) * T + first)
    finish(address(y, at), H * D, out, rows, sums, mixed, lanes, D)


@kernel(
    void(
        i64,
        i64,
        i64,
        i64,
        i64,
        i64,
        f32,
        types.UniTuple(i64, 3),
        ids2,
        ids2,
        i64,
        types.UniTuple(i64, 2),
    )
)
def score_few(scores, group, q, width, key, line, factor, place, k_pos, k_seq, b, own):
    """scores = factor * q k for a group of heads of one query that share a kv head; -inf where unseen.

    scores  (group, KEYS)
    q       (group, width)
    """
    (position, since, sequence), (first, count) = place, own
    for j in range(count):
        at = i64(k_pos[b, first + j]) if k_pos.size else first + j
        seen = since <= at <= position
        seen = seen and (k_seq.size == 0 or i64(k_seq[b, first + j]) == sequence)
        for h in range(group):
            score = f32(-INFINITY)
            if seen:
                dot = splat(0.0)
                for d in range(0, width, LANES):
                    left = width - d
                    at_key = load_part(key, j * line + d, left)
                    dot = fma(load_part(q, h * width + d, left), at_key, dot)
                score = total(dot) * factor
            poke(scores, h * KEYS + j, score)


@kernel(void(i64, i64, i64, i64, i64, i64))
def soften_few(scores, count, sums, h, y, width):
    """soften for row h of scores, whose values are mixed in place, in row h of y.

    scores  (heads, KEYS)
    sums    (2, FEW_HEADS)  top and sum
    y       (heads, width)
    """
    old = peek(sums, h)
    row, top, added = scores + 4 * KEYS * h, splat(old), splat(0.0)
    hidden = splat(-INFINITY)
    for j in range(0, count, LANES):
        top = larger(top, keep_first(load_part(row, j, count - j), count - j, hidden))
    high = largest(top)
    for j in range(0, count, LANES):
        e = power(keep_first(load_part(row, j, count - j), count - j, hidden) - high)
        store(row, j, e)
        added = added + e
    fade = power(splat(old - high))
    poke(sums, h, high)
    poke(sums, FEW_HEADS + h, total(fade * peek(sums, FEW_HEADS + h) / LANES + added))
    for d in range(0, width, LANES):
        at = h * width + d
        store_part(y, at, load_part(y, at, width - d) * fade, width - d)


@kernel(void(i64, i64, i64, i64, i64, i64))
def finish_few(lse, line, group, sums, y, width):
    """finish for rows y (group, width); lse (group,) lies `line` apart."""
    for h in range(group):
        seen = peek(sums, FEW_HEADS + h)
        poke(lse, h * line, peek(sums, h) * LN2 + math.log(seen) if seen > 0 else seen)
        by = f32(1.0) / seen if seen > 0 else seen
        for d in range(0, width, LANES):
            at = h * width + d
            store_part(y, at, load_part(y, at, width - d) * by, width - d)


@kernel(void(out4, out3, in4, bytes4, bytes4, places, i64, rule, types.UniTuple(i64, 5)))
def attend_group(y, lse, q, k, v, places_of, keys, rule, at_group):
    """One query of a group of at most FEW_HEADS heads that share kv head `head`; a lane is a part of the head."""
    b, t, head, first, group = at_group
    (q_pos, k_pos, q_seq, k_seq), (scale, window, cap) = places_of, rule
    T, H, D = q.shape[1:]
    S, K = k.shape[1:3]
    scores, sums, spare = scratch(FEW_SCORES), scratch(FEW_STATE), room(spare_of(k, D))
    at = ((b * T + t) * H + first) * D
    q_at, y_at = address(q, at), address(y, at)
    position = i64(q_pos[b, t]) if q_pos.size else t
    place = position, earliest(position, window), i64(q_seq[b, t]) if q_seq.size else 0
    clear(y_at, D, group, D)
    for h in range(group):
        poke(sums, h, LOWEST)
        poke(sums, FEW_HEADS + h, 0.0)
    for start in range(0, keys, KEYS):
        count = min(KEYS, keys - start)
        at = ((b * S + start) * K + head) * D
        key, line = heads(k, at, count, D, spare)
        factor = f32(scale * LOG2E)
        own = start, count
        score_few(scores, group, q_at, D, key, line, factor, place, k_pos, k_seq, b, own)
        if cap > 0:
            squash(scores, group * KEYS, cap * LOG2E)
        for h in range(group):
            soften_few(scores, count, sums, h, y_at, D)
        value, line = heads(v, at, count, D, spare)
        rows_product(group, D, count, y_at, D, scores, KEYS, value, line, True)
    finish_few(address(lse, (b * H + first) * T + t), T, group, sums, y_at, D)


@kernel(void(out4, out3, in4, bytes4, bytes4, places, i64, rule, i64))
def attend_few(y, lse, q, k, v, places_of, keys, rule, task):
    """All queries, which are few, for one kv head."""
    K = k.shape[2]
    b, head, sharing = task // K, task % K, q.shape[2] // K
    for t in range(q.shape[1]):
        for first in range(head * sharing, (head + 1) * sharing, FEW_HEADS):
            group = min(FEW_HEADS, (head + 1) * sharing - first)
            attend_group(y, lse, q, k, v, places_of, keys, rule, (b, t, head, first, group))


@kernel(void(out4, out3, in4, bytes4, bytes4, places, i64, rule, i64))
def attention_task(y, lse, q, k, v, places_of, keys, rule, task):
    """A block of queries of one head; where queries are few, all of them for a kv head."""
    if q.shape[1] > FEW:
        attend(y, lse, q, k, v, places_of, keys, rule, task)
    else:
        attend_few(y, lse, q, k, v, places_of, keys, rule, task)


@kernel(i64(i64, ids1, i64))
def extent(count, length, width):
    """The keys that count; heads must fit the scratch."""
    if width > WIDEST:
        raise ValueError("attention: heads are wider than 512")
    return max(min(count, i64(length[0])), 0) if length.size else count


@kernel(
    void(out4, out3, in4, bytes4, bytes4, ids2, ids2, ids2, ids2, ids1, f32, i64, f32),
)
def attention(y, lse, q, k, v, q_pos, k_pos, q_seq, k_seq, length, scale, window, cap):
    """Each query mixes the values of the keys that it sees; query head h reads kv head h // (H // K).

    y_i = sum_j p_ij v_j, p_ij = exp(z_ij - lse_i), lse_i = log(sum_j exp(z_ij)), z_ij = scale * q_i k_j
    over keys j < length[0] with k_seq[j] = q_seq[i] and k_pos[j] <= q_pos[i]; of no key, y = lse = 0
    window > 0: only keys with q_pos[i] - k_pos[j] < window; cap > 0: z = cap * tanh(z / cap)

        q, y          (B, T, H, D)  f32, D <= 512
        k, v          (B, S, K, 4 D or 2 D)  the bytes of f32 or f16, both alike
        lse           (B, H, T)     f32
        q_pos, q_seq  (B, T)        i32, or (0, 0): positions are indices (T = S), sequences equal
        k_pos, k_seq  (B, S)        i32, or (0, 0)
        length        (1,)          i32, or (0,): S
    """
    B, T, H, D = q.shape
    keys, places_of, rule = (
        extent(k.shape[1], length, D),
        (q_pos, k_pos, q_seq, k_seq),
        (scale, window, cap),
    )
    tasks = B * k.shape[2] if T <= FEW else B * H * -(-T // queries_in_block(D))
    if B * T * H * D * keys < SERIAL:
        for task in range(tasks):
            attention_task(y, lse, q, k, v, places_of, keys, rule, task)
    else:
        each(attention_task, (y, lse, q, k, v, places_of, keys, rule), tasks)
