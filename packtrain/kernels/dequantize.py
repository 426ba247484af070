"""Dequantize rows to f32, with the functions of dtypes/. `qtype` is ggml's type number."""

from numba import types

from packtrain import dtypes
from packtrain.kernels import bits, simd
from packtrain.kernels.call import each, kernel, part
from packtrain.kernels.rooms import bind_placeholders, choice, compile_role
from packtrain.kernels.simd import address, out2

i64, void = types.int64, types.void
F32 = dtypes.f32.number
packed2 = types.Array(types.uint8, 2, "C", readonly=True)
bind_placeholders(simd, bits)
unpack_signature = void(i64, i64, i64)
UNPACKERS = compile_role("unpack", part(unpack_signature, forceinline=False))
unpack = choice(UNPACKERS, unpack_signature, count_blocks=True)


@kernel(void(i64, i64, i64, i64))
def row(qtype, target_ptr, source_ptr, count):
    """Write `count` f32, whole blocks, to `target_ptr` from the packed bytes at `source_ptr`."""
    unpack(qtype, target_ptr, source_ptr, count)


@kernel(void(i64, out2, packed2, i64))
def dequantize_array_row(qtype, y, x, row_index):
    width = y.shape[1]
    row(qtype, address(y, row_index * width), x.ctypes.data + row_index * x.shape[1], width)


@kernel(void(i64, out2, packed2))
def rows(qtype, y, x):
    """Dequantize every row of x to y.

    x  (N, row bytes)  u8
    y  (N, width)      f32
    """
    each(dequantize_array_row, (qtype, y, x), len(y))
