"""Quantize rows of f32 with a weight for each column, with the functions of dtypes/weighted_packing; see quantize."""

import math

from numba import types

from packtrain.kernels import bits, codes, search, simd
from packtrain.kernels.call import each, kernel
from packtrain.kernels.quantize import squared_error, sum_of_squares
from packtrain.kernels.rooms import bind_placeholders, choice, compile_role
from packtrain.kernels.simd import address, in1, in2

i64, f64, void = types.int64, types.float64, types.void
bytes2_type = types.Array(types.uint8, 2, "C")
bind_placeholders(simd, bits, codes, search)
weigh_signature = void(i64, i64, i64, i64)
weigh = choice(compile_role("weigh", kernel(weigh_signature)), weigh_signature, count_blocks=True)


@kernel(void(i64, bytes2_type, types.Array(f64, 2, "C"), in2, in1, i64))
def quantize_row(qtype, y, sums, x, w, row_index):
    width, nbytes = x.shape[1], y.shape[1]
    source_ptr, target_ptr = address(x, row_index * width), y.ctypes.data + row_index * nbytes
    sums[0, row_index], sums[1, row_index] = sum_of_squares(source_ptr, width), 0.0
    if sums[0, row_index] < math.inf:
        weigh(qtype, target_ptr, source_ptr, address(w, 0), width)
        sums[1, row_index] = squared_error(qtype, target_ptr, nbytes, source_ptr, width)


@kernel(void(i64, bytes2_type, types.Array(f64, 2, "C"), in2, in1))
def rows(qtype, y, sums, x, w):
    """Quantize every finite row of x; writes the sums of squares of its values and rounding errors.

    x     (N, width)      f32
    w     (width,)        f32, finite and not below zero
    y     (N, row bytes)  u8
    sums  (2, N)          f64
    """
    each(quantize_row, (qtype, y, sums, x, w), len(x))
