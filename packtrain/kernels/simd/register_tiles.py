"""Emit register tiles as LLVM IR: small products and a transpose, on addresses.

Rows are `ld` floats apart; columns after the last full vector are read and written under a mask.
"""

from llvmlite import ir
from numba.core import cgutils

from packtrain.kernels.runtime import environment
from packtrain.kernels.runtime.jit import kernel
from packtrain.kernels.runtime.kernel_types import boolean, i64, void
from packtrain.kernels.simd.simd_f32 import (
    BITS, F32, I64, LANES, MASK, VECTOR, ZERO, call, first_lanes, instruction, read_masked, spread, write_masked,
)  # fmt: skip

POINTER = ir.PointerType()
PRODUCT_SIGNATURE = void(*[i64] * 9, boolean)
TRANSPOSE_SIGNATURE = void(*[i64] * 8)
# rows and vectors of a tile, the largest first: sums, columns and a broadcast value fill the registers
TILE_HEIGHTS, MAX_VECTORS = (
    ((12, 4, 1), 2) if environment.has_cpu_feature("avx512f") else ((6, 2, 1), 1)
)


def at(builder, base_pointer, row, row_stride, column):
    """Emit the pointer to base_pointer[row * row_stride + column], of f32."""
    index = builder.add(builder.mul(row, row_stride), column)
    return builder.gep(base_pointer, [index], source_etype=F32)


def emit_tile(builder, height, width, mask, by_column, c, ldc, a, lda, b, ldb, depth, add):
    """Emit c (height, 16 width) = a b, plus c where `add`, with sums in registers; by_column: a lies by columns."""
    tile_cells = [(i, j) for i in range(height) for j in range(width)]
    c_ptrs = {(i, j): at(builder, c, I64(i), ldc, I64(j * LANES)) for i, j in tile_cells}
    sums = {tile_cell: cgutils.alloca_once_value(builder, ZERO) for tile_cell in tile_cells}
    with builder.if_then(add):
        for tile_cell in tile_cells:
            builder.store(read_masked(builder, c_ptrs[tile_cell], mask), sums[tile_cell])
    a_step = lda if by_column else I64(1)
    tops = [a] if by_column else [at(builder, a, I64(i), lda, I64(0)) for i in range(0, height, 3)]
    cursors = [(cgutils.alloca_once_value(builder, a_start), a_step) for a_start in tops]
    cursors.append((cgutils.alloca_once_value(builder, b), ldb))
    with cgutils.for_range(builder, depth):
        *a_pointers, b_pointer = (builder.load(cursor) for cursor, _ in cursors)
        b_vectors = [
            read_masked(builder, at(builder, b_pointer, I64(0), ldb, I64(j * LANES)), mask)
            for j in range(width)
        ]
        for i in range(height):
            a_element = (
                (a_pointers[0], I64(0), lda, I64(i))
                if by_column
                else (a_pointers[i // 3], I64(i % 3), lda, I64(0))
            )
            a_value = builder.load(at(builder, *a_element), typ=F32, align=4)
            a_value = spread(builder, a_value, VECTOR)
            for j in range(width):
                done = builder.load(sums[i, j])
                done = call(builder, "llvm.fma.v16f32", VECTOR, a_value, b_vectors[j], done)
                builder.store(done, sums[i, j])
        for cursor, by in cursors:
            builder.store(builder.gep(builder.load(cursor), [by], source_etype=F32), cursor)
    for tile_cell in tile_cells:
        write_masked(builder, builder.load(sums[tile_cell]), c_ptrs[tile_cell], mask)


def emit_product(builder, by_column, m, n, depth, c, ldc, a, lda, b, ldb, add):
    """Emit c (m, n) = a b, plus c where `add`, in tiles up to MAX_VECTORS wide; by_column: a is stored by columns."""
    wide = builder.and_(n, I64(-MAX_VECTORS * LANES))
    for col_start, col_stop, num_vectors in ((I64(0), wide, MAX_VECTORS), (wide, n, 1)):
        column_step = I64(num_vectors * LANES)
        with cgutils.for_range_slice(builder, col_start, col_stop, column_step, inc=True) as (j, _):
            mask = None if col_stop is wide else first_lanes(builder, builder.sub(n, j))
            done = I64(0)
            for height in TILE_HEIGHTS:
                rows_left = builder.srem(builder.sub(m, done), I64(height))
                end = builder.sub(m, rows_left)
                with cgutils.for_range_slice(builder, done, end, I64(height), inc=True) as (i, _):
                    c_corner = at(builder, c, i, ldc, j)
                    a_start = at(builder, a, *((I64(0), lda, i) if by_column else (i, lda, I64(0))))
                    b_start = at(builder, b, I64(0), ldb, j)
                    tile_args = c_corner, ldc, a_start, lda, b_start, ldb, depth, add
                    emit_tile(builder, height, num_vectors, mask, by_column, *tile_args)
                done = end


def emit_transpose(builder, y, ldy, y_rows, y_columns, x, ldx, x_rows, x_columns):
    """Emit y = x transposed, 16 x 16: writes only y_rows x y_columns; x counts as 0 outside x_rows x x_columns."""
    no_lanes = ir.Constant(MASK, [0] * LANES)

    def inside(num_rows, num_columns, i):
        column_mask = first_lanes(builder, num_columns)
        return builder.select(builder.icmp_signed("<", I64(i), num_rows), column_mask, no_lanes)

    lines = [
        read_masked(builder, at(builder, x, I64(i), ldx, I64(0)), inside(x_rows, x_columns, i))
        for i in range(LANES)
    ]
    for swap_distance in (8, 4, 2, 1):
        first_order = [i + LANES - swap_distance if i & swap_distance else i for i in range(LANES)]
        second_order = [i + swap_distance for i in first_order]
        for i in (i for i in range(LANES) if not i & swap_distance):
            row_pair = lines[i], lines[i + swap_distance]
            for row_index, order in ((i, first_order), (i + swap_distance, second_order)):
                lines[row_index] = builder.shuffle_vector(*row_pair, ir.Constant(BITS, order))
    for i in range(LANES):
        write_masked(
            builder, lines[i], at(builder, y, I64(i), ldy, I64(0)), inside(y_rows, y_columns, i)
        )


def shared_function(function_name, emit, arg_kinds):
    """Return an intrinsic that calls one function of this name in each module, with emit(builder, *args) as its body.

    arg_kinds  a letter for each argument: p address, i int, b bool
    """
    llvm_types = {"p": POINTER, "i": I64, "b": ir.IntType(1)}

    def emit_call(builder, *args):
        function = builder.module.globals.get(function_name)
        if function is None:
            function_type = ir.FunctionType(ir.VoidType(), [llvm_types[k] for k in arg_kinds])
            function = ir.Function(builder.module, function_type, function_name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            body_builder = ir.IRBuilder(function.append_basic_block())
            emit(body_builder, *function.args)
            body_builder.ret_void()
        call_args = (
            builder.inttoptr(a, POINTER) if k == "p" else a
            for k, a in zip(arg_kinds, args, strict=True)
        )
        builder.call(function, list(call_args))

    numba_types = {"p": i64, "i": i64, "b": boolean}
    return instruction(void, *[numba_types[k] for k in arg_kinds])(emit_call)


# functions on pointers within a kernel: with addresses LLVM generates slower loops (attention_back: twice as slow)
product_by_rows = shared_function(
    "packtrain_rows_product", lambda builder, *args: emit_product(builder, False, *args), "iiipipipib",
)  # fmt: skip
product_by_columns = shared_function(
    "packtrain_columns_product", lambda builder, *args: emit_product(builder, True, *args), "iiipipipib",
)  # fmt: skip
transpose_call = shared_function("packtrain_turn", emit_transpose, "piiipiii")


@kernel(PRODUCT_SIGNATURE)
def rows_product(m, n, depth, c, ldc, a, lda, b, ldb, add):
    """c (m, n) = a (m, depth) @ b (depth, n) at addresses, plus c where `add`; rows are ldc, lda and ldb f32 apart."""
    product_by_rows(m, n, depth, c, ldc, a, lda, b, ldb, add)


@kernel(PRODUCT_SIGNATURE)
def columns_product(m, n, depth, c, ldc, a, lda, b, ldb, add):
    """c (m, n) = a @ b at addresses, plus c where `add`, with a stored by columns: a[i, k] at a + k * lda + i."""
    product_by_columns(m, n, depth, c, ldc, a, lda, b, ldb, add)


@kernel(TRANSPOSE_SIGNATURE)
def transpose_tile(y, ldy, y_rows, y_columns, x, ldx, x_rows, x_columns):
    """y = x.T, 16 x 16, at addresses: writes only y_rows x y_columns; x counts as 0 outside x_rows x x_columns."""
    transpose_call(y, ldy, y_rows, y_columns, x, ldx, x_rows, x_columns)


@instruction(i64, i64)
def on_stack(builder, num_values):
    """Return the address of `num_values` f32 on the caller's stack, 64-byte aligned; not to be called in a loop."""
    buffer = builder.alloca(F32, size=num_values)
    buffer.align = 64
    return builder.ptrtoint(buffer, I64)
