"""Windows that slide over images (N, C, H, W): their number, as rows, and pooled: the largest value, or the mean."""

import math
from itertools import product

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32
from packtrain.engine.ops.arrays import demand, flatten, gradient_samples
from packtrain.engine.ops.shape import reshape
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require

Pair = tuple[int, int]


def _out(n: int, k: int, stride: int, pad: int, dilation: int = 1) -> int:
    """Return how many windows of size k an axis of n has."""
    return (n + 2 * pad - dilation * (k - 1) - 1) // stride + 1


def check(
    x: Tensor | Spec, window: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair = (1, 1)
) -> Pair:
    """Check attributes of windows over x, pairs (down, across), for a shape rule; return height and width of y."""
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
    """Return all windows of x, (N, C, OH, OW, KH, KW): a view of x, or with padding, of a copy padded with `fill`."""
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


@im2col_back.kernel("torch")
@im2col_back.kernel("numpy")
def im2col_back_numpy(dx, dy, *, shape, window, stride, padding, dilation):
    dy_windows = dy.reshape(*dy.shape[:3], shape[1], *window).swapaxes(2, 3).swapaxes(1, 2)
    _sum_windows(dx, dy_windows, stride, padding, dilation)


def _sum_windows(dx, window_values, stride, padding, dilation=(1, 1)):
    """Write to dx (N, C, H, W) the sums of windows (N, C, OH, OW, KH, KW) at the places that they come from."""
    (h, w), (down_pad, across_pad) = dx.shape[2:], padding
    padded_shape = *dx.shape[:2], h + 2 * down_pad, w + 2 * across_pad
    is_numpy = isinstance(dx, np.ndarray)
    padded = np.zeros(padded_shape, dx.dtype) if is_numpy else dx.new_zeros(padded_shape)
    for a, b in product(*map(range, window_values.shape[4:])):
        down, across = (
            slice(k * d, k * d + s * (m - 1) + 1, s)
            for k, d, s, m in zip((a, b), dilation, stride, window_values.shape[2:4], strict=True)
        )
        padded[:, :, down, across] += window_values[..., a, b]
    dx[...] = padded[:, :, down_pad : down_pad + h, across_pad : across_pad + w]


@im2col_back.kernel("cpu")
def im2col_back_cpu(dx, dy, *, shape, window, stride, padding, dilation):
    sizes = kernel_sizes(shape, dy.shape[1:3], window, stride, padding, dilation)
    kernels.windows.fold(flatten(dx), flatten(dy), *shape[:2], sizes)


im2col_back.samples(gradient_samples(im2col, im2col_back))


@op()
def pool_2d(
    x: Tensor, *, largest: bool, window: Pair, stride: Pair | None = None, padding: Pair = (0, 0)
) -> Spec:
    """Take the `largest` value of each window, or if false its mean, edges counted as zeros. ggml_pool_2d.

    x  (N, C, H, W)    f32
    y  (N, C, OH, OW)  f32; `stride` is by default the size of the window
    """
    out_shape = check(x.spec, window, stride or window, padding)
    is_valid = all(p < k for p, k in zip(padding, window, strict=True))
    require(is_valid, f"padding is {padding}; it must be below the window {window}")
    return Spec((*x.shape[:2], *out_shape))


@pool_2d.vjp
def pool_2d_vjp(dy, y, x, **attrs):
    return (pool_2d_back(dy, x, **attrs),)


@pool_2d.kernel("numpy")
def pool_2d_numpy(y, x, *, largest, window, stride, padding):
    x_windows = windows(x, window, stride or window, padding, fill=-np.inf if largest else 0.0)
    y[...] = x_windows.max((4, 5)) if largest else x_windows.mean((4, 5))


@pool_2d.kernel("cpu")
def pool_2d_cpu(y, x, *, largest, window, stride, padding):
    sizes = kernel_sizes(x.shape, y.shape[2:], window, stride or window, padding)
    kernels.windows.pool(largest, flatten(y), flatten(x), x.shape[0] * x.shape[1], sizes)


def _pad_torch(x, padding, fill_value):
    (down, across), pad = padding, torch.nn.functional.pad
    return pad(x, (across, across, down, down), value=fill_value) if any(padding) else x


@pool_2d.kernel("torch")
def pool_2d_torch(y, x, *, largest, window, stride, padding):
    padded = _pad_torch(x, padding, -np.inf if largest else 0.0)
    pool = torch.nn.functional.max_pool2d if largest else torch.nn.functional.avg_pool2d
    if y.numel():
        y.copy_(pool(padded, window, stride or window))


@pool_2d.samples
def pool_2d_samples():
    values = np.random.default_rng(5).permutation(2 * 3 * 7 * 8).reshape(2, 3, 7, 8) / 50
    x = constant("x", values)
    for largest in (True, False):
        yield pool_2d(x, largest=largest, window=(2, 2))
        yield pool_2d(x, largest=largest, window=(3, 2), stride=(2, 1), padding=(1, 0))


@op()
def pool_2d_back(
    dy: Tensor, x: Tensor, *, largest: bool, window: Pair, stride: Pair | None, padding: Pair
) -> Spec:
    """Gradient of pool_2d: for the first of the largest values of a window, or for all alike. ggml_pool_2d_back."""
    Spec((*x.shape[:2], *check(x.spec, window, stride or window, padding))).require(dy=dy)
    return x.spec


@pool_2d_back.kernel("numpy")
def pool_2d_back_numpy(dx, dy, x, *, largest, window, stride, padding):
    strides, area = stride or window, math.prod(window)
    x_windows = windows(x, window, strides, padding, fill=-np.inf)
    first = x_windows.reshape(*x_windows.shape[:4], -1).argmax(-1)
    is_first = (first[..., None] == np.arange(area)).reshape(x_windows.shape)
    window_grads = dy[..., None, None] * (is_first if largest else 1 / area)
    _sum_windows(dx, np.broadcast_to(window_grads, x_windows.shape), strides, padding)


@pool_2d_back.kernel("cpu")
def pool_2d_back_cpu(dx, dy, x, *, largest, window, stride, padding):
    sizes = kernel_sizes(x.shape, dy.shape[2:], window, stride or window, padding)
    num_planes = x.shape[0] * x.shape[1]
    kernels.windows.pool_back(largest, flatten(dx), flatten(dy), flatten(x), num_planes, sizes)


@pool_2d_back.kernel("torch")
def pool_2d_back_torch(dx, dy, x, *, largest, window, stride, padding):
    if not dx.numel():
        return
    padded, pool_args = _pad_torch(x, padding, -np.inf), (window, stride or window, (0, 0))
    aten = torch.ops.aten
    if largest:
        _, max_index = aten.max_pool2d_with_indices(padded, *pool_args)
        options = (1, 1), False, max_index
        padded_grad = aten.max_pool2d_with_indices_backward(dy, padded, *pool_args, *options)
    else:
        padded_grad = aten.avg_pool2d_backward(dy, padded, *pool_args, False, True, None)
    (h, w), (down, across) = x.shape[2:], padding
    dx.copy_(padded_grad[:, :, down : down + h, across : across + w])


pool_2d_back.samples(gradient_samples(pool_2d, pool_2d_back))


def pool_1d(x: Tensor, *, largest: bool, window: int, stride: int = 0, padding: int = 0) -> Tensor:
    """pool_2d along one axis: x (N, C, L), y (N, C, OL), f32. ggml_pool_1d."""
    demand("pool_1d", len(x.shape) == 3, f"x is {x.spec}; it must be f32[N, C, L]", x)
    images = reshape(x, shape=(*x.shape[:2], 1, x.shape[-1]))
    sizes = {"window": (1, window), "stride": (1, stride or window), "padding": (0, padding)}
    y = pool_2d(images, largest=largest, **sizes)
    return reshape(y, shape=(*x.shape[:2], y.shape[-1]))
