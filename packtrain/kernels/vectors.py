"""Vectors of f32 at addresses, and where sequences begin, for kernels that go through states."""

from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import part
from packtrain.kernels.simd import LANES, address, fma, ids1, load_part, rank, splat, store_part

i64, f32, f64, void = types.int64, types.float32, types.float64, types.void
out4 = rank(4)


@part(void(i64, i64, f32))
def fill(at, size, value):
    for s in range(0, size, LANES):
        store_part(at, s, splat(value), size - s)


@part(void(i64, i64, i64))
def copy(to, source, size):
    for s in range(0, size, LANES):
        store_part(to, s, load_part(source, s, size - s), size - s)


@part(void(i64, i64, f32, i64))
def add_scaled(to, source, by, size):
    for s in range(0, size, LANES):
        left = size - s
        store_part(to, s, fma(load_part(source, s, left), splat(by), load_part(to, s, left)), left)


@part(f64(i64, i64, i64))
def dot(a, b, size):
    dot_sums = splat(0.0)
    for s in range(0, size, LANES):
        dot_sums = fma(load_part(a, s, size - s), load_part(b, s, size - s), dot_sums)
    return f64(simd.total(dot_sums))


@part(i64(ids1, i64, i64))
def begins(seq, t, time):
    """1 for the first token of a line, or of a sequence within it."""
    return i64(1) if t % time == 0 or (seq.size > 0 and seq[t] != seq[t - 1]) else i64(0)


@part(void(out4, ids1, ids1, i64))
def begin_lines(states, source, target, h):
    """Put the states of a head that are read, (P, N) each, where they will be written; zeros for a negative source."""
    _, heads, p, n = states.shape
    for r in range(len(target)):
        if target[r] >= 0:
            to = address(states, (target[r] * heads + h) * p * n)
            if source[r] >= 0:
                copy(to, address(states, (source[r] * heads + h) * p * n), p * n)
            else:
                fill(to, p * n, f32(0.0))
