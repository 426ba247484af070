"""Sums and their adjoint, broadcasting. The order is fixed; sums are in f64, column sums in f32 by blocks."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32
from packtrain.engine.ops import arrays
from packtrain.engine.ops.arrays import as_matrix, assigned, compiled, f32_rows, flatten, rows
from packtrain.engine.ops.shape import cont, reshape
from packtrain.engine.ops.torch_kernels import sum_chunks, to_sum_dtype
from packtrain.engine.tensor import Spec, Tensor, View, input, op, require


def sum_like(d: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x, given the gradient d of x broadcast: sum d to x's shape."""
    return d if d.spec.shape == x.spec.shape else sum_to(d, shape=x.shape)


@op(view=True)
def broadcast_to(x: Tensor, *, shape: tuple[int, ...]) -> Spec:
    """Repeat x along new or unit axes by strides of zero, as np.broadcast_to; see repeat."""
    padded = (1,) * (len(shape) - len(x.shape)) + x.shape
    is_valid = len(padded) == len(shape) and all(
        n in (1, s) for n, s in zip(padded, shape, strict=True)
    )
    require(is_valid, f"x {x.spec} does not broadcast to {tuple(shape)}")
    strides = (0,) * (len(shape) - len(x.shape)) + x.strides
    steps = tuple(0 if n == 1 != s else b for n, s, b in zip(padded, shape, strides, strict=True))
    return View(tuple(shape), x.dtype, steps)


broadcast_to.vjp(lambda dy, y, x, *, shape: (sum_like(dy, x),))


@broadcast_to.samples
def broadcast_to_samples():
    yield broadcast_to(input("x", (3, 1)), shape=(2, 3, 4))
    yield broadcast_to(input("x", ()), shape=(5,))
    yield cont(broadcast_to(input("x", (3, 1)), shape=(2, 3, 4)))


def repeat(x: Tensor, *, shape: tuple[int, ...]) -> Tensor:
    """Repeat x, of any type, up to sizes that are multiples of its own; new axes come first. ggml_repeat. Unit axes are
    repeated without a copy, see broadcast_to. Rows of a quantized x stay as they are."""
    padded_shape = (1,) * (len(shape) - len(x.shape)) + x.shape
    is_valid = len(padded_shape) == len(shape) and all(
        s == n or (n and s % n == 0) for n, s in zip(padded_shape, shape, strict=True)
    )
    keeps_rows = not x.dtype.quantized or shape[-1:] == x.shape[-1:]
    requirement = "have multiples of its sizes" if keeps_rows else "keep its quantized rows"
    message = f"x is {x.spec}; shape {tuple(shape)} must {requirement}"
    arrays.demand("repeat", is_valid and keeps_rows, message, x)
    if all(n in (1, s) for n, s in zip(padded_shape, shape, strict=True)):
        return broadcast_to(x, shape=tuple(shape))
    num_repeats = [s // n if n else 1 for n, s in zip(padded_shape, shape, strict=True)]
    pairs = [size for n, k in zip(padded_shape, num_repeats, strict=True) for size in (k, n)]
    expanded = reshape(x, shape=tuple(size for n in padded_shape for size in (1, n)))
    return reshape(cont(broadcast_to(expanded, shape=tuple(pairs))), shape=tuple(shape))


@op()
def sum(x: Tensor) -> Spec:
    """y = sum of all elements: x (...) f32, y () f32. ggml_sum."""
    require(x.dtype == f32, f"x is {x.spec}; it must be f32")
    return Spec(())


sum.vjp(lambda dy, y, x: (broadcast_to(dy, shape=x.shape),))
sum.kernel("numpy")(assigned(lambda x: x.sum(dtype=np.float64)))


@sum.kernel("cpu")
def sum_cpu(y, x):
    kernels.reduce.reduce_sum(flatten(y), flatten(x), False)


sum.kernel("torch")(assigned(sum_chunks))
sum.samples(lambda: (sum(input("x", (n,))) for n in (1, 15, 64, 70_000)))


@op()
def sum_rows(x: Tensor) -> Spec:
    """y = sum over the last axis: x (..., C) f32, y (..., 1) f32. ggml_sum_rows."""
    return Spec((*f32_rows(x).shape[:-1], 1))


sum_rows.vjp(lambda dy, y, x: (broadcast_to(dy, shape=x.shape),))
sum_rows.kernel("numpy")(assigned(lambda x: x.sum(-1, keepdims=True, dtype=np.float64)))


sum_rows.kernel("cpu")(compiled("reduce.sum_rows", flatten, rows))
sum_rows.kernel("torch", strided=True)(assigned(lambda x: to_sum_dtype(x).sum(-1, keepdim=True)))


@sum_rows.samples
def sum_rows_samples():
    for c in (1, 15, 63, 129):
        yield sum_rows(input("x", (3, 5, c)))
    yield sum_rows(input("x", (600, 65)))


@op()
def sum_to(x: Tensor, *, shape: tuple[int, ...]) -> Spec:
    """Sum the axes that broadcasting from `shape` to x's shape would repeat. ggml_repeat_back."""
    require(x.dtype == f32, f"x is {x.spec}; it must be f32")
    padded_shape = (1,) * (len(x.shape) - len(shape)) + tuple(shape)
    is_valid = len(padded_shape) == len(x.shape) and all(
        s in (1, n) for s, n in zip(padded_shape, x.shape, strict=True)
    )
    require(is_valid, f"{tuple(shape)} does not broadcast to x {x.spec}")
    return Spec(tuple(shape))


sum_to.vjp(lambda dy, y, x, *, shape: (broadcast_to(dy, shape=x.shape),))


@sum_to.kernel("numpy")
def sum_to_numpy(y, x, *, shape):
    padded_shape = (1,) * (x.ndim - y.ndim) + y.shape
    axes = tuple(i for i, n in enumerate(padded_shape) if n == 1 and x.shape[i] != 1)
    y[...] = x.sum(axes, keepdims=True, dtype=np.float64).reshape(y.shape)


@sum_to.kernel("cpu")
def sum_to_cpu(y, x, *, shape):
    if y.size == 1:
        kernels.reduce.reduce_sum(flatten(y), flatten(x), False)
    elif shape == x.shape[x.ndim - len(shape) :]:
        kernels.reduce.sum_cols(flatten(y), as_matrix(x, x.ndim - y.ndim))
    elif shape == (*x.shape[:-1], 1):
        kernels.reduce.sum_rows(flatten(y), rows(x))
    else:
        padded_shape = (1,) * (x.ndim - y.ndim) + y.shape
        axes = tuple(i for i, n in enumerate(x.shape) if padded_shape[i] != n)
        rest_shape = [n for i, n in enumerate(x.shape) if i not in axes]
        np.add.reduce(x, axes, np.float64, out=y.reshape(rest_shape))


sum_to.kernel("torch", strided=True)(
    assigned(lambda x, *, shape: to_sum_dtype(x).sum_to_size(shape))
)


@sum_to.samples
def sum_to_samples():
    for shape in ((), (17,), (5, 17), (1, 17), (3, 1, 1), (3, 5, 1), (1, 5, 1), (3, 5, 17)):
        yield sum_to(input("x", (3, 5, 17)), shape=shape)
    yield sum_to(input("x", (1000, 64)), shape=(64,))


@op()
def cumsum(x: Tensor, *, reverse: bool = False) -> Spec:
    """Sum along the last axis up to each element, from its end if `reverse`: y[i] = x[0] + ... + x[i]. ggml_cumsum."""
    return f32_rows(x)


cumsum.vjp(lambda dy, y, x, *, reverse: (cumsum(dy, reverse=not reverse),))


@cumsum.kernel("numpy")
def cumsum_numpy(y, x, *, reverse):
    direction = slice(None, None, -1 if reverse else 1)
    np.cumsum(x[..., direction], -1, np.float64, out=y[..., direction])


cumsum.kernel("cpu")(compiled("reduce.running_sums", rows, rows, "reverse"))


@cumsum.kernel("torch", strided=True)
def cumsum_torch(y, x, *, reverse):
    flip_axes = (-1,) if reverse else ()
    y.copy_(to_sum_dtype(x).flip(flip_axes).cumsum(-1).flip(flip_axes))


@cumsum.samples
def cumsum_samples():
    yield cumsum(input("x", (3, 5, 17)))
    yield cumsum(input("x", (4, 300)), reverse=True)
    yield cumsum(input("x", (600, 65)))
