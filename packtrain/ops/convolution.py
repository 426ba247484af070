"""Convolution and pooling of images (N, C, H, W): windows laid out as rows, and the products and means of those."""

from itertools import product

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32
from packtrain.ops.arrays import flat
from packtrain.ops.matmul import matmul
from packtrain.ops.shape import cont, permute, reshape
from packtrain.tensor import GraphError, Spec, Tensor, constant, input, op, want

Pair = tuple[int, int]


def _out(n: int, k: int, step: int, pad: int, apart: int = 1) -> int:
    return (n + 2 * pad - apart * (k - 1) - 1) // step + 1


def _check(x: Tensor, window: Pair, stride: Pair, padding: Pair, dilation: Pair = (1, 1)) -> Pair:
    """Height and width of the result."""
    want(x.dtype == f32 and len(x.shape) == 4, f"x is {x.spec}; it must be f32[N, C, H, W]")
    for name, pair, least in (
        ("window", window, 1), ("stride", stride, 1), ("dilation", dilation, 1), ("padding", padding, 0),
    ):  # fmt: skip
        want(
            len(pair) == 2 and min(pair) >= least,
            f"{name} is {pair}; it must be two numbers of at least {least}",
        )
    h, w = (_out(*one) for one in zip(x.shape[2:], window, stride, padding, dilation, strict=True))
    want(min(h, w) > 0, f"the window {window} does not fit into x {x.spec} with padding {padding}")
    return h, w


def _sizes(shape, out, window, stride, padding, dilation=(1, 1)):
    return np.array([*shape[2:], *window, *out, *stride, *padding, *dilation], np.int32)


def _windows(x, window, stride, padding, dilation=(1, 1), fill=0.0):
    """All windows of x, (N, C, OH, OW, KH, KW), in a copy with its edges filled."""
    edges = [(0, 0), (0, 0), *((p, p) for p in padding)]
    whole = np.pad(x, edges, constant_values=fill)
    spans = tuple(d * (k - 1) + 1 for k, d in zip(window, dilation, strict=True))
    seen = np.lib.stride_tricks.sliding_window_view(whole, spans, (2, 3))
    return seen[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


# ---- windows as rows -----------------------------------------------------------------------------------------


@op()
def im2col(
    x: Tensor,
    *,
    window: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
) -> Spec:
    """The windows of images as rows: x (N, C, H, W) f32, y (N, OH, OW, C * KH * KW) f32. ggml_im2col."""
    h, w = _check(x, window, stride, padding, dilation)
    return Spec((x.shape[0], h, w, x.shape[1] * window[0] * window[1]))


@im2col.vjp
def im2col_vjp(dy, y, x, **how):
    return (im2col_back(dy, shape=x.shape, **how),)


@im2col.kernel("numpy")
def im2col_numpy(y, x, *, window, stride, padding, dilation):
    seen = _windows(x, window, stride, padding, dilation)
    y[...] = seen.transpose(0, 2, 3, 1, 4, 5).reshape(y.shape)


@im2col.kernel("cpu")
def im2col_cpu(y, x, *, window, stride, padding, dilation):
    sizes = _sizes(x.shape, y.shape[1:3], window, stride, padding, dilation)
    kernels.windows.unfold(flat(y), flat(x), *x.shape[:2], sizes)


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
    """Gradient of im2col: each value of dy added to where it came from in x of this shape. ggml_im2col_back."""
    want(dy.dtype == f32, f"dy is {dy.spec}; it must be f32")
    return Spec(tuple(shape))


@im2col_back.vjp
def im2col_back_vjp(ddx, dx, dy, *, shape, **how):
    return (im2col(ddx, **how),)


@im2col_back.kernel("numpy")
def im2col_back_numpy(dx, dy, *, shape, window, stride, padding, dilation):
    n, c, h, w = shape
    rows = dy.reshape(n, *dy.shape[1:3], c, *window).transpose(0, 3, 1, 2, 4, 5)
    whole = np.zeros((n, c, h + 2 * padding[0], w + 2 * padding[1]), dx.dtype)
    for a, b in product(*map(range, window)):
        down, across = (
            slice(k * d, k * d + s * (m - 1) + 1, s)
            for k, d, s, m in zip((a, b), dilation, stride, dy.shape[1:3], strict=True)
        )
        whole[:, :, down, across] += rows[..., a, b]
    dx[...] = whole[:, :, padding[0] : padding[0] + h, padding[1] : padding[1] + w]


@im2col_back.kernel("cpu")
def im2col_back_cpu(dx, dy, *, shape, window, stride, padding, dilation):
    sizes = _sizes(shape, dy.shape[1:3], window, stride, padding, dilation)
    kernels.windows.fold(flat(dx), flat(dy), *shape[:2], sizes)


@im2col_back.samples
def im2col_back_samples():
    plain = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    yield im2col_back(input("dy", (2, 3, 5, 18)), shape=(2, 3, 5, 6), window=(3, 2), **plain)
    how = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
    yield im2col_back(input("dy", (3, 4, 8, 18)), shape=(3, 2, 7, 8), window=(3, 3), **how)


def conv_2d(
    x: Tensor, w: Tensor, *, stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1)
) -> Tensor:
    """Cross-correlation of images with filters. ggml_conv_2d.

    x  (N, C, H, W)    f32
    w  (O, C, KH, KW)  f32
    y  (N, O, OH, OW)  f32, OH = (H + 2 padding - dilation (KH - 1) - 1) // stride + 1
    """
    if len(w.shape) != 4 or len(x.shape) != 4 or w.shape[1] != x.shape[1]:
        raise GraphError(
            f"conv_2d: x is {x.spec} and w is {w.spec}; they must be [N, C, H, W] and [O, C, KH, KW]"
        )
    filters, _, *window = w.shape
    columns = im2col(
        x, window=(window[0], window[1]), stride=stride, padding=padding, dilation=dilation
    )
    y = matmul(columns, reshape(w, shape=(filters, columns.shape[-1])))
    return cont(permute(y, axes=(0, 3, 1, 2)))


def conv_1d(
    x: Tensor, w: Tensor, *, stride: int = 1, padding: int = 0, dilation: int = 1
) -> Tensor:
    """Cross-correlation along one axis: x (N, C, L), w (O, C, K), y (N, O, OL), all f32. ggml_conv_1d."""
    if len(w.shape) != 3 or len(x.shape) != 3:
        raise GraphError(
            f"conv_1d: x is {x.spec} and w is {w.spec}; they must be [N, C, L] and [O, C, K]"
        )
    wide, filters = (reshape(t, shape=(*t.shape[:2], 1, t.shape[2])) for t in (x, w))
    y = conv_2d(wide, filters, stride=(1, stride), padding=(0, padding), dilation=(1, dilation))
    return reshape(y, shape=(*y.shape[:2], y.shape[3]))


# ---- pooling -------------------------------------------------------------------------------------------------


@op()
def pool_2d(
    x: Tensor, *, largest: bool, window: Pair, stride: Pair | None = None, padding: Pair = (0, 0)
) -> Spec:
    """The largest value of each window, or its mean, edges counted as zeros. ggml_pool_2d.

    x  (N, C, H, W)    f32
    y  (N, C, OH, OW)  f32; windows are their own size apart unless `stride` says otherwise
    """
    fits = all(p < k for p, k in zip(padding, window, strict=True))
    want(fits, f"padding is {padding}; it must be below the window {window}")
    return Spec((*x.shape[:2], *_check(x, window, stride or window, padding)))


@pool_2d.vjp
def pool_2d_vjp(dy, y, x, **how):
    return (pool_2d_back(dy, x, **how),)


@pool_2d.kernel("numpy")
def pool_2d_numpy(y, x, *, largest, window, stride, padding):
    seen = _windows(x, window, stride or window, padding, fill=-np.inf if largest else 0.0)
    y[...] = seen.max((4, 5)) if largest else seen.mean((4, 5))


@pool_2d.kernel("cpu")
def pool_2d_cpu(y, x, *, largest, window, stride, padding):
    sizes = _sizes(x.shape, y.shape[2:], window, stride or window, padding)
    kernels.windows.pool(largest, flat(y), flat(x), x.shape[0] * x.shape[1], sizes)


def _pools(make):
    def samples():
        x = constant(
            "x", np.random.default_rng(5).permutation(2 * 3 * 7 * 8).reshape(2, 3, 7, 8) / 50
        )
        for largest in (True, False):
            yield make(x, largest=largest, window=(2, 2))
            yield make(x, largest=largest, window=(3, 2), stride=(2, 1), padding=(1, 0))

    return samples


pool_2d.samples(_pools(pool_2d))


@op()
def pool_2d_back(
    dy: Tensor, x: Tensor, *, largest: bool, window: Pair, stride: Pair | None, padding: Pair
) -> Spec:
    """Gradient of pool_2d: to the first of the largest values of a window, or to all alike. ggml_pool_2d_back."""
    want(dy.dtype == x.dtype == f32, f"dy is {dy.spec} and x is {x.spec}; both must be f32")
    return x.spec


@pool_2d_back.kernel("numpy")
def pool_2d_back_numpy(dx, dy, x, *, largest, window, stride, padding):
    apart, (kh, kw) = stride or window, window
    edges = [(0, 0), (0, 0), *((p, p) for p in padding)]
    whole = np.zeros_like(np.pad(x, edges))
    seen = _windows(x, window, apart, padding, fill=-np.inf)
    first = seen.reshape(*seen.shape[:4], -1).argmax(-1)
    for a, b in product(range(kh), range(kw)):
        down, across = (
            slice(k, k + s * (m - 1) + 1, s)
            for k, s, m in zip((a, b), apart, dy.shape[2:], strict=True)
        )
        whole[:, :, down, across] += dy * (first == a * kw + b if largest else 1 / (kh * kw))
    h, w = x.shape[2:]
    dx[...] = whole[:, :, padding[0] : padding[0] + h, padding[1] : padding[1] + w]


@pool_2d_back.kernel("cpu")
def pool_2d_back_cpu(dx, dy, x, *, largest, window, stride, padding):
    sizes = _sizes(x.shape, dy.shape[2:], window, stride or window, padding)
    planes = x.shape[0] * x.shape[1]
    kernels.windows.pool_back(largest, flat(dx), flat(dy), flat(x), planes, sizes)


def _pool_back(x, *, stride=None, **how):
    y = pool_2d(x, stride=stride, **how)
    return pool_2d_back(input("dy", y.shape), x, stride=stride, **{"padding": (0, 0)} | how)


pool_2d_back.samples(_pools(_pool_back))


def pool_1d(x: Tensor, *, largest: bool, window: int, stride: int = 0, padding: int = 0) -> Tensor:
    """pool_2d along one axis: x (N, C, L), y (N, C, OL), f32. ggml_pool_1d."""
    wide = reshape(x, shape=(*x.shape[:2], 1, x.shape[-1]))
    y = pool_2d(
        wide,
        largest=largest,
        window=(1, window),
        stride=(1, stride or window),
        padding=(0, padding),
    )
    return reshape(y, shape=(*x.shape[:2], y.shape[-1]))
