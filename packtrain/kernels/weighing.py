"""Quantizes rows of f32 with a weight for each column, with the functions of dtypes/weighted_packing; see quantize."""

import math

from numba import types

from packtrain.kernels import bits, codes, search, simd
from packtrain.kernels.call import each, kernel
from packtrain.kernels.quantize import squared_error, squares_of
from packtrain.kernels.rooms import choice, explain, from_rooms
from packtrain.kernels.simd import address, in1, in2

i64, f64, void = types.int64, types.float64, types.void
bytes2 = types.Array(types.uint8, 2, "C")
explain(simd, bits, codes, search)
form = void(i64, i64, i64, i64)
weigh = choice(from_rooms("weigh", kernel(form)), form, blocks=True)


@kernel(void(i64, bytes2, types.Array(f64, 2, "C"), in2, in1, i64))
def row_of(kind, y, sums, x, w, i):
    width, nbytes = x.shape[1], y.shape[1]
    source, target = address(x, i * width), y.ctypes.data + i * nbytes
    sums[0, i], sums[1, i] = squares_of(source, width), 0.0
    if sums[0, i] < math.inf:
        weigh(kind, target, source, address(w, 0), width)
        sums[1, i] = squared_error(kind, target, nbytes, source, width)


@kernel(void(i64, bytes2, types.Array(f64, 2, "C"), in2, in1))
def rows(kind, y, sums, x, w):
    """Every row of an array whose values are finite, with the squares of values and errors.

    x     (N, width)      f32
    w     (width,)        f32, finite and not below zero
    y     (N, row bytes)  u8
    sums  (2, N)          f64
    """
    each(row_of, (kind, y, sums, x, w), len(x))
