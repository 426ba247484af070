"""Matrix products. Every precision and every weight type of a product will be a kernel in this room."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32
from packtrain.ops.arrays import rows, start_with
from packtrain.ops.shape import transpose
from packtrain.tensor import Spec, Tensor, input, op, want


def _is_matrix(index: int, t: Tensor) -> bool:
    """Whether w is a matrix as BLAS knows it, or a transposed one: one axis contiguous, the other apart."""
    if index != 1:
        return False
    (row, column), (n, k) = t.strides[-2:], t.shape[-2:]
    return (column == 4 and row >= 4 * k) or (row == 4 and column >= 4 * n)


@op(inplace=(2,), acc=2)
def matmul(x: Tensor, w: Tensor, acc: Tensor | None = None) -> Spec:
    """Multiply rows of x by rows of w: y = x @ w.T (+ acc). ggml_mul_mat.

    x    (..., K)   f32
    w    (N, K)     f32, or (..., N, K) with the leading axes of x; a transposed view is as good
    acc  (..., N)   f32
    y    (..., N)   f32
    """
    want(x.dtype == f32 and w.dtype == f32, f"x is {x.spec} and w is {w.spec}; both must be f32")
    want(
        len(x.shape) >= 1 and len(w.shape) >= 2,
        f"x is {x.spec} and w is {w.spec}; w needs two axes",
    )
    k, rows_k = x.shape[-1], w.shape[-1]
    want(
        k == rows_k, f"last axis of x {x.spec} ({k}) must equal last axis of w {w.spec} ({rows_k})"
    )
    batched = len(w.shape) > 2
    want(
        not batched or w.shape[:-2] == x.shape[:-2],
        f"leading axes of w {w.spec} must be those of x {x.spec}",
    )
    y = Spec((*x.shape[:-1], w.shape[-2]))
    want(acc is None or acc.spec == y, f"acc is {acc and acc.spec}; it must be {y}")
    return y


@matmul.vjp
def matmul_vjp(dy, y, x, w, acc):
    batched = len(w.shape) > 2
    # dw is written first: x is then no longer needed when dx comes to be
    dw = matmul(transpose(dy), transpose(x)) if batched else out_prod(dy, x)
    return matmul(dy, transpose(w)), dw, (None if acc is None else dy)


@matmul.kernel("numpy")
def matmul_numpy(y, x, w, acc):
    product = np.matmul(x, np.swapaxes(w, -1, -2))
    y[...] = product if acc is None else product + acc


@matmul.kernel("cpu", strided=_is_matrix)
def matmul_cpu(y, x, w, acc):
    if acc is not None:
        start_with(y, acc)
    if w.ndim == 2:
        kernels.matmul.product(rows(y), rows(x), w.T, acc is not None)
        return
    for at in np.ndindex(w.shape[:-2]):
        kernels.matmul.product(y[at], x[at], w[at].T, acc is not None)


@matmul.samples
def matmul_samples():
    for m, n, k in (
        (1, 1, 1),
        (3, 15, 16),
        (17, 64, 63),
        (9, 65, 33),
        (70, 300, 129),
        (130, 1100, 129),
        (1, 65, 17),
        (2, 700, 65),
        (4, 17, 64),
    ):
        yield matmul(input("x", (m, k)), input("w", (n, k)))
    yield matmul(input("x", (2, 3, 16)), transpose(input("w", (16, 8))))
    yield matmul(input("x", (5, 7)), input("w", (9, 7)), input("acc", (5, 9)))
    yield matmul(input("x", (2, 3, 5, 8)), input("w", (2, 3, 4, 8)))
    yield matmul(input("x", (2, 5, 8)), transpose(input("w", (2, 8, 4))), input("acc", (2, 5, 4)))
    yield matmul(transpose(input("x", (8, 5))), input("w", (3, 8)))


@op(inplace=(2,), acc=2)
def out_prod(a: Tensor, b: Tensor, acc: Tensor | None = None) -> Spec:
    """Sum of outer products over all leading axes: y = a.T @ b (+ acc). ggml_out_prod; a weight's gradient.

    a    (..., P)   f32
    b    (..., Q)   f32, leading axes as a
    acc  (P, Q)     f32
    y    (P, Q)     f32
    """
    want(a.dtype == f32 and b.dtype == f32, f"a is {a.spec} and b is {b.spec}; both must be f32")
    want(a.shape[:-1] == b.shape[:-1], f"leading axes of a {a.spec} and b {b.spec} must be equal")
    y = Spec((a.shape[-1], b.shape[-1]))
    want(acc is None or acc.spec == y, f"acc is {acc and acc.spec}; it must be {y}")
    return y


@out_prod.vjp
def out_prod_vjp(dy, y, a, b, acc):
    return matmul(b, dy), matmul(a, transpose(dy)), (None if acc is None else dy)


@out_prod.kernel("numpy")
def out_prod_numpy(y, a, b, acc):
    product = rows(a).T @ rows(b)
    y[...] = product if acc is None else product + acc


@out_prod.kernel("cpu")
def out_prod_cpu(y, a, b, acc):
    if acc is not None:
        start_with(y, acc)
    kernels.matmul.product(y, rows(a).T, rows(b), acc is not None)


@out_prod.samples
def out_prod_samples():
    for r, p, q in ((1, 1, 1), (17, 3, 16), (64, 65, 15), (300, 63, 70), (300, 300, 200)):
        yield out_prod(input("a", (r, p)), input("b", (r, q)))
    yield out_prod(input("a", (2, 3, 5)), input("b", (2, 3, 4)), input("acc", (5, 4)))
