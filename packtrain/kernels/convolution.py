"""Convolution of pictures: windows are laid out a panel at a time, in the cache, and multiplied from there.

`sizes` are those of windows.py. K = C KH KW values of a window, P = OH OW windows of a picture.
"""

from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import each, kernel, part, spans
from packtrain.kernels.gemm import DEEP, sgemm, times_block
from packtrain.kernels.operands import pack_b
from packtrain.kernels.panels import PANEL, places
from packtrain.kernels.simd import LANES, address, ids1, in1, load_part, out1, peek, poke, scratch

i64, f32, void, flag = types.int64, types.float32, types.void, types.boolean
TASK = 1 << 20  # multiply-adds
SIDE = (
    256  # windows, and values of a window, of a panel for the gradient of the filters: SIDE x PANEL
)
FILTERS = 64  # of a task of that
BLOCK = 1 << 13
STACK = DEEP * PANEL
ONE = f32(1.0)


@part(void(flag, i64, i64, i64))
def run(back, panel, x, count):
    for s in range(0, count, LANES):
        left = count - s
        if back:
            simd.store_part(x, s, load_part(x, s, left) + load_part(panel, s, left), left)
        else:
            simd.store_part(panel, s, load_part(x, s, left), left)


@part(void(flag, i64, i64, i64, i64, i64))
def run_apart(back, panel, x, low, high, step):
    for s in range(low, high):
        if back:
            poke(x, s * step, peek(x, s * step) + peek(panel, s))
        else:
            poke(panel, s, peek(x, s * step))


@part(void(flag, i64, i64, i64, i64, i64, i64))
def line(back, panel, x, column, width, step, count):
    """`count` neighbours in a row of x (width,), from `column` on, `step` apart; those outside are skipped."""
    if step == 1:
        low, high = max(i64(0), -column), min(count, width - column)
        run(back, address(panel, low), address(x, column + low), high - low)
    else:
        low = max(i64(0), -(column // step))
        high = min(count, (width - 1 - column) // step + 1)
        run_apart(back, panel, address(x, column), low, high, step)


@kernel(void(flag, i64, i64, i64, i64, i64, i64, ids1))
def lay(back, panel, wide, x, first, depth, start, sizes):
    """panel (depth, wide) = values first … of the windows start …, 0 beyond edges; if `back`, those added to x.

    x is the address of a picture (C, H, W).
    """
    h, w, kh, kw, oh, ow, sh, sw, ph, pw, dh, dw = sizes
    count = min(wide, i64(oh) * ow - start)
    for k in range(depth):
        c, a, b = (first + k) // (kh * kw), (first + k) // kw % kh, (first + k) % kw
        to = address(panel, k * wide)
        if not back and ph + pw > 0:
            for t in range(0, count, LANES):
                simd.store_part(to, t, simd.splat(0.0), count - t)
        i, j, t = start // ow, start % ow, i64(0)
        while t < count:
            n = min(ow - j, count - t)
            row = i * sh - ph + a * dh
            if 0 <= row < h:
                source = address(x, (c * h + row) * w)
                line(back, address(to, t), source, j * sw - pw + b * dw, w, sw, n)
            t += n
            i += 1
            j = i64(0)


@kernel(void(i64, i64, i64, i64, i64, i64, i64, ids1))
def strip(y, x, w, channels, filters, windows, start, sizes):
    """PANEL windows of a picture times all filters: y (O, P) at `start`."""
    panel = scratch(STACK)
    size = channels * sizes[2] * sizes[3]
    for first in range(0, size, DEEP):
        depth = min(i64(DEEP), size - first)
        lay(False, panel, PANEL, x, first, depth, start, sizes)
        for at in range(depth * PANEL, places(depth, 0) * PANEL, LANES):
            simd.store(panel, at, simd.splat(0.0))
        keep = f32(1.0) if first else f32(0.0)
        left, target = min(i64(PANEL), windows - start), address(y, start)
        product_args = filters, left, address(w, first), size, panel, depth
        times_block(0, *product_args, keep, target, windows, 0)


@kernel(void(out1, in1, in1, i64, i64, ids1, i64, i64))
def strips(y, x, w, channels, filters, sizes, start, stop):
    windows = i64(sizes[4]) * sizes[5]
    count = -(-windows // PANEL)
    for number in range(start, stop):
        picture, at = number // count, number % count * PANEL
        source = address(x, picture * channels * sizes[0] * sizes[1])
        target = address(y, picture * filters * windows)
        strip(target, source, address(w, 0), channels, filters, windows, at, sizes)


@kernel(void(out1, in1, in1, i64, i64, i64, ids1))
def conv(y, x, w, pictures, channels, filters, sizes):
    """y = x convolved with w.

    x  (N C H W,)     f32
    w  (O C KH KW,)   f32
    y  (N O OH OW,)   f32
    """
    count = -(-i64(sizes[4]) * sizes[5] // PANEL)
    work = channels * sizes[2] * sizes[3] * filters * PANEL
    spans(strips, (y, x, w, channels, filters, sizes), pictures * count, TASK // work)


@kernel(void(i64, i64, i64, i64, i64, i64, i64, ids1))
def planes(dx, dy, w, first, depth, size, filters, sizes):
    """Add to a picture dx what values first … of its windows were multiplied with; dy (O, P)."""
    panel, columns = scratch(STACK), scratch(STACK)
    windows = i64(sizes[4]) * sizes[5]
    for start in range(0, windows, PANEL):
        left = min(i64(PANEL), windows - start)
        for f in range(0, filters, DEEP):
            num_filters = min(i64(DEEP), filters - f)
            pack_b(panel, address(dy, f * windows + start), 0, windows, num_filters, left, 0)
            keep = f32(1.0) if f else f32(0.0)
            product_args = depth, left, address(w, f * size + first), size, panel, num_filters
            times_block(1, *product_args, keep, columns, PANEL, 0)
        lay(True, columns, PANEL, dx, first, depth, start, sizes)


@kernel(void(out1, in1, in1, i64, i64, ids1, i64, i64))
def groups(dx, dy, w, channels, filters, sizes, start, stop):
    """Gradients of groups of channels, so many that their part of a window fits a panel; a larger one goes in parts."""
    area, window = i64(sizes[0]) * sizes[1], i64(sizes[2]) * sizes[3]
    channels_per_group = max(1, DEEP // window)
    count = -(-channels // channels_per_group)
    for number in range(start, stop):
        picture, channel = number // count, number % count * channels_per_group
        target = address(dx, picture * channels * area)
        last = min(channel + channels_per_group, channels)
        for at in range(channel * area, last * area):
            poke(target, at, f32(0.0))
        source = address(dy, picture * filters * sizes[4] * sizes[5])
        for first in range(channel * window, last * window, DEEP):
            depth = min(i64(DEEP), last * window - first)
            planes(target, source, address(w, 0), first, depth, channels * window, filters, sizes)


@kernel(void(out1, in1, in1, i64, i64, i64, ids1))
def conv_back(dx, dy, w, pictures, channels, filters, sizes):
    """Gradient of conv for x.

    dy  (N O OH OW,)   f32
    w   (O C KH KW,)   f32
    dx  (N C H W,)     f32
    """
    window = i64(sizes[2]) * sizes[3]
    channels_per_group = max(1, DEEP // window)
    count = -(-channels // channels_per_group)
    work = min(channels_per_group, channels) * window * filters * sizes[4] * sizes[5]
    task_args = (dx, dy, w, channels, filters, sizes)
    spans(groups, task_args, pictures * count, TASK // max(1, work))


@kernel(void(out1, in1, in1, i64, i64, i64, i64, ids1, i64))
def share(partial, dy, x, pictures, channels, filters, shares, sizes, number):
    """The gradient of some filters from a share of the pictures."""
    columns = scratch(STACK)
    windows, size = i64(sizes[4]) * sizes[5], channels * sizes[2] * sizes[3]
    portion, f = number % shares, number // shares * FILTERS
    num_filters = min(i64(FILTERS), filters - f)
    target = address(partial, (portion * filters + f) * size)
    for at in range(num_filters * size):
        poke(target, at, f32(0.0))
    for picture in range(pictures * portion // shares, pictures * (portion + 1) // shares):
        image = address(x, picture * channels * sizes[0] * sizes[1])
        for start in range(0, windows, SIDE):
            count = min(i64(SIDE), windows - start)
            source = address(dy, (picture * filters + f) * windows + start)
            for first in range(0, size, PANEL):
                wide = min(i64(PANEL), size - first)
                lay(False, columns, SIDE, image, first, wide, start, sizes)
                sgemm(
                    *(0, 1, num_filters, wide, count, source, windows, columns, SIDE),
                    *(ONE, address(target, first), size, 0),
                )


@kernel(void(out1, in1, i64, i64, i64))
def add_shares(dw, partial, shares, start, stop):
    for i in range(start, stop, LANES):
        left = stop - i
        lanes = simd.splat(0.0)
        for number in range(shares):
            lanes += load_part(partial, number * dw.size + i, left)
        simd.store_part(dw, i, lanes, left)


@kernel(void(out1, out1, in1, in1, i64, i64, i64, ids1))
def conv_back_w(dw, partial, dy, x, pictures, channels, filters, sizes):
    """Gradient of conv for w.

    dy       (N O OH OW,)           f32
    x        (N C H W,)             f32
    dw       (O C KH KW,)           f32
    partial  (shares O C KH KW,)    f32 workspace: sums over shares of the pictures
    """
    shares = partial.size // dw.size
    task_args = (partial, dy, x, pictures, channels, filters, shares, sizes)
    each(share, task_args, shares * -(-filters // FILTERS))
    spans(add_shares, (dw, partial, shares), dw.size, BLOCK)
