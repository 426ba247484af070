"""Attention masks: find the keys that a block of queries, or one query, sees, by position and sequence.

A query sees keys of its sequence up to its position, within the window (0: all; -n: in the same chunk of n positions).
Positions and sequences are int32 (batch, index); of size 0, positions are the indices and sequences are all equal.
"""

from llvmlite import ir

from packtrain.kernels.runtime.jit import kernel, part
from packtrain.kernels.runtime.kernel_types import UniTuple, i64, void
from packtrain.kernels.simd.register_tiles import POINTER, at
from packtrain.kernels.simd.simd_f32 import (
    BITS, I32, I64, INFINITY, LANES, VECTOR, f32x16, instruction, load, spread, store,
)  # fmt: skip

QUERIES = 64  # most queries in a block
PLACES = 3 * QUERIES
MIN_POSITION, BEYOND = -(1 << 31), 1 << 31
NONE_VISIBLE, SOME_VISIBLE, ALL = 0, 1, 2  # how much of a block of keys the queries of a block see

span_type = UniTuple(i64, 5)


@instruction(void, i64, i64, i64)
def poke_int(builder, y, i, value):
    """Write `value` as element i of the int32 at address y."""
    pointer = builder.gep(builder.inttoptr(y, POINTER), [i], source_etype=I32)
    builder.store(builder.trunc(value, I32), pointer)


@instruction(f32x16, f32x16, i64, i64, i64, i64)
def visible_scores(builder, score, ranges, i, *key):
    """Return scores of queries i … i + 15 for a key (position, sequence), -inf where `ranges`, an address, hides it."""
    base = builder.inttoptr(ranges, POINTER)
    position, sequence = (spread(builder, builder.trunc(k, I32), BITS) for k in key)
    is_visible = None
    for number, (sign, value) in enumerate((("<=", position), ("==", sequence), (">=", position))):
        spot = at(builder, base, I64(number), I64(QUERIES), i)
        is_allowed = builder.icmp_signed(sign, value, builder.load(spot, typ=BITS, align=4))
        is_visible = is_allowed if is_visible is None else builder.and_(is_visible, is_allowed)
    minus_infinity = ir.Constant(VECTOR, [-INFINITY] * LANES)
    return builder.select(is_visible, score, minus_infinity)


@part("i64(i64, i64)")
def earliest(position, window):
    """Return the first position visible from `position`: within the window, or for -n in the same chunk of n."""
    if window < 0:
        return max(position // -window * -window, MIN_POSITION)
    return max(position - window + 1, MIN_POSITION) if window else MIN_POSITION


@kernel("span_type(i64, ints2, ints2, i64, i64, i64, i64)")
def write_query_ranges(ranges, q_pos, q_seq, b, first_query, num_queries, window):
    """Write position, sequence, first visible position of num_queries queries, from first_query of row b, to `ranges`.

    ranges  (3, QUERIES)  i32 at an address; lanes beyond the queries see no key

    Returns the block's span: least and largest position, least and largest sequence, and the window.
    """
    min_pos, max_pos, min_seq, max_seq = BEYOND, MIN_POSITION, BEYOND, MIN_POSITION
    for i in range(QUERIES):
        position, sequence = MIN_POSITION, 0
        if i < num_queries:
            position = i64(q_pos[b, first_query + i]) if q_pos.size else first_query + i
            sequence = i64(q_seq[b, first_query + i]) if q_seq.size else 0
            min_pos, max_pos = min(min_pos, position), max(max_pos, position)
            min_seq, max_seq = min(min_seq, sequence), max(max_seq, sequence)
        poke_int(ranges, i, position)
        poke_int(ranges, QUERIES + i, sequence)
        poke_int(ranges, 2 * QUERIES + i, earliest(position, window))
    return min_pos, max_pos, min_seq, max_seq, window


@kernel("UniTuple(i64, 2)(i64, ints1, i64, i64, i64)")
def write_cell_ranges(ranges, q_pos, first_query, num_queries, window):
    """Write `ranges` as write_query_ranges does, for one sequence of a KV cache; returns least and largest position."""
    min_pos, max_pos = BEYOND, MIN_POSITION
    for i in range(QUERIES):
        position = MIN_POSITION
        if i < num_queries:
            position = i64(q_pos[first_query + i])
            min_pos, max_pos = min(min_pos, position), max(max_pos, position)
        poke_int(ranges, i, position)
        poke_int(ranges, QUERIES + i, 0)
        poke_int(ranges, 2 * QUERIES + i, earliest(position, window))
    return min_pos, max_pos


@kernel("i64, i64, i64, ints1, ints2, i64, i64, i64")
def hide_after(scores, lanes, ranges, k_pos, order, row, first_cell, count):
    """Set scores (count, lanes), at an address, to -inf where `ranges` hides cells order[row, first_cell …]."""
    for j in range(count):
        position = i64(k_pos[order[row, first_cell + j]])
        for i in range(0, lanes, LANES):
            offset = j * lanes + i
            store(scores, offset, visible_scores(load(scores, offset), ranges, i, position, 0))


@kernel("i64(span_type, ints2, ints2, i64, i64, i64)")
def sight(query_span, k_pos, k_seq, b, first_key, count):
    """Return whether queries of a span see `count` keys from first_key of row b: NONE_VISIBLE, SOME_VISIBLE or ALL."""
    min_pos, max_pos, min_seq, max_seq, window = query_span
    low, high, min_key_seq, stop = first_key, first_key + count - 1, 0, 0
    if k_pos.size:
        low, high = BEYOND, MIN_POSITION
        for j in range(first_key, first_key + count):
            low, high = min(low, i64(k_pos[b, j])), max(high, i64(k_pos[b, j]))
    if k_seq.size:
        min_key_seq, stop = BEYOND, MIN_POSITION
        for j in range(first_key, first_key + count):
            min_key_seq, stop = min(min_key_seq, i64(k_seq[b, j])), max(stop, i64(k_seq[b, j]))
    if low > max_pos or min_key_seq > max_seq or stop < min_seq or high < earliest(min_pos, window):
        return NONE_VISIBLE
    is_all_visible = high <= min_pos and low >= earliest(max_pos, window)
    return ALL if is_all_visible and min_key_seq == stop == min_seq == max_seq else SOME_VISIBLE


@kernel("i64, i64, i64, ints2, ints2, i64, i64, i64")
def mask_scores(scores, lanes, ranges, k_pos, k_seq, b, first_key, count):
    """Set scores (count, lanes), at an address, to -inf where `ranges` hides keys first_key … of row b."""
    for j in range(count):
        position = i64(k_pos[b, first_key + j]) if k_pos.size else first_key + j
        sequence = i64(k_seq[b, first_key + j]) if k_seq.size else 0
        for i in range(0, lanes, LANES):
            at = j * lanes + i
            store(scores, at, visible_scores(load(scores, at), ranges, i, position, sequence))
