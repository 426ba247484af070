"""Windows that slide over images: laid out as rows for a product, added back, and pooled.

`sizes` are int32: height and width of the image, of the window and of the result; steps down and across, zeros
before the first row and column, and distances between neighbours of a window, down and across.
"""

from numba import types

from packtrain.kernels.call import kernel, spans
from packtrain.kernels.simd import ids1, in1, out1

i64, f32, void, flag = types.int64, types.float32, types.void, types.boolean
WORK = 1 << 14  # values of a task


@kernel(void(out1, in1, i64, ids1, i64, i64))
def unfold_span(y, x, channels, sizes, start, stop):
    h, w, kh, kw, oh, ow, sh, sw, ph, pw, dh, dw = sizes
    for line in range(start, stop):
        image, i = line // oh, line % oh
        to = line * ow * channels * kh * kw
        for j in range(ow):
            for c in range(channels):
                plane = (image * channels + c) * h
                for a in range(kh):
                    row = i * sh - ph + a * dh
                    inside = 0 <= row < h
                    for b in range(kw):
                        column = j * sw - pw + b * dw
                        if inside and 0 <= column < w:
                            y[to] = x[(plane + row) * w + column]
                        else:
                            y[to] = 0.0
                        to += 1


@kernel(void(out1, in1, i64, i64, ids1))
def unfold(y, x, images, channels, sizes):
    """y = the windows of each image as rows of channels x window.

    x  (N C H W,)            f32
    y  (N OH OW C KH KW,)    f32
    """
    lines = images * sizes[4]
    step = max(1, WORK // max(1, sizes[5] * channels * sizes[2] * sizes[3]))
    spans(unfold_span, (y, x, channels, sizes), lines, step)


@kernel(void(out1, in1, i64, ids1, i64, i64))
def fold_span(dx, dy, channels, sizes, start, stop):
    h, w, kh, kw, oh, ow, sh, sw, ph, pw, dh, dw = sizes
    window = kh * kw
    for plane in range(start, stop):
        image, c = plane // channels, plane % channels
        for at in range(plane * h * w, (plane + 1) * h * w):
            dx[at] = 0.0
        for i in range(oh):
            for j in range(ow):
                source = (((image * oh + i) * ow + j) * channels + c) * window
                for a in range(kh):
                    row = i * sh - ph + a * dh
                    if not 0 <= row < h:
                        continue
                    for b in range(kw):
                        column = j * sw - pw + b * dw
                        if 0 <= column < w:
                            dx[(plane * h + row) * w + column] += dy[source + a * kw + b]


@kernel(void(out1, in1, i64, i64, ids1))
def fold(dx, dy, images, channels, sizes):
    """The adjoint of unfold: each value of dy added where it came from.

    dx  (N C H W,)           f32
    dy  (N OH OW C KH KW,)   f32
    """
    step = max(1, WORK // max(1, sizes[4] * sizes[5] * sizes[2] * sizes[3]))
    spans(fold_span, (dx, dy, channels, sizes), images * channels, step)


@kernel(void(flag, out1, in1, ids1, i64, i64))
def pool_span(largest, y, x, sizes, start, stop):
    h, w, kh, kw, oh, ow, sh, sw, ph, pw, _, _ = sizes
    for plane in range(start, stop):
        for i in range(oh):
            for j in range(ow):
                pooled = f32(-3.4028235e38) if largest else f32(0.0)
                for row in range(max(i * sh - ph, 0), min(i * sh - ph + kh, h)):
                    for column in range(max(j * sw - pw, 0), min(j * sw - pw + kw, w)):
                        value = x[(plane * h + row) * w + column]
                        pooled = max(pooled, value) if largest else pooled + value
                y[(plane * oh + i) * ow + j] = pooled if largest else pooled / f32(kh * kw)


@kernel(void(flag, out1, in1, i64, ids1))
def pool(largest, y, x, planes, sizes):
    """The largest value of each window, or its sum over its size.

    x  (N C H W,)    f32
    y  (N C OH OW,)  f32
    """
    step = max(1, WORK // max(1, sizes[4] * sizes[5] * sizes[2] * sizes[3]))
    spans(pool_span, (largest, y, x, sizes), planes, step)


@kernel(void(flag, out1, in1, in1, ids1, i64, i64))
def pool_back_span(largest, dx, dy, x, sizes, start, stop):
    h, w, kh, kw, oh, ow, sh, sw, ph, pw, _, _ = sizes
    for plane in range(start, stop):
        for at in range(plane * h * w, (plane + 1) * h * w):
            dx[at] = 0.0
        for i in range(oh):
            for j in range(ow):
                d = dy[(plane * oh + i) * ow + j]
                best, top = i64(-1), f32(0.0)
                for row in range(max(i * sh - ph, 0), min(i * sh - ph + kh, h)):
                    for column in range(max(j * sw - pw, 0), min(j * sw - pw + kw, w)):
                        at = (plane * h + row) * w + column
                        if not largest:
                            dx[at] += d / f32(kh * kw)
                        elif best < 0 or x[at] > top:
                            best, top = at, x[at]
                if best >= 0:
                    dx[best] += d


@kernel(void(flag, out1, in1, in1, i64, ids1))
def pool_back(largest, dx, dy, x, planes, sizes):
    """Gradient of pool: to the first of the largest values, or to all of a window alike.

    dx, x  (N C H W,)    f32
    dy     (N C OH OW,)  f32
    """
    step = max(1, WORK // max(1, sizes[4] * sizes[5] * sizes[2] * sizes[3]))
    spans(pool_back_span, (largest, dx, dy, x, sizes), planes, step)
