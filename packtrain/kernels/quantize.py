"""Quantizes rows of f32, with the functions of types/. Values must be finite. Kinds are ggml's type numbers."""

from numba import types

from packtrain.kernels import bits, codes, simd
from packtrain.kernels.call import each, kernel
from packtrain.kernels.rooms import choice, explain, from_rooms
from packtrain.kernels.simd import address, in2

i64, void = types.int64, types.void
explain(simd, bits, codes)
form = void(i64, i64, i64)
pack = choice(from_rooms("pack", kernel(form)), form, blocks=True)


@kernel(void(i64, i64, i64, i64))
def row(kind, target, source, count):
    """The packed bytes of `count` f32, whole blocks, at `source`."""
    pack(kind, target, source, count)


@kernel(void(i64, types.Array(types.uint8, 2, "C"), in2, i64))
def row_of(kind, y, x, i):
    width = x.shape[1]
    row(kind, y.ctypes.data + i * y.shape[1], address(x, i * width), width)


@kernel(void(i64, types.Array(types.uint8, 2, "C"), in2))
def rows(kind, y, x):
    """Every row of an array.

    x  (N, width)      f32
    y  (N, row bytes)  u8
    """
    each(row_of, (kind, y, x), len(x))
