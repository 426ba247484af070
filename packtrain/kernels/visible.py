"""Which keys the queries of a block see: by position, by sequence, by block and one by one.

A query sees keys of its own sequence up to its own position. Positions and sequences are int32
(batch, index); of size 0, positions are the indices and sequences are all equal.
"""

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from packtrain.kernels.simd import (
    BITS,
    I32,
    I64,
    INFINITY,
    LANES,
    VECTOR,
    f32x16,
    load,
    spread,
    store,
)
from packtrain.kernels.tile import POINTER, at

QUERIES = 64  # queries in a block, at most
PLACES = 2 * QUERIES
NO, SOME, ALL = 0, 1, 2  # what the queries of a block see of a block of keys

i64 = types.int64


@intrinsic
def poke_int(typingctx, y, i, value):
    """Write int32 number i of the address y."""

    def codegen(context, builder, sig, args):
        y, i, value = args
        pointer = builder.gep(builder.inttoptr(y, POINTER), [i], source_etype=I32)
        builder.store(builder.trunc(value, I32), pointer)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def shown(typingctx, score, places, i, key_position, key_sequence):
    """Scores of queries i .. i + 15, -inf where a query does not see the key."""

    def codegen(context, builder, sig, args):
        score, places, i, *key = args
        base = builder.inttoptr(places, POINTER)
        found = []
        for number, value in enumerate(key):
            spot = at(builder, base, I64(number), I64(QUERIES), i)
            lanes = builder.load(spot, typ=BITS, align=4)
            value = spread(builder, builder.trunc(value, I32), BITS)
            found.append(builder.icmp_signed("==" if number else "<=", value, lanes))
        hidden = ir.Constant(VECTOR, [-INFINITY] * LANES)
        return builder.select(builder.and_(*found), score, hidden)

    kinds = (f32x16, types.int64, types.int64, types.int64, types.int64)
    return f32x16(*kinds), codegen


@njit(cache=True)
def place_queries(places, q_pos, q_seq, b, first, rows):
    """Write positions and sequences of a block of queries; returns the least and largest of both.

    places  (2, QUERIES)  i32; no key is visible from behind the rows
    """
    low_pos, high_pos, low_seq, high_seq = 1 << 31, -(1 << 31), 1 << 31, -(1 << 31)
    for i in range(QUERIES):
        position, sequence = -(1 << 31), 0
        if i < rows:
            position = i64(q_pos[b, first + i]) if q_pos.size else first + i
            sequence = i64(q_seq[b, first + i]) if q_seq.size else 0
            low_pos, high_pos = min(low_pos, position), max(high_pos, position)
            low_seq, high_seq = min(low_seq, sequence), max(high_seq, sequence)
        poke_int(places, i, position)
        poke_int(places, QUERIES + i, sequence)
    return low_pos, high_pos, low_seq, high_seq


@njit(cache=True)
def sight(span, k_pos, k_seq, b, first, count):
    """What the queries with that span of positions and sequences can see of a block of keys."""
    low_pos, high_pos, low_seq, high_seq = span
    low, high, start, stop = first, first + count - 1, 0, 0
    if k_pos.size:
        low, high = 1 << 31, -(1 << 31)
        for j in range(first, first + count):
            low, high = min(low, i64(k_pos[b, j])), max(high, i64(k_pos[b, j]))
    if k_seq.size:
        start, stop = 1 << 31, -(1 << 31)
        for j in range(first, first + count):
            start, stop = min(start, i64(k_seq[b, j])), max(stop, i64(k_seq[b, j]))
    if low > high_pos or start > high_seq or stop < low_seq:
        return NO
    return ALL if high <= low_pos and start == stop == low_seq == high_seq else SOME


@njit(cache=True)
def hide(scores, lanes, places, k_pos, k_seq, b, first, count):
    """-inf in scores (count, lanes) where the query does not see the key."""
    for j in range(count):
        position = i64(k_pos[b, first + j]) if k_pos.size else first + j
        sequence = i64(k_seq[b, first + j]) if k_seq.size else 0
        for i in range(0, lanes, LANES):
            at = j * lanes + i
            store(scores, at, shown(load(scores, at), places, i, position, sequence))
