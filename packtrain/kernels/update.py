"""Optimizer steps in one pass over weight, gradient and state.

A weight is passed as bytes: f32, or bf16, of which a part at a time is converted, updated and rounded stochastically.
"""

import math

from numba import types

from packtrain.kernels import bits, simd
from packtrain.kernels.bits import I16, i32x16, put_short, reading, short_at, sixteen, to_bits
from packtrain.kernels.call import each, kernel, spans
from packtrain.kernels.dequantize import F32, row
from packtrain.kernels.elementwise import uniform
from packtrain.kernels.simd import I32, LANES, address, fma, in1, in2, load_part, out1, splat, sqrt

i64, f32, f64, void = types.int64, types.float32, types.float64, types.void
SERIAL = 1 << 13
BLOCK = 1 << 13
RUN = 8 * LANES  # products added in f32 lanes before they go to f64
PART = 1 << 10  # elements of a bf16 weight converted to f32 at a time

bytes1 = types.Array(types.uint8, 1, "C")
words_at = reading(sixteen(I32), i32x16, lambda builder, v: v)
put_shorts = bits.writing(i32x16, lambda builder, v: builder.trunc(v, sixteen(I16)))


@kernel(void(i64, i64, i64, i64, i64))
def round_at_random(w, part, key, first, n):
    """n f32 at the address `part`, elements `first` and on of a tensor, to bf16 at `w`; overwrites `part`.

    Stochastic rounding: 16 random bits are added to the 16 that are dropped, and the carry is kept. Vectors of bits
    have no addition, so the random ones are negated.
    """
    for i in range(0, n, LANES):
        noise_bits = to_bits(uniform(key, first + i) * -65536.0)
        rounded = (words_at(part, i) - noise_bits) >> 16
        if n - i >= LANES:
            put_shorts(w, i, rounded)
        else:
            put_shorts(part, 0, rounded)
            for k in range(n - i):
                put_short(w, i + k, short_at(part, k))


@kernel(void(i64, in1, out1, out1, in1, f32, f32, i64, i64))
def adamw_span(w, g, m, v, hyper, decay, gate, start, stop):
    decay_factor = splat(f32(1.0 - f64(hyper[0]) * f64(hyper[4]) * decay))
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
        simd.store_part(m, i, first, left)
        simd.store_part(v, i, second, left)
        simd.store_part(w, i, fma(rate, step, load_part(w, i, left) * decay_factor), left)


@kernel(void(i64, bytes1, in1, out1, out1, in1, f32, f32, i64, i64, i64))
def adamw_part(kind, w, g, m, v, hyper, decay, gate, key, start, stop):
    if kind == F32:
        adamw_span(w.ctypes.data, g, m, v, hyper, decay, gate, start, stop)
        return
    part = simd.scratch(PART)
    for i in range(start, stop, PART):
        at, n = w.ctypes.data + 2 * i, min(PART, stop - i)
        row(kind, part, at, n)
        adamw_span(part - 4 * i, g, m, v, hyper, decay, gate, i, i + n)
        round_at_random(at, part, key, i, n)


@kernel(void(i64, bytes1, in1, out1, out1, in1, f32, in1, i64))
def adamw(kind, w, g, m, v, hyper, decay, gate, key):
    """AdamW with decoupled decay, as torch.optim.AdamW, in place.

    g = gate * g
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    w = w * (1 - lr * wd * decay) - lr * (m / c1) / (sqrt(v / c2) + eps)

    kind, w           F32 or BF16, and the bytes of N of them
    g, m, v     (N,)  f32
    hyper       (7,)  f32: lr, b1, b2, eps, wd, c1 = 1 - b1**t, c2 = 1 - b2**t
    decay             f32: 0 or 1
    gate        (1,)  f32, or (0,) for 1; if it is not finite nothing changes
    key               i64: key of bf16's stochastic rounding, see counter
    """
    factor = gate[0] if gate.size else f32(1.0)
    if not math.isfinite(factor):
        return
    n = g.size
    spans(adamw_part, (kind, w, g, m, v, hyper, decay, factor, key), n, BLOCK if n > SERIAL else n)


@kernel(void(i64, in1, in1, f32, f32, i64, i64))
def sgd_span(w, g, hyper, decay, gate, start, stop):
    decay_factor = splat(f32(1.0 - f64(hyper[0]) * f64(hyper[1]) * decay))
    rate = splat(-hyper[0] * gate)
    for i in range(start, stop, LANES):
        left = stop - i
        w_new = fma(rate, load_part(g, i, left), load_part(w, i, left) * decay_factor)
        simd.store_part(w, i, w_new, left)


@kernel(void(i64, bytes1, in1, in1, f32, f32, i64, i64, i64))
def sgd_part(kind, w, g, hyper, decay, gate, key, start, stop):
    if kind == F32:
        sgd_span(w.ctypes.data, g, hyper, decay, gate, start, stop)
        return
    part = simd.scratch(PART)
    for i in range(start, stop, PART):
        at, n = w.ctypes.data + 2 * i, min(PART, stop - i)
        row(kind, part, at, n)
        sgd_span(part - 4 * i, g, hyper, decay, gate, i, i + n)
        round_at_random(at, part, key, i, n)


@kernel(void(i64, bytes1, in1, in1, f32, in1, i64))
def sgd(kind, w, g, hyper, decay, gate, key):
    """w = w * (1 - lr * wd * decay) - lr * gate * g, in place.

    kind, w      F32 or BF16, and the bytes of N of them
    g      (N,)  f32
    hyper  (2,)  f32: lr, wd
    decay        f32: 0 or 1
    gate   (1,)  f32, or (0,) for 1; if it is not finite nothing changes
    key          i64: key of bf16's stochastic rounding, see counter
    """
    factor = gate[0] if gate.size else f32(1.0)
    if not math.isfinite(factor):
        return
    n = g.size
    spans(sgd_part, (kind, w, g, hyper, decay, factor, key), n, BLOCK if n > SERIAL else n)


@kernel(void(out1, in1, f32, f32, i64, i64))
def momentum_span(b, g, momentum, gate, start, stop):
    momentum_factor, factor = splat(momentum), splat(gate)
    for i in range(start, stop, LANES):
        left = stop - i
        simd.store_part(
            b, i, fma(load_part(b, i, left), momentum_factor, load_part(g, i, left) * factor), left
        )


@kernel(void(out1, in1, f32, f32))
def momentum(b, g, momentum, gate):
    """b = momentum * b + gate * g, in place.

    b, g  (N,)  f32
    """
    n = g.size
    spans(momentum_span, (b, g, momentum, gate), n, BLOCK if n > SERIAL else n)


@kernel(void(out1, in1, in2, in2, in1, i64, i64))
def combine_span(p, g, s, y, c, start, stop):
    m, n = s.shape
    for i in range(start, stop, LANES):
        left = stop - i
        direction = load_part(g, i, left) * splat(c[0])
        for k in range(m):
            direction = fma(load_part(address(s, k * n), i, left), splat(c[1 + k]), direction)
            direction = fma(load_part(address(y, k * n), i, left), splat(c[1 + m + k]), direction)
        simd.store_part(p, i, direction, left)


@kernel(void(out1, in1, in2, in2, in1))
def combine(p, g, s, y, c):
    """p = c[0] g + sum over k of c[1 + k] s[k] + c[1 + M + k] y[k].

    p, g  (N,)        f32
    s, y  (M, N)      f32
    c     (1 + 2 M,)  f32
    """
    n = g.size
    spans(combine_span, (p, g, s, y, c), n, BLOCK if n > SERIAL else n)


@kernel(f64(i64, i64, i64))
def dot(a, b, n):
    """Of n f32 at two addresses: short runs in f32 lanes, everything longer in f64."""
    result = f64(0.0)
    for run in range(0, n, RUN):
        lanes = splat(0.0)
        for i in range(run, min(run + RUN, n), LANES):
            lanes = fma(load_part(a, i, n - i), load_part(b, i, n - i), lanes)
        result += f64(simd.total(lanes))
    return result


@kernel(void(out1, in1, in1))
def product(y, a, b):
    """y[0] += a · b.

    a, b  (N,)  f32
    """
    y[0] = f32(y[0] + dot(address(a, 0), address(b, 0), a.size))


@kernel(void(out1, in1, in2, in2, i64))
def products_at(z, g, s, y, at):
    m, n = s.shape
    row, column = at // (m + 1), at % (m + 1)
    other = address(g, 0) if column == 0 else address(y, (column - 1) * n)
    if row == 0:
        vector = address(g, 0)
    elif row <= m:
        vector = address(s, (row - 1) * n)
    else:
        vector = address(y, (row - 1 - m) * n)
    z[at] = f32(z[at] + dot(vector, other, n))


@kernel(void(out1, in1, in2, in2))
def products(z, g, s, y):
    """z[i, j] += u_i · v_j, where u is g, s[0] …, y[0] …, and v is g, y[0] ….

    z     ((2 M + 1) (M + 1),)  f32
    g     (N,)    f32
    s, y  (M, N)  f32
    """
    if g.size <= SERIAL:
        for at in range(z.size):
            products_at(z, g, s, y, at)
        return
    each(products_at, (z, g, s, y), z.size)
