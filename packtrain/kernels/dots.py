"""Dot products of f32 with quantized rows, dequantized in registers: most of the time of generation."""

from numba import types

from packtrain.kernels import bits, simd
from packtrain.kernels.call import part
from packtrain.kernels.rooms import choice, explain, from_rooms

i64, f32 = types.int64, types.float32
explain(simd, bits)
form = f32(i64, i64, i64)
DOTS = from_rooms("dot", part(form, forceinline=False))
FUSED = tuple(dtype.number for dtype in DOTS)
# (kind, x, w, n) of a kind in FUSED; n is a multiple of 32 and of the block
dot = choice(DOTS, form, blocks=False)
