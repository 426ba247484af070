"""Softmax over the last axis, with scale and additive mask."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32
from packtrain.engine.ops.arrays import rows, rows_or_absent
from packtrain.engine.ops.costs import elementwise_cost
from packtrain.engine.ops.reduce import sum_like
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require


@op(inplace=(0,))
def soft_max(x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Spec:
    """y = softmax(scale * x + mask) over the last axis; a fully masked row gives zeros.

        x     (..., M, C)  f32
        mask  (M, C)       f32 with -inf where masked, for all leading indices
        y     (..., M, C)  f32
    ggml_soft_max_ext.
    """
    require(
        x.dtype == f32 and len(x.shape) > 0, f"x is {x.spec}; it must be f32 with at least one axis"
    )
    fits = mask is None or (mask.shape == x.shape[-2:] and mask.dtype == f32)
    require(fits, f"mask is {mask and mask.spec}; for x {x.spec} it must be f32{[*x.shape[-2:]]}")
    return x.spec


@soft_max.vjp
def soft_max_vjp(dy, y, x, mask, *, scale):
    dmask = None if mask is None else sum_like(soft_max_back(dy, y, scale=1.0), mask)
    return soft_max_back(dy, y, scale=scale), dmask


@soft_max.kernel("numpy")
def soft_max_numpy(y, x, mask, *, scale):
    z = x * x.dtype.type(scale) + (0 if mask is None else mask)
    max_logit = z.max(-1, keepdims=True)
    e = np.exp(z - np.where(np.isinf(max_logit), 0, max_logit))
    sum_exp = e.sum(-1, keepdims=True)
    y[...] = e / np.where(sum_exp == 0, 1, sum_exp)


@soft_max.kernel("cpu")
def soft_max_cpu(y, x, mask, *, scale):
    kernels.softmax.soft_max(rows(y), rows(x), rows_or_absent(mask), scale)


@soft_max.kernel("torch")
def soft_max_torch(y, x, mask, *, scale):
    z = x * scale if mask is None else (x * scale).add_(mask)
    max_logit = z.amax(-1, keepdim=True)
    e = z.sub_(max_logit.masked_fill_(max_logit.isinf(), 0)).exp_()
    sum_exp = e.sum(-1, keepdim=True)
    torch.div(e, sum_exp.masked_fill_(sum_exp == 0, 1), out=y)


soft_max.cost(elementwise_cost())


@soft_max.samples
def soft_max_samples():
    for n, c in ((1, 1), (3, 15), (17, 64), (2, 65), (17, 1000)):
        yield soft_max(input("x", (n, c)), scale=1.7)
    mask_values = np.where(np.tri(5, 17, -1) > 0, 0.5, -np.inf)
    yield soft_max(input("x", (2, 5, 17)), constant("mask", mask_values), scale=0.5)


@op(inplace=(0, 1))
def soft_max_back(dy: Tensor, y: Tensor, *, scale: float) -> Spec:
    """Gradient of soft_max from its result: dx = scale * y * (dy - sum(dy * y)). ggml_soft_max_ext_back."""
    require(dy.spec == y.spec, f"dy is {dy.spec} and y is {y.spec}; they must be equal")
    return y.spec


@soft_max_back.kernel("numpy")
def soft_max_back_numpy(dx, dy, y, *, scale):
    dx[...] = scale * y * (dy - (dy * y).sum(-1, keepdims=True))


@soft_max_back.kernel("cpu")
def soft_max_back_cpu(dx, dy, y, *, scale):
    kernels.softmax.soft_max_back(rows(dx), rows(dy), rows(y), scale)


@soft_max_back.kernel("torch")
def soft_max_back_torch(dx, dy, y, *, scale):
    dy_dot_y = (dy * y).sum(-1, keepdim=True)
    torch.mul((dy - dy_dot_y).mul_(y), scale, out=dx)


@soft_max_back.samples
def soft_max_back_samples():
    for n, c in ((1, 1), (3, 15), (17, 64), (270, 65)):
        yield soft_max_back(input("dy", (n, c)), input("y", (n, c)), scale=1.7)
