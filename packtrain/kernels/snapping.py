"""Quantize rows of f32 to types whose codes name points of a grid, with or without a weight for each column."""

import math

from numba import types

from packtrain.kernels import bits, codes, search, simd
from packtrain.kernels.call import each, kernel
from packtrain.kernels.quantize import squared_error, sum_of_squares
from packtrain.kernels.rooms import bind_placeholders, choice, compile_role
from packtrain.kernels.simd import address, in1, in2

i64, f64, void = types.int64, types.float64, types.void
bytes2_type, table_type = types.Array(types.uint8, 2, "C"), types.Array(types.int32, 1, "C")
bind_placeholders(simd, bits, codes, search)
snap_signature = void(i64, i64, i64, i64, i64)
snap = choice(compile_role("snap", kernel(snap_signature)), snap_signature, count_blocks=True)


@kernel(void(i64, bytes2_type, types.Array(f64, 2, "C"), in2, in1, table_type, i64))
def quantize_row(qtype, y, sums, x, w, t, row_index):
    width, nbytes = x.shape[1], y.shape[1]
    source_ptr, target_ptr = address(x, row_index * width), y.ctypes.data + row_index * nbytes
    sums[0, row_index], sums[1, row_index] = sum_of_squares(source_ptr, width), 0.0
    if sums[0, row_index] < math.inf:
        snap(qtype, target_ptr, source_ptr, address(w, 0) if w.size else 0, t.ctypes.data, width)
        sums[1, row_index] = squared_error(qtype, target_ptr, nbytes, source_ptr, width)


@kernel(void(i64, bytes2_type, types.Array(f64, 2, "C"), in2, in1, table_type))
def rows(qtype, y, sums, x, w, t):
    """Quantize every finite row of x; writes the sums of squares of its values and rounding errors.

    x     (N, width)      f32
    w     (width,)        f32, finite and not below zero; or (0,)
    t     the table of the type's grid, see dtypes/neighbours
    y     (N, row bytes)  u8
    sums  (2, N)          f64
    """
    each(quantize_row, (qtype, y, sums, x, w, t), len(x))
