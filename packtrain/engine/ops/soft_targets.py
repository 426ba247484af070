"""Cross-entropy against probabilities, such as those of a teacher model."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32
from packtrain.engine.ops.arrays import demand, rows
from packtrain.engine.ops.costs import elementwise_cost
from packtrain.engine.ops.elementwise import mul, scale, sub
from packtrain.engine.ops.reduce import sum, sum_rows
from packtrain.engine.ops.shape import reshape
from packtrain.engine.ops.softmax import soft_max
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, input, op, require


@op(inplace=(0,))
def log_soft_max(x: Tensor) -> Spec:
    """y = x - log-sum-exp(x) over the last axis: x (..., C) f32."""
    require(x.dtype == f32 and len(x.shape) > 0, f"x is {x.spec}; it must be f32 with an axis")
    return x.spec


log_soft_max.vjp(lambda dy, y, x: (sub(dy, mul(soft_max(x), sum_rows(dy))),))


@log_soft_max.kernel("numpy")
def log_soft_max_numpy(y, x):
    z = x - x.max(-1, keepdims=True, initial=-np.inf)
    y[...] = z - np.log(np.exp(z).sum(-1, keepdims=True))


@log_soft_max.kernel("cpu")
def log_soft_max_cpu(y, x):
    kernels.softmax.log_soft_max(rows(y), rows(x))


@log_soft_max.kernel("torch")
def log_soft_max_torch(y, x):
    torch.log_softmax(x, -1, out=y)


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
    demand("soft_cross_entropy", is_valid, f"{mismatch} one for each row", logits, targets, weights)
    row_losses = sum_rows(mul(log_soft_max(logits), targets))
    losses = scale(reshape(row_losses, shape=weights.shape), by=-1.0)
    return sum(mul(losses, weights)), losses
