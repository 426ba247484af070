"""Register tiles written as LLVM IR: small products and a transpose, on addresses.

Rows are `ld` floats apart; columns after the last full vector are read and written under a mask.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from packtrain.kernels import runtime, simd
from packtrain.kernels.call import kernel
from packtrain.kernels.simd import BITS, F32, I64, LANES, MASK, VECTOR, ZERO

POINTER = ir.PointerType()
PRODUCT = types.void(*[types.int64] * 9, types.boolean)
TURN = types.void(*[types.int64] * 8)
# rows and vectors of a tile, the largest first: sums, columns and a broadcast value fill the registers
HEIGHTS, WIDEST = ((12, 4, 1), 2) if runtime.has("avx512f") else ((6, 2, 1), 1)


def at(builder, base, row, stride, column):
    """The pointer to base[row * stride + column]."""
    index = builder.add(builder.mul(row, stride), column)
    return builder.gep(base, [index], source_etype=F32)


def emit_tile(builder, height, width, mask, by_column, c, ldc, a, lda, b, ldb, depth, add):
    """c (height, width * 16) = a b, + c where `add`, with the sums in registers."""
    cells = [(i, j) for i in range(height) for j in range(width)]
    spots = {(i, j): at(builder, c, I64(i), ldc, I64(j * LANES)) for i, j in cells}
    sums = {cell: cgutils.alloca_once_value(builder, ZERO) for cell in cells}
    with builder.if_then(add):
        for cell in cells:
            builder.store(simd.read(builder, spots[cell], mask), sums[cell])
    step = lda if by_column else I64(1)
    tops = [a] if by_column else [at(builder, a, I64(i), lda, I64(0)) for i in range(0, height, 3)]
    moving = [(cgutils.alloca_once_value(builder, top), step) for top in tops]
    moving.append((cgutils.alloca_once_value(builder, b), ldb))
    with cgutils.for_range(builder, depth):
        *lefts, right = (builder.load(place) for place, _ in moving)
        rights = [
            simd.read(builder, at(builder, right, I64(0), ldb, I64(j * LANES)), mask)
            for j in range(width)
        ]
        for i in range(height):
            order = (
                (lefts[0], I64(0), lda, I64(i))
                if by_column
                else (lefts[i // 3], I64(i % 3), lda, I64(0))
            )
            left = builder.load(at(builder, *order), typ=F32, align=4)
            left = simd.spread(builder, left, VECTOR)
            for j in range(width):
                done = builder.load(sums[i, j])
                done = simd.call(builder, "llvm.fma.v16f32", VECTOR, left, rights[j], done)
                builder.store(done, sums[i, j])
        for place, by in moving:
            builder.store(builder.gep(builder.load(place), [by], source_etype=F32), place)
    for cell in cells:
        simd.write(builder, builder.load(sums[cell]), spots[cell], mask)


def emit_product(builder, by_column, m, n, depth, c, ldc, a, lda, b, ldb, add):
    """c (m, n) = a b, + c where `add`: WIDEST vectors of columns at a time, then one or what is left of it."""
    wide = builder.and_(n, I64(-WIDEST * LANES))
    for start, stop, width in ((I64(0), wide, WIDEST), (wide, n, 1)):
        step = I64(width * LANES)
        with cgutils.for_range_slice(builder, start, stop, step, inc=True) as (j, _):
            mask = None if stop is wide else simd.first_lanes(builder, builder.sub(n, j))
            done = I64(0)
            for height in HEIGHTS:
                rest = builder.srem(builder.sub(m, done), I64(height))
                end = builder.sub(m, rest)
                with cgutils.for_range_slice(builder, done, end, I64(height), inc=True) as (i, _):
                    corner = at(builder, c, i, ldc, j)
                    top = at(builder, a, *((I64(0), lda, i) if by_column else (i, lda, I64(0))))
                    right = at(builder, b, I64(0), ldb, j)
                    args = corner, ldc, top, lda, right, ldb, depth, add
                    emit_tile(builder, height, width, mask, by_column, *args)
                done = end


def emit_turn(builder, y, ldy, y_rows, y_columns, x, ldx, x_rows, x_columns):
    """y = x transposed, both (16, 16): only y_rows, y_columns are written; x is 0 outside its own."""
    nothing = ir.Constant(MASK, [0] * LANES)

    def inside(rows, columns, i):
        lanes = simd.first_lanes(builder, columns)
        return builder.select(builder.icmp_signed("<", I64(i), rows), lanes, nothing)

    lines = [
        simd.read(builder, at(builder, x, I64(i), ldx, I64(0)), inside(x_rows, x_columns, i))
        for i in range(LANES)
    ]
    for step in (8, 4, 2, 1):
        first = [i + LANES - step if i & step else i for i in range(LANES)]
        second = [i + step for i in first]
        for i in (i for i in range(LANES) if not i & step):
            pair = lines[i], lines[i + step]
            for line, order in ((i, first), (i + step, second)):
                lines[line] = builder.shuffle_vector(*pair, ir.Constant(BITS, order))
    for i in range(LANES):
        simd.write(
            builder, lines[i], at(builder, y, I64(i), ldy, I64(0)), inside(y_rows, y_columns, i)
        )


def compiled(name, emit, kinds):
    """An intrinsic that calls emit(builder, *args) as one function.

    kinds, a letter for each argument: p address, i int, b bool
    """
    kind = {"p": POINTER, "i": I64, "b": ir.IntType(1)}

    def emit_call(builder, *args):
        function = builder.module.globals.get(name)
        if function is None:
            form = ir.FunctionType(ir.VoidType(), [kind[k] for k in kinds])
            function = ir.Function(builder.module, form, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            inner = ir.IRBuilder(function.append_basic_block())
            emit(inner, *function.args)
            inner.ret_void()
        fixed = (
            builder.inttoptr(a, POINTER) if k == "p" else a
            for k, a in zip(kinds, args, strict=True)
        )
        builder.call(function, list(fixed))

    number = {"p": types.int64, "i": types.int64, "b": types.boolean}
    return simd.instruction(types.void, *[number[k] for k in kinds])(emit_call)


# functions on pointers within a kernel: with addresses LLVM generates slower loops (attention_back: twice as slow)
product_by_rows = compiled(
    "packtrain_rows_product",
    lambda builder, *args: emit_product(builder, False, *args),
    "iiipipipib",
)
product_by_columns = compiled(
    "packtrain_columns_product",
    lambda builder, *args: emit_product(builder, True, *args),
    "iiipipipib",
)
turned = compiled("packtrain_turn", emit_turn, "piiipiii")


@kernel(PRODUCT)
def rows_product(m, n, depth, c, ldc, a, lda, b, ldb, add):
    """c (m, n) = a b, + c where `add`; a (m, depth), b (depth, n), each with its rows' distance."""
    product_by_rows(m, n, depth, c, ldc, a, lda, b, ldb, add)


@kernel(PRODUCT)
def columns_product(m, n, depth, c, ldc, a, lda, b, ldb, add):
    """The same with a stored by columns: a[i, k] at a + k * lda + i."""
    product_by_columns(m, n, depth, c, ldc, a, lda, b, ldb, add)


@kernel(TURN)
def turn(y, ldy, y_rows, y_columns, x, ldx, x_rows, x_columns):
    """See emit_turn."""
    turned(y, ldy, y_rows, y_columns, x, ldx, x_rows, x_columns)


@simd.instruction(types.int64, types.int64)
def on_stack(builder, size):
    """The address of `size` f32 on the caller's stack, 64-byte aligned; not to be called in a loop."""
    block = builder.alloca(F32, size=size)
    block.align = 64
    return builder.ptrtoint(block, I64)
