"""Multiply f32 matrices in arrays.

A product is split into one task for each thread: smaller tasks packed equal values again and again, and products with
256 x 256 weights had only one. The sum over K is never split, so that results do not depend on the number of threads.
Thin products (LoRA's) are packed like others: tiles that read both sides in place gained nothing outside a cache.
"""

from packtrain.kernels.matmul import gemm
from packtrain.kernels.runtime.jit import each, kernel, spans, threads
from packtrain.kernels.runtime.kernel_types import f32, i64
from packtrain.kernels.simd.simd_f32 import (
    LANES, address, fma, load, load_part, peek, poke, splat, total,
)  # fmt: skip

# up to this many rows a product with a transposed b uses dot products, which read b once
FEW_ROWS = 4
SMALL = 1 << 19  # below this many multiply-adds a parallel region does not pay
PACKING = 6  # packing a value takes as long as this many multiply-adds


@kernel("any_out2, any_in2, any_in2, boolean, i64, i64")
def dot_rows(y, a, b, accumulate, start, stop):
    """y[:, start:stop] = a @ b[:, start:stop] by dot products; columns of b are contiguous, and each is read once."""
    m, k = a.shape
    ldb = b.strides[1] // 4
    for j in range(start, stop):
        column = address(b, j * ldb)
        for i in range(m):
            row = address(a, i * (a.strides[0] // 4))
            s0 = splat(0.0)
            s1 = splat(0.0)
            s2 = splat(0.0)
            s3 = splat(0.0)
            p = 0
            while p + 64 <= k:
                s0 = fma(load(row, p), load(column, p), s0)
                s1 = fma(load(row, p + 16), load(column, p + 16), s1)
                s2 = fma(load(row, p + 32), load(column, p + 32), s2)
                s3 = fma(load(row, p + 48), load(column, p + 48), s3)
                p += 64
            while p < k:
                s0 = fma(load_part(row, p, k - p), load_part(column, p, k - p), s0)
                p += 16
            s = total((s0 + s1) + (s2 + s3))
            offset = i * (y.strides[0] // 4) + j
            poke(y, offset, peek(y, offset) + s if accumulate else s)


@kernel("UniTuple(i64, 2)(i64, i64, i64, i64, i64, i64)")
def task_shape(m, n, num_tasks, column_unit, column_cost, broad):
    """Return rows and columns of each of `num_tasks` tasks of an (m, n) product that computes and packs fastest.

    Columns are multiples of `column_unit`, up to `broad` of them a block; packing a value of b takes as long as
    `column_cost` multiply-adds.
    """
    min_cost, task_rows, task_columns = i64(1) << 62, m, n
    for row_tasks in range(1, num_tasks + 1):
        if num_tasks % row_tasks == 0:
            rows_each = -(-m // (row_tasks * gemm.ROWS)) * gemm.ROWS
            wide = -(-n // (num_tasks // row_tasks * column_unit)) * column_unit
            task_cost = rows_each * (wide + PACKING * -(-wide // broad)) + column_cost * wide
            if task_cost < min_cost:
                min_cost, task_rows, task_columns = task_cost, rows_each, wide
    return task_rows, task_columns


@kernel("UniTuple(i64, 2)(any_in2)")
def matrix_layout(x):
    """Return (1 if x is a transposed row-major matrix, else 0; f32 between that matrix's rows). Raises ValueError."""
    row_stride, column_stride = x.strides[0] // 4, x.strides[1] // 4
    if (column_stride == 1 or x.shape[1] <= 1) and (row_stride >= x.shape[1] or x.shape[0] <= 1):
        return 0, row_stride
    if (row_stride == 1 or x.shape[0] <= 1) and (column_stride >= x.shape[0] or x.shape[1] <= 1):
        return 1, column_stride
    raise ValueError("product: each matrix must have unit stride on one of its axes")


@kernel("any_out2, any_in2, any_in2")
def check_shapes(y, a, b):
    if b.shape[0] != a.shape[1] or y.shape[0] != a.shape[0] or y.shape[1] != b.shape[1]:
        raise ValueError("product: shapes must be (M, K) @ (K, N) -> (M, N)")
    if y.size and y.strides[1] != 4 and y.shape[1] > 1:
        raise ValueError("product: y must have unit stride on its last axis")


@kernel("any_out2, any_in2, any_in2, boolean, i64, i64, i64, i64, i64")
def block(y, a, b, accumulate, bf16, row_start, num_rows, col_start, num_columns):
    """Compute y[row_start : + num_rows, col_start : + num_columns] of y = a @ b, cut off at the edges of y."""
    m, k = a.shape
    n = b.shape[1]
    ta, lda = matrix_layout(a)
    tb, ldb = matrix_layout(b)
    ldy = y.strides[0] // 4
    beta = f32(1.0) if accumulate else f32(0.0)
    a_ptr = address(a, row_start if ta else row_start * lda)
    b_ptr = address(b, col_start * ldb if tb else col_start)
    gemm.sgemm(
        *(ta, tb, min(num_rows, m - row_start), min(num_columns, n - col_start), k),
        *(a_ptr, lda, b_ptr, ldb, beta, address(y, row_start * ldy + col_start), ldy, bf16),
    )


@kernel("any_out2, any_in2, any_in2, boolean, i64, i64, i64, i64, i64")
def product_task(y, a, b, accumulate, bf16, rows, columns, across, task):
    block(y, a, b, accumulate, bf16, task // across * rows, rows, task % across * columns, columns)


@kernel("any_out2, any_in2, any_in2, boolean, i64")
def product(y, a, b, accumulate, bf16):
    """y = a @ b, plus y if `accumulate`.

        a  (M, K)  f32, unit stride on either axis
        b  (K, N)  f32, unit stride on either axis
        y  (M, N)  f32, unit stride on the last axis

    Up to 4 rows against a transposed b use dot products, bound by reading b once, unless bf16 = 1: a and b are rounded
    to bf16, and their products summed in f32.
    """
    check_shapes(y, a, b)
    if y.size == 0:
        return
    m, k = a.shape
    n = b.shape[1]
    if bf16 == 0 and m <= FEW_ROWS and matrix_layout(b)[0] == 1 and matrix_layout(a)[0] == 0:
        columns_per_task = max(16, -(-(1 << 16) // max(k * m, 1)))
        if n <= columns_per_task:
            dot_rows(y, a, b, accumulate, 0, n)
        else:
            spans(dot_rows, (y, a, b, accumulate), n, columns_per_task)
        return
    count = threads()
    if m * n * k <= SMALL or count == 1:
        block(y, a, b, accumulate, bf16, 0, m, 0, n)
        return
    rows, columns = task_shape(m, n, count, LANES, PACKING, gemm.BROAD_BF16 if bf16 else gemm.BROAD)
    tasks_across = -(-n // columns)
    task_args = (y, a, b, accumulate, bf16, rows, columns, tasks_across)
    each(product_task, task_args, -(-m // rows) * tasks_across)
