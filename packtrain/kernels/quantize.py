"""Quantizes rows of f32, with the functions of dtypes/. Values must be finite. Kinds are ggml's type numbers."""

import math

from numba import types

from packtrain.kernels import bits, codes, search, simd
from packtrain.kernels.bits import add_squares, no_sums, total_of
from packtrain.kernels.call import each, kernel
from packtrain.kernels.dequantize import row as unpack_row
from packtrain.kernels.rooms import choice, explain, from_rooms
from packtrain.kernels.simd import LANES, address, in2, load_part, scratch

i64, f64, void = types.int64, types.float64, types.void
LINE = 256  # values measured at a time: whole blocks of every type
bytes2 = types.Array(types.uint8, 2, "C")
explain(simd, bits, codes, search)
form = void(i64, i64, i64)
pack = choice(from_rooms("pack", kernel(form)), form, blocks=True)


@kernel(void(i64, i64, i64, i64))
def row(kind, target, source, count):
    """The packed bytes of `count` f32, whole blocks, at `source`."""
    pack(kind, target, source, count)


@kernel(f64(i64, i64))
def squares_of(x, count):
    sums = no_sums()
    for i in range(0, count, LANES):
        sums = add_squares(sums, load_part(x, i, count - i))
    return total_of(sums)


@kernel(f64(i64, i64, i64, i64, i64))
def squared_error(kind, packed, nbytes, x, count):
    """Of one row: squares of the f32 differences."""
    line, error_sums = scratch(LINE), no_sums()
    for at in range(0, count, LINE):
        left = min(count - at, LINE)
        unpack_row(kind, line, packed + at * nbytes // count, left)
        for i in range(0, left, LANES):
            original = load_part(x, at + i, left - i)
            error_sums = add_squares(error_sums, load_part(line, i, left - i) - original)
    return total_of(error_sums)


@kernel(void(i64, bytes2, types.Array(f64, 2, "C"), in2, i64))
def row_of(kind, y, sums, x, i):
    width, nbytes = x.shape[1], y.shape[1]
    source, target = address(x, i * width), y.ctypes.data + i * nbytes
    sums[0, i], sums[1, i] = squares_of(source, width), 0.0
    if sums[0, i] < math.inf:
        row(kind, target, source, width)
        sums[1, i] = squared_error(kind, target, nbytes, source, width)


@kernel(void(i64, bytes2, types.Array(f64, 2, "C"), in2))
def rows(kind, y, sums, x):
    """Every row of an array whose values are finite, with the squares of values and errors.

    x     (N, width)      f32
    y     (N, row bytes)  u8
    sums  (2, N)          f64
    """
    each(row_of, (kind, y, sums, x), len(x))
