"""Values of f32 arrays in bf16, and back: NaN stays NaN, others are rounded to the nearest, ties to even."""

from llvmlite import ir
from numba import types

from packtrain.kernels import bits
from packtrain.kernels.call import kernel, spans
from packtrain.kernels.simd import BITS, LANES, address, f32x16, in1, load, out1, store

i64, void = types.int64, types.void
out_words, words = (
    types.Array(types.uint16, 1, "C", readonly=readonly) for readonly in (False, True)
)
STEP = 1 << 14  # values of a task
NAN, INFINITY = 0x7FC0, 0x7F800000
I16 = ir.IntType(16)


def emit_rounded(builder, v):
    def each(n):
        return ir.Constant(BITS, [n] * LANES)

    word = builder.bitcast(v, BITS)
    odd = builder.and_(builder.lshr(word, each(16)), each(1))
    up = builder.lshr(builder.add(word, builder.add(odd, each(0x7FFF))), each(16))
    unordered = builder.fcmp_unordered("uno", v, v)
    return builder.trunc(builder.select(unordered, each(NAN), up), bits.sixteen(I16))


put_rounded = bits.writing(f32x16, emit_rounded)  # sixteen values as bf16


@kernel(void(out_words, in1, i64, i64))
def narrow_some(y, x, start, stop):
    to, source = y.ctypes.data, address(x, 0)
    vector_end = start + (stop - start) // LANES * LANES
    for i in range(start, vector_end, LANES):
        put_rounded(to, i, load(source, i))
    for i in range(vector_end, stop):
        word = bits.word_at(source, i)
        up = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
        bits.put_short(to, i, NAN if word & 0x7FFFFFFF > INFINITY else up)


@kernel(void(out1, words, i64, i64))
def widen_some(y, x, start, stop):
    to, source = address(y, 0), x.ctypes.data
    vector_end = start + (stop - start) // LANES * LANES
    for i in range(start, vector_end, LANES):
        store(to, i, bits.as_floats(bits.shorts_at(source, i) << 16))
    for i in range(vector_end, stop):
        bits.put_short(to, 2 * i, 0)
        bits.put_short(to, 2 * i + 1, bits.short_at(source, i))


@kernel(void(out_words, in1))
def narrow(y, x):
    """y = x in bf16, as u16."""
    spans(narrow_some, (y, x), x.size, STEP)


@kernel(void(out1, words))
def widen(y, x):
    """y = x, which is bf16, as u16."""
    spans(widen_some, (y, x), x.size, STEP)
