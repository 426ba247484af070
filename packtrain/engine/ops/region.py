"""Regions of a tensor, along all axes at once: viewed, added to and replaced. ggml_view, ggml_acc and ggml_set.

A region is `shape` elements from `start` on, each `step` from the one before, along every axis.
"""

import builtins
from collections.abc import Sequence

from packtrain.engine.ops.arrays import copy_acc_or_zero, demand
from packtrain.engine.tensor import Spec, Tensor, View, input, op, require

Axes = tuple[int, ...]


def _region_slices(start: Axes, shape: Axes, step: Axes) -> tuple[builtins.slice, ...]:
    stops = (s + (n - 1) * k + 1 if n else s for s, n, k in zip(start, shape, step, strict=True))
    return tuple(map(builtins.slice, start, stops, step))


def _step_or_ones(step: Axes, start: Axes) -> Axes:
    return step or (1,) * len(start)


def _check_region(name: str, x: Spec, start: Axes, shape: Axes, step: Axes) -> None:
    num_axes = len(x.shape)
    fact = f"start {start}, shape {shape} and step {step} must have one number for each axis of {name} {x}"
    require(len(start) == len(shape) == len(step) == num_axes, fact)
    fact = f"step {step} must be above 0, start {start} not below"
    require(min(step, default=1) > 0 <= min(start, default=0), fact)
    stops = [axis_slice.stop for axis_slice in _region_slices(start, shape, step)]
    is_inside = all(end <= n or not m for end, n, m in zip(stops, x.shape, shape, strict=True))
    require(is_inside, f"the region ends at {stops}, outside {name} {x}")


@op(view=True)
def slice(x: Tensor, *, start: Axes, shape: Axes, step: Axes = ()) -> Spec:
    """View `shape` elements of x from `start` on, `step` (or 1) apart, without a copy. ggml_view_1d to ggml_view_4d."""
    step = _step_or_ones(step, start)
    _check_region("x", x.spec, start, shape, step)
    require(not x.dtype.quantized, f"x is {x.spec}; quantized rows are cut by narrow")
    offset = sum(s * b for s, b in zip(start, x.strides, strict=True))
    return View(
        tuple(shape), x.dtype, tuple(k * b for k, b in zip(step, x.strides, strict=True)), offset
    )


@slice.vjp
def slice_vjp(dy, y, x, *, start, shape, step):
    return (acc(dy, size=x.shape, start=start, step=step),)


@slice.samples
def slice_samples():
    yield slice(input("x", (5, 8)), start=(1, 2), shape=(3, 3), step=(1, 2))
    yield slice(input("x", (2, 3, 4)), start=(0, 1, 0), shape=(2, 2, 4))


@op(inplace=(1,), acc=1)
def acc(
    part: Tensor, into: Tensor | None = None, *, size: Axes, start: Axes, step: Axes = ()
) -> Spec:
    """Add `part` to a region of `into`, or of zeros of `size`, from `start` on, `step` (or 1) apart. f32. ggml_acc."""
    y = Spec(tuple(size)).require(into=into)
    Spec(part.shape).require(part=part)
    _check_region("the result", y, start, part.shape, _step_or_ones(step, start))
    return y


@acc.vjp
def acc_vjp(dy, y, part, into, *, size, start, step):
    return slice(dy, start=start, shape=part.shape, step=step), None if into is None else dy


@acc.kernel("torch", strided=lambda index, t: index == 0)
@acc.kernel("cpu", strided=lambda index, t: index == 0)
@acc.kernel("numpy")
def acc_kernel(y, part, into, *, size, start, step):
    copy_acc_or_zero(y, into)
    y[_region_slices(start, part.shape, _step_or_ones(step, start))] += part


@acc.samples
def acc_samples():
    yield acc(input("part", (3, 3)), size=(5, 8), start=(1, 2), step=(1, 2))
    yield acc(input("part", (2, 4)), input("into", (5, 4)), size=(5, 4), start=(2, 0))


@op(inplace=(0,))
def set(
    x: Tensor, part: Tensor | None = None, *, start: Axes, shape: Axes, step: Axes = ()
) -> Spec:
    """Replace a region of x, `shape` from `start` on, `step` (or 1) apart, by `part` or zeros; all f32. ggml_set."""
    _check_region("x", x.spec, start, shape, _step_or_ones(step, start))
    Spec(tuple(shape)).require(part=part)
    return Spec(x.shape).require(x=x)


@set.vjp
def set_vjp(dy, y, x, part, *, start, shape, step):
    part_grad = None if part is None else slice(dy, start=start, shape=shape, step=step)
    return set(dy, start=start, shape=shape, step=step), part_grad


@set.kernel("torch", strided=lambda index, t: index == 1)
@set.kernel("cpu", strided=lambda index, t: index == 1)
@set.kernel("numpy")
def set_kernel(y, x, part, *, start, shape, step):
    copy_acc_or_zero(y, x)
    y[_region_slices(start, shape, _step_or_ones(step, start))] = 0.0 if part is None else part


@set.samples
def set_samples():
    yield set(input("x", (5, 8)), input("part", (3, 3)), start=(1, 2), shape=(3, 3), step=(1, 2))
    yield set(input("x", (2, 3, 4)), start=(0, 1, 0), shape=(2, 1, 4))


def pad(x: Tensor, *, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Add zeros before and after x along each axis, as many as `before` and `after` say. ggml_pad, ggml_pad_ext."""
    is_valid = len(before) == len(after) == len(x.shape) and min((*before, *after), default=0) >= 0
    message = f"before {(*before,)} and after {(*after,)} must be a number, 0 or more, for each axis of x {x.spec}"
    demand("pad", is_valid, message, x)
    size = tuple(b + n + a for b, n, a in zip(before, x.shape, after, strict=True))
    return acc(x, size=size, start=tuple(before))
