"""Windows that slide over images (N, C, H, W): how many there are, and windows laid out as rows."""

from itertools import product

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32
from packtrain.engine.ops.arrays import flatten, gradient_samples
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, input, op, require

Pair = tuple[int, int]


def _out(n: int, k: int, stride: int, pad: int, dilation: int = 1) -> int:
    return (n + 2 * pad - dilation * (k - 1) - 1) // stride + 1


def check(
    x: Tensor | Spec, window: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair = (1, 1)
) -> Pair:
    """Validate the attributes of windows; return height and width of the result."""
    require(x.dtype == f32 and len(x.shape) == 4, f"x is {x}; it must be f32[N, C, H, W]")
    for name, axis_pair, min_value in (
        ("window", window, 1), ("stride", stride, 1), ("dilation", dilation, 1), ("padding", padding, 0),
    ):  # fmt: skip
        is_valid = isinstance(axis_pair, tuple) and len(axis_pair) == 2
        require(
            is_valid and all(isinstance(n, int | np.integer) and n >= min_value for n in axis_pair),
            f"{name} is {axis_pair}; it must be two whole numbers of at least {min_value}, down and across",
        )
    h, w = (
        _out(*sizes) for sizes in zip(x.shape[2:], window, stride, padding, dilation, strict=True)
    )
    require(min(h, w) > 0, f"the window {window} does not fit into {x} with padding {padding}")
    return h, w


def kernel_sizes(shape, out_shape, window, stride, padding, dilation=(1, 1)):
    return np.array([*shape[2:], *window, *out_shape, *stride, *padding, *dilation], np.int32)


def windows(x, window, stride, padding, dilation=(1, 1), fill=0.0, writeable=False):
    """Return all windows of x, (N, C, OH, OW, KH, KW): a view, or a copy if edges are filled."""
    edges = [(0, 0), (0, 0), *((p, p) for p in padding)]
    padded = np.pad(x, edges, constant_values=fill) if any(padding) else x
    spans = tuple(d * (k - 1) + 1 for k, d in zip(window, dilation, strict=True))
    seen = np.lib.stride_tricks.sliding_window_view(padded, spans, (2, 3), writeable=writeable)
    return seen[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


@op()
def im2col(
    x: Tensor, *, window: Pair, stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1),
) -> Spec:  # fmt: skip
    """Lay out the windows of images as rows: x (N, C, H, W) f32, y (N, OH, OW, C * KH * KW) f32. ggml_im2col."""
    h, w = check(x.spec, window, stride, padding, dilation)
    return Spec((x.shape[0], h, w, x.shape[1] * window[0] * window[1]))


@im2col.vjp
def im2col_vjp(dy, y, x, **attrs):
    return (im2col_back(dy, shape=x.shape, **attrs),)


@im2col.kernel("numpy")
def im2col_numpy(y, x, *, window, stride, padding, dilation):
    x_windows = windows(x, window, stride, padding, dilation)
    y[...] = x_windows.transpose(0, 2, 3, 1, 4, 5).reshape(y.shape)


@im2col.kernel("cpu")
def im2col_cpu(y, x, *, window, stride, padding, dilation):
    sizes = kernel_sizes(x.shape, y.shape[1:3], window, stride, padding, dilation)
    kernels.windows.unfold(flatten(y), flatten(x), *x.shape[:2], sizes)


@im2col.kernel("torch")
def im2col_torch(y, x, *, window, stride, padding, dilation):
    if y.numel():
        x_windows = torch.nn.functional.unfold(x, window, dilation, padding, stride)
        y.view(len(x), -1, y.shape[-1]).copy_(x_windows.mT)


@im2col.samples
def im2col_samples():
    yield im2col(input("x", (2, 3, 5, 6)), window=(3, 2))
    yield im2col(
        input("x", (3, 2, 7, 8)), window=(3, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2)
    )
    yield im2col(input("x", (5, 1, 28, 28)), window=(3, 3), padding=(1, 1))


@op()
def im2col_back(
    dy: Tensor, *, shape: tuple[int, ...], window: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Spec:
    """Gradient of im2col: add each value of dy to its place in x of this shape. ggml_im2col_back."""
    dx_spec = Spec(tuple(shape))
    out_shape = check(dx_spec, window, stride, padding, dilation)
    Spec((shape[0], *out_shape, shape[1] * window[0] * window[1])).require(dy=dy)
    return dx_spec


im2col_back.vjp(lambda ddx, dx, dy, *, shape, **attrs: (im2col(ddx, **attrs),))


@im2col_back.kernel("numpy")
def im2col_back_numpy(dx, dy, *, shape, window, stride, padding, dilation):
    n, c, h, w = shape
    dy_windows = dy.reshape(n, *dy.shape[1:3], c, *window).transpose(0, 3, 1, 2, 4, 5)
    padded = np.zeros((n, c, h + 2 * padding[0], w + 2 * padding[1]), dx.dtype)
    _add_windows(padded, dy_windows, stride, dilation)
    dx[...] = padded[:, :, padding[0] : padding[0] + h, padding[1] : padding[1] + w]


def _add_windows(padded, window_values, stride, dilation):
    """Add windows (N, C, OH, OW, KH, KW) to the places that they come from."""
    for a, b in product(*map(range, window_values.shape[4:])):
        down, across = (
            slice(k * d, k * d + s * (m - 1) + 1, s)
            for k, d, s, m in zip((a, b), dilation, stride, window_values.shape[2:4], strict=True)
        )
        padded[:, :, down, across] += window_values[..., a, b]


@im2col_back.kernel("cpu")
def im2col_back_cpu(dx, dy, *, shape, window, stride, padding, dilation):
    sizes = kernel_sizes(shape, dy.shape[1:3], window, stride, padding, dilation)
    kernels.windows.fold(flatten(dx), flatten(dy), *shape[:2], sizes)


@im2col_back.kernel("torch")
def im2col_back_torch(dx, dy, *, shape, window, stride, padding, dilation):
    n, c, h, w = shape
    dy_windows = dy.unflatten(-1, (c, *window)).permute(0, 3, 1, 2, 4, 5)
    padded = dx.new_zeros((n, c, h + 2 * padding[0], w + 2 * padding[1]))
    _add_windows(padded, dy_windows, stride, dilation)
    dx.copy_(padded[:, :, padding[0] : padding[0] + h, padding[1] : padding[1] + w])


im2col_back.samples(gradient_samples(im2col, im2col_back))
