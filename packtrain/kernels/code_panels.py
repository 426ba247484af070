"""Products of many rows of integers with panels of codes, see `dot_tile`: columns side by side, scaled group by group.

A line has the codes of a chunk of a row of weights, then its scales. Sixteen lines are turned: each vector has four
codes, or one scale, of all of them; those of a panel's columns stand beside one another.
"""

from itertools import product
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from packtrain.kernels import dot_tile
from packtrain.kernels.dot_tile import CODES_FORM, MORE, SCALES_FORM, called, line, width_of
from packtrain.kernels.gemm import emit_write
from packtrain.kernels.octets import BY_SIGN, CODES, VNNI, by_fours, by_fours_signed, put, read
from packtrain.kernels.simd import BITS, F32, I32, I64, LANES, VECTOR, call, spread

i64, f32, void = types.int64, types.float32, types.void
HIGH, WIDE = (4, 3) if VNNI else (4, 1)  # rows and vectors of a tile: as many as registers hold
VECTOR_NBYTES = 64


class Form(NamedTuple):
    """What tiles know of a type: of a chunk the codes, and how many of 64 are of one group; see Code."""

    width: int
    share: int
    offsets: bool
    signed: bool


def form_of(dtype):
    codes = dtype.code["codes"]
    return Form(
        width_of(dtype), dot_tile.share_of(dtype), codes.less == 0, codes.signed and not VNNI
    )


class Tile:
    """The code of one form for `wide` vectors of columns."""

    def __init__(self, module, form, wide):
        self.form, self.wide = form, wide
        self.lanes, self.vectors = form.share // 4, form.width // CODES.count
        self.groups = LANES // self.lanes
        self.by_sign = BY_SIGN and form.signed
        self.cells = list(product(range(HIGH), range(wide)))
        name = module.get_unique_name("panel_tile")
        kind = ir.FunctionType(ir.VoidType(), [*[I64] * 5, F32, *[I64] * 3])
        self.function = ir.Function(module, kind, name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        self.emit(*self.function.args)

    def emit(self, x, row_stride, panel, count, y, keep, down, rows, left):
        """y = x @ panel + keep * y for the first of HIGH rows and the first columns.

        row_stride, down  bytes of rows of x and y
        count        chunks
        """
        b, form = self.builder, self.form
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        self.sums = {cell: cgutils.alloca_once_value(b, zero) for cell in self.cells}
        last = b.sub(rows, I64(1))
        at = [b.select(b.icmp_signed("<", I64(r), last), I64(r), last) for r in range(HIGH)]
        at = [b.add(x, b.mul(row_stride, r)) for r in at]
        vector = VECTOR_NBYTES * self.wide
        with cgutils.for_range(b, count, intp=I64) as chunk:
            chunk_offset = b.mul(chunk.index, I64(line(form.width, 1)))
            lines = [b.add(r, chunk_offset) for r in at]
            codes = b.add(panel, b.mul(chunk.index, I64(vector * LANES * (self.vectors + 1))))
            scales = b.add(codes, I64(vector * LANES * self.vectors))
            with cgutils.for_range(b, I64(self.groups), intp=I64) as group:
                by_four, by_vector = (b.mul(group.index, I64(n)) for n in (4, vector))
                into = b.mul(by_four, I64(self.lanes))
                group_rows = [b.add(r, into) for r in lines]
                self.group(
                    group_rows,
                    b.add(codes, b.mul(by_vector, I64(self.lanes))),
                    b.add(scales, by_vector),
                )
                if form.offsets:
                    self.offsets([b.add(r, by_four) for r in lines], b.add(scales, by_vector))
        for r in range(HIGH):
            with b.if_then(b.icmp_signed("<", I64(r), rows), likely=True):
                for v in range(self.wide):
                    to = b.add(y, b.add(b.mul(down, I64(r)), I64(VECTOR_NBYTES * v)))
                    emit_write(b, b.load(self.sums[r, v]), keep, to, b.sub(left, I64(LANES * v)))
        b.ret_void()

    def group(self, x, codes, scales):
        """Add what the columns give with a group of each row."""
        b, width = self.builder, self.form.width
        group_sums = {}
        for r, at in enumerate(x):
            start = ir.Constant(BITS, [0] * LANES)
            if not self.form.offsets and not self.by_sign:
                start = self.many(I32, at, width + 2 * MORE)
            group_sums |= {(r, v): start for v in range(self.wide)}
        for i, lane in product(range(self.vectors), range(self.lanes)):
            columns = [self.vector(CODES, codes, LANES * i + lane, v) for v in range(self.wide)]
            for r, at in enumerate(x):
                integers = b.bitcast(self.many(I32, at, CODES.count * i + 4 * lane), CODES)
                for v, column in enumerate(columns):
                    dot_args = b, column, integers, group_sums[r, v]
                    signed = self.by_sign
                    group_sums[r, v] = (
                        by_fours_signed(*dot_args)
                        if signed
                        else by_fours(*dot_args, self.form.signed)
                    )
        by = [self.vector(VECTOR, scales, 0, v) for v in range(self.wide)]
        steps = [self.many(F32, at, width) for at in x]
        for (r, v), sums in group_sums.items():
            self.add((r, v), b.sitofp(sums, VECTOR), b.fmul(by[v], steps[r]))

    def offsets(self, x, scales):
        """Add the groups' offsets times the sums of their integers."""
        lows = [self.vector(VECTOR, scales, self.groups, v) for v in range(self.wide)]
        for r, at in enumerate(x):
            rest = self.many(F32, at, self.form.width + MORE + 4 * self.groups)
            for v, low in enumerate(lows):
                self.add((r, v), low, rest)

    def add(self, cell, a, c):
        b, place = self.builder, self.sums[cell]
        b.store(call(b, "llvm.fma.v16f32", VECTOR, a, c, b.load(place)), place)

    def many(self, kind, at, nbytes):
        """A value in all lanes."""
        return spread(
            self.builder, read(self.builder, kind, at, nbytes), ir.VectorType(kind, LANES)
        )

    def vector(self, kind, at, number, column):
        return read(self.builder, kind, at, VECTOR_NBYTES * (self.wide * number + column))


def tiles(codes):
    """An intrinsic (wide, kind, x, along, panel, count, y, keep, down, rows, left), of a literal: see Tile.emit."""

    def codegen(context, builder, sig, args):
        _, kind, *tile_args = args
        end = builder.append_basic_block("done")
        switch, form_blocks = builder.switch(kind, end), {}
        for dtype in codes:
            form = form_of(dtype)
            if form not in form_blocks:
                form_blocks[form] = builder.append_basic_block("form")
                builder.position_at_end(form_blocks[form])
                tile = Tile(builder.module, form, sig.args[0].literal_value)
                builder.call(tile.function, tile_args)
                builder.branch(end)
            switch.add_case(I64(dtype.number), form_blocks[form])
        builder.position_at_end(end)
        return context.get_dummy_value()

    def typed(typingctx, wide, kind, x, row_stride, panel, count, y, keep, down, rows, left):
        return void(wide, *[i64] * 6, f32, *[i64] * 3), codegen

    return intrinsic(prefer_literal=True)(typed)


def lines(codes, scales):
    """An intrinsic (kind, y, w): the codes and scales of a chunk of weights at w become a line at y."""

    def codegen(context, builder, sig, args):
        kind, y, w = args
        end = builder.append_basic_block("done")
        switch = builder.switch(kind, end)
        for dtype in codes:
            case = builder.append_basic_block(dtype.name)
            switch.add_case(I64(dtype.number), case)
            builder.position_at_end(case)
            for at in range(0, width_of(dtype), CODES.count):
                code_args = w, I64(at // CODES.count)
                put(builder, called(context, builder, codes[dtype], CODES_FORM, *code_args), y, at)
            scale_values = called(context, builder, scales[dtype], SCALES_FORM, w)
            put(builder, scale_values, y, width_of(dtype))
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return intrinsic(lambda typingctx, kind, y, w: (void(i64, i64, i64), codegen))
