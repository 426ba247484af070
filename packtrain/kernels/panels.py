"""How packed operands of products are laid out: panels of columns and groups of rows, as register tiles read them.

With `half`, values are rounded to bf16, and two steps of k are one 32-bit place: the even one in its lower half.
"""

from llvmlite import ir
from numba import types

from packtrain.kernels import runtime, simd
from packtrain.kernels.call import part
from packtrain.kernels.simd import I32, I64, LANES, VECTOR

AVX512 = runtime.has("avx512f")
HALF = AVX512 and runtime.has("avx512bf16")  # whether bf16 can be multiplied
NARROW = not AVX512  # vectors are two registers or more
AMX = HALF and runtime.has(runtime.AMX)  # by tiles, see amx.py
ROWS, WIDE = (8, 3) if AVX512 else (6, 1)  # of a register tile, in rows and vectors
PANEL = WIDE * LANES
UNROLL = 4  # steps of a tile's loop
GROUP = 8  # places for the rows of a tile in packed a
DEEP = 512 if AVX512 else 384  # most places of k in a block of b
SHIFT = LANES  # f32 between groups of packed a, so that they do not fall into the same places of a cache
FLAT = DEEP + SHIFT  # f32 between whole rows of packed a
ALONG, BELOW = 192, 4  # prefetched ahead of what is packed: bytes of a row, and rows
IN_GROUPS, PAIRED, IN_ROWS = 0, 1, 2  # layouts of packed a; PAIRED is IN_GROUPS in bf16
i64 = types.int64
BYTE = ir.IntType(8).as_pointer()


def vector_at(builder, base):
    return builder.inttoptr(base, VECTOR.as_pointer())


def beyond(builder, base, count):
    """The address `count` f32 behind base."""
    return builder.add(base, builder.mul(count, I64(4)))


def emit_prefetch(builder, place, write=0, level=3):
    simd.call(
        builder, "llvm.prefetch.p0", ir.VoidType(),
        builder.inttoptr(place, BYTE), I32(write), I32(level), I32(1),
    )  # fmt: skip


@simd.instruction(types.void, types.int64)
def fetch(builder, place):
    """Prefetch a line of the cache into L2."""
    emit_prefetch(builder, place, level=2)


class Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, Bfloat)

    def __hash__(self):
        return hash(Bfloat)


HALVES = ir.VectorType(Bfloat(), 2 * LANES)
WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)


def emit_pair(builder, low, high):
    """Two vectors rounded to bf16, side by side in each lane."""
    if not HALF:
        return low
    both = simd.call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", HALVES, high, low)
    words, order = builder.bitcast(both, WORDS), [i // 2 + i % 2 * LANES for i in range(2 * LANES)]
    mixed = builder.shuffle_vector(
        words, words, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), order)
    )
    return builder.bitcast(mixed, VECTOR)


pair = simd.lanewise(emit_pair, 2)


def emit_row(builder, source, ld, number, last, left):
    """16 values of a row, or of row `last` if that comes before it; the first `left` lanes. Prefetches what follows."""
    ahead = beyond(builder, source, builder.mul(I64(number), ld))
    emit_prefetch(builder, builder.add(ahead, I64(ALONG)))
    row = builder.select(builder.icmp_signed("<", I64(number), last), I64(number), last)
    place = vector_at(builder, beyond(builder, source, builder.mul(row, ld)))
    mask = simd.first_lanes(builder, left)
    return simd.read(builder, place, mask)


def emit_turned(builder, rows, rounds):
    """The values of `rows` with columns outermost, as if they were one long vector."""
    low, high = (
        ir.Constant(simd.BITS, [start + i // 2 + i % 2 * LANES for i in range(LANES)])
        for start in (0, LANES // 2)
    )
    half = len(rows) // 2
    for _ in range(rounds):
        pairs = list(zip(rows[:half], rows[half:], strict=True))
        rows = [builder.shuffle_vector(a, b, part) for a, b in pairs for part in (low, high)]
    return rows


@simd.instruction(types.void, i64, i64, i64, i64, i64, i64)
def turn16(builder, source, ld, last, left, target, ld_target):
    """16 x 16 of `source` transposed; its rows stop at `last`, its columns at `left`."""
    rows = [emit_row(builder, source, ld, r, last, left) for r in range(LANES)]
    for r, value in enumerate(emit_turned(builder, rows, 4)):
        spot = beyond(builder, target, builder.mul(I64(r), ld_target))
        builder.store(value, vector_at(builder, spot), align=64)


@simd.instruction(types.void, i64, i64, i64, i64, i64, i64)
def turn16_pairs(builder, source, ld, last, left, target, ld_target):
    """The same in bf16: 16 x 8 pairs."""
    rows = [emit_row(builder, source, ld, r, last, left) for r in range(LANES)]
    transposed = emit_turned(builder, rows, 4)
    for r in range(LANES // 2):
        spot = beyond(builder, target, builder.mul(I64(r), ld_target))
        value = emit_pair(builder, transposed[2 * r], transposed[2 * r + 1])
        builder.store(value, vector_at(builder, spot), align=64)


@simd.instruction(types.void, i64, i64, i64, i64, i64)
def turn_group(builder, source, ld, last, left, target):
    """8 x 16 of `source` transposed to 16 x 8 in a row."""
    rows = [emit_row(builder, source, ld, r, last, left) for r in range(GROUP)]
    for r, value in enumerate(emit_turned(builder, rows, 3)):
        builder.store(value, vector_at(builder, builder.add(target, I64(64 * r))), align=64)


@simd.instruction(types.void, i64, i64, i64, i64, i64)
def turn_group_pairs(builder, source, ld, last, left, target):
    """The same in bf16: 8 x 8 pairs in a row."""
    rows = [emit_row(builder, source, ld, r, last, left) for r in range(GROUP)]
    transposed = emit_turned(builder, rows, 3)
    for r in range(GROUP // 2):
        low, high = (halves_of(builder, transposed[2 * r : 2 * r + 2], n) for n in (0, 1))
        spot = builder.add(target, I64(64 * r))
        builder.store(emit_pair(builder, low, high), vector_at(builder, spot), align=64)


def halves_of(builder, rows, number):
    """The lower (0) or upper (1) halves of two vectors, side by side."""
    lanes = [LANES * (i // GROUP) + GROUP * number + i % GROUP for i in range(LANES)]
    return builder.shuffle_vector(*rows, ir.Constant(simd.BITS, lanes))


@simd.instruction(types.void, i64, i64, i64)
def move_panel(builder, source, ld, target):
    """PANEL values of a row of `source`. Prefetches a row that follows."""
    below = beyond(builder, source, builder.mul(ld, I64(BELOW)))
    for w in range(WIDE):
        by = I64(64 * w)
        emit_prefetch(builder, builder.add(below, by))
        values = builder.load(vector_at(builder, builder.add(source, by)), align=4)
        builder.store(values, vector_at(builder, builder.add(target, by)), align=64)


@part(i64(i64, i64))
def places(depth, half):
    """Places of packed values for a depth, whole turns of the loop over them; what is added are zeros."""
    if AMX and half:
        return -(-depth // (2 * LANES)) * LANES * half
    count = (max(depth, 1) + half) // (1 + half)
    return -(-count // UNROLL) * UNROLL


@part(i64(i64))
def apart(deep):
    """The distance of groups in packed a: never one that puts all of them into the same places of a cache."""
    return deep * GROUP + SHIFT
