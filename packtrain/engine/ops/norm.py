"""Root-mean-square and layer normalisation, with their weights."""

import math

import numpy as np

from packtrain import kernels
from packtrain.engine.backends import triton
from packtrain.engine.ops import arrays
from packtrain.engine.ops.arrays import f32_rows, flatten_or_absent, rows, rows_or_absent
from packtrain.engine.ops.costs import elementwise_cost
from packtrain.engine.ops.elementwise import scale, sub
from packtrain.engine.ops.reduce import sum_like, sum_rows
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, input, op

PARTIAL_ROWS = 64  # rows of a partial sum of the weight gradient


@op(inplace=(0,))
def rms_norm(x: Tensor, w: Tensor | None = None, *, eps: float) -> Spec:
    """Divide by the root mean square of the last axis, times a weight.

    y = x / sqrt(mean(x**2) + eps) * w

        x  (..., C)  f32
        w  (C,)      f32, or None for 1
        y  (..., C)  f32
    Zhang & Sennrich 2019, arXiv 1910.07467; ggml_rms_norm.
    """
    Spec(x.shape[-1:]).require(w=w)
    return f32_rows(x)


@rms_norm.vjp
def rms_norm_vjp(dy, y, x, w, *, eps):
    dx, dw = rms_norm_back(dy, x, w, eps=eps)
    return dx, (None if w is None else dw)


def _row_mean(x):
    """Return the mean over the last axis, which is kept; 0 if the axis is empty."""
    return x.sum(-1, keepdims=True) / max(x.shape[-1], 1)


@rms_norm.kernel("numpy")
def rms_norm_numpy(y, x, w, *, eps):
    y[...] = x / np.sqrt(_row_mean(x * x) + eps) * (1 if w is None else w)


rms_norm.kernel("cpu")(arrays.compiled("norm.rms_norm", rows, rows, flatten_or_absent, "eps"))


@rms_norm.kernel("torch")
def rms_norm_torch(y, x, w, *, eps):
    r = (_row_mean_torch(x.square()) + eps).rsqrt_()
    torch.mul(x, r, out=y)
    if w is not None:
        y.mul_(w)


rms_norm.kernel("cuda")(triton.lazy_kernel("norm", "rms_norm"))


def _row_mean_torch(x):
    return x.sum(-1, keepdim=True).div_(max(x.shape[-1], 1))


rms_norm.cost(elementwise_cost(0.75))


@rms_norm.samples
def rms_norm_samples():
    for n, c in ((1, 1), (3, 15), (17, 64), (2, 65), (140, 129)):
        yield rms_norm(input("x", (n, c)), input("w", (c,)), eps=1e-5)
    yield rms_norm(input("x", (2, 3, 16)), eps=1e-5)


@op(inplace=(0, 3), acc=3, optional=(0, 1))
def rms_norm_back(
    dy: Tensor, x: Tensor, w: Tensor | None = None, acc: Tensor | None = None, *, eps: float
) -> tuple[Spec, ...]:
    """Gradients of rms_norm for x and w, with r = 1 / sqrt(mean(x**2) + eps), u = x * r and g = dy * w.

    dx = r * (g - u * mean(g * u)) (+ acc),  dw = sum over rows of dy * u. ggml_rms_norm_back.
    """
    return x.spec.require(dy=dy, acc=acc), Spec(x.shape[-1:]).require(w=w)


@rms_norm_back.workspace("cpu")
def rms_norm_back_workspace(dy, x, w, acc, *, eps):
    num_blocks = -(-math.prod(x.shape[:-1]) // PARTIAL_ROWS)
    return (Spec((num_blocks, x.shape[-1])),)


@rms_norm_back.kernel("numpy")
def rms_norm_back_numpy(out, dy, x, w, acc, *, eps):
    dx, dw = out
    r = 1 / np.sqrt(_row_mean(x * x) + eps)
    u, g = x * r, dy * (1 if w is None else w)
    x_grad = r * (g - u * _row_mean(g * u))
    w_grad = rows(dy * u).sum(0)
    if dx is not None:
        dx[...] = x_grad if acc is None else x_grad + acc
    if dw is not None:
        dw[...] = w_grad


@rms_norm_back.kernel("cpu")
def rms_norm_back_cpu(out, dy, x, w, acc, *, eps, work):
    dx, dw = out
    results = rows_or_absent(dx), flatten_or_absent(dw), work[0]
    inputs = rows(dy), rows(x), flatten_or_absent(w), rows_or_absent(acc)
    return arrays.run_replayable(kernels.norm.rms_norm_back, *results, *inputs, eps)


@rms_norm_back.kernel("torch")
def rms_norm_back_torch(out, dy, x, w, acc, *, eps):
    dx, dw = out
    r = (_row_mean_torch(x.square()) + eps).rsqrt_()
    u, g = x * r, dy if w is None else dy * w
    if dw is not None:
        torch.sum(rows(dy * u), 0, out=dw)
    if dx is not None:
        x_grad = (g - u * _row_mean_torch(g * u)).mul_(r)
        dx.copy_(x_grad if acc is None else x_grad.add_(acc))


rms_norm_back.kernel("cuda")(triton.lazy_kernel("norm", "rms_norm_back"))
rms_norm_back.cost(elementwise_cost(1.4))


@rms_norm_back.samples
def rms_norm_back_samples():
    yield from arrays.gradient_samples(rms_norm, rms_norm_back)()
    x = input("x", (2, 3, 16))
    yield rms_norm_back(input("dy", (2, 3, 16)), x, None, input("acc", (2, 3, 16)), eps=1e-5)[0]


# ---- around the mean -----------------------------------------------------------------------------------------


def mean_rows(x: Tensor) -> Tensor:
    """Average the last axis: x (..., C) f32, y (..., 1) f32. ggml_mean."""
    return scale(sum_rows(x), by=1 / max(x.shape[-1], 1))


@op(inplace=(0,))
def norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, eps: float) -> Spec:
    """Layer norm: y = (x - mean) / sqrt(variance + eps) * w + b over the last axis. ggml_norm; arXiv 1607.06450.

    x  (..., C)  f32
    w  (C,)      f32, or None for 1
    b  (C,)      f32, or None for 0
    y  (..., C)  f32
    """
    Spec(x.shape[-1:]).require(w=w, b=b)
    return f32_rows(x)


@norm.vjp
def norm_vjp(dy, y, x, w, b, *, eps):
    du, dw = rms_norm_back(dy, sub(x, mean_rows(x)), w, eps=eps)
    db = None if b is None else sum_like(dy, b)
    return sub(du, mean_rows(du)), (None if w is None else dw), db


@norm.kernel("numpy")
def norm_numpy(y, x, w, b, *, eps):
    u = x - _row_mean(x)
    u = u / np.sqrt(_row_mean(u * u) + eps)
    y[...] = u * (1 if w is None else w) + (0 if b is None else b)


norm.kernel("cpu")(
    arrays.compiled("norm.norm", rows, rows, flatten_or_absent, flatten_or_absent, "eps")
)


@norm.kernel("torch")
def norm_torch(y, x, w, b, *, eps):
    u = x - _row_mean_torch(x)
    u *= (_row_mean_torch(u.square()) + eps).rsqrt_()
    u = u if w is None else u.mul_(w)
    y.copy_(u if b is None else u.add_(b))


norm.cost(elementwise_cost(0.75))


@norm.samples
def norm_samples():
    for n, c in ((1, 1), (3, 15), (17, 64), (2, 65), (140, 129)):
        yield norm(input("x", (n, c)), input("w", (c,)), input("b", (c,)), eps=1e-5)
    yield norm(input("x", (2, 3, 16)), eps=1e-5)
    yield norm(input("x", (4, 9)), None, input("b", (9,)), eps=1e-5)
