"""Vectors of 32 codes of a byte, and of 8 f32: words for dot products in integers.

Codes are unsigned, unless a word says otherwise; `c >> 4`, `c & 15`, `c | d` work by code. Products of 32 codes are
summed by fours, to 8 sums.
"""

import operator

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, lower_cast, models, register_model

from packtrain.kernels import runtime
from packtrain.kernels.simd import F32, I32, I64, call, f32x16, fold

llvmlite.binding.initialize_native_asmparser()
VNNI = runtime.has("avx512vnni") and runtime.has("avx512vl")
AVX2 = runtime.has("avx2")
I8, I16 = ir.IntType(8), ir.IntType(16)
CODES, EIGHT, SUMS = ir.VectorType(I8, 32), ir.VectorType(F32, 8), ir.VectorType(I32, 8)
PAIRS, HALF = ir.VectorType(I16, 16), ir.HalfType()


def vector_type(name, kind):
    class Vector(types.Type):
        def __init__(self):
            super().__init__(name=name)

    @register_model(Vector)
    class VectorModel(models.PrimitiveModel):
        def __init__(self, dmm, fe_type):
            super().__init__(dmm, fe_type, kind)

    return Vector()


codes32, f32x8 = vector_type("codes32", CODES), vector_type("f32x8", EIGHT)


def spread(builder, value, kind):
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return shuffled(builder, first, [0] * kind.count)


def shuffled(builder, value, order):
    places = ir.Constant(ir.VectorType(I32, len(order)), order)
    return builder.shuffle_vector(value, value, places)


@lower_cast(types.Integer, type(codes32))
def integer_to_codes(context, builder, fromty, toty, value):
    return spread(builder, context.cast(builder, value, fromty, types.int8), CODES)


@lower_cast(types.Number, type(f32x8))
def number_to_eight(context, builder, fromty, toty, value):
    return spread(builder, context.cast(builder, value, fromty, types.float32), EIGHT)


def binary_operator(symbol, instruction, kind):
    @infer_global(symbol)
    class Operator(AbstractTemplate):
        def generic(self, args, kws):
            if kind in args and all(isinstance(a, (type(kind), types.Number)) for a in args):
                return signature(kind, kind, kind)
            return None

    @lower_builtin(symbol, kind, kind)
    def lower(context, builder, sig, args):
        return getattr(builder, instruction)(*args)


for name, instruction in {
    "and_": "and_",
    "or_": "or_",
    "sub": "sub",
    "lshift": "shl",
    "rshift": "lshr",
}.items():
    binary_operator(getattr(operator, name), instruction, codes32)
for name, instruction in {"add": "fadd", "mul": "fmul"}.items():
    binary_operator(getattr(operator, name), instruction, f32x8)


def word(result, *given):
    """An intrinsic of these types, by a function of the builder and the values."""

    def named(emit):
        def codegen(context, builder, sig, args):
            return emit(builder, *args)

        typed = {
            1: lambda typingctx, a: (result(*given), codegen),
            2: lambda typingctx, a, b: (result(*given), codegen),
            3: lambda typingctx, a, b, c: (result(*given), codegen),
        }
        return intrinsic(typed[len(given)])

    return named


def read(builder, kind, address, nbytes):
    at = builder.inttoptr(builder.add(address, nbytes), kind.as_pointer())
    return builder.load(at, align=1)


i64, f32 = types.int64, types.float32


@word(codes32, i64, i64)
def codes_at(builder, address, i):
    """32 codes, `i` bytes from an address."""
    return read(builder, CODES, address, i)


@word(codes32, i64, i64)
def nibbles_at(builder, address, i):
    """The low nibbles of 16 bytes, then the high ones."""
    both = shuffled(builder, read(builder, ir.VectorType(I8, 16), address, i), [*range(16)] * 2)
    words = builder.bitcast(both, ir.VectorType(I64, 4))
    words = builder.lshr(words, ir.Constant(words.type, [0, 0, 4, 4]))
    return builder.and_(builder.bitcast(words, CODES), ir.Constant(CODES, [15] * 32))


@word(codes32, i64, i64)
def codes_where(builder, bits, code):
    """A code where a bit is set, elsewhere 0."""
    mask = builder.bitcast(builder.trunc(bits, I32), ir.VectorType(ir.IntType(1), 32))
    some = spread(builder, builder.trunc(code, I8), CODES)
    return builder.select(mask, some, ir.Constant(CODES, [0] * 32))


@word(codes32, codes32, i64, i64)
def look_up(builder, codes, low, high):
    """Codes below 16 become the bytes of two words."""
    table = ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
    for place, half in enumerate((low, high)):
        table = builder.insert_element(table, half, I32(place))
    table = builder.bitcast(table, ir.VectorType(I8, 16))
    if AVX2:
        both = shuffled(builder, table, [*range(16)] * 2)
        return call(builder, "llvm.x86.avx2.pshuf.b", CODES, both, codes)
    found = ir.Constant(CODES, ir.Undefined)
    for lane in map(I32, range(32)):
        place = builder.zext(builder.extract_element(codes, lane), I32)
        found = builder.insert_element(found, builder.extract_element(table, place), lane)
    return found


@word(f32x8, i64, i64)
def eight_at(builder, address, i):
    """Elements i … i + 7."""
    return read(builder, EIGHT, address, builder.shl(i, I64(2)))


@word(f32x8, i64, i64)
def fours_at(builder, address, i):
    """Element i four times, then the next one four times."""
    two = read(builder, ir.VectorType(F32, 2), address, builder.shl(i, I64(2)))
    return shuffled(builder, two, [0] * 4 + [1] * 4)


@word(f32x8, i64, i64)
def eight_halves(builder, address, i):
    """The i-th f16, in all lanes."""
    one = read(builder, I16, address, builder.shl(i, I64(1)))
    eight = spread(builder, one, ir.VectorType(I16, 8))
    return builder.fpext(builder.bitcast(eight, ir.VectorType(HALF, 8)), EIGHT)


@word(f32x8, f32x16)
def first_eight(builder, v):
    return shuffled(builder, v, [*range(8)])


@word(f32x8, f32x16)
def last_eight(builder, v):
    return shuffled(builder, v, [*range(8, 16)])


@word(f32x8, f32x8, f32x8, f32x8)
def fma8(builder, a, b, c):
    return call(builder, "llvm.fma.v8f32", EIGHT, a, b, c)


@word(f32, f32x8)
def total8(builder, v):
    return fold(builder, v, lambda builder, a, b: builder.fadd(a, b))


@word(f32x8, f32)
def eight(builder, v):
    return spread(builder, v, EIGHT)


def by_fours(builder, codes, others, start):
    """start + sums of four products each: codes are unsigned, `others` signed."""
    if VNNI:
        words = (builder.bitcast(v, SUMS) for v in (codes, others))
        return call(builder, "llvm.x86.avx512.vpdpbusd.256", SUMS, start, *words)
    if AVX2:
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", PAIRS, codes, others)
        ones = ir.Constant(PAIRS, [1] * 16)
        return builder.add(start, call(builder, "llvm.x86.avx2.pmadd.wd", SUMS, pairs, ones))
    wide = ir.VectorType(I32, 32)
    every = builder.mul(builder.zext(codes, wide), builder.sext(others, wide))
    for first in range(4):
        start = builder.add(start, shuffled(builder, every, [*range(first, 32, 4)]))
    return start


@word(f32, i64, i64, i64)
def sum_codes(builder, x, n, i):
    """Write the 8 sums of four of the i-th 32 of n codes; returns their sum."""
    none, ones = ir.Constant(SUMS, [0] * 8), ir.Constant(CODES, [1] * 32)
    sums = by_fours(builder, ones, read(builder, CODES, x, i), none)
    at = builder.inttoptr(builder.add(x, builder.add(n, i)), SUMS.as_pointer())
    builder.store(sums, at, align=1)
    return builder.sitofp(fold(builder, sums, lambda builder, a, b: builder.add(a, b)), F32)


@word(types.void, i64, i64, f32x8)
def put_eight(builder, address, i, v):
    """Write elements i … i + 7."""
    at = builder.inttoptr(builder.add(address, builder.shl(i, I64(2))), EIGHT.as_pointer())
    builder.store(v, at, align=1)
    return ir.Constant(ir.PointerType(I8), None)


def product_less(offset):
    """An intrinsic (codes, x, n, i): sums of four products of (code - offset) and x's i-th 32 of n rounded values."""

    def emit(builder, codes, x, n, i):
        start = ir.Constant(SUMS, [0] * 8)
        if offset:
            sums = read(builder, SUMS, x, builder.add(n, i))
            start = builder.mul(sums, ir.Constant(SUMS, [-offset] * 8))
        sums = by_fours(builder, codes, read(builder, CODES, x, i), start)
        return builder.sitofp(sums, EIGHT)

    def codegen(context, builder, sig, args):
        return emit(builder, *args)

    typed = f32x8(codes32, i64, i64, i64), codegen
    return intrinsic(lambda typingctx, c, x, n, i: typed)


times, times_less_8, times_less_16, times_less_32 = map(product_less, (0, 8, 16, 32))


@word(f32x8, codes32, i64, i64)
def times_signed(builder, codes, x, i):
    """Sums of four products of signed codes and rounded values."""
    others, none = read(builder, CODES, x, i), ir.Constant(CODES, [0] * 32)
    below = builder.icmp_signed("<", codes, none)
    if AVX2:
        others = call(builder, "llvm.x86.avx2.psign.b", CODES, others, codes)
    else:
        others = builder.select(below, builder.neg(others), others)
    size = builder.select(below, builder.sub(none, codes), codes)
    return builder.sitofp(by_fours(builder, size, others, ir.Constant(SUMS, [0] * 8)), EIGHT)
