"""Multiply many rows of integers by panels of codes, see `dot_tile`: columns side by side, scaled group by group.

A line has the codes of a chunk of a row of weights, then its scales. Sixteen lines are transposed: each vector has four
codes, or one scale, of all of them; those of a panel's columns stand beside one another. Four rows and 48 columns reach
235 to 296 GFLOP/s per thread, f32 97 to 104, `vdpbf16ps` 175 to 194; the floor with scales is 315 (Q6_K) to 378 (Q4_0).
"""

from functools import partial
from itertools import product
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from packtrain.kernels.matmul import dot_tile
from packtrain.kernels.matmul.dot_tile import (
    CODES_FORM, LANES_NBYTES, MAX_TYPES, SCALES_FORM, line, width_of,
)  # fmt: skip
from packtrain.kernels.matmul.gemm import emit_write
from packtrain.kernels.runtime.jit import emit_part
from packtrain.kernels.runtime.kernel_types import f32, i64, void
from packtrain.kernels.simd.simd_f32 import (
    BITS, F32, I32, I64, LANES, VECTOR, call, emit_switch, intrinsic_of, spread,
)  # fmt: skip
from packtrain.kernels.simd.simd_u8 import (
    BY_SIGN, CODES, VNNI, dot_fours, dot_fours_signed, put, read,
)  # fmt: skip

HIGH, WIDE = (4, 3) if VNNI else (4, 1)  # rows and vectors of a tile: as many as registers hold
VECTOR_NBYTES = 64


class TileLayout(NamedTuple):
    """A type's chunk as tiles see it: codes, codes of each group among 64, whether it has offsets or signed codes."""

    width: int
    codes_per_group: int
    offsets: bool
    signed: bool


def tile_layout(dtype):
    codes = dtype.code["codes"]
    return TileLayout(
        width_of(dtype), dot_tile.codes_per_group(dtype), codes.code_offset == 0, codes.is_signed and not VNNI,
    )  # fmt: skip


class PanelTile:
    """Emits the LLVM function of a type's TileLayout: HIGH rows times `wide` vectors of columns; see emit_code."""

    def __init__(self, module, layout, wide):
        self.layout, self.wide = layout, wide
        self.lanes, self.vectors = layout.codes_per_group // 4, layout.width // CODES.count
        self.groups = LANES // self.lanes
        self.use_signed_dot = BY_SIGN and layout.signed
        self.tile_cells = list(product(range(HIGH), range(wide)))
        function_name = module.get_unique_name("panel_tile")
        function_type = ir.FunctionType(ir.VoidType(), [*[I64] * 5, F32, *[I64] * 3])
        self.function = ir.Function(module, function_type, function_name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        self.emit_code(*self.function.args)

    def emit_code(self, x, row_stride, panel_ptr, count, y, beta, down, rows, left):
        """Emit y = x @ panel + beta * y for the first `rows` of HIGH rows and the first `left` columns.

        x, panel_ptr, y   addresses of rows by round_row, of a panel by pack_panel, and of f32
        row_stride, down  bytes between rows of x, and of y
        count             number of chunks
        """
        b, layout = self.builder, self.layout
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        self.sums = {cell: cgutils.alloca_once_value(b, zero) for cell in self.tile_cells}
        last = b.sub(rows, I64(1))
        at = [b.select(b.icmp_signed("<", I64(r), last), I64(r), last) for r in range(HIGH)]
        at = [b.add(x, b.mul(row_stride, r)) for r in at]
        vec_size = VECTOR_NBYTES * self.wide
        with cgutils.for_range(b, count, intp=I64) as chunk:
            chunk_offset = b.mul(chunk.index, I64(line(layout.width, 1)))
            line_ptrs = [b.add(r, chunk_offset) for r in at]
            codes = b.add(panel_ptr, b.mul(chunk.index, I64(vec_size * LANES * (self.vectors + 1))))
            scales = b.add(codes, I64(vec_size * LANES * self.vectors))
            with cgutils.for_range(b, I64(self.groups), intp=I64) as group:
                by_four, by_vector = (b.mul(group.index, I64(n)) for n in (4, vec_size))
                group_offset = b.mul(by_four, I64(self.lanes))
                group_rows = [b.add(r, group_offset) for r in line_ptrs]
                self.add_group(
                    group_rows,
                    b.add(codes, b.mul(by_vector, I64(self.lanes))),
                    b.add(scales, by_vector),
                )
                if layout.offsets:
                    self.offsets([b.add(r, by_four) for r in line_ptrs], b.add(scales, by_vector))
        for r in range(HIGH):
            with b.if_then(b.icmp_signed("<", I64(r), rows), likely=True):
                for v in range(self.wide):
                    to = b.add(y, b.add(b.mul(down, I64(r)), I64(VECTOR_NBYTES * v)))
                    emit_write(b, b.load(self.sums[r, v]), beta, to, b.sub(left, I64(LANES * v)))
        b.ret_void()

    def add_group(self, row_ptrs, codes_ptr, scales_ptr):
        """Emit the addition to the sums of one group's products: of each row of x, at row_ptrs, with all columns."""
        b, width = self.builder, self.layout.width
        group_sums = {}
        for r, row_ptr in enumerate(row_ptrs):
            initial_sums = ir.Constant(BITS, [0] * LANES)
            if not self.layout.offsets and not self.use_signed_dot:
                initial_sums = self.broadcast_value(I32, row_ptr, width + 2 * LANES_NBYTES)
            group_sums |= {(r, v): initial_sums for v in range(self.wide)}
        for i, lane in product(range(self.vectors), range(self.lanes)):
            columns = [self.vector(CODES, codes_ptr, LANES * i + lane, v) for v in range(self.wide)]
            for r, row_ptr in enumerate(row_ptrs):
                integers = b.bitcast(
                    self.broadcast_value(I32, row_ptr, CODES.count * i + 4 * lane), CODES
                )
                for v, column in enumerate(columns):
                    dot_args = b, column, integers, group_sums[r, v]
                    if self.use_signed_dot:
                        group_sums[r, v] = dot_fours_signed(*dot_args)
                    else:
                        group_sums[r, v] = dot_fours(*dot_args, self.layout.signed)
        scale_vectors = [self.vector(VECTOR, scales_ptr, 0, v) for v in range(self.wide)]
        steps = [self.broadcast_value(F32, row_ptr, width) for row_ptr in row_ptrs]
        for (r, v), sums in group_sums.items():
            self.add_product((r, v), b.sitofp(sums, VECTOR), b.fmul(scale_vectors[v], steps[r]))

    def offsets(self, row_ptrs, scales_ptr):
        """Emit the addition to the sums of a group's offsets times its sums of integers, read at row_ptrs."""
        offset_vectors = [self.vector(VECTOR, scales_ptr, self.groups, v) for v in range(self.wide)]
        for r, at in enumerate(row_ptrs):
            rest = self.broadcast_value(F32, at, self.layout.width + LANES_NBYTES + 4 * self.groups)
            for v, offset_vector in enumerate(offset_vectors):
                self.add_product((r, v), offset_vector, rest)

    def add_product(self, tile_cell, a, c):
        b, sum_slot = self.builder, self.sums[tile_cell]
        b.store(call(b, "llvm.fma.v16f32", VECTOR, a, c, b.load(sum_slot)), sum_slot)

    def broadcast_value(self, llvm_type, at, nbytes):
        """Emit a load of the value `nbytes` behind address `at` into all lanes of a vector."""
        return spread(
            self.builder, read(self.builder, llvm_type, at, nbytes), ir.VectorType(llvm_type, LANES)
        )

    def vector(self, llvm_type, at, number, column):
        return read(self.builder, llvm_type, at, VECTOR_NBYTES * (self.wide * number + column))


def panel_tiles(codes):
    """Return an intrinsic (wide, qtype, *arguments of PanelTile.emit_code) for the types that are keys of `codes`."""

    def codegen(context, builder, sig, args):
        wide, qtype, *tile_args = args
        tiles = {}

        def emit_case(form):
            if form not in tiles:
                tiles[form] = PanelTile(builder.module, *form)
            builder.call(tiles[form].function, tile_args)

        cases = {
            dtype.number + MAX_TYPES * columns: partial(emit_case, (tile_layout(dtype), columns))
            for dtype, columns in product(codes, range(1, WIDE + 1))
        }
        emit_switch(builder, builder.add(qtype, builder.mul(wide, I64(MAX_TYPES))), cases)
        return context.get_dummy_value()

    signature = void(*[i64] * 7, f32, *[i64] * 3)
    return intrinsic_of(11, lambda typingctx, *_: (signature, codegen))


def weight_lines(codes, scale_functions):
    """Return an intrinsic (qtype, y, w) that unpacks a chunk of weights at address w to a line at address y.

    A line has the chunk's codes (128 or 256 bytes), then 16 f32: scales and offsets. The arguments: see dot_tiles.
    """

    def codegen(context, builder, sig, args):
        qtype, y, w = args

        def emit_case(dtype):
            for at in range(0, width_of(dtype), CODES.count):
                code_args = w, I64(at // CODES.count)
                put(
                    builder, emit_part(context, builder, codes[dtype], CODES_FORM, code_args), y, at
                )
            scale_values = emit_part(context, builder, scale_functions[dtype], SCALES_FORM, [w])
            put(builder, scale_values, y, width_of(dtype))

        emit_switch(builder, qtype, {dtype.number: partial(emit_case, dtype) for dtype in codes})
        return context.get_dummy_value()

    return intrinsic_of(3, lambda typingctx, *_: (void(i64, i64, i64), codegen))
