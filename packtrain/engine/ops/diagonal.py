"""Diagonals, and masks above a diagonal, of the last two axes."""

import numpy as np

from packtrain.dtypes import f32
from packtrain.engine.ops.arrays import f32_rows
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, View, input, op, require


@op()
def diag(x: Tensor) -> Spec:
    """Make matrices with x on their diagonal: x (..., N) f32, y (..., N, N) f32. ggml_diag."""
    return Spec((*f32_rows(x).shape, x.shape[-1]))


@diag.vjp
def diag_vjp(dy, y, x):
    return (diagonal(dy),)


@diag.kernel("numpy")
def diag_numpy(y, x):
    y[...] = 0
    index = np.arange(x.shape[-1])
    y[..., index, index] = x


diag.kernel("cpu", strided=True)(diag_numpy)


@diag.kernel("torch", strided=True)
def diag_torch(y, x):
    y.zero_()
    y.diagonal(dim1=-2, dim2=-1).copy_(x)


@diag.samples
def diag_samples():
    yield diag(input("x", (5,)))
    yield diag(input("x", (2, 3, 7)))


@op(view=True)
def diagonal(x: Tensor) -> Spec:
    """View the diagonals of square matrices: x (..., N, N), y (..., N). np.diagonal of the last axes."""
    is_square = len(x.shape) > 1 and x.shape[-1] == x.shape[-2] and not x.dtype.quantized
    require(is_square, f"x is {x.spec}; its last two axes must be equal, and not quantized")
    return View(x.shape[:-1], x.dtype, (*x.strides[:-2], x.strides[-1] + x.strides[-2]))


diagonal.vjp(lambda dy, y, x: (diag(dy),))


@diagonal.samples
def diagonal_samples():
    yield diagonal(input("x", (5, 5)))
    yield diagonal(input("x", (2, 3, 3)))


def _check_mask_input(x: Tensor, past: int) -> Spec:
    require(x.dtype == f32 and len(x.shape) > 1, f"x is {x.spec}; it must be f32 with two axes")
    require(past >= 0, f"past is {past}; it must not be below 0")
    return x.spec


@op(inplace=(0,))
def diag_mask_zero(x: Tensor, *, past: int = 0) -> Spec:
    """Copy x (..., M, N) f32 with zeros where column > past + row. ggml_diag_mask_zero."""
    return _check_mask_input(x, past)


@op(inplace=(0,))
def diag_mask_inf(x: Tensor, *, past: int = 0) -> Spec:
    """Copy x (..., M, N) f32 with -inf where column > past + row. ggml_diag_mask_inf."""
    return _check_mask_input(x, past)


def _mask_kernel(fill_value):
    def apply_mask(y, x, *, past):
        np.copyto(y, x)
        y[..., ~np.tri(*x.shape[-2:], past, bool)] = fill_value

    return apply_mask


for _op, _value in ((diag_mask_zero, 0), (diag_mask_inf, -np.inf)):
    _op.vjp(lambda dy, y, x, *, past: (diag_mask_zero(dy, past=past),))
    _op.kernel("numpy")(_mask_kernel(_value))
    _op.kernel("cpu", strided=True)(_mask_kernel(_value))


@diag_mask_zero.kernel("torch", strided=True)
def diag_mask_zero_torch(y, x, *, past):
    torch.tril(x, past, out=y)


@diag_mask_inf.kernel("torch", strided=True)
def diag_mask_inf_torch(y, x, *, past):
    is_above_diagonal = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu_(past + 1)
    y.copy_(x)
    y.masked_fill_(is_above_diagonal, -np.inf)


diag_mask_zero.samples(lambda: [diag_mask_zero(input("x", (2, 5, 7)), past=2)])


diag_mask_inf.samples(lambda: [diag_mask_inf(input("x", (2, 5, 7)))])
