"""Softmax of rows with a scale and an additive mask, and its gradient."""

import math

from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import kernel, part, spans
from packtrain.kernels.simd import INFINITY, LANES, f32x16, in2, load_part, out2, splat, store_part

i64, f32, f64, void = types.int64, types.float32, types.float64, types.void
SERIAL = 1 << 13
BLOCK = 1 << 13
RUN = 64 * LANES  # elements added in f32 lanes before they go to f64


@part(f32x16(i64, i64, i64, i64, f32))
def masked(x, mask, i, left, scale):
    """scale * x + mask, -inf beyond `left` lanes; rows by address, because arrays would be reference-counted."""
    v = load_part(x, i, left) * scale
    if mask:
        v += load_part(mask, i, left)
    return v if left >= LANES else simd.keep_first(v, left, -INFINITY)


@kernel(void(out2, in2, in2, f32, i64, i64))
def soft_max_rows(y, x, mask, scale, start, stop):
    width = x.shape[1]
    for row in range(start, stop):
        source = simd.address(x, row * width)
        added = simd.address(mask, row % mask.shape[0] * width) if mask.size else 0
        lanes = splat(-INFINITY)
        for i in range(0, width, LANES):
            lanes = simd.maximum(masked(source, added, i, width - i, scale), lanes)
        top = simd.largest(lanes)
        if top == -INFINITY:
            for i in range(0, width, LANES):
                store_part(y, row * width + i, splat(0.0), width - i)
            continue
        weight = f64(0.0)
        for run in range(0, width, RUN):
            lanes = splat(0.0)
            for i in range(run, min(run + RUN, width), LANES):
                v = simd.exp(masked(source, added, i, width - i, scale) - top)
                store_part(y, row * width + i, v, width - i)
                lanes += v
            weight += f64(simd.total(lanes))
        share = splat(f32(1.0 / weight))
        for i in range(0, width, LANES):
            at = row * width + i
            store_part(y, at, load_part(y, at, width - i) * share, width - i)


@kernel(void(out2, in2, i64, i64))
def log_soft_max_rows(y, x, start, stop):
    width = x.shape[1]
    for row in range(start, stop):
        source = simd.address(x, row * width)
        lanes = splat(-INFINITY)
        for i in range(0, width, LANES):
            lanes = simd.maximum(masked(source, 0, i, width - i, f32(1.0)), lanes)
        top = simd.largest(lanes)
        weight = f64(0.0)
        for run in range(0, width, RUN):
            lanes = splat(0.0)
            for i in range(run, min(run + RUN, width), LANES):
                lanes += simd.exp(masked(source, 0, i, width - i, f32(1.0)) - top)
            weight += f64(simd.total(lanes))
        log_sum = splat(f32(math.log(weight)))
        for i in range(0, width, LANES):
            at = row * width + i
            store_part(y, at, load_part(x, at, width - i) - top - log_sum, width - i)


@kernel(void(out2, in2))
def log_soft_max(y, x):
    """y = x - log-sum-exp(x) of each row; y may be x.

    x, y  (N, C)  f32
    """
    n, width = x.shape
    spans(log_soft_max_rows, (y, x), n, BLOCK // max(1, width) if x.size > SERIAL else n)


@kernel(void(out2, in2, in2, f32))
def soft_max(y, x, mask, scale):
    """y = softmax(scale * x + mask) of each row; y may be x.

    x, y  (N, C)  f32
    mask  (M, C)  f32, N a multiple of M, row i takes mask[i % M]; or (0, 0) for none

    A fully masked row (-inf) gives zeros.
    """
    n, width = x.shape
    spans(soft_max_rows, (y, x, mask, scale), n, BLOCK // max(1, width) if x.size > SERIAL else n)


@kernel(void(out2, in2, in2, f32, i64, i64))
def soft_max_back_rows(dx, dy, y, scale, start, stop):
    width = y.shape[1]
    for row in range(start, stop):
        dot = f64(0.0)
        for run in range(0, width, RUN):
            lanes = splat(0.0)
            for i in range(run, min(run + RUN, width), LANES):
                at = row * width + i
                lanes = simd.fma(load_part(dy, at, width - i), load_part(y, at, width - i), lanes)
            dot += f64(simd.total(lanes))
        mean = splat(f32(dot))
        for i in range(0, width, LANES):
            at = row * width + i
            v = load_part(y, at, width - i) * scale
            store_part(dx, at, v * (load_part(dy, at, width - i) - mean), width - i)


@kernel(void(out2, in2, in2, f32))
def soft_max_back(dx, dy, y, scale):
    """dx = scale * y * (dy - sum(dy * y)) of each row; dx may be dy or y.

    dx, dy, y  (N, C)  f32
    """
    n, width = y.shape
    rows = BLOCK // max(1, width) if y.size > SERIAL else n
    spans(soft_max_back_rows, (dx, dy, y, scale), n, rows)
