"""Rows by index: embeddings, the KV cache, and their gradients. A negative index means no row."""

from functools import partial

import numpy as np

from packtrain import kernels
from packtrain.dtypes import BLOCK_TYPES, READABLE, TRAINABLE, dtype_of, f16, f32, i32
from packtrain.engine.backends import triton
from packtrain.engine.ops import arrays
from packtrain.engine.ops.arrays import as_matrix, flatten, floats, packed, run_replayable
from packtrain.engine.ops.costs import Cost
from packtrain.engine.ops.torch_kernels import BlockArray, blocks, torch, unpack
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require, state
from packtrain.kernels.quant import quantized_arrays

ADD_ROWS = triton.lazy_kernel("rows", "add_rows")
Q8_0 = BLOCK_TYPES["q8_0"]


def _raise_if_invalid(name, ids, num_rows, position):
    """Raise IndexError for the id at `position`, which a kernel returned; it is negative if all ids are valid."""
    if position >= 0:
        raise arrays.invalid_id(name, ids, position, num_rows)


@op()
def get_rows(w: Tensor, ids: Tensor) -> Spec:
    """Rows of w by index: y[i] = w[ids[i]], zeros where ids[i] < 0. ggml_get_rows.

    w    (V, ...)         any readable type
    ids  (...)            i32
    y    ids.shape + ...  f32
    """
    fact = f"w is {w.spec}; it must have at least two axes and a type that can be read"
    require(w.dtype in READABLE and len(w.shape) >= 2, fact)
    require(ids.dtype == i32, f"ids is {ids.spec}; it must be i32")
    return Spec(ids.shape + w.shape[1:])


@get_rows.vjp
def get_rows_vjp(dy, y, w, ids):
    return (get_rows_back(dy, ids, shape=w.shape) if w.dtype in TRAINABLE else None), None


@get_rows.kernel("numpy")
def get_rows_numpy(y, w, ids):
    arrays.check_ids("get_rows", ids, len(w))
    y[...] = floats(w[np.maximum(ids, 0)])
    y[ids < 0] = 0


@get_rows.kernel("cpu")
def get_rows_cpu(y, w, ids):
    args = as_matrix(y, ids.ndim), *packed(as_matrix(w, 1)), flatten(ids)
    raise_if_invalid = partial(_raise_if_invalid, "get_rows", ids, len(w))
    return run_replayable(kernels.rows.get_rows, *args, check=raise_if_invalid)


@get_rows.kernel("torch")
def get_rows_torch(y, w, ids):
    arrays.check_ids("get_rows", ids, w.shape[0])
    row_ids, y_rows = ids.view(-1).clamp(min=0), as_matrix(y, ids.ndim)
    if isinstance(w, BlockArray):
        unpack(y, BlockArray(w.raw.index_select(0, row_ids).unflatten(0, ids.shape), w.dtype))
    elif w.dtype == y.dtype:
        torch.index_select(as_matrix(w, 1), 0, row_ids, out=y_rows)
    else:
        y_rows.copy_(as_matrix(w, 1).index_select(0, row_ids))
    y_rows.masked_fill_((ids.view(-1) < 0)[:, None], 0)


@get_rows.cost
def get_rows_cost(y, w, ids):
    # reads as much of the table as it writes
    return Cost(nbytes=2 * y.spec.nbytes + ids.spec.nbytes)


@get_rows.samples
def get_rows_samples():
    for n, v, c in ((1, 1, 1), (17, 5, 15), (270, 9, 65), (3, 2, 256)):
        yield get_rows(input("w", (v, c)), _sample_ids(n, v))
    ids = constant("ids", np.array([[0, 5, 5], [-1, 2, 1]]), i32)
    yield get_rows(input("w", (6, 2, 4)), ids)
    block_bytes = np.arange(6 * 2 * 34, dtype=np.uint8).reshape(6, 2, 34)
    block_bytes[..., :2] = np.float16([0.01]).view(np.uint8)  # scales
    yield get_rows(constant("w", block_bytes.view(Q8_0.numpy)[..., 0], Q8_0), ids)


@op(inplace=(2,), acc=2)
def get_rows_back(
    dy: Tensor, ids: Tensor, acc: Tensor | None = None, *, shape: tuple[int, ...]
) -> Spec:
    """Add rows of dy into zeros of `shape` (or acc) by index, in order: dw[ids[i]] += dy[i]. ggml_get_rows_back."""
    Spec(ids.shape + shape[1:]).require(dy=dy)
    Spec(shape).require(acc=acc)
    return Spec(shape)


@get_rows_back.vjp
def get_rows_back_vjp(ddw, dw, dy, ids, acc, *, shape):
    return get_rows(ddw, ids), None, (None if acc is None else ddw)


@get_rows_back.kernel("numpy")
def get_rows_back_numpy(dw, dy, ids, acc, *, shape):
    arrays.check_ids("get_rows_back", ids, len(dw))
    dw[...] = 0 if acc is None else acc
    np.add.at(dw, ids[ids >= 0], dy[ids >= 0])


@get_rows_back.kernel("cpu")
def get_rows_back_cpu(dw, dy, ids, acc, *, shape):
    arrays.copy_acc(dw, acc)
    invalid_position = kernels.rows.get_rows_back(
        as_matrix(dw, 1), as_matrix(dy, ids.ndim), flatten(ids), acc is not None
    )
    _raise_if_invalid("get_rows_back", ids, len(dw), invalid_position)


@get_rows_back.kernel("torch")
def get_rows_back_torch(dw, dy, ids, acc, *, shape):
    arrays.check_ids("get_rows_back", ids, len(dw))
    arrays.copy_acc_or_zero(dw, acc)
    ids = ids.view(-1)
    dy_rows = as_matrix(dy, dy.ndim - dw.ndim + 1)
    if dw.numel() and triton.runs_on(dw):
        ADD_ROWS(as_matrix(dw, 1), dy_rows, ids)
    elif dw.numel():
        dy_rows = dy_rows.masked_fill((ids < 0)[:, None], 0)
        as_matrix(dw, 1).index_add_(0, ids.clamp(min=0), dy_rows)


@get_rows_back.cost
def get_rows_back_cost(dw, dy, ids, acc, *, shape):
    touched = 3 * dy.spec.nbytes + ids.spec.nbytes  # reads dy and rows of dw, and writes those
    return Cost(nbytes=touched + (dw.spec.nbytes if acc is None else 0))


@get_rows_back.samples
def get_rows_back_samples():
    for n, v, c in ((1, 1, 1), (17, 5, 15), (270, 9, 65)):
        yield get_rows_back(input("dy", (n, c)), _sample_ids(n, v), shape=(v, c))
    yield get_rows_back(input("dy", (5, 4)), _sample_ids(5, 3), input("acc", (3, 4)), shape=(3, 4))


@op(writes=(0,), repeatable=True)
def set_rows(leaf: Tensor, x: Tensor, ids: Tensor) -> tuple[Spec, ...]:
    """Write rows of x into a leaf by index: leaf[ids[i]] = x[i]. ggml_set_rows; fills a KV cache.

    leaf  (V, ...)         f32, f16 or q8_0
    x     ids.shape + ...  f32
    ids   (...)            i32: distinct, or negative to write nothing
    Returns the leaf's new handle (as a tuple of one).
    """
    fact = f"leaf is {leaf.spec} and x is {x.spec}; leaf must be f32, f16 or q8_0, x f32"
    require(leaf.dtype in (f32, f16, Q8_0) and x.dtype == f32, fact)
    is_valid = x.shape == ids.shape + leaf.shape[1:] and ids.dtype == i32
    fact = f"x is {x.spec}, ids {ids.spec}; it must be {ids.shape + leaf.shape[1:]} with i32 ids"
    require(is_valid, fact)
    return (leaf.spec,)


@set_rows.vjp
def set_rows_vjp(dy, y, leaf, x, ids):
    return zero_rows(dy[0], ids), get_rows(dy[0], ids), None


@set_rows.kernel("numpy")
def set_rows_numpy(out, leaf, x, ids):
    arrays.check_ids("set_rows", ids, len(leaf))
    x_rows = x[ids >= 0]
    with np.errstate(over="ignore"):  # overflow of f16 becomes infinite
        leaf[ids[ids >= 0]] = (
            quantized_arrays.quantize(x_rows, Q8_0) if dtype_of(leaf) == Q8_0 else x_rows
        )


@set_rows.kernel("cpu")
def set_rows_cpu(out, leaf, x, ids):
    source_args = as_matrix(x, ids.ndim), flatten(ids)
    if leaf.dtype == np.float32:
        kernel, leaf_args = kernels.rows.set_rows, (as_matrix(leaf, 1),)
    else:
        type_number, leaf_blocks = packed(as_matrix(leaf, 1))
        kernel, leaf_args = kernels.rows.pack_rows, (type_number == f16.number, leaf_blocks)
    check = partial(_raise_if_invalid, "set_rows", ids, len(leaf))
    return run_replayable(kernel, *leaf_args, *source_args, check=check)


@set_rows.kernel("torch")
def set_rows_torch(out, leaf, x, ids):
    arrays.check_ids("set_rows", ids, leaf.shape[0])
    is_packed = isinstance(leaf, BlockArray)
    leaf_rows = as_matrix(leaf.raw if is_packed else leaf, 1)
    x_rows = as_matrix(blocks().packed_q8_0(x) if is_packed else x.to(leaf.dtype), ids.ndim)
    ids = ids.view(-1).long()
    if len(ids):  # negative ids repeat the write of the largest id, or rewrite what is there
        max_id, max_id_position = ids.max(0)
        is_skipped, row_indices = ids < 0, torch.arange(len(ids), device=ids.device)
        x_rows = x_rows.index_select(0, torch.where(is_skipped, max_id_position, row_indices))
        x_rows = torch.where(max_id < 0, leaf_rows[:1], x_rows)
        leaf_rows.index_copy_(0, torch.where(is_skipped, max_id.clamp(min=0), ids), x_rows)


set_rows.cost(lambda out, leaf, x, ids: Cost(nbytes=2 * x.spec.nbytes + ids.spec.nbytes))


@set_rows.samples
def set_rows_samples():
    for ids in ([0], [3, 0, -1, 2], [[4, 1], [-1, 0]]):
        row_ids = constant("ids", np.array(ids), i32)
        yield set_rows(state("cache", (5, 2, 15)), input("x", (*row_ids.shape, 2, 15)), row_ids)[0]
    backwards = constant("ids", np.arange(590)[::-1], i32)
    yield set_rows(state("cache", (600, 30)), input("x", (590, 30)), backwards)[0]


@op(inplace=(0,))
def zero_rows(x: Tensor, ids: Tensor) -> Spec:
    """Copy x (V, ...) f32 with rows `ids` i32 set to zero: the gradient of set_rows for the overwritten leaf."""
    fact = f"x is {x.spec} and ids is {ids.spec}; they must be f32 and i32"
    require(ids.dtype == i32 and x.dtype == f32, fact)
    return x.spec


zero_rows.vjp(lambda dy, y, x, ids: (zero_rows(dy, ids), None))


@zero_rows.kernel("numpy")
def zero_rows_numpy(y, x, ids):
    arrays.check_ids("zero_rows", ids, len(x))
    y[...] = x
    y[ids[ids >= 0]] = 0


@zero_rows.kernel("cpu")
def zero_rows_cpu(y, x, ids):
    invalid_position = kernels.rows.zero_rows(as_matrix(y, 1), as_matrix(x, 1), flatten(ids))
    _raise_if_invalid("zero_rows", ids, len(x), invalid_position)


@zero_rows.kernel("torch")
def zero_rows_torch(y, x, ids):
    arrays.check_ids("zero_rows", ids, len(x))
    is_zeroed = torch.zeros(len(x) + 1, dtype=torch.bool, device=x.device)
    ids = ids.view(-1).long()
    is_zeroed[torch.where(ids < 0, len(x), ids)] = True
    y.copy_(x)
    as_matrix(y, 1).masked_fill_(is_zeroed[:-1, None], 0)


@zero_rows.samples
def zero_rows_samples():
    for n, v, c in ((1, 1, 1), (3, 5, 15), (17, 270, 65)):
        yield zero_rows(input("x", (v, c)), _sample_ids(n, v))


def _sample_ids(n: int, num_rows: int) -> Tensor:
    return constant("ids", (np.arange(n) * 7 + 3) % num_rows, i32)
