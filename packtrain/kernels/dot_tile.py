"""Dot products of some rows of weights with some rows of activations that are integers, 32 with a step, in registers.

Integers are the sum of `planes` signed bytes, the first times the largest power of 256. Weights are taken a chunk at a
time, four blocks of 32 or one of 256, in groups with a scale each; `codes` of its type gives 64 codes of it, some of
each group, and `scales` its scales. As many integers make a line: by plane, in the order of the codes; by lane of a sum
the steps; and what products with codes have too much, i32, or for types with offsets by lane of the scales the steps
times the sums of integers of the groups whose offsets stand there.
"""

from itertools import product

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from packtrain.kernels import octets
from packtrain.kernels.call import settle
from packtrain.kernels.folds import folded
from packtrain.kernels.octets import BY_SIGN, CODES
from packtrain.kernels.panels import emit_prefetch
from packtrain.kernels.simd import BITS, F32, I64, LANES, VECTOR, call, f32x16

i64, void = types.int64, types.void
VALUES = 128  # least integers of a line
MORE = 64  # bytes of 16 lanes
PLANES, KINDS = (1, 3), 64
ROWS = {1: 4, 2: 4, 4: 3, 8: 2}  # of weights, by rows of activations: as many as registers hold
LARGEST = 8355000  # of integers of three planes: a little less than fits
AHEAD = 4096  # bytes after the rows that follow, where weights are prefetched
CACHE_LINE = 64
CODES_FORM, SCALES_FORM = octets.codes64(i64, i64), f32x16(i64)


def width_of(dtype):
    """How many codes make a chunk."""
    return max(VALUES, dtype.block)


def share_of(dtype):
    """How many of 64 codes are of one group."""
    group = 16 if dtype.layout is not None and dtype.layout.group == 16 else 32
    return group * CODES.count // width_of(dtype)


def is_parted(dtype, planes):
    """Whether sums of products do not fit into 32 bits, so that those with the last plane are summed apart."""
    count = width_of(dtype) // LANES
    return planes > 1 and count * dtype.code["codes"].most * LARGEST >= 1 << 31


def line(width, planes):
    return width * planes + 3 * MORE


def called(context, builder, code, form, *call_args):
    """What a part gives; it raises nothing."""
    settle(code)
    (overload,) = code.overloads.values()
    context.add_linking_libs((overload.library,))
    function = context.declare_function(builder.module, overload.fndesc)
    _, result = context.call_conv.call_function(
        builder, function, form.return_type, form.args, call_args
    )
    return result


class Tile:
    """The code for one type, `m` rows of activations and `r` of weights."""

    def __init__(self, context, module, dtype, code, m, planes):
        self.context, self.code, self.m, self.r = context, code, m, ROWS[m]
        self.width, self.planes = width_of(dtype), range(planes)
        self.steps, self.line = self.width * planes, line(self.width, planes)
        self.less, self.signed = dtype.code["codes"].less, dtype.code["codes"].signed
        self.parted, self.lanes = is_parted(dtype, planes), share_of(dtype) // 4
        self.alone = dtype.block == self.width
        self.nbytes = dtype.block_nbytes * max(1, VALUES // dtype.block)
        name = module.get_unique_name(f"tile_{dtype.name}_{m}_{planes}")
        form = ir.FunctionType(ir.VoidType(), [I64] * 10)
        self.function = ir.Function(module, form, name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        self.emit(*self.function.args)

    def emit(self, x, row_stride, w, stride, count, left, y, down, rows, add):
        """y[i, j] (+)= x[i] w[j] for m rows of x and up to r of w.

        row_stride, stride, down  bytes of rows of x, w and y
        count, left          chunks of a row of w, and bytes after them
        """
        b = self.builder
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        self.sums = [cgutils.alloca_once_value(b, zero) for _ in range(self.m * self.r)]
        last = b.sub(rows, I64(1))
        at = [self.least(b, I64(j), last) for j in range(self.r)]
        at = [b.add(w, b.mul(stride, j)) for j in at]
        ahead = b.add(b.add(w, b.mul(stride, I64(self.r))), I64(AHEAD))
        self.chunks(x, row_stride, at, ahead, count)
        if not self.alone:
            with b.if_then(b.icmp_signed(">", left, I64(0)), likely=False):
                rest = self.rests(at, count, left)
                self.chunks(b.add(x, b.mul(count, I64(self.line))), row_stride, rest, ahead, I64(1))
        totals = folded(b, [b.load(s) for s in self.sums], lambda b, v, w: b.fadd(v, w))
        room = b.ptrtoint(cgutils.alloca_once_value(b, totals), I64)
        for j in range(self.r):
            with b.if_then(b.icmp_signed("<", I64(j), rows)):
                for i in range(self.m):
                    to = b.add(y, b.add(b.mul(down, I64(i)), I64(4 * j)))
                    self.finish(octets.read(b, F32, room, 4 * (i * self.r + j)), to, add)
        b.ret_void()

    def prefetch(self, at):
        """Rows that follow, in the order of their bytes: rows side by side halve the rate of memory."""
        for line in range(0, self.nbytes * self.r, CACHE_LINE):
            emit_prefetch(self.builder, self.builder.add(at, I64(line)), level=2)

    def finish(self, total, to, add):
        b = self.builder
        added_total = b.fadd(octets.read(b, F32, to), total)
        octets.put(b, b.select(b.icmp_signed("!=", add, I64(0)), added_total, total), to)

    def rests(self, at, count, left):
        """Addresses of what is left of rows after whole chunks, with zeros behind it."""
        b = self.builder
        with b.goto_entry_block():
            room = b.alloca(ir.ArrayType(ir.ArrayType(CODES.element, self.nbytes), self.r))
        first = b.ptrtoint(room, I64)
        rests = [b.add(first, I64(j * self.nbytes)) for j in range(self.r)]
        full_nbytes = b.mul(count, I64(self.nbytes))
        octets.put(b, ir.Constant(room.type.pointee, None), first)
        for source, rest in zip(at, rests, strict=True):
            with cgutils.for_range(b, left, intp=I64) as loop:
                byte = octets.read(b, CODES.element, b.add(source, full_nbytes), loop.index)
                octets.put(b, byte, b.add(rest, loop.index))
        return rests

    def chunks(self, x, row_stride, at, ahead, count):
        """Add what so many chunks of rows give."""
        b = self.builder
        with cgutils.for_range(b, count, intp=I64) as loop:
            through = b.mul(loop.index, I64(self.nbytes))
            self.prefetch(b.add(ahead, b.mul(loop.index, I64(self.nbytes * self.r))))
            first = b.add(x, b.mul(loop.index, I64(self.line)))
            chunk_rows = [b.add(first, b.mul(row_stride, I64(i))) for i in range(self.m)]
            self.chunk(chunk_rows, [b.add(j, through) for j in at])

    def chunk(self, x, w):
        """Add what a chunk of rows at w gives with rows at x."""
        b = self.builder
        scales = [self.called("scales", SCALES_FORM, j) for j in w]
        by = [octets.shuffled(b, s, [lane // self.lanes for lane in range(LANES)]) for s in scales]
        code_vectors = range(self.width // CODES.count)
        codes = [[self.called("codes", CODES_FORM, j, I64(i)) for j in w] for i in code_vectors]
        for i, at in enumerate(x):
            places = self.sums[i * self.r : (i + 1) * self.r]
            step = octets.read(b, VECTOR, at, self.steps)
            steps = [b.fmul(d, step) for d in by]
            sums = map(b.load, places)
            sums = map(self.fma, self.products(codes, at), steps, sums)
            if not self.less:
                rest = octets.read(b, VECTOR, at, self.steps + MORE)
                sums = map(self.fma, scales, [rest] * self.r, sums)
            for place, value in zip(places, list(sums), strict=True):
                b.store(value, place)

    def products(self, codes, at):
        """Sums by fours of products of codes with the integers of a row, as floats."""
        rest = self.steps + MORE
        if not self.parted:
            return [*map(self.to_floats, self.summed(codes, at, self.planes, rest))]
        high = self.summed(codes, at, self.planes[:-1], rest)
        low = self.summed(codes, at, self.planes[-1:], rest + MORE)
        by_256 = ir.Constant(VECTOR, [256.0] * LANES)
        pairs = zip(map(self.to_floats, high), map(self.to_floats, low), strict=True)
        return [self.fma(v, by_256, w) for v, w in pairs]

    def summed(self, codes, at, planes, rest):
        """The same of some planes.

        Those of all rows of w go side by side: each waits for the one before, longer than registers hold others.
        """
        b = self.builder
        # integers of more planes may be -128
        by_sign = BY_SIGN and self.signed and len(self.planes) == 1
        plane_sums = [ir.Constant(BITS, [0] * LANES)] * self.r
        for p in planes:
            if p != planes[0]:
                plane_sums = [b.shl(v, ir.Constant(BITS, [8] * LANES)) for v in plane_sums]
            if p == planes[-1] and self.less and not by_sign:
                correction = octets.read(b, BITS, at, rest)
                plane_sums = [b.add(v, correction) for v in plane_sums]
            for i, row_codes in enumerate(codes):
                integers = octets.read(b, CODES, at, self.width * p + CODES.count * i)
                for j, code in enumerate(row_codes):
                    if by_sign:
                        plane_sums[j] = octets.by_fours_signed(b, code, integers, plane_sums[j])
                    else:
                        plane_sums[j] = octets.by_fours(
                            b, code, integers, plane_sums[j], self.signed
                        )
        return plane_sums

    def to_floats(self, v):
        return self.builder.sitofp(v, VECTOR)

    def fma(self, a, b, c):
        return call(self.builder, "llvm.fma.v16f32", VECTOR, a, b, c)

    def least(self, b, v, w):
        return b.select(b.icmp_signed("<", v, w), v, w)

    def called(self, role, form, *call_args):
        return called(self.context, self.builder, self.code[role], form, *call_args)


def tiles(codes, scales):
    """An intrinsic (m, kind, planes, x, w, stride, k, y, down, rows, add), of a literal m: see Tile.emit."""

    def codegen(context, builder, sig, args):
        _, kind, planes, x, w, stride, k, y, down, rows, add = args
        lines = builder.udiv(builder.add(k, I64(VALUES - 1)), I64(VALUES))
        end = builder.append_basic_block("done")
        switch = builder.switch(builder.add(kind, builder.mul(planes, I64(KINDS))), end)
        for dtype, planes in product(codes, PLANES):
            case = builder.append_basic_block(dtype.name)
            switch.add_case(I64(dtype.number + KINDS * planes), case)
            builder.position_at_end(case)
            code = {"codes": codes[dtype], "scales": scales[dtype]}
            tile = Tile(context, builder.module, dtype, code, sig.args[0].literal_value, planes)
            size, nbytes = I64(width_of(dtype)), I64(dtype.block_nbytes)
            left = builder.mul(builder.udiv(builder.urem(k, size), I64(dtype.block)), nbytes)
            row_stride = builder.mul(lines, I64(line(VALUES, planes)))
            tile_args = x, row_stride, w, stride, builder.udiv(k, size), left, y, down, rows, add
            builder.call(tile.function, tile_args)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    def typed(typingctx, m, kind, planes, x, w, stride, k, y, down, rows, add):
        return void(m, *[i64] * 10), codegen

    return intrinsic(prefer_literal=True)(typed)
