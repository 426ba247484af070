"""Routing tokens to experts: the largest of a token's logits, and sorting rows by expert.

The number of rows of an expert depends on data; all shapes are static. Ids have no gradient, the chosen logits do.
"""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32, i32
from packtrain.engine.ops import arrays
from packtrain.engine.ops.arrays import assigned, check_ids, f32_rows, flatten, rows
from packtrain.engine.ops.shape import reshape
from packtrain.engine.ops.torch_kernels import check_ids as torch_check_ids
from packtrain.engine.ops.torch_kernels import top_k_indices, torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require


@op()
def top_k(x: Tensor, *, k: int) -> Spec:
    """Find the indices of the k largest along the last axis, largest first; the lower index on ties. ggml_top_k.

    x    (..., E)  f32
    ids  (..., k)  i32
    """
    f32_rows(x)
    require(0 < k <= x.shape[-1], f"k is {k}; it must be 1 to {x.shape[-1]}, the last axis of x")
    return Spec((*x.shape[:-1], k), i32)


top_k.kernel("numpy")(assigned(lambda x, *, k: np.argsort(-x, axis=-1, kind="stable")[..., :k]))


@top_k.kernel("cpu")
def top_k_cpu(ids, x, *, k):
    kernels.experts.top_k(rows(ids), rows(x))


@top_k.kernel("torch")
def top_k_torch(ids, x, *, k):
    rows(ids).copy_(top_k_indices(rows(x), k))


@top_k.samples
def top_k_samples():
    for n, e, k in ((1, 1, 1), (3, 8, 2), (17, 64, 8), (300, 65, 5)):
        yield top_k(input("x", (n, e)), k=k)
    yield top_k(input("x", (2, 3, 4)), k=4)
    yield top_k(constant("x", np.array([[1.0, 3, 3, 1, 3], [0, 0, 0, 0, 0]])), k=4)


@op()
def take(x: Tensor, ids: Tensor) -> Spec:
    """Take elements of each row by index: y[..., j] = x[..., ids[..., j]].

    x    (..., E)  f32
    ids  (..., k)  i32
    y    (..., k)  f32
    """
    is_valid = x.shape[:-1] == ids.shape[:-1] and len(x.shape) == len(ids.shape) > 0
    fact = f"x is {x.spec} and ids is {ids.spec}; f32[..., E] and i32[..., k] are needed"
    require(is_valid and x.dtype == f32 and ids.dtype == i32, fact)
    return Spec(ids.shape)


@take.vjp
def take_vjp(dy, y, x, ids):
    return take_back(dy, ids, width=x.shape[-1]), None


@take.kernel("numpy")
def take_numpy(y, x, ids):
    check_ids("take", ids, x.shape[-1], min_id=0)
    y[...] = np.take_along_axis(x, ids, -1)


@take.kernel("cpu")
def take_cpu(y, x, ids):
    check_ids("take", ids, x.shape[-1], min_id=0)
    kernels.experts.take(rows(y), rows(x), rows(ids))


@take.kernel("torch")
def take_torch(y, x, ids):
    torch_check_ids("take", ids, x.shape[-1], min_id=0)
    torch.gather(x, -1, ids.long(), out=y)


@take.samples
def take_samples():
    for n, e, k in ((1, 1, 1), (3, 8, 2), (17, 64, 8)):
        yield take(input("x", (n, e)), _sample_choices(n, e, k))
    yield take(input("x", (2, 3, 4)), reshape(_sample_choices(6, 4, 3), shape=(2, 3, 3)))


@op()
def take_back(dy: Tensor, ids: Tensor, *, width: int) -> Spec:
    """Add dy into zeros by index: dx[..., ids[..., j]] += dy[..., j]."""
    fact = f"dy is {dy.spec} and ids is {ids.spec}; f32[..., k] and i32[..., k] are needed"
    require(dy.spec == Spec(ids.shape) and ids.dtype == i32, fact)
    return Spec((*dy.shape[:-1], width))


take_back.vjp(lambda ddx, dx, dy, ids, *, width: (take(ddx, ids), None))


@take_back.kernel("numpy")
def take_back_numpy(dx, dy, ids, *, width):
    check_ids("take_back", ids, width, min_id=0)
    dx[...] = 0
    np.add.at(rows(dx), (np.arange(len(rows(ids)))[:, None], rows(ids)), rows(dy))


@take_back.kernel("cpu")
def take_back_cpu(dx, dy, ids, *, width):
    check_ids("take_back", ids, width, min_id=0)
    kernels.experts.take_back(rows(dx), rows(dy), rows(ids))


@take_back.kernel("torch")
def take_back_torch(dx, dy, ids, *, width):
    torch_check_ids("take_back", ids, width, min_id=0)
    dx.zero_().scatter_add_(-1, ids.long(), dy)


@take_back.samples
def take_back_samples():
    yield from arrays.gradient_samples(take, take_back)()
    repeated_ids = constant("ids", np.array([[1, 1, 0]]), i32)
    yield take_back(input("dy", (1, 3)), repeated_ids, width=2)


@op()
def group_rows(ids: Tensor, *, groups: int) -> tuple[Spec, ...]:
    """Sort the choices of all rows by group, stably.

    Rows are sorted and gathered once, and gradients are runs of a group, too; ggml's mul_mat_id sorts in each product.

    ids        (..., k)  i32, from 0 to groups - 1
    row_ids    (N,)      i32, N = ids.size: the row that a choice came from
    group_ids  (N,)      i32, ascending: the chosen groups
    positions  (..., k)  i32: the new position of each choice, so group_ids[positions] = ids
    """
    require(ids.dtype == i32 and len(ids.shape) > 0, f"ids is {ids.spec}; it must be i32[..., k]")
    return Spec((ids.spec.size,), i32), Spec((ids.spec.size,), i32), ids.spec


group_rows.workspace("cpu")(lambda ids, *, groups: (Spec((groups,), i32),))


@group_rows.kernel("numpy")
def group_rows_numpy(out, ids, *, groups):
    check_ids("group_rows", ids, groups, min_id=0)
    row_ids, group_ids, positions = out
    order = np.argsort(flatten(ids), kind="stable")
    row_ids[...], group_ids[...] = order // ids.shape[-1], flatten(ids)[order]
    positions.flat[order] = np.arange(ids.size)


@group_rows.kernel("cpu")
def group_rows_cpu(out, ids, *, groups, work):
    check_ids("group_rows", ids, groups, min_id=0)
    row_ids, group_ids, positions = out
    kernels.experts.group_rows(row_ids, group_ids, rows(positions), rows(ids), work[0])


@group_rows.kernel("torch")
def group_rows_torch(out, ids, *, groups):
    torch_check_ids("group_rows", ids, groups, min_id=0)
    row_ids, group_ids, positions = out
    sorted_ids, order = ids.view(-1).sort(stable=True)
    row_ids.copy_(order // ids.shape[-1])
    group_ids.copy_(sorted_ids)
    new_positions = torch.arange(len(order), dtype=torch.int32, device=ids.device)
    positions.view(-1).scatter_(0, order, new_positions)


@group_rows.samples
def group_rows_samples():
    for n, e, k in ((1, 1, 1), (3, 8, 2), (170, 64, 8)):
        yield from group_rows(_sample_choices(n, e, k), groups=e)


def _sample_choices(n: int, e: int, k: int) -> Tensor:
    """Return k distinct choices of e for each of n rows."""
    ids = (np.arange(n)[:, None] * 5 + np.arange(k) * 3) % e
    return constant("ids", ids, i32)
