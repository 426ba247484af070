"""The attention mask: which keys the queries of a block see, by position and sequence, for blocks and single keys.

A query sees keys of its own sequence up to its own position, within the window (0: no window). Positions
and sequences are int32 (batch, index); of size 0, positions are the indices and sequences are all equal. A key may
belong to a set of sequences, a bit each of an int64, which is seen as two int32.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from packtrain.kernels.call import kernel, part
from packtrain.kernels.simd import (
    BITS,
    I32,
    I64,
    INFINITY,
    LANES,
    VECTOR,
    call,
    f32x16,
    first_lanes,
    load,
    spread,
    store,
)
from packtrain.kernels.tile import POINTER, at

QUERIES = 64  # queries in a block, at most
PLACES = 3 * QUERIES
EARLIEST, BEYOND = -(1 << 31), 1 << 31
WIDE, FLAGS = ir.VectorType(I64, LANES), ir.VectorType(ir.IntType(1), LANES)
NO, SOME, ALL = 0, 1, 2  # how much of a block of keys the queries of a block see

i64 = types.int64
ids2 = types.Array(types.int32, 2, "C", readonly=True)
span = types.UniTuple(i64, 5)


@intrinsic
def poke_int(typingctx, y, i, value):
    """Write int32 number i of the address y."""

    def codegen(context, builder, sig, args):
        y, i, value = args
        pointer = builder.gep(builder.inttoptr(y, POINTER), [i], source_etype=I32)
        builder.store(builder.trunc(value, I32), pointer)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def emit_same(builder, keys, queries, sets):
    """Whether keys have the sequence of queries, by lanes: keys are i64, sequences or sets of them."""
    places = builder.zext(queries, WIDE)
    inside = builder.trunc(builder.lshr(keys, places), FLAGS)
    same = builder.icmp_signed("==", builder.trunc(keys, BITS), queries)
    return builder.select(sets, inside, same)


@intrinsic
def shown(typingctx, score, places, i, key_position, key_sequence, sets):
    """Scores of queries i .. i + 15, -inf where masked."""

    def codegen(context, builder, sig, args):
        score, places, i, position, sequence, sets = args
        base = builder.inttoptr(places, POINTER)
        latest, sequences, earliest = (
            builder.load(at(builder, base, I64(n), I64(QUERIES), i), typ=BITS, align=4)
            for n in range(3)
        )
        position = spread(builder, builder.trunc(position, I32), BITS)
        near = builder.and_(
            builder.icmp_signed("<=", position, latest),
            builder.icmp_signed(">=", position, earliest),
        )
        same = emit_same(builder, spread(builder, sequence, WIDE), sequences, sets)
        hidden = ir.Constant(VECTOR, [-INFINITY] * LANES)
        return builder.select(builder.and_(near, same), score, hidden)

    kinds = (f32x16, *[types.int64] * 4, types.boolean)
    return f32x16(*kinds), codegen


@intrinsic
def cells_seen(typingctx, positions, sequences, sets, count, earliest, latest, sequence):
    """Which of `count` <= 64 cells a query sees, as bits.

    positions  address of their positions, i32
    sequences  of their sequences, i32, or of sets of them, i64
    """

    def codegen(context, builder, sig, args):
        positions, sequences, sets, count, *query = args
        query = [spread(builder, builder.trunc(value, I32), BITS) for value in query]
        found = I64(0)
        for first in range(0, 64, LANES):
            mask = first_lanes(builder, builder.sub(count, I64(first)))
            position = masked(builder, positions, first, BITS, mask)
            numbers = masked(builder, sequences, first, BITS, mask)
            keys = masked(
                builder, sequences, first, WIDE, builder.and_(mask, spread(builder, sets, FLAGS))
            )
            keys = builder.select(sets, keys, builder.sext(numbers, WIDE))
            seen = emit_same(builder, keys, query[2], sets)
            seen = builder.and_(seen, builder.icmp_signed(">=", position, query[0]))
            seen = builder.and_(seen, builder.icmp_signed("<=", position, query[1]))
            some = builder.bitcast(builder.and_(seen, mask), ir.IntType(LANES))
            found = builder.or_(found, builder.shl(builder.zext(some, I64), I64(first)))
        return found

    return i64(i64, i64, types.boolean, i64, i64, i64, i64), codegen


def masked(builder, address, first, kind, mask):
    """Elements first .. first + 15 where the mask is set, else 0."""
    pointer = builder.inttoptr(address, POINTER)
    pointer = builder.gep(pointer, [I64(first)], source_etype=kind.element)
    name = f"llvm.masked.load.v{LANES}{kind.element.intrinsic_name}.p0"
    size = I32(kind.element.width // 8)
    return call(builder, name, kind, pointer, size, mask, ir.Constant(kind, [0] * LANES))


@part(types.boolean(ids2, ids2))
def is_sets(k_pos, k_seq):
    """Whether k_seq has sets of sequences: i64, seen as pairs of i32."""
    return k_pos.size > 0 and k_seq.shape[1] > k_pos.shape[1]


@part(i64(ids2, ids2, i64, i64))
def sequence_of(k_pos, k_seq, b, j):
    """The sequence of a key, or the set of its sequences."""
    if is_sets(k_pos, k_seq):
        return i64(k_seq[b, 2 * j + 1]) << 32 | (i64(k_seq[b, 2 * j]) & 0xFFFFFFFF)
    return i64(k_seq[b, j])


@part(i64(i64, i64))
def earliest(position, window):
    """The first position visible from `position`."""
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


@kernel(i64(span, ids2, ids2, i64, i64, i64))
def sight(span, k_pos, k_seq, b, first, count):
    """How much of a block of keys the queries of that span can see."""
    low_pos, high_pos, low_seq, high_seq, window = span
    low, high, start, stop = first, first + count - 1, 0, 0
    if k_pos.size:
        low, high = BEYOND, EARLIEST
        for j in range(first, first + count):
            low, high = min(low, i64(k_pos[b, j])), max(high, i64(k_pos[b, j]))
    if low > high_pos or high < earliest(low_pos, window):
        return NO
    if is_sets(k_pos, k_seq):
        some, every = i64(0), i64(-1)
        for j in range(first, first + count):
            own = sequence_of(k_pos, k_seq, b, j)
            some, every = some | own, every & own
        if some & ((i64(2) << high_seq) - (i64(1) << low_seq)) == 0:
            return NO
        same = low_seq == high_seq and every >> low_seq & 1 == 1
    else:
        if k_seq.size:
            start, stop = BEYOND, EARLIEST
            for j in range(first, first + count):
                start, stop = min(start, i64(k_seq[b, j])), max(stop, i64(k_seq[b, j]))
        if start > high_seq or stop < low_seq:
            return NO
        same = start == stop == low_seq == high_seq
    near = high <= low_pos and low >= earliest(high_pos, window)
    return ALL if near and same else SOME


@kernel(types.void(i64, i64, i64, ids2, ids2, i64, i64, i64))
def hide(scores, lanes, places, k_pos, k_seq, b, first, count):
    """Set scores (count, lanes) to -inf where masked."""
    sets = is_sets(k_pos, k_seq)
    for j in range(count):
        position = i64(k_pos[b, first + j]) if k_pos.size else first + j
        sequence = sequence_of(k_pos, k_seq, b, first + j) if k_seq.size else 0
        for i in range(0, lanes, LANES):
            at = j * lanes + i
            score = shown(load(scores, at), places, i, position, sequence, sets)
            store(scores, at, score)
