"""Dequantize rows to f32, with the functions of dtypes/. `qtype` is ggml's type number."""

from packtrain import dtypes
from packtrain.kernels.quant.type_dispatch import blocks_by_type, blocks_of, compile_blocks
from packtrain.kernels.runtime.jit import each_task, kernel
from packtrain.kernels.simd.simd_f32 import address

F32, Q8_0 = dtypes.f32.number, dtypes.BLOCK_TYPES["q8_0"]
UNPACKERS = compile_blocks("unpack")
unpack = blocks_by_type("unpack", UNPACKERS)
unpack_f16 = UNPACKERS[dtypes.f16]  # (y, x, n), n values
unpack_q8_0 = blocks_of("unpack", Q8_0, UNPACKERS[Q8_0])  # likewise


@kernel("i64, i64, i64, i64")
def row(qtype, target_ptr, source_ptr, count):
    """Dequantize `count` f32, whole blocks of type number `qtype`, from address source_ptr to address target_ptr."""
    unpack(qtype, target_ptr, source_ptr, count)


@each_task("i64, out2, bytes2", lambda y: len(y))
def rows(qtype, y, x, row_index):
    """Dequantize every row of x, u8 (N, row bytes) of type number `qtype`, to y, f32 (N, width); a task a row."""
    width = y.shape[1]
    row(qtype, address(y, row_index * width), x.ctypes.data + row_index * x.shape[1], width)
