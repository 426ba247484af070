"""Lay out packed operands of products: panels of columns and groups of rows, as register tiles read them.

With bf16 > 0, values are rounded to bf16, and two steps of k are one 32-bit place: the even one in its lower half.
"""

from llvmlite import ir

from packtrain.kernels.runtime import environment
from packtrain.kernels.runtime.jit import part
from packtrain.kernels.runtime.kernel_types import i64, void
from packtrain.kernels.simd.simd_f32 import (
    BITS, I32, I64, LANES, VECTOR, call, first_lanes, instruction, lanewise, read_masked,
)  # fmt: skip

AVX512 = environment.has_cpu_feature("avx512f")
HALF = AVX512 and environment.has_cpu_feature("avx512bf16")  # whether the CPU multiplies bf16
HAS_NARROW_VECTORS = not AVX512  # vectors are two registers or more
AMX = HALF and environment.has_cpu_feature(environment.AMX)  # by tiles, see amx.py
ROWS, WIDE = (8, 3) if AVX512 else (6, 1)  # of a register tile, in rows and vectors
PANEL = WIDE * LANES
UNROLL = 4  # steps of a tile's loop
GROUP = 8  # places for the rows of a tile in packed a
DEEP = 512 if AVX512 else 384  # most places of k in a block of b
GROUP_SHIFT = LANES  # f32 between groups of packed a, so that they do not fall into the same places of a cache
FLAT_STRIDE = DEEP + GROUP_SHIFT  # f32 between whole rows of packed a
PREFETCH_NBYTES, BELOW = 192, 4  # prefetched ahead of what is packed: bytes of a row, and rows
IN_GROUPS, PAIRED, IN_ROWS = 0, 1, 2  # layouts of packed a; PAIRED is IN_GROUPS in bf16
BYTE_POINTER = ir.IntType(8).as_pointer()


def vector_at(builder, base_ptr):
    return builder.inttoptr(base_ptr, VECTOR.as_pointer())


def beyond(builder, base_ptr, num_floats):
    """Emit the address `num_floats` f32 behind `base_ptr`."""
    return builder.add(base_ptr, builder.mul(num_floats, I64(4)))


def emit_prefetch(builder, line_ptr, write=0, level=3):
    call(
        builder, "llvm.prefetch.p0", ir.VoidType(),
        builder.inttoptr(line_ptr, BYTE_POINTER), I32(write), I32(level), I32(1),
    )  # fmt: skip


@instruction(void, i64)
def prefetch_line(builder, line_ptr):
    """Prefetch a line of the cache into L2."""
    emit_prefetch(builder, line_ptr, level=2)


class Bf16Type(ir.Type):
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, Bf16Type)

    def __hash__(self):
        return hash(Bf16Type)


BF16_VECTOR = ir.VectorType(Bf16Type(), 2 * LANES)
WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)


def emit_pair(builder, low, high):
    """Emit two vectors rounded to bf16 and interleaved: lane i has low[i], then high[i]. Without bf16 it is `low`."""
    if not HALF:
        return low
    both = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", BF16_VECTOR, high, low)
    words, order = builder.bitcast(both, WORDS), [i // 2 + i % 2 * LANES for i in range(2 * LANES)]
    interleaved = builder.shuffle_vector(
        words, words, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), order)
    )
    return builder.bitcast(interleaved, VECTOR)


pair = lanewise(emit_pair, 2)


def emit_row(builder, source, ld, row_index, last, left):
    """Emit a load of row min(row_index, last), rows `ld` f32 apart: its first `left` lanes, else zeros."""
    next_row = beyond(builder, source, builder.mul(I64(row_index), ld))
    emit_prefetch(builder, builder.add(next_row, I64(PREFETCH_NBYTES)))
    row = builder.select(builder.icmp_signed("<", I64(row_index), last), I64(row_index), last)
    row_ptr = vector_at(builder, beyond(builder, source, builder.mul(row, ld)))
    mask = first_lanes(builder, left)
    return read_masked(builder, row_ptr, mask)


def emit_transposed(builder, rows, num_rounds):
    """Emit the transpose of `rows`, 2**num_rounds vectors, as one long vector: all of column 0, then column 1, …."""
    low_order, high = (
        ir.Constant(BITS, [first_lane + i // 2 + i % 2 * LANES for i in range(LANES)])
        for first_lane in (0, LANES // 2)
    )
    half_count = len(rows) // 2
    for _ in range(num_rounds):
        pairs = list(zip(rows[:half_count], rows[half_count:], strict=True))
        rows = [builder.shuffle_vector(a, b, part) for a, b in pairs for part in (low_order, high)]
    return rows


def transposing(num_rows, is_paired):
    """Return an intrinsic (source, ld, last, left, target, ld_target) that transposes num_rows x 16 of `source`.

    Its rows stop at `last`, its columns at `left`. Vectors at `target` are `ld_target` f32 apart: each has a column of
    16 rows, or two columns of 8; if `is_paired`, pairs of bf16 of two columns, or of four.
    """

    def emit(builder, source, ld, last, left, target, ld_target):
        rows = [emit_row(builder, source, ld, r, last, left) for r in range(num_rows)]
        vectors = emit_transposed(builder, rows, num_rows.bit_length() - 1)
        if is_paired:
            neighbours = list(zip(vectors[::2], vectors[1::2], strict=True))
            if num_rows == GROUP:
                neighbours = [[halves_of(builder, two, n) for n in (0, 1)] for two in neighbours]
            vectors = [emit_pair(builder, *two) for two in neighbours]
        for i, vector in enumerate(vectors):
            spot = beyond(builder, target, builder.mul(I64(i), ld_target))
            builder.store(vector, vector_at(builder, spot), align=64)

    return instruction(void, *[i64] * 6)(emit)


transpose16, transpose16_bf16 = transposing(LANES, False), transposing(LANES, True)
transpose_group, transpose_group_bf16 = transposing(GROUP, False), transposing(GROUP, True)


def halves_of(builder, vectors, half_index):
    """Emit the lower (half_index 0) or upper (1) halves of two vectors, side by side, as one vector."""
    lane_order = [LANES * (i // GROUP) + GROUP * half_index + i % GROUP for i in range(LANES)]
    return builder.shuffle_vector(*vectors, ir.Constant(BITS, lane_order))


@instruction(void, i64, i64, i64)
def move_panel(builder, source, ld, target):
    """Copy PANEL f32 at address source to target; prefetches the row that is BELOW rows of `ld` f32 further down."""
    prefetch_row = beyond(builder, source, builder.mul(ld, I64(BELOW)))
    for vector_index in range(WIDE):
        vector_offset = I64(64 * vector_index)
        emit_prefetch(builder, builder.add(prefetch_row, vector_offset))
        vector = builder.load(vector_at(builder, builder.add(source, vector_offset)), align=4)
        builder.store(vector, vector_at(builder, builder.add(target, vector_offset)), align=64)


@part("i64(i64, i64)")
def places(depth, bf16):
    """Return the f32 that `depth` values of a row or column take once packed, with zeros up to whole turns of loops."""
    if AMX and bf16:
        return -(-depth // (2 * LANES)) * LANES * bf16
    num_places = (max(depth, 1) + bf16) // (1 + bf16)
    return -(-num_places // UNROLL) * UNROLL


@part("i64(i64)")
def group_stride(packed_k):
    """Return the f32 from one group of packed a to the next, of packed_k places: not all in equal places of a cache."""
    return packed_k * GROUP + GROUP_SHIFT
