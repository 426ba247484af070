"""The attention mask: which keys the queries of a block see, by position and sequence, for blocks and single keys.

A query sees keys of its own sequence up to its own position, within the window (0: no window; -n: the same n).
Positions and sequences are int32 (batch, index); of size 0, positions are the indices and sequences are all equal.
"""

from llvmlite import ir
from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import kernel, part
from packtrain.kernels.simd import BITS, I32, I64, INFINITY, LANES, VECTOR, f32x16, ids1
from packtrain.kernels.tile import POINTER, at

QUERIES = 64  # queries in a block, at most
PLACES = 3 * QUERIES
EARLIEST, BEYOND = -(1 << 31), 1 << 31
NO, SOME, ALL = 0, 1, 2  # how much of a block of keys the queries of a block see

i64 = types.int64
ids2 = types.Array(types.int32, 2, "C", readonly=True)
span = types.UniTuple(i64, 5)


@simd.instruction(types.void, types.int64, types.int64, types.int64)
def poke_int(builder, y, i, value):
    """Write int32 number i of the address y."""
    pointer = builder.gep(builder.inttoptr(y, POINTER), [i], source_etype=I32)
    builder.store(builder.trunc(value, I32), pointer)


@simd.instruction(f32x16, f32x16, types.int64, types.int64, types.int64, types.int64)
def shown(builder, score, places, i, *key):
    """Scores of queries i .. i + 15, -inf where masked, of a key's position and sequence."""
    base = builder.inttoptr(places, POINTER)
    position, sequence = (simd.spread(builder, builder.trunc(k, I32), BITS) for k in key)
    is_visible = None
    for number, (sign, value) in enumerate((("<=", position), ("==", sequence), (">=", position))):
        spot = at(builder, base, I64(number), I64(QUERIES), i)
        holds = builder.icmp_signed(sign, value, builder.load(spot, typ=BITS, align=4))
        is_visible = holds if is_visible is None else builder.and_(is_visible, holds)
    hidden = ir.Constant(VECTOR, [-INFINITY] * LANES)
    return builder.select(is_visible, score, hidden)


@part(i64(i64, i64))
def earliest(position, window):
    """The first position visible from `position`: within a window, or with one of -n in the same n."""
    if window < 0:
        return max(position // -window * -window, EARLIEST)
    return max(position - window + 1, EARLIEST) if window else EARLIEST


@kernel(span(i64, ids2, ids2, i64, i64, i64, i64))
def place_queries(places, q_pos, q_seq, b, first, rows, window):
    """Write positions, sequences and earliest positions of a block of queries; returns their span.

    places  (3, QUERIES)  i32; lanes beyond the rows see no key

    The span: the least and largest position, the least and largest sequence, and the window.
    """
    low_pos, high_pos, low_seq, high_seq = BEYOND, EARLIEST, BEYOND, EARLIEST
    for i in range(QUERIES):
        position, sequence = EARLIEST, 0
        if i < rows:
            position = i64(q_pos[b, first + i]) if q_pos.size else first + i
            sequence = i64(q_seq[b, first + i]) if q_seq.size else 0
            low_pos, high_pos = min(low_pos, position), max(high_pos, position)
            low_seq, high_seq = min(low_seq, sequence), max(high_seq, sequence)
        poke_int(places, i, position)
        poke_int(places, QUERIES + i, sequence)
        poke_int(places, 2 * QUERIES + i, earliest(position, window))
    return low_pos, high_pos, low_seq, high_seq, window


@kernel(types.UniTuple(i64, 2)(i64, ids1, i64, i64, i64))
def put_places(places, q_pos, first, rows, window):
    """place_queries for a sequence of a cache; returns the least and largest position."""
    low_pos, high_pos = BEYOND, EARLIEST
    for i in range(QUERIES):
        position = EARLIEST
        if i < rows:
            position = i64(q_pos[first + i])
            low_pos, high_pos = min(low_pos, position), max(high_pos, position)
        poke_int(places, i, position)
        poke_int(places, QUERIES + i, 0)
        poke_int(places, 2 * QUERIES + i, earliest(position, window))
    return low_pos, high_pos


@kernel(types.void(i64, i64, i64, ids1, ids2, i64, i64, i64))
def hide_after(scores, lanes, places, k_pos, order, row, first, count):
    """Set scores (count, lanes) of cells order[row, first …] to -inf where masked."""
    for j in range(count):
        position = i64(k_pos[order[row, first + j]])
        for i in range(0, lanes, LANES):
            at = j * lanes + i
            simd.store(scores, at, shown(simd.load(scores, at), places, i, position, 0))


@kernel(i64(span, ids2, ids2, i64, i64, i64))
def sight(span, k_pos, k_seq, b, first, count):
    """How much of a block of keys the queries of that span can see."""
    low_pos, high_pos, low_seq, high_seq, window = span
    low, high, start, stop = first, first + count - 1, 0, 0
    if k_pos.size:
        low, high = BEYOND, EARLIEST
        for j in range(first, first + count):
            low, high = min(low, i64(k_pos[b, j])), max(high, i64(k_pos[b, j]))
    if k_seq.size:
        start, stop = BEYOND, EARLIEST
        for j in range(first, first + count):
            start, stop = min(start, i64(k_seq[b, j])), max(stop, i64(k_seq[b, j]))
    if low > high_pos or start > high_seq or stop < low_seq or high < earliest(low_pos, window):
        return NO
    is_all_visible = high <= low_pos and low >= earliest(high_pos, window)
    return ALL if is_all_visible and start == stop == low_seq == high_seq else SOME


@kernel(types.void(i64, i64, i64, ids2, ids2, i64, i64, i64))
def hide(scores, lanes, places, k_pos, k_seq, b, first, count):
    """Set scores (count, lanes) to -inf where masked."""
    for j in range(count):
        position = i64(k_pos[b, first + j]) if k_pos.size else first + j
        sequence = i64(k_seq[b, first + j]) if k_seq.size else 0
        for i in range(0, lanes, LANES):
            at = j * lanes + i
            simd.store(scores, at, shown(simd.load(scores, at), places, i, position, sequence))
