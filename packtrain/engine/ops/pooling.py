"""Pooling of images (N, C, H, W): the largest value of each window, or its mean."""

from itertools import product

import numpy as np

from packtrain import kernels
from packtrain.engine.ops.arrays import demand, flatten, gradient_samples
from packtrain.engine.ops.shape import reshape
from packtrain.engine.ops.torch_kernels import torch
from packtrain.engine.ops.windows import Pair, check, kernel_sizes, windows
from packtrain.engine.tensor import Spec, Tensor, constant, op, require


@op()
def pool_2d(
    x: Tensor, *, largest: bool, window: Pair, stride: Pair | None = None, padding: Pair = (0, 0)
) -> Spec:
    """Take the largest value of each window, or its mean, edges counted as zeros. ggml_pool_2d.

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
    strides, (kh, kw) = stride or window, window
    edges = [(0, 0), (0, 0), *((p, p) for p in padding)]
    padded_grad = np.zeros_like(np.pad(x, edges))
    x_windows = windows(x, window, strides, padding, fill=-np.inf)
    first = x_windows.reshape(*x_windows.shape[:4], -1).argmax(-1)
    for a, b in product(range(kh), range(kw)):
        down, across = (
            slice(k, k + s * (m - 1) + 1, s)
            for k, s, m in zip((a, b), strides, dy.shape[2:], strict=True)
        )
        padded_grad[:, :, down, across] += dy * (first == a * kw + b if largest else 1 / (kh * kw))
    h, w = x.shape[2:]
    dx[...] = padded_grad[:, :, padding[0] : padding[0] + h, padding[1] : padding[1] + w]


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
