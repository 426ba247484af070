"""Normalize rows: RMS norm with a weight, its gradients, and layer norm."""

import math

from packtrain.kernels.runtime.jit import each_if_large, kernel, parallel, spans
from packtrain.kernels.runtime.kernel_types import f32
from packtrain.kernels.simd.simd_f32 import (
    LANES, address, fma, keep_first, load_part, splat, store_part, total,
)  # fmt: skip
from packtrain.kernels.simd.f32_ranges import sum_rows

SERIAL = 1 << 14
ROWS_PER_BLOCK = 64  # rows that share one row of partial sums of dw
COLUMNS = 256


@kernel("f32(i64, i64, f32)")
def inverse_rms(x, width, eps):
    """Return 1 / sqrt(mean(x**2) + eps) of the row at address x."""
    s0 = splat(0.0)
    s1 = splat(0.0)
    for i in range(0, width, 2 * LANES):
        a = load_part(x, i, width - i)
        b = load_part(x, i + LANES, width - i - LANES)
        s0 = fma(a, a, s0)
        s1 = fma(b, b, s1)
    return f32(1.0 / math.sqrt(total(s0 + s1) / width + eps))


@parallel("out2, in2, in1, f32", lambda x: x.shape, serial=SERIAL)
def rms_norm(y, x, w, eps, row_start, row_stop):
    """y = x / sqrt(mean(x**2) + eps) * w; y may be x.

    x, y  (N, C)  f32
    w     (C,)    f32, or (0,) for none
    """
    width = x.shape[1]
    for row in range(row_start, row_stop):
        r = splat(inverse_rms(address(x, row * width), width, eps))
        for i in range(0, width, LANES):
            num_left = width - i
            v = load_part(x, row * width + i, num_left) * r
            if w.size:
                v *= load_part(w, i, num_left)
            store_part(y, row * width + i, v, num_left)


@kernel("f32(i64, i64, i64, i64)")
def gradient_dot(dy, x, w, width):
    """Return sum(dy * w * x) of rows of `width` f32 at these addresses; w = 0: without a weight."""
    lane_sums = splat(0.0)
    for i in range(0, width, LANES):
        num_left = width - i
        g = load_part(dy, i, num_left)
        if w:
            g *= load_part(w, i, num_left)
        lane_sums = fma(g, load_part(x, i, num_left), lane_sums)
    return total(lane_sums)


@kernel("out2, out2, in2, in2, in1, in2, f32, i64")
def norm_back_block(dx, partial, dy, x, w, acc, eps, block):
    """Write dx of 64 rows, from 64 block on, and sums of dy * x / rms over them to partial[block]: see rms_norm_back.

    All of a row's inputs are read before its dx is written, lane by lane, so that dx may be an input.
    """
    n, width = x.shape
    weight_ptr = address(w, 0) if w.size else 0
    for row in range(block * ROWS_PER_BLOCK, min(n, (block + 1) * ROWS_PER_BLOCK)):
        x_ptr = address(x, row * width)
        inv_rms = inverse_rms(x_ptr, width, eps)
        pull_factor = f32(0.0)
        if dx.size:
            dot = gradient_dot(address(dy, row * width), x_ptr, weight_ptr, width)
            pull_factor = dot * inv_rms * inv_rms * inv_rms / f32(width)
        r = splat(inv_rms)
        for i in range(0, width, LANES):
            num_left = width - i
            offset = row * width + i
            d = load_part(dy, offset, num_left)
            v = load_part(x, offset, num_left)
            if partial.size:
                partial_lanes = d * v * r
                if row > block * ROWS_PER_BLOCK:
                    partial_lanes += load_part(partial, block * width + i, num_left)
                store_part(partial, block * width + i, partial_lanes, num_left)
            if dx.size:
                if w.size:
                    d *= load_part(w, i, num_left)
                d = d * r - v * pull_factor
                if acc.size:
                    d += load_part(acc, offset, num_left)
                store_part(dx, offset, d, num_left)


@kernel("out2, out1, out2, in2, in2, in1, in2, f32")
def rms_norm_back(dx, dw, partial, dy, x, w, acc, eps):
    """Write the gradients of rms_norm; dx may be dy, x or acc.

    dx = acc + (g - x * mean(g * x) / rms**2) / rms, g = dy * w;  dw = sum of dy * x / rms over rows

        x, dy    (N, C)            f32
        dx, acc  (N, C)            f32, or (0, 0) for none
        w, dw    (C,)              f32, or (0,) for none
        partial  (ceil(N / 64), C) f32 workspace, or (0, 0) without dw
    """
    n, width = x.shape
    blocks = -(-n // ROWS_PER_BLOCK)
    if dw.size and partial.size < blocks * width:
        raise ValueError("rms_norm_back: partial must be (ceil(N / 64), C)")
    task_args = dx, partial, dy, x, w, acc, eps
    each_if_large(n * width > SERIAL, norm_back_block, task_args, blocks)
    if dw.size:
        task_args = address(dw, 0), address(partial, 0), blocks, width
        spans(sum_rows, task_args, width, COLUMNS if blocks * width > SERIAL else width)


@kernel("UniTuple(f32, 2)(i64, i64, f32)")
def mean_and_inverse(x, width, eps):
    """Return the mean of the row at address x, and 1 / sqrt(variance + eps)."""
    lane_sums = splat(0.0)
    for i in range(0, width, LANES):
        lane_sums += load_part(x, i, width - i)
    mean = f32(total(lane_sums) / max(width, 1))
    lane_sums = splat(0.0)
    for i in range(0, width, LANES):
        v = keep_first(load_part(x, i, width - i) - mean, width - i, 0.0)
        lane_sums = fma(v, v, lane_sums)
    return mean, f32(1.0 / math.sqrt(total(lane_sums) / max(width, 1) + eps))


@parallel("out2, in2, in1, in1, f32", lambda x: x.shape, serial=SERIAL)
def norm(y, x, w, b, eps, row_start, row_stop):
    """y = (x - mean) / sqrt(variance + eps) * w + b; y may be x.

    x, y  (N, C)  f32
    w, b  (C,)    f32, or (0,) for none
    """
    width = x.shape[1]
    for row in range(row_start, row_stop):
        mean, inv_std = mean_and_inverse(address(x, row * width), width, eps)
        for i in range(0, width, LANES):
            num_left = width - i
            v = (load_part(x, row * width + i, num_left) - mean) * inv_std
            if w.size:
                v *= load_part(w, i, num_left)
            if b.size:
                v += load_part(b, i, num_left)
            store_part(y, row * width + i, v, num_left)
