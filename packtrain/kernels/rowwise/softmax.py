"""Compute softmax and log-softmax of rows, with a scale and an additive mask, and softmax's gradient."""

import math

from packtrain.kernels.runtime.jit import parallel, part
from packtrain.kernels.runtime.kernel_types import f32, f64
from packtrain.kernels.simd.simd_f32 import (
    INFINITY, LANES, address, exp, fma, keep_first, largest, load_part, maximum, splat, store_part, total,
)  # fmt: skip

SERIAL = 1 << 13
VALUES_PER_RUN = 64 * LANES  # elements added in f32 lanes before they go to f64


@part("f32x16(i64, i64, i64, i64, f32)")
def masked(x_ptr, mask_ptr, i, left, scale):
    """Return 16 scores scale * x + mask, -inf beyond `left`; rows by address: arrays would be reference-counted."""
    v = load_part(x_ptr, i, left) * scale
    if mask_ptr:
        v += load_part(mask_ptr, i, left)
    return v if left >= LANES else keep_first(v, left, -INFINITY)


@parallel("out2, in2", lambda x: x.shape, serial=SERIAL)
def log_soft_max(y, x, row_start, row_stop):
    """y = x - log-sum-exp(x) of each row; x, y (N, C) f32; y may be x."""
    width = x.shape[1]
    for row in range(row_start, row_stop):
        x_row = address(x, row * width)
        lane_values = splat(-INFINITY)
        for i in range(0, width, LANES):
            lane_values = maximum(masked(x_row, 0, i, width - i, f32(1.0)), lane_values)
        max_logit = largest(lane_values)
        exp_sum = f64(0.0)
        for run_start in range(0, width, VALUES_PER_RUN):
            lane_values = splat(0.0)
            for i in range(run_start, min(run_start + VALUES_PER_RUN, width), LANES):
                lane_values += exp(masked(x_row, 0, i, width - i, f32(1.0)) - max_logit)
            exp_sum += f64(total(lane_values))
        log_sum = splat(f32(math.log(exp_sum)))
        for i in range(0, width, LANES):
            offset = row * width + i
            store_part(y, offset, load_part(x, offset, width - i) - max_logit - log_sum, width - i)


@parallel("out2, in2, in2, f32", lambda x: x.shape, serial=SERIAL)
def soft_max(y, x, mask, scale, row_start, row_stop):
    """y = softmax(scale * x + mask) of each row; y may be x.

    x, y  (N, C)  f32
    mask  (M, C)  f32, N a multiple of M, row i takes mask[i % M]; or (0, 0) for none

    A fully masked row (-inf) gives zeros.
    """
    width = x.shape[1]
    for row in range(row_start, row_stop):
        x_row = address(x, row * width)
        mask_row = address(mask, row % mask.shape[0] * width) if mask.size else 0
        lane_values = splat(-INFINITY)
        for i in range(0, width, LANES):
            lane_values = maximum(masked(x_row, mask_row, i, width - i, scale), lane_values)
        max_score = largest(lane_values)
        if max_score == -INFINITY:
            for i in range(0, width, LANES):
                store_part(y, row * width + i, splat(0.0), width - i)
            continue
        exp_sum = f64(0.0)
        for run_start in range(0, width, VALUES_PER_RUN):
            lane_values = splat(0.0)
            for i in range(run_start, min(run_start + VALUES_PER_RUN, width), LANES):
                v = exp(masked(x_row, mask_row, i, width - i, scale) - max_score)
                store_part(y, row * width + i, v, width - i)
                lane_values += v
            exp_sum += f64(total(lane_values))
        inverse_sum = splat(f32(1.0 / exp_sum))
        for i in range(0, width, LANES):
            offset = row * width + i
            store_part(y, offset, load_part(y, offset, width - i) * inverse_sum, width - i)


@parallel("out2, in2, in2, f32", lambda y: y.shape, serial=SERIAL)
def soft_max_back(dx, dy, y, scale, row_start, row_stop):
    """dx = scale * y * (dy - sum(dy * y)) of each row; dx, dy, y (N, C) f32; dx may be dy or y."""
    width = y.shape[1]
    for row in range(row_start, row_stop):
        dot_sum = f64(0.0)
        for run_start in range(0, width, VALUES_PER_RUN):
            lanes = splat(0.0)
            for i in range(run_start, min(run_start + VALUES_PER_RUN, width), LANES):
                at = row * width + i
                lanes = fma(load_part(dy, at, width - i), load_part(y, at, width - i), lanes)
            dot_sum += f64(total(lanes))
        mean_lanes = splat(f32(dot_sum))
        for i in range(0, width, LANES):
            at = row * width + i
            v = load_part(y, at, width - i) * scale
            store_part(dx, at, v * (load_part(dy, at, width - i) - mean_lanes), width - i)
