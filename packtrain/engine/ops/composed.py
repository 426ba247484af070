"""Functions composed of other ops, whose gradients follow: means, norms, losses, upscaling."""

import math

import numpy as np

from packtrain.dtypes import i32
from packtrain.engine.ops.arrays import demand
from packtrain.engine.ops.attention import attention
from packtrain.engine.ops.elementwise import add, div, mul, scale, sqr, sqrt, sub
from packtrain.engine.ops.elementwise import scale as scale_by
from packtrain.engine.ops.norm import norm
from packtrain.engine.ops.reduce import broadcast_to, sum, sum_rows
from packtrain.engine.ops.shape import concat, cont, narrow, reshape
from packtrain.engine.ops.softmax import soft_max
from packtrain.engine.ops.unary_functions import clamp
from packtrain.engine.tensor import Tensor, constant


def mean(x: Tensor) -> Tensor:
    """Mean of all elements: x (...) f32, y () f32."""
    return scale(sum(x), by=1 / max(x.spec.size, 1))


def mean_squared_error(y: Tensor, target: Tensor) -> Tensor:
    """Mean of (y - target)**2 over all elements, () f32."""
    return mean(sqr(sub(y, target)))


def group_norm(x: Tensor, *, groups: int, eps: float) -> Tensor:
    """Give each group of channels of each image mean 0 and variance 1. ggml_group_norm; arXiv 1803.08494. x (N, C, ...)
    f32, C a multiple of groups"""
    is_valid = len(x.shape) > 1 <= groups and x.shape[1] % groups == 0
    message = f"x is {x.spec}; its second axis must be groups of equal size, {groups} of them"
    demand("group_norm", is_valid, message, x)
    group_width = x.spec.size // max(x.shape[0] * groups, 1)
    y = norm(reshape(x, shape=(x.shape[0], groups, group_width)), eps=eps)
    return reshape(y, shape=x.shape)


def l2_norm(x: Tensor, *, eps: float) -> Tensor:
    """Divide by the length over the last axis: y = x / max(|x|, eps), x (..., C) f32. ggml_l2_norm."""
    return div(x, sqrt(clamp(sum_rows(sqr(x)), low=eps**2)))


def upscale(x: Tensor, *, factor: int) -> Tensor:
    """Repeat each element of the last two axes `factor` times: x (..., H, W). ggml_upscale, ggml_interpolate."""
    message = f"x is {x.spec}, factor {factor}; x needs two axes, factor 1 or more"
    demand("upscale", len(x.shape) > 1 <= factor, message, x)
    *leading_shape, h, w = x.shape
    broadcast = broadcast_to(
        reshape(x, shape=(*leading_shape, h, 1, w, 1)), shape=(*leading_shape, h, factor, w, factor)
    )
    return reshape(cont(broadcast), shape=(*leading_shape, h * factor, w * factor))


def attention_to_all(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Attend without a causal mask: q (B, T, H, D), k and v (B, S, K, D), y as q; every query sees every key."""
    (b, t), s = q.shape[:2], k.shape[1]
    positions = (
        constant("q_pos", np.full((b, t), s - 1), i32), constant("k_pos", np.tile(np.arange(s), (b, 1)), i32),
    )  # fmt: skip
    return attention(q, k, v, *positions, scale=scale)[0]


def soft_max_sinks(
    x: Tensor, sinks: Tensor, mask: Tensor | None = None, *, scale: float = 1.0
) -> Tensor:
    """Softmax of scale * x + mask with one more column, a sink logit of each head, which the result leaves out.

    x      (B, H, T, S)  f32
    sinks  (H,)          f32
    mask   broadcasts to x
    Attention sinks, arXiv 2309.17453; ggml_soft_max_add_sinks.
    """
    is_valid = len(x.shape) == 4 and sinks.shape == x.shape[1:2]
    message = f"x is {x.spec} and sinks {sinks.spec}; they must be [B, H, T, S] and [H]"
    demand("soft_max_sinks", is_valid, message, x, sinks)
    x = x if scale == 1 else scale_by(x, by=scale)
    x = x if mask is None else add(x, mask)
    column = broadcast_to(reshape(sinks, shape=(*sinks.shape, 1, 1)), shape=(*x.shape[:3], 1))
    return narrow(soft_max(concat([x, column], axis=3)), axis=3, start=0, length=x.shape[3])


def alibi(x: Tensor, slopes: Tensor, distance: Tensor) -> Tensor:
    """Add linear biases to scores: y = x (B, H, T, S) + slopes (H,) * distance (T, S). arXiv 2108.12409."""
    return add(x, mul(reshape(slopes, shape=(*slopes.shape, 1, 1)), distance))


def alibi_slopes(heads: int, *, largest: float = 8.0) -> list[float]:
    """Return ALiBi's slope of each head, as ggml_soft_max_ext computes it from max_bias = `largest`."""
    demand("alibi_slopes", heads > 0, f"heads is {heads}; it must be at least 1")
    nearest_power = 2 ** math.floor(math.log2(heads))
    base_slope, extra_slope = 2 ** (-largest / nearest_power), 2 ** (-largest / 2 / nearest_power)
    return [
        base_slope ** (h + 1) if h < nearest_power else extra_slope ** (2 * (h - nearest_power) + 1)
        for h in range(heads)
    ]
