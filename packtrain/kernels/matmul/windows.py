"""Slide windows over images: lay them out as rows for a product, add them back, and pool them.

`sizes` are int32: height and width of the image, of the window and of the result; steps down and across, zeros
before the first row and column, and distances between neighbours of a window, down and across.
"""

from packtrain.kernels.runtime.jit import parallel, part
from packtrain.kernels.runtime.kernel_types import f32, i64

VALUES_PER_TASK = 1 << 14  # values of a task


@part("i64(ints1)")
def plane_work(sizes):
    """Return how many values all windows of a plane have, OH OW KH KW; `sizes` are as in unfold."""
    return i64(sizes[4]) * sizes[5] * sizes[2] * sizes[3]


@parallel(
    "out1, in1, i64, i64, ints1",
    lambda num_images, channels, sizes: (
        num_images * sizes[4],
        channels * plane_work(sizes) // sizes[4],
    ),
    block=VALUES_PER_TASK,
)
def unfold(y, x, num_images, channels, sizes, line_start, line_stop):
    """Write the windows of each image as rows of y, each channels x window; num_images and channels are N and C.

    x      (N C H W,)            f32
    y      (N OH OW C KH KW,)    f32
    sizes  (12,)                 i32: H, W, KH, KW, OH, OW; steps, padding, distances in a window, each down and across
    """
    h, w, kh, kw, oh, ow, sh, sw, ph, pw, dh, dw = sizes
    for output_line in range(line_start, line_stop):
        image, i = output_line // oh, output_line % oh
        target = output_line * ow * channels * kh * kw
        for j in range(ow):
            for c in range(channels):
                plane = (image * channels + c) * h
                for a in range(kh):
                    row = i * sh - ph + a * dh
                    is_inside = 0 <= row < h
                    for b in range(kw):
                        column = j * sw - pw + b * dw
                        if is_inside and 0 <= column < w:
                            y[target] = x[(plane + row) * w + column]
                        else:
                            y[target] = 0.0
                        target += 1


@parallel(
    "out1, in1, i64, i64, ints1", lambda num_images, channels, sizes: (num_images * channels, plane_work(sizes)),
    block=VALUES_PER_TASK,
)  # fmt: skip
def fold(dx, dy, num_images, channels, sizes, plane_start, plane_stop):
    """Add each value of dy to the place in dx that `unfold` (with equal sizes) read it from: the adjoint of unfold.

    dx  (N C H W,)           f32
    dy  (N OH OW C KH KW,)   f32
    """
    h, w, kh, kw, oh, ow, sh, sw, ph, pw, dh, dw = sizes
    window_size = kh * kw
    for plane in range(plane_start, plane_stop):
        image, c = plane // channels, plane % channels
        for offset in range(plane * h * w, (plane + 1) * h * w):
            dx[offset] = 0.0
        for i in range(oh):
            for j in range(ow):
                source = (((image * oh + i) * ow + j) * channels + c) * window_size
                for a in range(kh):
                    row = i * sh - ph + a * dh
                    if not 0 <= row < h:
                        continue
                    for b in range(kw):
                        column = j * sw - pw + b * dw
                        if 0 <= column < w:
                            dx[(plane * h + row) * w + column] += dy[source + a * kw + b]


@parallel(
    "boolean, out1, in1, i64, ints1", lambda planes, sizes: (planes, plane_work(sizes)), block=VALUES_PER_TASK,
)  # fmt: skip
def pool(use_max, y, x, planes, sizes, plane_start, plane_stop):
    """Write each window's largest value if use_max, else its mean; `planes` = N C, `sizes` as unfold explains them.

    x  (N C H W,)    f32
    y  (N C OH OW,)  f32
    """
    h, w, kh, kw, oh, ow, sh, sw, ph, pw, _, _ = sizes
    for plane in range(plane_start, plane_stop):
        for i in range(oh):
            for j in range(ow):
                pooled = f32(-3.4028235e38) if use_max else f32(0.0)
                for row in range(max(i * sh - ph, 0), min(i * sh - ph + kh, h)):
                    for column in range(max(j * sw - pw, 0), min(j * sw - pw + kw, w)):
                        value = x[(plane * h + row) * w + column]
                        pooled = max(pooled, value) if use_max else pooled + value
                y[(plane * oh + i) * ow + j] = pooled if use_max else pooled / f32(kh * kw)


@parallel(
    "boolean, out1, in1, in1, i64, ints1", lambda planes, sizes: (planes, plane_work(sizes)), block=VALUES_PER_TASK,
)  # fmt: skip
def pool_back(use_max, dx, dy, x, planes, sizes, plane_start, plane_stop):
    """Gradient of pool: dy goes to the first of a window's largest values if use_max, else to all its values alike.

    dx, x  (N C H W,)    f32
    dy     (N C OH OW,)  f32
    """
    h, w, kh, kw, oh, ow, sh, sw, ph, pw, _, _ = sizes
    for plane in range(plane_start, plane_stop):
        for offset in range(plane * h * w, (plane + 1) * h * w):
            dx[offset] = 0.0
        for i in range(oh):
            for j in range(ow):
                d = dy[(plane * oh + i) * ow + j]
                max_offset, max_value = i64(-1), f32(0.0)
                for row in range(max(i * sh - ph, 0), min(i * sh - ph + kh, h)):
                    for column in range(max(j * sw - pw, 0), min(j * sw - pw + kw, w)):
                        offset = (plane * h + row) * w + column
                        if not use_max:
                            dx[offset] += d / f32(kh * kw)
                        elif max_offset < 0 or x[offset] > max_value:
                            max_offset, max_value = offset, x[offset]
                if max_offset >= 0:
                    dx[max_offset] += d
