"""Quantize rows of f32 with a weight for each column, with the functions of dtypes/weighted_packing; see quantize."""

import math

from packtrain.kernels.quant import codes, scale_search
from packtrain.kernels.quant.quantize import squared_error, sum_of_squares
from packtrain.kernels.quant.type_dispatch import bind_placeholders, blocks_by_type, compile_blocks
from packtrain.kernels.runtime.jit import each_task, kernel
from packtrain.kernels.runtime.kernel_types import f32
from packtrain.kernels.simd.simd_f32 import address, peek

bind_placeholders(codes, scale_search)
weigh = blocks_by_type("weigh", compile_blocks("weigh", kernel))


@each_task("i64, out_bytes2, out_doubles2, in2, in1", lambda x: len(x))
def rows(qtype, y, sums, x, w, row_index):
    """Quantize every finite row of x as type number `qtype`; writes the sums of squares of its values and errors.

    x     (N, width)      f32
    w     (width,)        f32, finite and not below zero
    y     (N, row bytes)  u8
    sums  (2, N)          f64
    """
    width, nbytes = x.shape[1], y.shape[1]
    source_ptr, target_ptr = address(x, row_index * width), y.ctypes.data + row_index * nbytes
    sums[0, row_index], sums[1, row_index] = sum_of_squares(source_ptr, width), 0.0
    if sums[0, row_index] < math.inf:
        spread = f32(0)  # the mean square, summed one value after the other, as ggml does
        for i in range(width):
            spread += peek(source_ptr, i) * peek(source_ptr, i)
        weigh(qtype, target_ptr, source_ptr, address(w, 0), spread / f32(width), width)
        sums[1, row_index] = squared_error(qtype, target_ptr, nbytes, source_ptr, width)
