"""Multiply f32 by quantized rows, dequantized in registers: dot products, most of the time of generation.

Prefetching gains nothing for F16: its dot products read 30 GB/s without.
"""

from packtrain.kernels.quant.type_dispatch import choice, compile_role, emit_call
from packtrain.kernels.runtime.jit import part
from packtrain.kernels.runtime.kernel_types import f32, i64

dot_signature = f32(i64, i64, i64)
DOT_FUNCTIONS = compile_role("dot", part(dot_signature, forceinline=False))
FUSED_TYPES = tuple(dtype.number for dtype in DOT_FUNCTIONS)
# (qtype, x, w, n) of a type in FUSED_TYPES; n is a multiple of 32 and of the block
dot = choice(
    DOT_FUNCTIONS,
    dot_signature,
    lambda context, builder, dtype, args: emit_call(
        context, builder, DOT_FUNCTIONS[dtype], dot_signature, args
    ),
)
