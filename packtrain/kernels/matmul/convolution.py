"""Convolve images: windows are laid out a panel at a time, in the cache, and multiplied from there.

`sizes` are those of windows.py. K = C KH KW values of a window, P = OH OW windows of an image.
"""

from packtrain.kernels.matmul.gemm import DEEP, multiply_block, sgemm
from packtrain.kernels.matmul.operand_packing import pack_b
from packtrain.kernels.matmul.panels import PANEL, places
from packtrain.kernels.runtime.jit import BLOCK, each, kernel, parallel, part, spans
from packtrain.kernels.runtime.kernel_types import f32, i64
from packtrain.kernels.simd.simd_f32 import (
    LANES, address, load_part, peek, poke, scratch, splat, store, store_part,
)  # fmt: skip
from packtrain.kernels.simd.f32_ranges import sum_rows

TASK = 1 << 20  # multiply-adds
SIDE = 256  # windows at a time for the gradient of the filters, by PANEL values of a window
FILTERS_PER_TASK = 64  # filters in a task of that gradient
PANEL_BUFFER = DEEP * PANEL
BETA_ONE = f32(1.0)


@part("boolean, i64, i64, i64")
def copy_run(is_backward, panel_ptr, x, count):
    """Copy `count` f32 at address x to panel_ptr; is_backward: add those at panel_ptr to x."""
    for s in range(0, count, LANES):
        left = count - s
        if is_backward:
            store_part(x, s, load_part(x, s, left) + load_part(panel_ptr, s, left), left)
        else:
            store_part(panel_ptr, s, load_part(x, s, left), left)


@part("boolean, i64, i64, i64, i64, i64")
def copy_strided_run(is_backward, panel_ptr, x, first_index, index_stop, x_step):
    """Copy f32 number i * x_step at x to place i of the panel, or if is_backward add that to x, for each index i."""
    for s in range(first_index, index_stop):
        if is_backward:
            poke(x, s * x_step, peek(x, s * x_step) + peek(panel_ptr, s))
        else:
            poke(panel_ptr, s, peek(x, s * x_step))


@part("boolean, i64, i64, i64, i64, i64, i64")
def copy_line(is_backward, panel_ptr, x, column, row_width, column_step, count):
    """Copy `count` values, column_step apart from `column` on, of the row at x to panel_ptr; is_backward: add to x."""
    if column_step == 1:
        low, index_stop = max(i64(0), -column), min(count, row_width - column)
        copy_run(is_backward, address(panel_ptr, low), address(x, column + low), index_stop - low)
    else:
        low = max(i64(0), -(column // column_step))
        index_stop = min(count, (row_width - 1 - column) // column_step + 1)
        copy_strided_run(is_backward, panel_ptr, address(x, column), low, index_stop, column_step)


@kernel("boolean, i64, i64, i64, i64, i64, i64, ints1")
def lay_windows(is_backward, panel_ptr, panel_width, x, first, depth, window_start, sizes):
    """panel (depth, panel_width) = values first … of windows window_start …, 0 beyond edges; backward adds it to x.

    panel_ptr and x are addresses, x that of an image (C, H, W); `sizes` are those of windows.unfold.
    """
    h, w, kh, kw, oh, ow, sh, sw, ph, pw, dh, dw = sizes
    num_windows = min(panel_width, i64(oh) * ow - window_start)
    for k in range(depth):
        c, a, b = ((first + k) // (kh * kw), (first + k) // kw % kh, (first + k) % kw)
        panel_row = address(panel_ptr, k * panel_width)
        if not is_backward and ph + pw > 0:
            for t in range(0, num_windows, LANES):
                store_part(panel_row, t, splat(0.0), num_windows - t)
        i, j, t = window_start // ow, window_start % ow, i64(0)
        while t < num_windows:
            n = min(ow - j, num_windows - t)
            row = i * sh - ph + a * dh
            if 0 <= row < h:
                x_row = address(x, (c * h + row) * w)
                copy_line(is_backward, address(panel_row, t), x_row, j * sw - pw + b * dw, w, sw, n)
            t += n
            i += 1
            j = i64(0)


@kernel("i64, i64, i64, i64, i64, i64, i64, ints1")
def conv_panel(y, x, w, channels, filters, windows, window_start, sizes):
    """Multiply up to PANEL windows of image x, from window_start on, by all filters w: these columns of y (O, P).

    x (C, H, W), w (O, C KH KW) and y are f32 at addresses; `windows` is P, `sizes` are those of windows.unfold.
    """
    panel = scratch(PANEL_BUFFER)
    window_size = channels * sizes[2] * sizes[3]
    for value_start in range(0, window_size, DEEP):
        depth = min(i64(DEEP), window_size - value_start)
        lay_windows(False, panel, PANEL, x, value_start, depth, window_start, sizes)
        for float_index in range(depth * PANEL, places(depth, 0) * PANEL, LANES):
            store(panel, float_index, splat(0.0))
        beta = f32(1.0) if value_start else f32(0.0)
        num_left, target = min(i64(PANEL), windows - window_start), address(y, window_start)
        product_args = filters, num_left, address(w, value_start), window_size, panel, depth
        multiply_block(0, *product_args, beta, target, windows, 0)


@parallel(
    "out1, in1, in1, i64, i64, i64, ints1",
    lambda images, channels, filters, sizes: (
        images * -(-i64(sizes[4]) * sizes[5] // PANEL),
        channels * sizes[2] * sizes[3] * filters * PANEL,
    ),
    block=TASK,
)
def conv(y, x, w, images, channels, filters, sizes, panel_start, panel_stop):
    """y = x convolved with the filters w; images, channels and filters are N, C and O, sizes those of windows.unfold.

    x  (N C H W,)     f32
    w  (O C KH KW,)   f32
    y  (N O OH OW,)   f32
    """
    num_windows = i64(sizes[4]) * sizes[5]
    num_panels = -(-num_windows // PANEL)
    for panel_index in range(panel_start, panel_stop):
        picture, at = panel_index // num_panels, panel_index % num_panels * PANEL
        source = address(x, picture * channels * sizes[0] * sizes[1])
        target = address(y, picture * filters * num_windows)
        conv_panel(target, source, address(w, 0), channels, filters, num_windows, at, sizes)


@kernel("i64, i64, i64, i64, i64, i64, i64, ints1")
def planes(dx, dy, w, first, depth, size, filters, sizes):
    """Add to image dx gradients of values first : + depth of its windows, by dy (O, P), w (O, size); addresses."""
    panel, columns = scratch(PANEL_BUFFER), scratch(PANEL_BUFFER)
    windows = i64(sizes[4]) * sizes[5]
    for start in range(0, windows, PANEL):
        num_left = min(i64(PANEL), windows - start)
        for f in range(0, filters, DEEP):
            block_filters = min(i64(DEEP), filters - f)
            pack_b(panel, address(dy, f * windows + start), 0, windows, block_filters, num_left, 0)
            beta = f32(1.0) if f else f32(0.0)
            product_args = depth, num_left, address(w, f * size + first), size, panel, block_filters
            multiply_block(1, *product_args, beta, columns, PANEL, 0)
        lay_windows(True, columns, PANEL, dx, first, depth, start, sizes)


def group_work(images, channels, filters, sizes):
    """Return the number of groups of channels whose part of a window fits a panel, and multiply-adds of each."""
    window_size = i64(sizes[2]) * sizes[3]
    channels_per_group = max(1, DEEP // window_size)
    group_ops = min(channels_per_group, channels) * window_size * filters * sizes[4] * sizes[5]
    return images * -(-channels // channels_per_group), group_ops


@parallel("out1, in1, in1, i64, i64, i64, ints1", group_work, block=TASK)
def conv_back(dx, dy, w, images, channels, filters, sizes, group_start, group_stop):
    """Compute dx, the gradient of `conv` for x, with conv's numbers; a channel larger than a panel goes in parts.

    dy  (N O OH OW,)   f32
    w   (O C KH KW,)   f32
    dx  (N C H W,)     f32
    """
    plane_size, window = i64(sizes[0]) * sizes[1], i64(sizes[2]) * sizes[3]
    channels_per_group = max(1, DEEP // window)
    num_groups = -(-channels // channels_per_group)
    for group_index in range(group_start, group_stop):
        picture, channel = group_index // num_groups, group_index % num_groups * channels_per_group
        target = address(dx, picture * channels * plane_size)
        channel_stop = min(channel + channels_per_group, channels)
        for float_index in range(channel * plane_size, channel_stop * plane_size):
            poke(target, float_index, f32(0.0))
        source = address(dy, picture * filters * sizes[4] * sizes[5])
        for first in range(channel * window, channel_stop * window, DEEP):
            depth = min(i64(DEEP), channel_stop * window - first)
            planes(target, source, address(w, 0), first, depth, channels * window, filters, sizes)


@kernel("out1, in1, in1, i64, i64, i64, i64, ints1, i64")
def filter_grad_share(partial, dy, x, images, channels, filters, num_shares, sizes, task_index):
    """Write the gradient of a group of filters (task_index // num_shares) by a share (the rest) of the images."""
    columns_ptr = scratch(PANEL_BUFFER)
    num_windows, window_size = i64(sizes[4]) * sizes[5], channels * sizes[2] * sizes[3]
    portion, f = task_index % num_shares, task_index // num_shares * FILTERS_PER_TASK
    task_filters = min(i64(FILTERS_PER_TASK), filters - f)
    target = address(partial, (portion * filters + f) * window_size)
    for float_index in range(task_filters * window_size):
        poke(target, float_index, f32(0.0))
    for picture in range(images * portion // num_shares, images * (portion + 1) // num_shares):
        image = address(x, picture * channels * sizes[0] * sizes[1])
        for start in range(0, num_windows, SIDE):
            count = min(i64(SIDE), num_windows - start)
            source = address(dy, (picture * filters + f) * num_windows + start)
            for first in range(0, window_size, PANEL):
                wide = min(i64(PANEL), window_size - first)
                lay_windows(False, columns_ptr, SIDE, image, first, wide, start, sizes)
                sgemm(
                    *(0, 1, task_filters, wide, count, source, num_windows, columns_ptr, SIDE),
                    *(BETA_ONE, address(target, first), window_size, 0),
                )


@kernel("out1, out1, in1, in1, i64, i64, i64, ints1")
def conv_back_w(dw, partial, dy, x, images, channels, filters, sizes):
    """Compute dw, the gradient of `conv` for w, with conv's numbers.

    dy       (N O OH OW,)           f32
    x        (N C H W,)             f32
    dw       (O C KH KW,)           f32
    partial  (shares O C KH KW,)    f32 workspace: sums over shares of the images
    """
    num_shares = partial.size // dw.size
    share_args = partial, dy, x, images, channels, filters, num_shares, sizes
    each(filter_grad_share, share_args, num_shares * -(-filters // FILTERS_PER_TASK))
    task_args = address(dw, 0), address(partial, 0), num_shares, dw.size
    spans(sum_rows, task_args, dw.size, BLOCK)
