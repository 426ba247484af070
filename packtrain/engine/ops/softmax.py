"""Softmax over the last axis and its logarithm, and cross-entropy against probabilities, such as those of a teacher."""

import numpy as np

from packtrain.dtypes import f32
from packtrain.engine.ops import arrays
from packtrain.engine.ops.arrays import assigned, compiled, f32_rows, rows, rows_or_absent
from packtrain.engine.ops.costs import elementwise_cost
from packtrain.engine.ops.elementwise import mul, sub
from packtrain.engine.ops.elementwise import scale as scale_by
from packtrain.engine.ops.reduce import sum, sum_like, sum_rows
from packtrain.engine.ops.shape import reshape
from packtrain.engine.ops.torch_kernels import filled, torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require


@op(inplace=(0,))
def soft_max(x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Spec:
    """y = softmax(scale * x + mask) over the last axis; a fully masked row gives zeros.

        x     (..., M, C)  f32
        mask  (M, C)       f32 with -inf where masked, for all leading indices
        y     (..., M, C)  f32
    ggml_soft_max_ext.
    """
    f32_rows(x)
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


soft_max.kernel("cpu")(compiled("softmax.soft_max", rows, rows, rows_or_absent, "scale"))


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
    for n, c in ((1, 1), (3, 15), (17, 64), (270, 65), (17, 1000)):
        yield soft_max(input("x", (n, c)), scale=1.7)
    mask_values = np.where(np.tri(5, 17, -1) > 0, 0.5, -np.inf)
    yield soft_max(input("x", (2, 5, 17)), constant("mask", mask_values), scale=0.5)


@op(inplace=(0, 1))
def soft_max_back(dy: Tensor, y: Tensor, *, scale: float) -> Spec:
    """Gradient of soft_max from its result: dx = scale * y * (dy - sum(dy * y)). ggml_soft_max_ext_back."""
    return y.spec.require(dy=dy)


soft_max_back.kernel("numpy")(
    assigned(lambda dy, y, *, scale: scale * y * (dy - (dy * y).sum(-1, keepdims=True)))
)
soft_max_back.kernel("cpu")(compiled("softmax.soft_max_back", rows, rows, rows, "scale"))


@soft_max_back.kernel("torch")
def soft_max_back_torch(dx, dy, y, *, scale):
    dy_dot_y = (dy * y).sum(-1, keepdim=True)
    torch.mul((dy - dy_dot_y).mul_(y), scale, out=dx)


soft_max_back.samples(arrays.gradient_samples(soft_max, soft_max_back))


@op(inplace=(0,))
def log_soft_max(x: Tensor) -> Spec:
    """y = x - log-sum-exp(x) over the last axis: x (..., C) f32."""
    return f32_rows(x)


log_soft_max.vjp(lambda dy, y, x: (sub(dy, mul(soft_max(x), sum_rows(dy))),))


@log_soft_max.kernel("numpy")
def log_soft_max_numpy(y, x):
    z = x - x.max(-1, keepdims=True, initial=-np.inf)
    y[...] = z - np.log(np.exp(z).sum(-1, keepdims=True))


log_soft_max.kernel("cpu")(compiled("softmax.log_soft_max", rows, rows))
log_soft_max.kernel("torch")(filled("log_softmax", -1))
log_soft_max.cost(elementwise_cost())


@log_soft_max.samples
def log_soft_max_samples():
    for n, c in ((1, 1), (3, 15), (17, 64)):
        yield log_soft_max(input("x", (n, c)))
    yield log_soft_max(input("x", (2, 3, 7)))


def soft_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """loss = sum of weights * losses, losses = -sum(targets * log softmax(logits)). ggml_cross_entropy_loss.

    logits, targets  (..., V)  f32, targets are probabilities
    weights          (...)     f32; 1 / number of rows gives the mean
    loss             ()        f32
    losses           (...)     f32
    """
    is_valid = logits.spec == targets.spec and weights.shape == logits.shape[:-1]
    mismatch = (
        f"logits {logits.spec} and targets {targets.spec} must be equal, weights {weights.spec}"
    )
    arrays.demand(
        "soft_cross_entropy", is_valid, f"{mismatch} one for each row", logits, targets, weights
    )
    row_losses = sum_rows(mul(log_soft_max(logits), targets))
    losses = scale_by(reshape(row_losses, shape=weights.shape), by=-1.0)
    return sum(mul(losses, weights)), losses
