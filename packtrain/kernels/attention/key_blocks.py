"""Functions shared by attention for many and for few queries: keys in blocks, exp2, keys and values as f32."""

from packtrain.kernels.attention.masks import QUERIES
from packtrain.kernels.quant.dequantize import unpack_f16
from packtrain.kernels.runtime.jit import kernel, part
from packtrain.kernels.simd.simd_f32 import (
    LANES, fma, lanewise, load, scaled, select_less, splat, store, store_part, tanh,
)  # fmt: skip

KEYS = 64  # keys in a block
STATE = 2 * QUERIES
WIDEST = 512  # the widest head
SERIAL = 1 << 16  # products below which a parallel region costs more than it saves
LOWEST = -1e30  # initial running maximum
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def emit_fast_max(builder, a, b):
    """Emit the larger of a and b by lane: one instruction on x86, unlike maximum; a NaN in b wins."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


larger = lanewise(emit_fast_max, 2)


@part("f32x16(f32x16)")
def exp2(x):
    """Return 2**x to 1.7e-7 for x < 128, 0 below -127."""
    x = larger(-127.0, x)
    t = x + 12582912.0
    r = x - (t - 12582912.0)
    p = fma(r, 0.0013264726298940486, 0.009671513009988097)
    p = fma(p, r, 0.05550733749092541)
    p = fma(p, r, 0.24022242079184578)
    p = fma(p, r, 0.6931469775938083)
    return scaled(fma(p, r, 1.0), t)


@kernel("i64, i64, f32")
def softcap(scores, num_scores, cap):
    """scores = cap * tanh(scores / cap) for num_scores f32 at an address, whole vectors; -inf stays."""
    for i in range(0, num_scores, LANES):
        x = load(scores, i)
        store(scores, i, select_less(x, LOWEST, x, tanh(x / cap) * cap))


@kernel("i64, i64, i64, i64")
def clear_rows(x, stride, num_rows, width):
    """Set num_rows rows of `width` f32 at address x, `stride` f32 apart, to zero."""
    for i in range(num_rows):
        for d in range(0, width, LANES):
            store_part(x, i * stride + d, splat(0.0), width - d)


@part("i64(bytes4, i64)")
def head_buffer_size(x, width):
    """Return how many f32 load_heads needs to convert KEYS heads of x (B, S, K, bytes): 0 if x has f32 already."""
    return KEYS * width if x.shape[3] < 4 * width else 0


@kernel("UniTuple(i64, 2)(bytes4, i64, i64, i64, i64)")
def load_heads(x, start, num_heads, width, scratch_address):
    """Return (address, row stride) of num_heads f32 heads of x from element `start` on: in place, or in scratch."""
    base_ptr, row_stride = x.ctypes.data, x.shape[2] * width
    if x.shape[3] == 4 * width:
        return base_ptr + 4 * start, row_stride
    for j in range(num_heads):
        unpack_f16(scratch_address + 4 * j * width, base_ptr + 2 * (start + j * row_stride), width)
    return scratch_address, width
