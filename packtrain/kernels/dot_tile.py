"""Dot products of some rows of weights with some rows of activations that are rounded to 8 bits, in registers.

Weights are taken a chunk at a time, four blocks of 32 or one of 256; `codes` of its type gives 64 codes of it, and
`scales` its scales. 128 rounded values lie in LINE bytes: the first halves of four groups of 32, codes of a byte; the
second halves; for each 8 sums by fours their step; and what codes have too much, see `added`, or for types with
offsets the steps times the sums.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from packtrain.kernels.call import settle
from packtrain.kernels.octets import (
    CODES,
    SIGNED,
    by_fours,
    by_fours_signed,
    codes64,
    put,
    read,
    shuffled,
)
from packtrain.kernels.panels import emit_prefetch
from packtrain.kernels.simd import BITS, F32, I64, LANES, VECTOR, call, f32x16, fold

i64, void = types.int64, types.void
VALUES, LINE = 128, 320
SECOND, STEPS, RESTS, LATER = 64, 128, 192, 256
ROWS = {
    1: 4,
    2: 4,
    4: 3,
}  # of weights, by rows of activations; 8 need more registers than there are
AHEAD = 4096  # bytes after the rows that follow, where weights are prefetched
CACHE_LINE = 64
CODES_FORM, SCALES_FORM = codes64(i64, i64), f32x16(i64)


class Tile:
    """The code for one type, `m` rows of activations and `r` of weights."""

    def __init__(self, context, module, dtype, code, m):
        self.context, self.code, self.m, self.r = context, code, m, ROWS[m]
        self.less = dtype.code["codes"].less
        self.split = dtype.layout is not None and dtype.layout.group < 32
        self.halves = max(1, dtype.block // VALUES)
        self.nbytes = dtype.block_nbytes * max(1, VALUES // dtype.block)
        name = module.get_unique_name(f"tile_{dtype.name}_{m}")
        form = ir.FunctionType(ir.VoidType(), [I64] * 10)
        self.function = ir.Function(module, form, name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        self.emit(*self.function.args)

    def emit(self, x, along, w, stride, count, left, y, down, rows, add):
        """y[i, j] (+)= x[i] w[j] for m rows of x and up to r of w.

        along, stride, down  bytes of rows of x, w and y
        count, left          chunks of a row of w, and bytes after them
        """
        b = self.builder
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        self.sums = [cgutils.alloca_once_value(b, zero) for _ in range(self.m * self.r)]
        last = b.sub(rows, I64(1))
        at = [self.least(b, I64(j), last) for j in range(self.r)]
        at = [b.add(w, b.mul(stride, j)) for j in at]
        rest = self.rests(at, count, left)
        ahead = b.add(b.add(w, b.mul(stride, I64(self.r))), I64(AHEAD))
        many = b.add(count, b.zext(b.icmp_signed(">", left, I64(0)), I64))
        with cgutils.for_range(b, many, intp=I64) as loop:
            through = b.mul(loop.index, I64(self.nbytes))
            whole = b.icmp_signed("<", loop.index, count)
            here = [b.add(j, through) for j in at]
            self.prefetch(b.add(ahead, b.mul(loop.index, I64(self.nbytes * self.r))))
            here = [b.select(whole, j, other) for j, other in zip(here, rest, strict=True)]
            first = b.add(x, b.mul(loop.index, I64(LINE * self.halves)))
            self.chunk([b.add(first, b.mul(along, I64(i))) for i in range(self.m)], here)
        for j in range(self.r):
            with b.if_then(b.icmp_signed("<", I64(j), rows)):
                for i in range(self.m):
                    to = b.add(y, b.add(b.mul(down, I64(i)), I64(4 * j)))
                    self.finish(b.load(self.sums[i * self.r + j]), to, add)
        b.ret_void()

    def prefetch(self, at):
        """Rows that follow, in the order of their bytes: rows side by side halve the rate of memory."""
        for line in range(0, self.nbytes * self.r, CACHE_LINE):
            emit_prefetch(self.builder, self.builder.add(at, I64(line)), level=2)

    def finish(self, lanes, to, add):
        b = self.builder
        total = fold(b, lanes, lambda builder, v, w: builder.fadd(v, w))
        more = b.fadd(read(b, F32, to), total)
        put(b, b.select(b.icmp_signed("!=", add, I64(0)), more, total), to)

    def rests(self, at, count, left):
        """Addresses of what is left of rows after whole chunks, with zeros behind it."""
        b = self.builder
        if self.halves > 1:
            return at
        with b.goto_entry_block():
            room = b.alloca(ir.ArrayType(ir.ArrayType(CODES.element, self.nbytes), self.r))
        first = b.ptrtoint(room, I64)
        rests = [b.add(first, I64(j * self.nbytes)) for j in range(self.r)]
        with b.if_then(b.icmp_signed(">", left, I64(0)), likely=False):
            whole = b.mul(count, I64(self.nbytes))
            put(b, ir.Constant(room.type.pointee, None), first)
            for source, rest in zip(at, rests, strict=True):
                with cgutils.for_range(b, left, intp=I64) as loop:
                    byte = read(b, CODES.element, b.add(source, whole), loop.index)
                    put(b, byte, b.add(rest, loop.index))
        return rests

    def chunk(self, x, w):
        """Add what a chunk of rows at w gives with rows at x."""
        b = self.builder
        scales = [self.called("scales", SCALES_FORM, j) for j in w]
        for half in range(self.halves):
            codes = [
                [self.called("codes", CODES_FORM, j, I64(2 * half + i)) for i in range(2)]
                for j in w
            ]
            by = [self.spread(s, half) for s in scales]
            for i, first in enumerate(x):
                at = b.add(first, I64(half * LINE))
                given = [read(b, CODES, at), read(b, CODES, at, SECOND)]
                step = read(b, VECTOR, at, STEPS)
                for j in range(self.r):
                    sums = self.sums[i * self.r + j]
                    b.store(self.added(b.load(sums), codes[j], by[j], given, step, at), sums)

    def added(self, sums, codes, by, given, step, at):
        """The sums of one row with one, and 128 products more."""
        b, times = self.builder, by_fours_signed if self.less == SIGNED else by_fours
        if self.split:
            for place, code, other, d in zip((RESTS, LATER), codes, given, by, strict=True):
                products = times(b, code, other, read(b, BITS, at, place))
                sums = self.fma(b.sitofp(products, VECTOR), b.fmul(d, step), sums)
            return sums
        none = ir.Constant(BITS, [0] * LANES)
        start = read(b, BITS, at, RESTS) if self.less else none
        products = times(b, codes[1], given[1], times(b, codes[0], given[0], start))
        sums = self.fma(b.sitofp(products, VECTOR), b.fmul(by[0], step), sums)
        return sums if self.less else self.fma(by[1], read(b, VECTOR, at, RESTS), sums)

    def spread(self, scales, half):
        """Of 128 codes, by lane of a sum: scales, and offsets if there are any, or scales of both halves of groups."""
        if self.split:
            firsts = [range(8 * half + i, 8 * half + 8, 2) for i in range(2)]
        else:
            firsts = [range(4 * i, 4 * i + 4) for i in (half, self.halves + half)]
        return [
            shuffled(self.builder, scales, [lane for lane in lanes for _ in range(4)])
            for lanes in firsts
        ]

    def fma(self, a, b, c):
        return call(self.builder, "llvm.fma.v16f32", VECTOR, a, b, c)

    def least(self, b, v, w):
        return b.select(b.icmp_signed("<", v, w), v, w)

    def called(self, role, form, *given):
        """What a part gives; it raises nothing."""
        (found,) = self.code[role].overloads.values()
        self.context.add_linking_libs((found.library,))
        function = self.context.declare_function(self.builder.module, found.fndesc)
        convention = self.context.call_conv
        _, result = convention.call_function(
            self.builder, function, form.return_type, form.args, given
        )
        return result


def tiles(codes, scales):
    """An intrinsic (kind, m, x, w, stride, k, y, down, rows, add), of a literal m: see Tile.emit."""

    def codegen(context, builder, sig, args):
        m = sig.args[1].literal_value
        kind, _, x, w, stride, k, y, down, rows, add = args
        along = builder.mul(builder.udiv(builder.add(k, I64(VALUES - 1)), I64(VALUES)), I64(LINE))
        end = builder.append_basic_block("done")
        switch = builder.switch(kind, end)
        for dtype in codes:
            case = builder.append_basic_block(dtype.name)
            switch.add_case(I64(dtype.number), case)
            builder.position_at_end(case)
            for part in (codes[dtype], scales[dtype]):
                settle(part)
            code = {"codes": codes[dtype], "scales": scales[dtype]}
            tile = Tile(context, builder.module, dtype, code, m)
            size = I64(max(dtype.block, VALUES))
            left = builder.udiv(
                builder.mul(builder.urem(k, size), I64(dtype.block_nbytes)), I64(dtype.block)
            )
            given = x, along, w, stride, builder.udiv(k, size), left, y, down, rows, add
            builder.call(tile.function, given)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    def typed(typingctx, kind, m, x, w, stride, k, y, down, rows, add):
        return void(i64, m, *[i64] * 8), codegen

    return intrinsic(prefer_literal=True)(typed)
