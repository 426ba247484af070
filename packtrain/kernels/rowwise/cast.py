"""Convert f32 arrays to bf16 and back: NaN stays NaN, other values round to the nearest, ties to even."""

from llvmlite import ir
from numba import types

from packtrain.kernels.runtime.jit import parallel
from packtrain.kernels.simd.simd_f32 import BITS, LANES, address, f32x16, load, store
from packtrain.kernels.simd.simd_i32 import (
    as_floats, put_short, short_at, shorts_at, vector16, word_at, writing_intrinsic,
)  # fmt: skip

out_words_type, words_type = (
    types.Array(types.uint16, 1, "C", readonly=readonly) for readonly in (False, True)
)
VALUES_PER_TASK = 1 << 14  # values of a task
BF16_NAN, INFINITY = 0x7FC0, 0x7F800000
I16 = ir.IntType(16)


def emit_rounded(builder, v):
    """Emit v rounded to bf16, ties to even, as sixteen i16; NaN stays NaN."""

    def splat_int(n):
        return ir.Constant(BITS, [n] * LANES)

    word = builder.bitcast(v, BITS)
    is_odd = builder.and_(builder.lshr(word, splat_int(16)), splat_int(1))
    up = builder.lshr(builder.add(word, builder.add(is_odd, splat_int(0x7FFF))), splat_int(16))
    is_nan = builder.fcmp_unordered("uno", v, v)
    return builder.trunc(builder.select(is_nan, splat_int(BF16_NAN), up), vector16(I16))


put_bf16 = writing_intrinsic(f32x16, emit_rounded)  # sixteen values as bf16


@parallel("out_words_type, in1", lambda x: (x.size, 1), block=VALUES_PER_TASK)
def narrow(y, x, span_start, span_stop):
    """y = x rounded to bf16, stored as u16."""
    target, source = y.ctypes.data, address(x, 0)
    vector_end = span_start + (span_stop - span_start) // LANES * LANES
    for i in range(span_start, vector_end, LANES):
        put_bf16(target, i, load(source, i))
    for i in range(vector_end, span_stop):
        value_bits = word_at(source, i)
        rounded_up = (value_bits + 0x7FFF + ((value_bits >> 16) & 1)) >> 16
        put_short(target, i, BF16_NAN if value_bits & 0x7FFFFFFF > INFINITY else rounded_up)


@parallel("out1, words_type", lambda x: (x.size, 1), block=VALUES_PER_TASK)
def widen(y, x, span_start, span_stop):
    """y = x in f32; x is bf16, stored as u16."""
    target, source = address(y, 0), x.ctypes.data
    vector_end = span_start + (span_stop - span_start) // LANES * LANES
    for i in range(span_start, vector_end, LANES):
        store(target, i, as_floats(shorts_at(source, i) << 16))
    for i in range(vector_end, span_stop):
        put_short(target, 2 * i, 0)
        put_short(target, 2 * i + 1, short_at(source, i))
