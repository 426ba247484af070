"""Quantize rows of f32 to types whose codes name points of a grid, with or without a weight for each column."""

import math

from packtrain.kernels.quant import codes, scale_search
from packtrain.kernels.quant.quantize import squared_error, sum_of_squares
from packtrain.kernels.quant.type_dispatch import bind_placeholders, blocks_by_type, compile_blocks
from packtrain.kernels.runtime.jit import each_task, kernel
from packtrain.kernels.simd.simd_f32 import address

bind_placeholders(codes, scale_search)
snap = blocks_by_type("snap", compile_blocks("snap", kernel))


@each_task("i64, out_bytes2, out_doubles2, in2, in1, out_ints1", lambda x: len(x))
def rows(qtype, y, sums, x, w, t, row_index):
    """Quantize every finite row of x on the grid of type number `qtype`; writes sums of squares of values and errors.

    x     (N, width)      f32
    w     (width,)        f32, finite and not below zero; or (0,)
    t     the table of the type's grid, see dtypes/neighbours
    y     (N, row bytes)  u8
    sums  (2, N)          f64
    """
    width, nbytes = x.shape[1], y.shape[1]
    source_ptr, target_ptr = address(x, row_index * width), y.ctypes.data + row_index * nbytes
    sums[0, row_index], sums[1, row_index] = sum_of_squares(source_ptr, width), 0.0
    if sums[0, row_index] < math.inf:
        snap(qtype, target_ptr, source_ptr, address(w, 0) if w.size else 0, t.ctypes.data, width)
        sums[1, row_index] = squared_error(qtype, target_ptr, nbytes, source_ptr, width)
