"""Sums in a fixed order: short runs in f32 lanes, everything longer in f64."""

from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import each, kernel, spans
from packtrain.kernels.simd import LANES, in1, in2, out1, out2

i64, f32, f64, void = types.int64, types.float32, types.float64, types.void
RUN = 8 * LANES  # elements added in f32 lanes before they go to f64
PARTS = 64  # tasks of one sum
SERIAL = 1 << 15
COLUMNS = 64  # columns of one task
ROWS = 64  # rows added in f32 before they go to the sum over all rows


@kernel(f64(in1, i64, i64, types.boolean))
def span_sum(x, start, stop, squared):
    """The sum of x[start:stop], or of its squares."""
    result = f64(0.0)
    for run in range(start, stop, RUN):
        lanes = simd.splat(0.0)
        for i in range(run, min(run + RUN, stop), LANES):
            v = simd.load_part(x, i, stop - i)
            lanes += v * v if squared else v
        result += f64(simd.total(lanes))
    return result


@kernel(void(i64, in1, i64, types.boolean, i64))
def fold_part(parts, x, length, squared, t):
    """Part t of a sum, as a pair of f32 (head and rest of an f64)."""
    part = span_sum(x, t * length, min(x.size, (t + 1) * length), squared)
    simd.poke(parts, 2 * t, f32(part))
    simd.poke(parts, 2 * t + 1, f32(part - f64(f32(part))))


@kernel(void(out1, in1, types.boolean))
def fold(y, x, squared):
    """y[0] = the sum."""
    n = x.size
    if n <= SERIAL:
        y[0] = f32(span_sum(x, 0, n, squared))
        return
    parts = simd.scratch(128)
    length = -(-n // (PARTS * RUN)) * RUN
    each(fold_part, (parts, x, length, squared), PARTS)
    result = f64(0.0)
    for t in range(PARTS):
        result += f64(simd.peek(parts, 2 * t)) + f64(simd.peek(parts, 2 * t + 1))
    y[0] = f32(result)


@kernel(void(out1, in1))
def sum_all(y, x):
    """y = sum(x).

    x  (N,)  f32
    y  (1,)  f32
    """
    fold(y, x, False)


@kernel(void(out1, in1))
def sum_squares(y, x):
    """y = sum(x**2).

    x  (N,)  f32
    y  (1,)  f32
    """
    fold(y, x, True)


@kernel(f64(i64, i64))
def row_sum(x, width):
    """The sum of the row at that address."""
    result = f64(0.0)
    for run in range(0, width, RUN):
        lanes = simd.splat(0.0)
        for i in range(run, min(run + RUN, width), LANES):
            lanes += simd.load_part(x, i, width - i)
        result += f64(simd.total(lanes))
    return result


@kernel(void(out1, in2, i64, i64))
def row_sums(y, x, start, stop):
    for row in range(start, stop):
        y[row] = f32(row_sum(simd.address(x, row * x.shape[1]), x.shape[1]))


@kernel(void(out1, in2))
def sum_rows(y, x):
    """y[i] = sum(x[i]).

    x  (N, C)  f32
    y  (N,)    f32
    """
    n, width = x.shape
    spans(row_sums, (y, x), n, (SERIAL // 4) // max(1, width) if x.size > SERIAL else n)


@kernel(void(out1, in2, i64, i64))
def columns_sum(y, x, start, stop):
    n, width = x.shape
    for i in range(start, stop, LANES):
        left = stop - i
        lanes = simd.splat(0.0)
        for first in range(0, n, ROWS):
            part = simd.splat(0.0)
            for row in range(first, min(n, first + ROWS)):
                part += simd.load_part(x, row * width + i, left)
            lanes += part
        simd.store_part(y, i, lanes, left)


@kernel(void(out1, in2))
def sum_cols(y, x):
    """y[j] = sum(x[:, j]).

    x  (N, C)  f32
    y  (C,)    f32
    """
    width = x.shape[1]
    spans(columns_sum, (y, x), width, COLUMNS if x.size > SERIAL else width)


@kernel(void(out2, in2, types.boolean, i64, i64))
def running_rows(y, x, reverse, start, stop):
    width = x.shape[1]
    for row in range(start, stop):
        result = f64(0.0)
        for i in range(width):
            at = row * width + (width - 1 - i if reverse else i)
            result += f64(simd.peek(x, at))
            simd.poke(y, at, f32(result))


@kernel(void(out2, in2, types.boolean))
def running(y, x, reverse):
    """Running sums of each row, from its end if `reverse`; y may be x.

    x, y  (N, C)  f32
    """
    n, width = x.shape
    spans(running_rows, (y, x, reverse), n, SERIAL // max(1, 4 * width) if x.size > SERIAL else n)
