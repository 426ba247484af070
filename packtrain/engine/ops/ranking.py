"""Indices of the largest values, sorted indices, and counts of equal values. None of these ops has a gradient."""

import numpy as np

from packtrain.dtypes import i32, i64
from packtrain.engine.ops.arrays import f32_rows
from packtrain.engine.ops.torch_kernels import copied
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require


@op()
def argmax(x: Tensor) -> Spec:
    """Index of the first of the largest values along the last axis: x (..., C) f32, y (...) i32. ggml_argmax."""
    f32_rows(x)
    require(x.shape[-1] > 0, f"x is {x.spec}; its last axis must not be empty")
    return Spec(x.shape[:-1], i32)


@argmax.kernel("numpy")
def argmax_numpy(y, x):
    y[...] = x.argmax(-1)


argmax.kernel("cpu", strided=True)(argmax_numpy)
argmax.kernel("torch", strided=True)(copied(lambda x: x.argmax(-1)))


@argmax.samples
def argmax_samples():
    yield argmax(input("x", (7, 33)))
    yield argmax(input("x", (2, 3, 5)))
    yield argmax(constant("x", np.array([1.0, 3.0, 3.0])))


@op()
def argsort(x: Tensor, *, descending: bool = False) -> Spec:
    """Indices that sort the last axis; equal values stay in order. x (..., C) f32, y (..., C) i32. ggml_argsort."""
    return Spec(f32_rows(x).shape, i32)


@argsort.kernel("numpy")
def argsort_numpy(y, x, *, descending):
    y[...] = np.argsort(-x if descending else x, -1, kind="stable")


argsort.kernel("cpu", strided=True)(argsort_numpy)


@argsort.kernel("torch", strided=True)
def argsort_torch(y, x, *, descending):
    y.copy_((-x if descending else x).argsort(stable=True, dim=-1))


@argsort.samples
def argsort_samples():
    yield argsort(input("x", (7, 33)))
    yield argsort(constant("x", np.array([2.0, 1.0, 2.0, 0.0])), descending=True)


@op()
def count_equal(a: Tensor, b: Tensor) -> Spec:
    """Count the equal elements: a, b (...) i32, y () i64. ggml_count_equal."""
    is_valid = a.spec == b.spec and a.dtype == i32
    require(is_valid, f"a is {a.spec} and b is {b.spec}; they must be equal i32")
    return Spec((), i64)


@count_equal.kernel("numpy")
def count_equal_numpy(y, a, b):
    y[...] = np.count_nonzero(a == b)


count_equal.kernel("cpu", strided=True)(count_equal_numpy)
count_equal.kernel("torch", strided=True)(copied(lambda a, b: (a == b).sum()))


@count_equal.samples
def count_equal_samples():
    a, b = np.arange(35).reshape(5, 7) % 3, np.arange(35).reshape(5, 7) % 4
    yield count_equal(constant("a", a, i32), constant("b", b, i32))
    yield count_equal(argmax(input("x", (300, 10))), constant("b", np.arange(300) % 10, i32))
