"""Optimizer steps in one pass over weight, gradient and state."""

import math

from numba import prange, types

from packtrain.kernels.simd import (
    LANES,
    fma,
    in1,
    kernel,
    load_part,
    out1,
    splat,
    sqrt,
    store_part,
)

i64, f32, f64, void = types.int64, types.float32, types.float64, types.void
SERIAL = 1 << 13
BLOCK = 1 << 13


@kernel(void(out1, in1, out1, out1, in1, f32, f32, i64, i64))
def adamw_span(w, g, m, v, hyper, decay, gate, start, stop):
    kept = splat(f32(1.0 - f64(hyper[0]) * f64(hyper[4]) * decay))
    rate = splat(f32(-f64(hyper[0]) / f64(hyper[5])))
    root = splat(f32(1.0 / math.sqrt(f64(hyper[6]))))
    beta1, rest1 = splat(hyper[1]), splat(f32(1.0 - f64(hyper[1])))
    beta2, rest2 = splat(hyper[2]), splat(f32(1.0 - f64(hyper[2])))
    eps, factor = splat(hyper[3]), splat(gate)
    for i in range(start, stop, LANES):
        left = stop - i
        gradient = load_part(g, i, left) * factor
        first = fma(load_part(m, i, left), beta1, gradient * rest1)
        second = fma(load_part(v, i, left), beta2, gradient * gradient * rest2)
        step = first / fma(sqrt(second), root, eps)
        store_part(m, i, first, left)
        store_part(v, i, second, left)
        store_part(w, i, fma(rate, step, load_part(w, i, left) * kept), left)


@kernel(void(out1, in1, out1, out1, in1, f32, in1), parallel=True)
def adamw(w, g, m, v, hyper, decay, gate):
    """AdamW with decoupled decay, as torch.optim.AdamW, in place.

    g = gate * g
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    w = w * (1 - lr * wd * decay) - lr * (m / c1) / (sqrt(v / c2) + eps)

    w, g, m, v  (N,)  f32
    hyper       (7,)  f32: lr, b1, b2, eps, wd, c1 = 1 - b1**t, c2 = 1 - b2**t
    decay             f32: 0 or 1
    gate        (1,)  f32, or (0,) for 1; if it is not finite nothing changes
    """
    factor = gate[0] if gate.size else f32(1.0)
    if not math.isfinite(factor):
        return
    n = w.size
    if n <= SERIAL:
        adamw_span(w, g, m, v, hyper, decay, factor, 0, n)
        return
    for t in prange(-(-n // BLOCK)):
        adamw_span(w, g, m, v, hyper, decay, factor, t * BLOCK, min(n, (t + 1) * BLOCK))


@kernel(void(out1, in1, in1, f32, f32, i64, i64))
def sgd_span(w, g, hyper, decay, gate, start, stop):
    kept = splat(f32(1.0 - f64(hyper[0]) * f64(hyper[1]) * decay))
    rate = splat(-hyper[0] * gate)
    for i in range(start, stop, LANES):
        left = stop - i
        w_new = fma(rate, load_part(g, i, left), load_part(w, i, left) * kept)
        store_part(w, i, w_new, left)


@kernel(void(out1, in1, in1, f32, in1), parallel=True)
def sgd(w, g, hyper, decay, gate):
    """w = w * (1 - lr * wd * decay) - lr * gate * g, in place.

    w, g   (N,)  f32
    hyper  (2,)  f32: lr, wd
    decay        f32: 0 or 1
    gate   (1,)  f32, or (0,) for 1; if it is not finite nothing changes
    """
    factor = gate[0] if gate.size else f32(1.0)
    if not math.isfinite(factor):
        return
    n = w.size
    if n <= SERIAL:
        sgd_span(w, g, hyper, decay, factor, 0, n)
        return
    for t in prange(-(-n // BLOCK)):
        sgd_span(w, g, hyper, decay, factor, t * BLOCK, min(n, (t + 1) * BLOCK))
