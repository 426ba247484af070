"""Multiply f32 by quantized rows, dequantized in registers: dot products, most of the time of generation.

Prefetching gains nothing for F16: its dot products read 30 GB/s without.
"""

from numba import types

from packtrain.kernels import bits, simd
from packtrain.kernels.call import part
from packtrain.kernels.rooms import bind_placeholders, choice, compile_role

i64, f32 = types.int64, types.float32
bind_placeholders(simd, bits)
dot_signature = f32(i64, i64, i64)
DOT_FUNCTIONS = compile_role("dot", part(dot_signature, forceinline=False))
FUSED_TYPES = tuple(dtype.number for dtype in DOT_FUNCTIONS)
# (qtype, x, w, n) of a type in FUSED_TYPES; n is a multiple of 32 and of the block
dot = choice(DOT_FUNCTIONS, dot_signature, count_blocks=False)
