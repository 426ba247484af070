"""Matrix products in bf16 by AMX: tiles of 16 x 16 f32 sums, to which one instruction adds 32 steps of k.

Both operands are packed alike, as lines of 16 rows of a or 16 columns of b: a tile of bf16 for every 32 steps of k.
With bf16 = 2 (bf16x3) a second tile behind each has what rounding lost, rounded too. TDPBF16PS takes denormals for 0,
so that the second part of a factor below 2^-118 counts as 0, and the factor is as exact as bf16.
"""

import itertools

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from packtrain.kernels.matmul import panels
from packtrain.kernels.matmul.panels import (
    AMX, BF16_VECTOR, beyond, emit_pair, emit_prefetch, vector_at,
)  # fmt: skip
from packtrain.kernels.runtime.jit import kernel
from packtrain.kernels.runtime.kernel_types import i64, void
from packtrain.kernels.simd.simd_f32 import (
    BITS, I64, LANES, VECTOR, address, call, first_lanes, instruction, load_part, read_masked, scratch, store_part,
)  # fmt: skip

STEPS = 2 * LANES  # steps of k in a tile
TILE = LANES * LANES  # f32 in a tile
EDGE_SIZE = 4 * TILE
I8 = ir.IntType(8)


def tile_call(builder, name, *args):
    """Emit a call of LLVM's intrinsic `name` for AMX; an int among `args` is the number of a tile register."""
    if not AMX:
        return
    call_args = [I8(arg) if isinstance(arg, int) else arg for arg in args]
    call(builder, f"llvm.x86.{name}", ir.VoidType(), *call_args)


def load_tile(builder, tile_index, base_ptr, row_stride=None):
    tile_pointer = builder.inttoptr(base_ptr, I8.as_pointer())
    tile_call(builder, "tileloadd64", tile_index, tile_pointer, row_stride or I64(4 * LANES))


@instruction(void)
def configure_tiles(builder):
    """Configure eight tile registers of 16 rows of 64 bytes, in 50 ns; `by_tiles` does so for each block."""
    tile_config = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[LANES] * 8, *[0] * 8]
    config_type = ir.ArrayType(I8, len(tile_config))
    config_pointer = cgutils.alloca_once_value(builder, ir.Constant(config_type, tile_config))
    tile_call(builder, "ldtilecfg", builder.bitcast(config_pointer, I8.as_pointer()))


@instruction(void)
def release_tiles(builder):
    """Release the tile registers, so that switching threads saves none."""
    tile_call(builder, "tilerelease")


# ---- packing ---------------------------------------------------------------------------------------------------
# Sources are not prefetched: the processor sees rows coming, and prefetches took a third to half of the packing time.


def emit_load(builder, vector_ptr, num_floats):
    """Emit a load of 16 f32 at vector_ptr, or with `num_floats` of the first `num_floats` of them and zeros."""
    mask = None if num_floats is None else first_lanes(builder, num_floats)
    return read_masked(builder, vector_at(builder, vector_ptr), mask)


def emit_source_pair(builder, steps_adjacent, source, ld, pair_index, line_limits):
    """Emit the load of two vectors for one row of pairs: 32 steps of line `pair_index`, or two steps of 16 lines.

    steps_adjacent  whether steps lie side by side at address `source`, not lines; rows there are `ld` f32 apart
    line_limits     numbers of lines and steps there are; None: a whole tile
    """
    lines, steps_left = line_limits or (None, None)
    if steps_adjacent:
        line = I64(pair_index)
        if line_limits:
            last_line = builder.sub(lines, I64(1))
            line = builder.select(builder.icmp_signed("<", line, last_line), line, last_line)
        line_ptr = beyond(builder, source, builder.mul(line, ld))
        high_left = builder.sub(steps_left, I64(LANES)) if line_limits else None
        high_vector = emit_load(builder, builder.add(line_ptr, I64(4 * LANES)), high_left)
        return emit_load(builder, line_ptr, steps_left), high_vector
    values = []
    for step_index in (2 * pair_index, 2 * pair_index + 1):
        line_ptr = beyond(builder, source, builder.mul(I64(step_index), ld))
        if line_limits:
            is_inside = builder.icmp_signed("<", I64(step_index), steps_left)
            values.append(emit_load(builder, line_ptr, builder.select(is_inside, lines, I64(0))))
        else:
            values.append(emit_load(builder, line_ptr, None))
    return values


def emit_bf16_pair(builder, steps_adjacent, low, high):
    """Emit vectors `low` and `high` rounded to bf16 as a row of pairs: in turn if steps_adjacent, else interleaved."""
    if not steps_adjacent:
        return emit_pair(builder, low, high)
    bf16_pair = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", BF16_VECTOR, high, low)
    return builder.bitcast(bf16_pair, VECTOR)


def emit_lost(builder, steps_adjacent, rounded_pairs, low, high):
    """Emit what rounding to bf16 took from `low` and `high`, two vectors; rounded_pairs is emit_bf16_pair's result."""
    pair_bits = builder.bitcast(rounded_pairs, BITS)
    shift_16 = ir.Constant(BITS, [16] * LANES)
    if steps_adjacent:
        pair_words = builder.bitcast(rounded_pairs, ir.VectorType(ir.IntType(16), 2 * LANES))
        parts = (
            builder.shuffle_vector(
                pair_words, pair_words, ir.Constant(BITS, [first + i for i in range(LANES)])
            )
            for first in (0, LANES)
        )
        widened = [builder.shl(builder.zext(word_half, BITS), shift_16) for word_half in parts]
    else:
        upper_mask = ir.Constant(BITS, [0xFFFF0000] * LANES)
        widened = [builder.shl(pair_bits, shift_16), builder.and_(pair_bits, upper_mask)]
    return [
        builder.fsub(original, builder.bitcast(rounded_bits, VECTOR))
        for original, rounded_bits in zip((low, high), widened, strict=True)
    ]


def emit_pack(builder, steps_adjacent, turn, source, ld, target, num_tiles, line_limits):
    """Emit the packing of a tile of `source` to target; num_tiles = 2 adds what rounding lost. See emit_source_pair."""
    tile_rows = [[] for _ in range(num_tiles)]

    def store_row(tile_index, r, pair_row):
        row_ptr = builder.add(target, I64(64 * r + 4 * TILE * tile_index))
        builder.store(pair_row, vector_at(builder, row_ptr), align=64)

    for r in range(LANES):
        two = emit_source_pair(builder, steps_adjacent, source, ld, r, line_limits)
        for tile_index, row_list in enumerate(tile_rows):
            pair_row = emit_bf16_pair(builder, steps_adjacent, *two)
            two = emit_lost(builder, steps_adjacent, pair_row, *two) if num_tiles > 1 else two
            row_list.append(pair_row)
            if not turn:
                store_row(tile_index, r, pair_row)
    for tile_index, row_list in enumerate(tile_rows if turn else ()):
        for r, pair_row in enumerate(panels.emit_transposed(builder, row_list, 4)):
            store_row(tile_index, r, pair_row)


def pack_tile_intrinsic(steps_adjacent, turn):
    """Return an intrinsic (source, ld, lines, steps, target, bf16): packs 16 x 32 f32, zeros beyond lines and steps.

    steps_adjacent  steps lie side by side in `source`, not lines
    turn            pairs of the tile lie line by line if they did not in the source
    """

    def emit(builder, source, ld, lines, left, target, bf16):
        if not AMX:
            return
        is_full = builder.and_(
            builder.icmp_signed(">=", lines, I64(LANES)),
            builder.icmp_signed(">=", left, I64(STEPS)),
        )
        is_half = builder.icmp_signed("==", bf16, I64(1))
        for num_tiles, is_selected in ((1, is_half), (2, builder.not_(is_half))):
            for limits, is_matching in ((None, is_full), ((lines, left), builder.not_(is_full))):
                with builder.if_then(builder.and_(is_selected, is_matching), likely=limits is None):
                    emit_pack(builder, steps_adjacent, turn, source, ld, target, num_tiles, limits)

    return instruction(void, i64, i64, i64, i64, i64, i64)(emit)


pack_a_rows, pack_a_columns = pack_tile_intrinsic(True, False), pack_tile_intrinsic(False, True)
pack_b_rows, pack_b_columns = pack_tile_intrinsic(False, False), pack_tile_intrinsic(True, True)


@kernel("*[i64] * 8")
def pack_columns(block, size, b, tb, ldb, depth, n, bf16):
    """Pack b (depth, n), or b.T if tb = 1, from address b to block in lines of 16 columns, of `size` f32 each.

    Rows of b are ldb f32 apart. bf16 = 2 (for bf16x3) packs, behind each tile, a tile of what rounding lost.
    """
    if tb:
        for j in range(0, n, LANES):
            for k in range(0, depth, STEPS):
                target = address(block, j // LANES * size + k // STEPS * TILE * bf16)
                pack_b_columns(address(b, j * ldb + k), ldb, n - j, depth - k, target, bf16)
    else:
        for k in range(0, depth, STEPS):
            for j in range(0, n, LANES):
                target = address(block, j // LANES * size + k // STEPS * TILE * bf16)
                pack_b_rows(address(b, k * ldb + j), ldb, n - j, depth - k, target, bf16)


@kernel("*[i64] * 8")
def pack_rows(block, size, a, ta, lda, depth, m, bf16):
    """Pack a (m, depth), or a.T if ta = 1, from address a to block in lines of 16 rows; else as pack_columns."""
    if ta:
        for k in range(0, depth, STEPS):
            for i in range(0, m, LANES):
                target = address(block, i // LANES * size + k // STEPS * TILE * bf16)
                pack_a_columns(address(a, k * lda + i), lda, m - i, depth - k, target, bf16)
    else:
        for i in range(0, m, LANES):
            for k in range(0, depth, STEPS):
                target = address(block, i // LANES * size + k // STEPS * TILE * bf16)
                pack_a_rows(address(a, i * lda + k), lda, m - i, depth - k, target, bf16)


# ---- products --------------------------------------------------------------------------------------------------


def emit_step(builder, bf16, row_tiles, col_tiles, a_ptr, b_ptr, size):
    """Emit a step of 32 k: sums 0 … 3 += row_tiles x col_tiles products of tiles; bf16 = 2 adds a_lost b, a b_lost."""
    a, b = range(4, 4 + row_tiles), range(6, 6 + col_tiles)
    operands = {"a": (a, a_ptr), "b": (b, b_ptr)}

    def load_operand(operand, part_index):
        tile_numbers, base_ptr = operands[operand]
        for i, tile_number in enumerate(tile_numbers):
            line_ptr = builder.add(base_ptr, builder.mul(I64(4 * i), size))
            load_tile(builder, tile_number, builder.add(line_ptr, I64(4 * TILE * part_index)))

    def multiply():
        for i, j in itertools.product(range(row_tiles), range(col_tiles)):
            tile_call(builder, "tdpbf16ps", 2 * i + j, a[i], b[j])

    load_operand("a", bf16 - 1), load_operand("b", 0)
    multiply()
    if bf16 == 2:
        load_operand("a", 0)
        multiply()
        load_operand("b", 1)
        multiply()


def emit_sums(builder, bf16, row_tiles, col_tiles, a, b, size):
    """Emit the loop over k: sums += row_tiles packed lines at a times col_tiles lines at b, each `size` f32 long."""
    step = I64(4 * TILE * bf16)
    with cgutils.for_range_slice(builder, I64(0), builder.mul(size, I64(4)), step, inc=True) as (
        k_offset,
        _,
    ):
        a_ptr, b_ptr = builder.add(a, k_offset), builder.add(b, k_offset)
        emit_step(builder, bf16, row_tiles, col_tiles, a_ptr, b_ptr, size)


@intrinsic(prefer_literal=True)
def multiply_tiles(typingctx, row_tiles, col_tiles, bf16, a, b, size, c, ldc, add):
    """c (16 row_tiles, 16 col_tiles) = a @ b, plus c if `add`, at addresses; a, b: packed lines of `size` f32."""

    def codegen(context, builder, sig, args):
        _, _, bf16, a, b, line_stride, c, ldc, add = args
        row_tiles, col_tiles = (literal_type.literal_value for literal_type in sig.args[:2])
        row_stride = builder.mul(ldc, I64(4))
        tile_ptrs = {
            2 * i + j: builder.add(beyond(builder, c, builder.mul(I64(16 * i), ldc)), I64(64 * j))
            for i, j in itertools.product(range(row_tiles), range(col_tiles))
        }
        # lines of the cache to be written take longer to come than a short product
        for i, j in itertools.product(range(STEPS if row_tiles > 1 else LANES), range(col_tiles)):
            row_ptr = beyond(builder, c, builder.mul(I64(i), ldc))
            emit_prefetch(builder, builder.add(row_ptr, I64(64 * j)), write=1)
        with builder.if_else(builder.icmp_signed("==", add, I64(0))) as (zero_branch, load_branch):
            with zero_branch:
                for tile_number in tile_ptrs:
                    tile_call(builder, "tilezero", tile_number)
            with load_branch:
                for tile_number, tile_ptr in tile_ptrs.items():
                    load_tile(builder, tile_number, tile_ptr, row_stride)
        with builder.if_else(builder.icmp_signed("==", bf16, I64(1))) as (one, split_branch):
            for parts_branch, num_parts in ((one, 1), (split_branch, 2)):
                with parts_branch:
                    emit_sums(builder, num_parts, row_tiles, col_tiles, a, b, line_stride)
        for tile_number, tile_ptr in tile_ptrs.items():
            row_ptr = builder.inttoptr(tile_ptr, I8.as_pointer())
            tile_call(builder, "tilestored64", tile_number, row_ptr, row_stride)
        return context.get_dummy_value()

    return void(row_tiles, col_tiles, i64, i64, i64, i64, i64, i64, i64), codegen


@kernel("*[i64] * 9")
def multiply_tile_shape(row_tiles, col_tiles, bf16, a, b, size, c, ldc, add):
    """Call multiply_tiles with literal counts, for row_tiles and col_tiles of 1 or 2; other arguments are passed on."""
    if row_tiles == 2 and col_tiles == 2:
        multiply_tiles(2, 2, bf16, a, b, size, c, ldc, add)
    elif row_tiles == 2:
        multiply_tiles(2, 1, bf16, a, b, size, c, ldc, add)
    elif col_tiles == 2:
        multiply_tiles(1, 2, bf16, a, b, size, c, ldc, add)
    else:
        multiply_tiles(1, 1, bf16, a, b, size, c, ldc, add)


@kernel("i64, i64, i64, i64, i64, i64")
def copy_matrix(m, n, y, ldy, x, ldx):
    """y (m, n) = x at addresses; rows are ldy and ldx f32 apart."""
    for i in range(m):
        for j in range(0, n, LANES):
            store_part(y, i * ldy + j, load_part(x, i * ldx + j, n - j), n - j)


@kernel("i64, i64, i64, i64, i64, i64, i64, i64, i64")
def by_tiles(m, n, a, b, size, add, c, ldc, bf16):
    """c (m, n) = a @ b, plus c if `add`, at addresses: a by pack_rows, b by pack_columns, lines of `size` f32."""
    edge_ptr = scratch(EDGE_SIZE)
    configure_tiles()
    for i in range(0, m, STEPS):
        rows, a_ptr = min(m - i, STEPS), address(a, i // LANES * size)
        for j in range(0, n, STEPS):
            columns, b_ptr = min(n - j, STEPS), address(b, j // LANES * size)
            high, wide, c_ptr = -(-rows // LANES), -(-columns // LANES), address(c, i * ldc + j)
            if rows % LANES == 0 and columns % LANES == 0:
                multiply_tile_shape(high, wide, bf16, a_ptr, b_ptr, size, c_ptr, ldc, add)
                continue
            if add:
                copy_matrix(rows, columns, edge_ptr, STEPS, c_ptr, ldc)
            multiply_tile_shape(high, wide, bf16, a_ptr, b_ptr, size, edge_ptr, STEPS, add)
            copy_matrix(rows, columns, c_ptr, ldc, edge_ptr, STEPS)
    release_tiles()
