"""Quantize rows of finite f32, with the functions of dtypes/. `qtype` is ggml's type number."""

import math

from packtrain.kernels.quant import codes, scale_search
from packtrain.kernels.quant.dequantize import row as unpack_row
from packtrain.kernels.quant.type_dispatch import bind_placeholders, blocks_by_type, compile_blocks
from packtrain.kernels.runtime.jit import each_task, kernel
from packtrain.kernels.simd.simd_f32 import LANES, address, load_part, scratch
from packtrain.kernels.simd.simd_i32 import add_squares, sum_lanes, zero_sums

MAX_CHUNK = 256  # values measured at a time: whole blocks of every type
bind_placeholders(codes, scale_search)
pack = blocks_by_type("pack", compile_blocks("pack", kernel))


@kernel("i64, i64, i64, i64")
def pack_row(qtype, target_ptr, source_ptr, count):
    """Quantize `count` f32 at address source_ptr, whole blocks of type number `qtype`, to address target_ptr."""
    pack(qtype, target_ptr, source_ptr, count)


@kernel("f64(i64, i64)")
def sum_of_squares(values_ptr, count):
    """Return the sum of squares of `count` f32 at address values_ptr, in f64."""
    sums = zero_sums()  # folding every 16 values took a third of the time of BF16 and F16
    for i in range(0, count, LANES):
        sums = add_squares(sums, load_part(values_ptr, i, count - i))
    return sum_lanes(sums)


@kernel("f64(i64, i64, i64, i64, i64)")
def squared_error(qtype, packed_ptr, row_nbytes, values_ptr, count):
    """Return the sum of squared differences between `count` f32 at values_ptr and the packed row at packed_ptr."""
    unpacked, error_sums = scratch(MAX_CHUNK), zero_sums()
    for chunk_start in range(0, count, MAX_CHUNK):
        chunk_size = min(count - chunk_start, MAX_CHUNK)
        unpack_row(qtype, unpacked, packed_ptr + chunk_start * row_nbytes // count, chunk_size)
        for i in range(0, chunk_size, LANES):
            original = load_part(values_ptr, chunk_start + i, chunk_size - i)
            error_sums = add_squares(error_sums, load_part(unpacked, i, chunk_size - i) - original)
    return sum_lanes(error_sums)


@each_task("i64, out_bytes2, out_doubles2, in2", lambda x: len(x))
def rows(qtype, y, sums, x, row_index):
    """Quantize every finite row of x as type number `qtype`; writes the sums of squares of its values and errors.

    x     (N, width)      f32
    y     (N, row bytes)  u8
    sums  (2, N)          f64
    """
    width, row_nbytes = x.shape[1], y.shape[1]
    source_ptr, target_ptr = address(x, row_index * width), y.ctypes.data + row_index * row_nbytes
    sums[0, row_index], sums[1, row_index] = sum_of_squares(source_ptr, width), 0.0
    if sums[0, row_index] < math.inf:
        pack_row(qtype, target_ptr, source_ptr, width)
        sums[1, row_index] = squared_error(qtype, target_ptr, row_nbytes, source_ptr, width)
