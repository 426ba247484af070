"""Quantized rows to f32, with the functions of dtypes/. Kinds are ggml's type numbers."""

from numba import types

from packtrain import dtypes
from packtrain.kernels import bits, simd
from packtrain.kernels.call import each, kernel, part
from packtrain.kernels.rooms import choice, explain, from_rooms
from packtrain.kernels.simd import address, out2

i64, void = types.int64, types.void
F32 = dtypes.f32.number
packed2 = types.Array(types.uint8, 2, "C", readonly=True)
explain(simd, bits)
form = void(i64, i64, i64)
UNPACKERS = from_rooms("unpack", part(form, forceinline=False))
unpack = choice(UNPACKERS, form, blocks=True)


@kernel(void(i64, i64, i64, i64))
def row(kind, target, source, count):
    """`count` f32, whole blocks, at `target` from the packed bytes at `source`."""
    unpack(kind, target, source, count)


@kernel(void(i64, out2, packed2, i64))
def row_of(kind, y, x, i):
    width = y.shape[1]
    row(kind, address(y, i * width), x.ctypes.data + i * x.shape[1], width)


@kernel(void(i64, out2, packed2))
def rows(kind, y, x):
    """Every row of an array.

    x  (N, row bytes)  u8
    y  (N, width)      f32
    """
    each(row_of, (kind, y, x), len(y))
