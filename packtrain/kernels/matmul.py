"""Matrix products in f32: `product` on arrays, `sgemm` on addresses for other kernels.

The partition into tasks is a function of the shape; the sum over K is never split between tasks.
"""

from numba import types

from packtrain.kernels import gemm, runtime
from packtrain.kernels.call import each, kernel, spans
from packtrain.kernels.simd import (
    address,
    any_in2,
    any_out2,
    fma,
    load,
    load_part,
    peek,
    poke,
    splat,
    total,
)

i32, i64, f32, void = types.int32, types.int64, types.float32, types.void
BLAS = runtime.blas()
integer = types.int64 if BLAS is None or BLAS.wide else types.int32
foreign_sgemm = types.ExternalFunction(
    "packtrain_sgemm",
    void(
        *(i32, i32, i32, integer, integer, integer),
        *(f32, i64, integer, i64, integer, f32, i64, integer),
    ),
)
FEW_ROWS = (
    4  # up to this many rows a product with a transposed b uses dot products, which read b once
)
SMALL = 1 << 19  # below this many multiply-adds a parallel region does not pay
LEAST_ROWS = 0 if BLAS is None else 8  # to pack for them, where b is stored as it is read
TASK = 1 << 26  # multiply-adds of one task, unless that makes more than MOST_TASKS
MOST_TASKS = 32
SIDE = 128  # a longer side may be halved


def call_blas(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    order, rows_a, rows_b = i32(101), max(lda, m if ta else k, 1), max(ldb, k if tb else n, 1)
    foreign_sgemm(
        *(order, i32(111 + ta), i32(111 + tb), m, n, k),
        *(alpha, a, rows_a, b, rows_b, beta, c, max(ldc, n)),
    )


blas_sgemm = gemm.own_sgemm if BLAS is None else kernel(gemm.SGEMM)(call_blas)


@kernel(gemm.SGEMM)
def sgemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """c (m, n) = alpha * op(a) @ op(b) + beta * c on one thread; a, b, c are addresses, row-major.

    op(a) (m, k) is a, or a transposed if ta = 1 (then a is stored (k, m)); op(b) (k, n) likewise;
    lda, ldb, ldc are the row strides in elements. c is not read if beta = 0.
    With few rows and a b that is stored as it is read, packing does not pay, and OpenBLAS computes them.
    """
    if m <= 0 or n <= 0:
        return
    if m >= LEAST_ROWS or tb == 1:
        gemm.own_sgemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)
    else:
        blas_sgemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)


@kernel(void(any_out2, any_in2, any_in2, types.boolean, i64, i64))
def dot_rows(y, a, b, accumulate, start, stop):
    """y[:, start:stop] = a @ b if the columns of b are contiguous: each is read once."""
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
            at = i * (y.strides[0] // 4) + j
            poke(y, at, peek(y, at) + s if accumulate else s)


@kernel(types.UniTuple(i64, 2)(i64, i64, i64))
def tile_shape(m, n, k):
    """Rows and columns of one task: the longer side is halved until the work is small enough."""
    rows, columns = m, n
    count = 1
    while rows * columns * k > TASK and count < MOST_TASKS:
        if columns >= rows and columns > SIDE:
            columns = (columns + 1) // 2
        elif rows > SIDE:
            rows = (rows + 1) // 2
        else:
            break
        count *= 2
    step = gemm.PANEL
    return -(-rows // gemm.ROWS) * gemm.ROWS, -(-columns // step) * step


@kernel(types.UniTuple(i64, 2)(any_in2))
def layout(x):
    """Whether x is a row-major matrix transposed (1) or not (0), and the stride of its rows."""
    first, last = x.strides[0] // 4, x.strides[1] // 4
    if (last == 1 or x.shape[1] <= 1) and (first >= x.shape[1] or x.shape[0] <= 1):
        return 0, first
    if (first == 1 or x.shape[0] <= 1) and (last >= x.shape[0] or x.shape[1] <= 1):
        return 1, last
    raise ValueError("product: each matrix must have unit stride on one of its axes")


@kernel(void(any_out2, any_in2, any_in2))
def check(y, a, b):
    if b.shape[0] != a.shape[1] or y.shape[0] != a.shape[0] or y.shape[1] != b.shape[1]:
        raise ValueError("product: shapes must be (M, K) @ (K, N) -> (M, N)")
    if y.size and y.strides[1] != 4 and y.shape[1] > 1:
        raise ValueError("product: y must have unit stride on its last axis")


@kernel(void(any_out2, any_in2, any_in2, types.boolean, i64, i64, i64, i64))
def block(y, a, b, accumulate, i, rows, j, columns):
    """y[i : i + rows, j : j + columns], cut off at the edges of y."""
    m, k = a.shape
    n = b.shape[1]
    ta, lda = layout(a)
    tb, ldb = layout(b)
    ldy = y.strides[0] // 4
    beta = f32(1.0) if accumulate else f32(0.0)
    source_a = address(a, i if ta else i * lda)
    source_b = address(b, j * ldb if tb else j)
    sgemm(
        *(ta, tb, min(rows, m - i), min(columns, n - j), k, f32(1.0)),
        *(source_a, lda, source_b, ldb, beta, address(y, i * ldy + j), ldy),
    )


@kernel(void(any_out2, any_in2, any_in2, types.boolean, i64, i64, i64, i64))
def block_task(y, a, b, accumulate, rows, columns, across, task):
    block(y, a, b, accumulate, task // across * rows, rows, task % across * columns, columns)


@kernel(void(any_out2, any_in2, any_in2, types.boolean))
def product(y, a, b, accumulate):
    """y = a @ b, or y + a @ b.

        a  (M, K)  f32, unit stride on either axis
        b  (K, N)  f32, unit stride on either axis
        y  (M, N)  f32, unit stride on the last axis

    Up to 4 rows against a transposed b use dot products, bound by reading b once.
    """
    check(y, a, b)
    if y.size == 0:
        return
    m, k = a.shape
    n = b.shape[1]
    if m <= FEW_ROWS and layout(b)[0] == 1 and layout(a)[0] == 0:
        step = max(16, -(-(1 << 16) // max(k * m, 1)))
        if n <= step:
            dot_rows(y, a, b, accumulate, 0, n)
        else:
            spans(dot_rows, (y, a, b, accumulate), n, step)
        return
    rows, columns = tile_shape(m, n, k)
    if m * n * k <= SMALL or (rows >= m and columns >= n):
        block(y, a, b, accumulate, 0, m, 0, n)
        return
    across = -(-n // columns)
    given = (y, a, b, accumulate, rows, columns, across)
    each(block_task, given, -(-m // rows) * across)
