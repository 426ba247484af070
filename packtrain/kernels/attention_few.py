"""Attention of few queries: one at a time, a group of heads that share a kv head, lanes along the head width."""

import math

from numba import types

from packtrain.kernels.call import kernel
from packtrain.kernels.online import (
    FEW_HEADS,
    FEW_SCORES,
    FEW_STATE,
    KEYS,
    LN2,
    LOG2E,
    LOWEST,
    bytes4,
    clear,
    f32,
    heads,
    i64,
    in4,
    larger,
    out3,
    out4,
    places,
    power,
    rule,
    spare_of,
    squash,
    void,
)
from packtrain.kernels.simd import (
    INFINITY,
    LANES,
    address,
    fma,
    keep_first,
    largest,
    load_part,
    peek,
    poke,
    scratch,
    splat,
    store,
    store_part,
    total,
)
from packtrain.kernels.tile import on_stack, rows_product
from packtrain.kernels.visible import cells_seen, earliest, ids2, is_sets


@kernel(void(i64, i64, i64, i64, i64, i64, f32, i64))
def score_few(scores, group, q, width, key, line, factor, seen):
    """scores = factor * q k for a group of heads of one query that share a kv head; -inf where `seen` has no bit.

    scores  (group, KEYS)
    q       (group, width)
    """
    for at in range(0, group * KEYS, LANES):
        store(scores, at, splat(-INFINITY))
    for j in range(KEYS):
        if seen >> j & 1 == 0:
            continue
        for h in range(group):
            dot = splat(0.0)
            for d in range(0, width, LANES):
                left = width - d
                at_key = load_part(key, j * line + d, left)
                dot = fma(load_part(q, h * width + d, left), at_key, dot)
            poke(scores, h * KEYS + j, total(dot) * factor)


@kernel(i64(ids2, ids2, types.boolean, i64, i64, i64, i64, i64, i64))
def seen_of(k_pos, k_seq, sets, b, start, count, earliest, position, sequence):
    """Which of the keys from `start` on a query sees, as bits."""
    if k_pos.size == 0 or k_seq.size == 0:
        found = i64(0)
        for j in range(count):
            at = i64(k_pos[b, start + j]) if k_pos.size else start + j
            same = k_seq.size == 0 or i64(k_seq[b, start + j]) == sequence
            found |= i64(earliest <= at <= position and same) << j
        return found
    positions = k_pos.ctypes.data + 4 * (b * k_pos.shape[1] + start)
    sequences = k_seq.ctypes.data + 4 * (b * k_seq.shape[1] + start * (2 if sets else 1))
    return cells_seen(positions, sequences, sets, count, earliest, position, sequence)


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
    scores, sums, spare = scratch(FEW_SCORES), scratch(FEW_STATE), on_stack(spare_of(k, D))
    at = ((b * T + t) * H + first) * D
    q_at, y_at = address(q, at), address(y, at)
    position = i64(q_pos[b, t]) if q_pos.size else t
    since, sequence = earliest(position, window), i64(q_seq[b, t]) if q_seq.size else 0
    sets = is_sets(k_pos, k_seq)
    clear(y_at, D, group, D)
    for h in range(group):
        poke(sums, h, LOWEST)
        poke(sums, FEW_HEADS + h, 0.0)
    for start in range(0, keys, KEYS):
        count = min(KEYS, keys - start)
        seen = seen_of(k_pos, k_seq, sets, b, start, count, since, position, sequence)
        if seen == 0:
            continue
        at = ((b * S + start) * K + head) * D
        key, line = heads(k, at, count, D, spare)
        factor = f32(scale * LOG2E)
        score_few(scores, group, q_at, D, key, line, factor, seen)
        if cap > 0:
            squash(scores, group * KEYS, cap * LOG2E)
        for h in range(group):
            soften_few(scores, count, sums, h, y_at, D)
        value, line = heads(v, at, count, D, spare)
        rows_product(group, D, count, y_at, D, scores, KEYS, value, line, True)
    finish_few(address(lse, (b * H + first) * T + t), T, group, sums, y_at, D)


@kernel(void(out4, out3, in4, bytes4, bytes4, places, i64, rule, i64))
def attend_few(y, lse, q, k, v, places_of, keys, rule, task):
    """One query for one kv head."""
    T, K = q.shape[1], k.shape[2]
    b, t, head, sharing = task // K // T, task // K % T, task % K, q.shape[2] // K
    for first in range(head * sharing, (head + 1) * sharing, FEW_HEADS):
        group = min(FEW_HEADS, (head + 1) * sharing - first)
        attend_group(y, lse, q, k, v, places_of, keys, rule, (b, t, head, first, group))
