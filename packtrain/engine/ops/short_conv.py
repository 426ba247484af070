"""Short convolutions along time, one filter for each channel: they mix a token with the few before it."""

from functools import partial

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32, i32
from packtrain.engine.ops import arrays
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require


def _check_sequence(name: str, x: Tensor, seq: Tensor | None) -> None:
    require(len(x.shape) == 3 and x.dtype == f32, f"{name} is {x.spec}; it must be f32[B, T, C]")
    Spec(x.shape[:2], i32).require(seq=seq)


def _check_filters(x: Tensor, w: Tensor) -> None:
    is_valid = len(w.shape) == 2 and w.dtype == f32 and w.shape[0] == x.shape[-1]
    require(is_valid, f"w is {w.spec}; for {x.spec} it must be f32[{x.shape[-1]}, K]")


def _shift_tokens(x, seq, shift):
    """Return x (B, T, C) moved by `shift` tokens, zero beyond a row and where another sequence (`seq`) begins."""
    shifted, left = np.zeros_like(x), max(x.shape[1] - shift, 0)
    shifted[:, shift:] = x[:, :left]
    if seq is not None:
        shifted[:, shift:] *= (seq[:, shift:] == seq[:, :left])[..., None]
    return shifted


def _sample_inputs():
    random = np.random.default_rng(1)
    for b, t, c, k in ((1, 1, 1, 1), (2, 7, 5, 3), (1, 3, 20, 4), (2, 150, 70, 4)):
        seq = constant("seq", np.sort(random.integers(0, 4, (b, t)), axis=1), i32)
        for ids in (None, seq):
            yield input("x", (b, t, c)), input("w", (c, k)), ids


@op()
def short_conv(x: Tensor, w: Tensor, seq: Tensor | None = None) -> Spec:
    """Convolve each channel with its filter along time, up to each token: y[t] = sum of w[k] x[t - (K - 1 - k)].

    Tokens of another sequence, and those before the first, count as zeros. ggml_ssm_conv.

    x, y  (B, T, C)  f32
    w     (C, K)     f32
    seq   (B, T)     i32: several sequences can share a row
    """
    _check_sequence("x", x, seq)
    _check_filters(x, w)
    return x.spec


@short_conv.vjp
def short_conv_vjp(dy, y, x, w, seq):
    return short_conv_back(dy, w, seq), short_conv_back_w(dy, x, seq, taps=w.shape[1]), None


def _run_conv_kernel(y, x, w, seq, w_t, step):
    """Run the compiled convolution; w_t: scratch for transposed filters, step: -1 reads rows before, 1 rows after."""
    w_t[...] = w.T
    args = arrays.rows(y), arrays.rows(x), w_t, arrays.flatten_or_absent(seq, arrays.ABSENT_IDS)
    kernels.short_conv.conv(*args, x.shape[1], step)


def _transposed_filter_workspace(x, w, *other_inputs):
    return (Spec((w.shape[1], w.shape[0])),)


short_conv.workspace("cpu")(_transposed_filter_workspace)


@short_conv.kernel("cpu")
def short_conv_cpu(y, x, w, seq, work):
    _run_conv_kernel(y, x, w, seq, work[0], -1)


def _convolve(y, x, w, seq, step):
    """Write short_conv of x to y (step 1), or its gradient for x (step -1), by NumPy or PyTorch, tap by tap."""
    y[...] = 0
    num_steps, num_taps = x.shape[1], w.shape[1]
    for k in range(num_taps):
        shift = num_taps - 1 - k
        left = max(num_steps - shift, 0)
        output_slice, input_slice = (slice(num_steps - left, None), slice(None, left))[::step]
        products = x[:, input_slice] * w[:, k]
        if seq is not None:
            products *= (seq[:, output_slice] == seq[:, input_slice])[..., None]
        y[:, output_slice] += products


short_conv.kernel("torch")(short_conv.kernel("numpy")(partial(_convolve, step=1)))
short_conv.samples(lambda: (short_conv(*inputs) for inputs in _sample_inputs()))


@op()
def short_conv_back(dy: Tensor, w: Tensor, seq: Tensor | None = None) -> Spec:
    """Gradient of short_conv for x: dx[t] = sum of w[k] dy[t + (K - 1 - k)]; shapes as in short_conv."""
    _check_sequence("dy", dy, seq)
    _check_filters(dy, w)
    return dy.spec


@short_conv_back.vjp
def short_conv_back_vjp(ddx, dx, dy, w, seq):
    return short_conv(ddx, w, seq), short_conv_back_w(dy, ddx, seq, taps=w.shape[1]), None


short_conv_back.workspace("cpu")(_transposed_filter_workspace)


@short_conv_back.kernel("cpu")
def short_conv_back_cpu(dx, dy, w, seq, work):
    _run_conv_kernel(dx, dy, w, seq, work[0], 1)


short_conv_back.kernel("torch")(short_conv_back.kernel("numpy")(partial(_convolve, step=-1)))
short_conv_back.samples(arrays.gradient_samples(short_conv, short_conv_back))


@op()
def short_conv_back_w(dy: Tensor, x: Tensor, seq: Tensor | None = None, *, taps: int) -> Spec:
    """Gradient of short_conv for w (C, taps): dw[k] = sum of dy[t] x[t - (taps - 1 - k)]; shapes as in short_conv."""
    _check_sequence("x", x, seq)
    x.spec.require(dy=dy)
    require(taps > 0, f"taps is {taps}; it must be at least 1")
    return Spec((x.shape[2], taps))


@short_conv_back_w.vjp
def short_conv_back_w_vjp(ddw, dw, dy, x, seq, *, taps):
    return short_conv(x, ddw, seq), short_conv_back(dy, ddw, seq), None


short_conv_back_w.workspace("cpu")(lambda dy, x, *inputs, taps: (Spec((taps, x.shape[2])),) * 2)


@short_conv_back_w.kernel("numpy")
def short_conv_back_w_numpy(dw, dy, x, seq, *, taps):
    for k in range(taps):
        dw[:, k] = (dy * _shift_tokens(x, seq, taps - 1 - k)).sum((0, 1))


@short_conv_back_w.kernel("cpu")
def short_conv_back_w_cpu(dw, dy, x, seq, *, taps, work):
    args = arrays.rows(dy), arrays.rows(x), arrays.flatten_or_absent(seq, arrays.ABSENT_IDS)
    kernels.short_conv.conv_back_w(*work, *args, x.shape[1])
    dw[...] = work[0].T


@short_conv_back_w.kernel("torch")
def short_conv_back_w_torch(dw, dy, x, seq, *, taps):
    num_steps = x.shape[1]
    for k in range(taps):
        left = max(num_steps - (taps - 1 - k), 0)
        products = dy[:, num_steps - left :] * x[:, :left]
        if seq is not None:
            products *= (seq[:, num_steps - left :] == seq[:, :left])[..., None]
        dw[:, k] = products.sum((0, 1))


short_conv_back_w.samples(arrays.gradient_samples(short_conv, short_conv_back_w))


@op()
def short_conv_cells(x: Tensor, w: Tensor, cells: Tensor) -> Spec:
    """Apply short_conv to tokens whose earlier ones lie in cells: y[t] = sum of w[k] x[cells[t, k]].

    x      (S, C)  f32, of all cells
    w      (C, K)  f32
    cells  (T, K)  i32; the last is the token's own, a negative one counts as zeros
    y      (T, C)  f32
    """
    require(len(x.shape) == 2 and x.dtype == f32, f"x is {x.spec}; it must be f32[S, C]")
    _check_filters(x, w)
    Spec((*cells.shape[:1], w.shape[1]), i32).require(cells=cells)
    return Spec((cells.shape[0], x.shape[1]))


@short_conv_cells.kernel("torch")
@short_conv_cells.kernel("numpy")
def short_conv_cells_numpy(y, x, w, cells):
    y[...] = (x[cells] * (cells >= 0)[..., None] * w.T).sum(1)


short_conv_cells.workspace("cpu")(_transposed_filter_workspace)


@short_conv_cells.kernel("cpu")
def short_conv_cells_cpu(y, x, w, cells, work):
    work[0][...] = w.T
    kernels.short_conv.conv_cells(y, x, work[0], arrays.flatten(cells))


@short_conv_cells.samples
def short_conv_cells_samples():
    random = np.random.default_rng(1)
    for s, c, t, k in ((1, 1, 1, 1), (9, 20, 4, 3), (40, 70, 30, 4)):
        cells = constant("cells", random.integers(-1, s, (t, k)), i32)
        yield short_conv_cells(input("x", (s, c)), input("w", (c, k)), cells)
