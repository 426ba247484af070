"""Views (the same bytes with another shape or strides), and dense copies."""

import math
from collections.abc import Sequence

import numpy as np

from packtrain.engine.ops.arrays import copy_acc_or_zero, demand
from packtrain.engine.ops.torch_kernels import BlockArray
from packtrain.engine.tensor import Spec, Tensor, View, input, op, require


def _strides_for(x: Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return strides with which x can be viewed in another shape; None if that needs a copy."""
    if x.dense:
        return Spec(shape, x.dtype).strides
    runs: list[tuple[int, int]] = []  # axes, merged where they are contiguous
    for n, step in zip(x.shape, x.strides, strict=True):
        if n == 1:
            continue
        is_contiguous = runs and runs[-1][1] == n * step
        runs[-1:] = [(runs[-1][0] * n, step)] if is_contiguous else [*runs[-1:], (n, step)]
    strides = []
    for n in reversed(shape):
        if n == 1:
            strides.append(x.dtype.block_nbytes)
            continue
        if not runs or runs[-1][0] % n:
            return None
        size, step = runs.pop()
        strides.append(step)
        if size != n:
            runs.append((size // n, step * n))
    return tuple(reversed(strides))


@op(view=True)
def reshape(x: Tensor, *, shape: tuple[int, ...]) -> Spec:
    """View the elements in another shape, without a copy; raises if that needs a copy: use cont first. ggml_reshape."""
    shape, (x_shape, dtype) = tuple(map(int, shape)), (x.spec.shape, x.spec.dtype)
    size = math.prod(x_shape)
    fact = f"x {{}} has {size} elements, shape {shape} has a different number"
    require(math.prod(shape) == size and min(shape, default=0) >= 0, fact, x)
    keeps_rows = dtype.block == 1 or shape[-1:] == x_shape[-1:]
    require(keeps_rows, f"x {{}} is quantized, so its rows must stay {x_shape[-1:]} wide", x)
    strides = _strides_for(x, shape)
    message = f"x {{}} with strides {x.strides} cannot become {shape} without a copy; use cont"
    require(strides is not None, message, x)
    return View(shape, dtype, strides or ())


@reshape.vjp
def reshape_vjp(dy, y, x, *, shape):
    return (reshape(dy if dy.dense else cont(dy), shape=x.shape),)


@op(view=True)
def permute(x: Tensor, *, axes: tuple[int, ...]) -> Spec:
    """Put axes into another order, as np.transpose. ggml_permute, with NumPy's meaning of axes."""
    shape, dtype = x.spec.shape, x.spec.dtype
    fact = f"axes {axes} are not a permutation of the {len(shape)} axes of x"
    require(sorted(axes) == list(range(len(shape))), fact)
    keeps_rows = dtype.block == 1 or axes[-1] == len(axes) - 1
    require(keeps_rows, "x {} is quantized, so its rows stay last", x)
    strides = tuple(map(x.strides.__getitem__, axes))
    return View(tuple(map(shape.__getitem__, axes)), dtype, strides)


@permute.vjp
def permute_vjp(dy, y, x, *, axes):
    return (permute(dy, axes=tuple(sorted(range(len(axes)), key=lambda i: axes[i]))),)


def transpose(x: Tensor) -> Tensor:
    """View x (..., M, N) as (..., N, M). ggml_transpose."""
    n = len(x.spec.shape)
    return permute(x, axes=(*range(n - 2), n - 1, n - 2))


@op(view=True)
def narrow(x: Tensor, *, axis: int, start: int, length: int) -> Spec:
    """View x[..., start : start + length, ...] along one axis. ggml_view."""
    require(0 <= axis < len(x.shape), f"axis {axis} is not an axis of x {x.spec}")
    fact = f"{start}:{start + length} is outside axis {axis} of x {x.spec}"
    require(0 <= start <= start + length <= x.shape[axis], fact)
    fact = f"x {x.spec} is quantized and can only be split between rows"
    require(not x.dtype.quantized or axis < len(x.shape) - 1, fact)
    shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
    return View(shape, x.dtype, x.strides, start * x.strides[axis])


@narrow.vjp
def narrow_vjp(dy, y, x, *, axis, start, length):
    return (narrow_back(dy, axis=axis, start=start, size=x.shape[axis]),)


@reshape.samples
def reshape_samples():
    yield reshape(input("x", (4, 6)), shape=(2, 2, 3, 2))
    yield reshape(permute(input("x", (2, 3, 4)), axes=(1, 0, 2)), shape=(3, 2, 2, 2))
    yield reshape(narrow(input("x", (5, 6)), axis=0, start=1, length=4), shape=(2, 12))
    yield reshape(narrow(input("x", (5, 6)), axis=1, start=2, length=3), shape=(5, 3, 1))


@permute.samples
def permute_samples():
    yield permute(input("x", (2, 3, 4)), axes=(2, 0, 1))
    yield transpose(input("x", (5, 3)))


@narrow.samples
def narrow_samples():
    yield narrow(input("x", (5, 4)), axis=0, start=1, length=3)
    yield narrow(input("x", (5, 4)), axis=1, start=0, length=1)


@op()
def cont(x: Tensor) -> Spec:
    """Make a dense copy of x, of any type. ggml_cont, ggml_dup."""
    return x.spec


cont.vjp(lambda dy, y, x: (dy,))


@cont.kernel("cpu", strided=True)
@cont.kernel("numpy")
def cont_kernel(y, x):
    np.copyto(y, x)


@cont.kernel("torch", strided=True)
def cont_torch(y, x):
    if isinstance(x, BlockArray):
        y, x = y.raw, x.raw
    y.copy_(x)


@cont.samples
def cont_samples():
    yield cont(input("x", (3, 5)))
    yield cont(permute(input("x", (2, 3, 4)), axes=(2, 0, 1)))
    yield cont(narrow(transpose(input("x", (64, 65))), axis=0, start=3, length=17))


@op(inplace=(1,), acc=1)
def narrow_back(dy: Tensor, acc: Tensor | None = None, *, axis: int, start: int, size: int) -> Spec:
    """Add dy at `start` of one axis to acc, or to zeros that are `size` long there: the gradient of narrow."""
    is_number = dy.dtype.numpy.kind in "fi"
    require(is_number, f"dy is {dy.spec}; it must be of numbers that can be added")
    require(0 <= axis < len(dy.shape), f"axis {axis} is not an axis of dy {dy.spec}")
    end = start + dy.shape[axis]
    require(0 <= start <= end <= size, f"{start}:{end} is outside 0:{size}")
    return Spec((*dy.shape[:axis], size, *dy.shape[axis + 1 :]), dy.dtype).require(acc=acc)


@narrow_back.vjp
def narrow_back_vjp(ddx, dx, dy, acc, *, axis, start, size):
    dy_grad = narrow(ddx, axis=axis, start=start, length=dy.shape[axis])
    return dy_grad, None if acc is None else ddx


@narrow_back.kernel("torch", strided=lambda index, t: index == 0)
@narrow_back.kernel("cpu", strided=lambda index, t: index == 0)
@narrow_back.kernel("numpy")
def narrow_back_kernel(dx, dy, acc, *, axis, start, size):
    copy_acc_or_zero(dx, acc)
    dx[(slice(None),) * axis + (slice(start, start + dy.shape[axis]),)] += dy


def concat(parts: Sequence[Tensor], *, axis: int) -> Tensor:
    """Join tensors along an axis, counted from the end if below 0. ggml_concat."""
    spec_list = ", ".join(str(part.spec) for part in parts)
    axis_counts = {len(part.shape) for part in parts}
    is_valid = len(axis_counts) == 1 and -min(axis_counts) <= axis < min(axis_counts)
    message = f"the parts are {spec_list or 'none'}; axis {axis} must be one of each"
    demand("concat", is_valid, message, *parts)
    axis %= min(axis_counts)
    is_compatible = len({(*p.shape[:axis], *p.shape[axis + 1 :], p.dtype) for p in parts}) == 1
    message = f"the parts are {spec_list}; they may differ along axis {axis} only"
    demand("concat", is_compatible, message, *parts)
    size, start, result = sum(part.shape[axis] for part in parts), 0, None
    for part in parts:
        result = narrow_back(part, result, axis=axis, start=start, size=size)
        start += part.shape[axis]
    assert result is not None
    return result


@narrow_back.samples
def narrow_back_samples():
    yield narrow_back(input("dy", (3, 4)), axis=0, start=1, size=5)
    yield narrow_back(input("dy", (3, 4)), axis=1, start=0, size=4)
    yield narrow_back(input("dy", (3, 4)), input("acc", (3, 6)), axis=1, start=2, size=6)
