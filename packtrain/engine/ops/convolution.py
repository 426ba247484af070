"""Convolution of images (N, C, H, W) with filters (O, C, KH, KW), as products of windows; few of them exist at once."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32
from packtrain.engine.ops import costs
from packtrain.engine.ops.arrays import demand, flatten, gradient_samples
from packtrain.engine.ops.shape import reshape
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.ops.windows import Pair, check, kernel_sizes, windows
from packtrain.engine.tensor import Spec, Tensor, input, op, require

SHARES, MAX_PARTIAL_VALUES = 16, 1 << 22  # most partial sums of a filter gradient, and their values


def _counts(y, w):
    """Return (images, channels, filters): how many y (N, O, OH, OW) and w (O, C, KH, KW) have."""
    return len(y), w.shape[1], w.shape[0]


def _conv_cost(y: Tensor, w: Tensor) -> costs.Cost:
    n, o, *out_shape = y.shape
    return costs.f32_product_cost(o, n * math.prod(out_shape), math.prod(w.shape[1:]))


def _sample_cases() -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """Yield images, filters and attributes for checks: edges, steps, and more channels or filters than a panel has."""
    strided_attrs = {"stride": (3, 2), "padding": (2, 3), "dilation": (2, 1)}
    for image, filters, attrs in (
        ((2, 3, 5, 6), (4, 3, 3, 2), {}), ((2, 2, 9, 11), (3, 2, 3, 4), strided_attrs),
        ((3, 1, 28, 28), (8, 1, 3, 3), {"padding": (1, 1)}), ((1, 33, 5, 6), (17, 33, 3, 3), {"padding": (1, 1)}),
        ((1, 2, 4, 5), (260, 2, 2, 2), {}), ((1, 1, 18, 19), (2, 1, 17, 16), {}),
    ):  # fmt: skip
        yield input("x", image), input("w", filters), attrs


@op()
def conv_2d(
    x: Tensor, w: Tensor, *, stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1)
) -> Spec:
    """Cross-correlate images with filters. ggml_conv_2d, ggml_conv_2d_direct.

    x  (N, C, H, W)    f32
    w  (O, C, KH, KW)  f32
    y  (N, O, OH, OW)  f32, OH = (H + 2 padding - dilation (KH - 1) - 1) // stride + 1
    """
    fits = w.dtype == f32 and len(w.shape) == 4 and x.shape[1:2] == w.shape[1:2]
    fact = f"x is {x.spec} and w is {w.spec}; they must be f32[N, C, H, W] and f32[O, C, KH, KW]"
    require(fits, fact)
    out_shape = check(x.spec, w.shape[2:], stride, padding, dilation)
    return Spec((x.shape[0], w.shape[0], *out_shape))


@conv_2d.vjp
def conv_2d_vjp(dy, y, x, w, **attrs):
    dw = conv_2d_back_w(dy, x, window=w.shape[2:], **attrs)
    return conv_2d_back(dy, w, size=x.shape[2:], **attrs), dw


@conv_2d.kernel("numpy")
def conv_2d_numpy(y, x, w, **attrs):
    x_windows = windows(x, w.shape[2:], **attrs)
    y[...] = np.einsum("nchwab,ocab->nohw", x_windows, w, optimize=True)


@conv_2d.kernel("cpu")
def conv_2d_cpu(y, x, w, **attrs):
    sizes = kernel_sizes(x.shape, y.shape[2:], w.shape[2:], **attrs)
    if not w.size:
        y[...] = 0
        return
    kernels.convolution.conv(flatten(y), flatten(x), flatten(w), *_counts(y, w), sizes)


@conv_2d.kernel("torch")
def conv_2d_torch(y, x, w, **attrs):
    y.copy_(torch.nn.functional.conv2d(x, w, **attrs)) if x.numel() * w.numel() else y.zero_()


conv_2d.cost(lambda y, x, w, **attrs: _conv_cost(y, w))
conv_2d.samples(lambda: (conv_2d(x, w, **attrs) for x, w, attrs in _sample_cases()))


@op()
def conv_2d_back(
    dy: Tensor, w: Tensor, *, size: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Spec:
    """Gradient of conv_2d for images of this `size` (height, width); also dy's transposed convolution. See conv_2d.

    dy  (N, O, OH, OW)  f32
    w   (O, C, KH, KW)  f32
    dx  (N, C, H, W)    f32
    ggml_conv_transpose_2d_p0.
    """
    is_valid = w.dtype == f32 and len(w.shape) == len(dy.shape) == 4
    require(is_valid, f"dy is {dy.spec} and w is {w.spec}; they must be f32 with four axes")
    dx_spec = Spec((dy.shape[0], w.shape[1], *size))
    out_shape = check(dx_spec, w.shape[2:], stride, padding, dilation)
    Spec((dy.shape[0], w.shape[0], *out_shape)).require(dy=dy)
    return dx_spec


@conv_2d_back.vjp
def conv_2d_back_vjp(ddx, dx, dy, w, *, size, **attrs):
    return conv_2d(ddx, w, **attrs), conv_2d_back_w(dy, ddx, window=w.shape[2:], **attrs)


@conv_2d_back.kernel("numpy")
def conv_2d_back_numpy(dx, dy, w, *, size, stride, padding, dilation):
    (h, ph), (width, pw) = zip(size, padding, strict=True)
    padded = np.zeros((*dx.shape[:2], h + 2 * ph, width + 2 * pw), dx.dtype)
    dx_windows = windows(padded, w.shape[2:], stride, (0, 0), dilation, writeable=True)
    for a, b in product(*map(range, w.shape[2:])):
        dx_windows[..., a, b] += np.einsum("nohw,oc->nchw", dy, w[:, :, a, b], optimize=True)
    dx[...] = padded[:, :, ph : ph + h, pw : pw + width]


@conv_2d_back.kernel("cpu")
def conv_2d_back_cpu(dx, dy, w, *, size, **attrs):
    if not w.size:
        dx[...] = 0
        return
    sizes = kernel_sizes(dx.shape, dy.shape[2:], w.shape[2:], **attrs)
    kernels.convolution.conv_back(flatten(dx), flatten(dy), flatten(w), *_counts(dy, w), sizes)


@conv_2d_back.kernel("torch")
def conv_2d_back_torch(dx, dy, w, *, size, **attrs):
    is_nonempty = dy.numel() * w.numel()
    dx.copy_(torch.nn.grad.conv2d_input(dx.shape, w, dy, **attrs)) if is_nonempty else dx.zero_()


conv_2d_back.cost(lambda dx, dy, w, **attrs: _conv_cost(dy, w))
conv_2d_back.samples(gradient_samples(conv_2d, conv_2d_back))


@op()
def conv_2d_back_w(
    dy: Tensor, x: Tensor, *, window: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Spec:
    """Gradient of conv_2d for filters of this height and width: dy as y, dw (O, C, KH, KW) f32."""
    out_shape = check(x.spec, window, stride, padding, dilation)
    Spec((x.shape[0], *dy.shape[1:2], *out_shape)).require(dy=dy)
    return Spec((dy.shape[1], x.shape[1], *window))


@conv_2d_back_w.vjp
def conv_2d_back_w_vjp(ddw, dw, dy, x, *, window, **attrs):
    return conv_2d(x, ddw, **attrs), conv_2d_back(dy, ddw, size=x.shape[2:], **attrs)


@conv_2d_back_w.workspace("cpu")
def conv_2d_back_w_workspace(dy, x, *, window, **attrs):
    size = dy.shape[1] * x.shape[1] * math.prod(window)
    return (Spec((max(1, min(SHARES, x.shape[0], MAX_PARTIAL_VALUES // max(size, 1))), size)),)


@conv_2d_back_w.kernel("numpy")
def conv_2d_back_w_numpy(dw, dy, x, *, window, **attrs):
    dw[...] = np.einsum("nohw,nchwab->ocab", dy, windows(x, window, **attrs), optimize=True)


@conv_2d_back_w.kernel("cpu")
def conv_2d_back_w_cpu(dw, dy, x, *, window, work, **attrs):
    sizes = kernel_sizes(x.shape, dy.shape[2:], window, **attrs)
    args = flatten(dw), flatten(work[0]), flatten(dy), flatten(x)
    if not dw.size:
        return
    kernels.convolution.conv_back_w(*args, *_counts(dy, dw), sizes)


@conv_2d_back_w.kernel("torch")
def conv_2d_back_w_torch(dw, dy, x, *, window, **attrs):
    is_nonempty = dy.numel() * x.numel()
    dw.copy_(torch.nn.grad.conv2d_weight(x, dw.shape, dy, **attrs)) if is_nonempty else dw.zero_()


conv_2d_back_w.cost(lambda dw, dy, x, **attrs: _conv_cost(dy, dw))
conv_2d_back_w.samples(gradient_samples(conv_2d, conv_2d_back_w))


def conv_1d(
    x: Tensor, w: Tensor, *, stride: int = 1, padding: int = 0, dilation: int = 1
) -> Tensor:
    """Cross-correlate along one axis: x (N, C, L), w (O, C, K), y (N, O, OL), all f32. ggml_conv_1d."""
    message = f"x is {x.spec} and w is {w.spec}; they must be f32[N, C, L] and f32[O, C, K]"
    demand("conv_1d", len(w.shape) == len(x.shape) == 3, message, x, w)
    images, filters = (reshape(t, shape=(*t.shape[:2], 1, t.shape[2])) for t in (x, w))
    y = conv_2d(images, filters, stride=(1, stride), padding=(0, padding), dilation=(1, dilation))
    return reshape(y, shape=(*y.shape[:2], y.shape[3]))
