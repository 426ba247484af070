"""Parts of a mixture of experts: products of rows with the matrix of their expert, and weighted sums of rows."""

from itertools import pairwise

import numpy as np

from packtrain import kernels
from packtrain.dtypes import BLOCK_TYPES, READABLE, TRAINABLE, dtype_of, f16, f32, i32
from packtrain.engine.ops import arrays, torch_kernels
from packtrain.engine.ops.arrays import check_ids, copy_acc, copy_acc_or_zero, floats, packed, rows
from packtrain.engine.ops.costs import Cost, by_expert, multiplied
from packtrain.engine.ops.matmul import is_matrix
from packtrain.engine.ops.shape import reshape, transpose
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require

ASCENDING = "ids must ascend, as group_rows returns them"


def _check_ascending(op_name, ids, num_experts):
    check_ids(op_name, ids, num_experts, min_id=0)
    if (ids[1:] < ids[:-1]).any():
        raise IndexError(f"{op_name}: {ASCENDING}")


def _expert_spans(name, ids, num_experts):
    """Yield (expert, first row, one past the last) for experts with rows; on `meta`, as if one expert had all rows."""
    check_ids(name, ids, num_experts, min_id=0)
    is_descending = (ids[1:] < ids[:-1]).any()
    expert_ids = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    bounds = torch.searchsorted(ids, expert_ids)
    if not arrays.on_host(ids):
        yield 0, 0, len(ids)
        return
    if bool(is_descending):
        raise IndexError(f"{name}: {ASCENDING}")
    for expert, (row_start, row_end) in enumerate(pairwise(bounds.tolist())):
        if row_start < row_end:
            yield expert, row_start, row_end


# ---- products ------------------------------------------------------------------------------------------------


def _expert_product_spec(
    name: str, x: Tensor, w: Tensor, ids: Tensor, acc: Tensor | None, summed: int, output_axis: int
) -> Spec:
    """Return the spec of rows x times their expert's matrix; name: of x in errors; summed, output_axis: axes of w."""
    is_valid = len(x.shape) == 2 and len(w.shape) == 3 and x.shape[1] == w.shape[summed]
    requirement = f"f32[N, {'EFK'[summed]}] and a readable type's [E, F, K] are needed"
    fact = f"{name} is {x.spec} and w is {w.spec}; {requirement}"
    require(is_valid and x.dtype == f32 and w.dtype in READABLE, fact)
    Spec(x.shape[:1], i32).require(ids=ids)
    return Spec((x.shape[0], w.shape[output_axis])).require(acc=acc)


@op(inplace=(3,), acc=3)
def matmul_id(x: Tensor, w: Tensor, ids: Tensor, acc: Tensor | None = None) -> Spec:
    """Multiply each row of x by the matrix of its expert: y[i] = w[ids[i]] @ x[i] (+ acc[i]). ggml_mul_mat_id.

    x    (N, K)     f32
    w    (E, F, K)  any readable type; f32 may be a transposed view
    ids  (N,)       i32, ascending: rows of one expert are multiplied at once
    y    (N, F)     f32
    """
    return _expert_product_spec("x", x, w, ids, acc, 2, 1)


@matmul_id.vjp
def matmul_id_vjp(dy, y, x, w, ids, acc):
    dw = out_prod_id(dy, x, ids, count=w.shape[0]) if w.dtype in TRAINABLE else None
    dx = matmul_id(dy, transpose(w), ids) if w.dtype == f32 else matmul_id_back(dy, w, ids)
    return dx, dw, None, (None if acc is None else dy)


def _declare_products(op, matrix_of, add_rows):
    """Declare the kernels of NumPy and PyTorch of an op that multiplies rows by their expert's matrix.

    matrix_of  returns the matrix (inputs, outputs) of a weight, for NumPy
    add_rows   torch_kernels.add_product or add_product_back
    """

    def run_numpy(y, x, w, ids, acc):
        _check_ascending(op.name, ids, len(w))
        y[...] = 0 if acc is None else acc
        for e in np.unique(ids):
            y[ids == e] += x[ids == e] @ matrix_of(floats(w[e]))

    def run_torch(y, x, w, ids, acc):
        overwrite = torch_kernels.start_product(y, acc)
        for e, row_start, row_end in _expert_spans(op.name, ids, w.shape[0]):
            add_rows(y[row_start:row_end], x[row_start:row_end], w[e], fresh=overwrite)

    op.kernel("numpy")(run_numpy)
    op.kernel("torch", strided=is_matrix if matrix_of is np.transpose else False)(run_torch)


@matmul_id.kernel("cpu", strided=is_matrix)
def matmul_id_cpu(y, x, w, ids, acc):
    _check_ascending("matmul_id", ids, len(w))
    copy_acc(y, acc)
    if w.dtype == np.float32:
        kernels.experts.matmul_id(y, x, w, ids, acc is not None)
    else:
        kernels.experts.packed_matmul_id(y, x, *packed(rows(w)), len(w), ids, acc is not None)


_declare_products(matmul_id, np.transpose, torch_kernels.add_product)
matmul_id.cost(lambda y, x, w, ids, acc: by_expert(x.shape[0], w, x.shape[1], w.shape[1]))


@matmul_id.samples
def matmul_id_samples():
    cases = ((1,), 1, 1), ((0, 3, 0, 20), 15, 33), ((17, 1, 30), 250, 64), ((3, 2), 5, 256)
    for counts, f, k in cases:
        w, ids = input("w", (len(counts), f, k)), _ascending_ids(counts)
        yield matmul_id(input("x", (sum(counts), k)), w, ids)
        yield matmul_id(input("x", (sum(counts), k)), w, ids, input("acc", (sum(counts), f)))
    transposed = transpose(input("w", (3, 16, 9)))
    yield matmul_id(input("x", (9, 16)), transposed, _ascending_ids((2, 0, 7)))
    for w in _packed_stacks():
        yield matmul_id(input("x", (13, w.shape[2])), w, _ascending_ids((9, 0, 4)))
    yield matmul_id(input("x", (5, 64)), w, _ascending_ids((0, 0, 5)), input("acc", (5, 150)))


@op(inplace=(3,), acc=3)
def matmul_id_back(dy: Tensor, w: Tensor, ids: Tensor, acc: Tensor | None = None) -> Spec:
    """Gradient of matmul_id for x where w is quantized: dx[i] = dy[i] @ w[ids[i]] (+ acc[i]).

    dy   (N, F)     f32
    w    (E, F, K)  any readable type
    ids  (N,)       i32, ascending
    dx   (N, K)     f32
    """
    return _expert_product_spec("dy", dy, w, ids, acc, 1, 2)


@matmul_id_back.vjp
def matmul_id_back_vjp(ddx, dx, dy, w, ids, acc):
    dw = out_prod_id(dy, ddx, ids, count=w.shape[0]) if w.dtype in TRAINABLE else None
    return matmul_id(ddx, w, ids), dw, None, (None if acc is None else ddx)


@matmul_id_back.kernel("cpu")
def matmul_id_back_cpu(dx, dy, w, ids, acc):
    _check_ascending("matmul_id_back", ids, len(w))
    copy_acc(dx, acc)
    args = dtype_of(w).block, *packed(rows(w)), len(w), ids, acc is not None
    kernels.experts.packed_matmul_id_back(dx, dy, *args)


_declare_products(matmul_id_back, lambda w: w, torch_kernels.add_product_back)
matmul_id_back.cost(lambda dx, dy, w, ids, acc: by_expert(dy.shape[0], w, dy.shape[1], w.shape[2]))


@matmul_id_back.samples
def matmul_id_back_samples():
    yield matmul_id_back(input("dy", (5, 7)), input("w", (2, 7, 256)), _ascending_ids((3, 2)))
    for w in _packed_stacks():
        yield matmul_id_back(input("dy", (13, w.shape[1])), w, _ascending_ids((9, 0, 4)))
    yield matmul_id_back(input("dy", (5, 150)), w, _ascending_ids((0, 0, 5)), input("acc", (5, 64)))


@op(inplace=(3,), acc=3)
def out_prod_id(
    a: Tensor, b: Tensor, ids: Tensor, acc: Tensor | None = None, *, count: int
) -> Spec:
    """Sum of outer products of rows by expert: y[ids[i]] += outer(a[i], b[i]), into zeros (or acc).

    a    (N, P)         f32
    b    (N, Q)         f32
    ids  (N,)           i32, ascending, below count
    y    (count, P, Q)  f32; the gradient of matmul_id's w
    """
    is_valid = len(a.shape) == len(b.shape) == 2 and a.shape[:1] == b.shape[:1]
    fact = f"a is {a.spec} and b is {b.spec}; f32[N, P] and f32[N, Q] are needed"
    require(is_valid and a.dtype == f32 and b.dtype == f32, fact)
    Spec(a.shape[:1], i32).require(ids=ids)
    return Spec((count, a.shape[1], b.shape[1])).require(acc=acc)


@out_prod_id.vjp
def out_prod_id_vjp(dy, y, a, b, ids, acc, *, count):
    da, db = matmul_id(b, dy, ids), matmul_id(a, transpose(dy), ids)
    return da, db, None, (None if acc is None else dy)


@out_prod_id.kernel("numpy")
def out_prod_id_numpy(y, a, b, ids, acc, *, count):
    _check_ascending("out_prod_id", ids, count)
    y[...] = 0 if acc is None else acc
    for e in np.unique(ids):
        y[e] += a[ids == e].T @ b[ids == e]


@out_prod_id.kernel("cpu")
def out_prod_id_cpu(y, a, b, ids, acc, *, count):
    _check_ascending("out_prod_id", ids, count)
    copy_acc(y, acc)
    kernels.experts.out_prod_id(y, a, b, ids, acc is not None)


@out_prod_id.kernel("torch")
def out_prod_id_torch(y, a, b, ids, acc, *, count):
    copy_acc_or_zero(y, acc)
    for e, row_start, row_end in _expert_spans("out_prod_id", ids, count):
        torch_kernels.multiply(y[e], a[row_start:row_end].mT, b[row_start:row_end], False)


@out_prod_id.cost
def out_prod_id_cost(y, a, b, ids, acc, *, count):
    (n, p), q = a.shape, b.shape[1]
    return Cost({"multiply": count * multiplied(p, q, -(-n // count)), "pack": float(n * (p + q))})


@out_prod_id.samples
def out_prod_id_samples():
    for counts, p, q in (((1,), 1, 1), ((0, 3, 0, 20), 15, 33), ((17, 0, 30), 250, 64)):
        a, b = input("a", (sum(counts), p)), input("b", (sum(counts), q))
        yield out_prod_id(a, b, _ascending_ids(counts), count=len(counts))
        acc = input("acc", (len(counts), p, q))
        yield out_prod_id(a, b, _ascending_ids(counts), acc, count=len(counts))


# ---- weighted sums of rows -----------------------------------------------------------------------------------


@op(inplace=(3,), acc=3)
def weighted_rows(x: Tensor, ids: Tensor, weights: Tensor, acc: Tensor | None = None) -> Spec:
    """Sum rows by index with weights: y[...] = sum over j of weights[..., j] * x[ids[..., j]] (+ acc).

    x        (N, C)    f32
    ids      (..., k)  i32, with each of the N rows once, as `positions` of group_rows
    weights  (..., k)  f32
    y        (..., C)  f32
    """
    is_valid = len(x.shape) == 2 and ids.spec.size == x.shape[0] and len(ids.shape) > 0
    fact = f"x is {x.spec}, ids {ids.spec}; f32[N, C] and i32[..., k] of N elements are needed"
    require(is_valid and x.dtype == f32 and ids.dtype == i32, fact)
    Spec(ids.shape).require(weights=weights)
    return Spec((*ids.shape[:-1], x.shape[1])).require(acc=acc)


@weighted_rows.vjp
def weighted_rows_vjp(dy, y, x, ids, weights, acc):
    dx, dweights = weighted_rows_back(dy, x, ids, weights)
    return dx, None, dweights, (None if acc is None else dy)


@weighted_rows.kernel("numpy")
def weighted_rows_numpy(y, x, ids, weights, acc):
    check_ids("weighted_rows", ids, len(x), min_id=0)
    y[...] = (x[ids] * weights[..., None]).sum(-2) + (0 if acc is None else acc)


@weighted_rows.kernel("cpu")
def weighted_rows_cpu(y, x, ids, weights, acc):
    check_ids("weighted_rows", ids, len(x), min_id=0)
    copy_acc(y, acc)
    kernels.experts.weighted_rows(rows(y), x, rows(ids), rows(weights), acc is not None)


@weighted_rows.kernel("torch")
def weighted_rows_torch(y, x, ids, weights, acc):
    check_ids("weighted_rows", ids, len(x), min_id=0)
    expert_rows = x.index_select(0, ids.view(-1)).unflatten(0, rows(ids).shape)
    sums = torch.bmm(rows(weights)[:, None], expert_rows)[:, 0]
    rows(y).copy_(sums if acc is None else sums.add_(rows(acc)))


@weighted_rows.samples
def weighted_rows_samples():
    for n, k, c in ((1, 1, 1), (9, 2, 33), (300, 3, 64)):
        inputs = input("x", (n * k, c)), _permuted_ids(n, k), input("weights", (n, k))
        yield weighted_rows(*inputs)
        yield weighted_rows(*inputs, input("acc", (n, c)))
    ids = reshape(_permuted_ids(6, 2), shape=(2, 3, 2))
    yield weighted_rows(input("x", (12, 5)), ids, input("weights", (2, 3, 2)))


@op(inplace=(1,), optional=(0, 1))
def weighted_rows_back(dy: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Spec, ...]:
    """Gradients of weighted_rows: dx[ids[..., j]] = weights[..., j] * dy, dweights[..., j] = dy . x[ids[..., j]]."""
    Spec((*ids.shape[:-1], x.shape[1])).require(dy=dy)
    return Spec(x.shape).require(x=x), Spec(weights.shape).require(weights=weights)


@weighted_rows_back.kernel("numpy")
def weighted_rows_back_numpy(out, dy, x, ids, weights):
    check_ids("weighted_rows_back", ids, len(x), min_id=0)
    dx, dweights = out
    if dweights is not None:
        dweights[...] = (dy[..., None, :] * x[ids]).sum(-1)
    if dx is not None:
        dx[ids] = weights[..., None] * dy[..., None, :]


@weighted_rows_back.kernel("cpu")
def weighted_rows_back_cpu(out, dy, x, ids, weights):
    check_ids("weighted_rows_back", ids, len(x), min_id=0)
    dx, dweights = (arrays.rows_or_absent(t) for t in out)
    kernels.experts.weighted_rows_back(dx, dweights, rows(dy), x, rows(ids), rows(weights))


@weighted_rows_back.kernel("torch")
def weighted_rows_back_torch(out, dy, x, ids, weights):
    check_ids("weighted_rows_back", ids, len(x), min_id=0)
    dx, dweights = out
    dy, ids, weights = rows(dy), rows(ids), rows(weights)
    if dweights is not None:
        expert_rows = x.index_select(0, ids.view(-1)).unflatten(0, ids.shape)
        rows(dweights).copy_(torch.bmm(expert_rows, dy[:, :, None])[:, :, 0])
    if dx is not None:
        row_grads = weights[:, :, None] * dy[:, None]
        dx.index_copy_(0, ids.view(-1).long(), row_grads.flatten(0, 1))


weighted_rows_back.samples(arrays.gradient_samples(weighted_rows, weighted_rows_back))


# ---- for samples ---------------------------------------------------------------------------------------------


def _ascending_ids(counts: tuple[int, ...]) -> Tensor:
    return constant("ids", np.repeat(np.arange(len(counts)), counts), i32)


def _permuted_ids(n: int, k: int) -> Tensor:
    return constant("ids", np.random.default_rng(3).permutation(n * k).reshape(n, k), i32)


def _packed_stacks():
    """Yield sample weights of three experts, one of each kind of storage: f16, and blocks of two sizes."""
    random = np.random.default_rng(1)
    yield constant("w", random.standard_normal((3, 20, 33)).astype(np.float16), f16)
    for name, blocks_shape in (("q4_K", (3, 40, 2)), ("q8_0", (3, 150, 2))):
        bits = random.integers(0, 256, (*blocks_shape, BLOCK_TYPES[name].block_nbytes), np.uint8)
        bits[..., :4] = np.float16([0.01, 0.02]).view(np.uint8)  # scales
        yield constant("w", bits.view(BLOCK_TYPES[name].numpy)[..., 0], BLOCK_TYPES[name])
