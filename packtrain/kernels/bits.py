"""Vectors of 16 i32 for kernels on quantized data: bytes and f16 in memory, f32x16 for computing.

`b >> 4`, `b & 15`, `a | b`, `b - 8` work by lane; scalars are broadcast. `byte_at(address, i)` is element i, counted in
bytes, `bytes_at` sixteen from it on; `put_byte` and `put_bytes` write them; halves are f16, shorts u16.
"""

import operator

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import lower_cast, models, register_model

from packtrain.kernels import runtime, simd
from packtrain.kernels.simd import BITS, F32, I32, I64, LANES, MASK, VECTOR, f32x16

llvmlite.binding.initialize_native_asmparser()
AVX512, AVX2, F16C = (runtime.has(name) for name in ("avx512f", "avx2", "f16c"))
HALF, I8, I16 = ir.HalfType(), ir.IntType(8), ir.IntType(16)
WIDE = ir.VectorType(ir.DoubleType(), LANES)


class Bits(types.Type):
    """The numba type of 16 i32 in one LLVM vector."""

    def __init__(self):
        super().__init__(name="i32x16")


i32x16 = Bits()


@register_model(Bits)
class BitsModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, BITS)


@lower_cast(types.Integer, Bits)
def integer_to_bits(context, builder, fromty, toty, value):
    return simd.spread(builder, context.cast(builder, value, fromty, types.int32), BITS)


for name, emitted in {
    "and_": "and_", "or_": "or_", "add": "add", "sub": "sub", "mul": "mul", "lshift": "shl", "rshift": "lshr"
}.items():  # fmt: skip
    simd.binary_operator(i32x16, types.Integer, getattr(operator, name), emitted)


def reading(kind, result, emit):
    """An intrinsic (address, i): emit(builder, value) of element i there, or of sixteen from it on."""

    def emit_read(builder, address, i):
        element_type = kind.element if isinstance(kind, ir.VectorType) else kind
        at = builder.gep(builder.inttoptr(address, element_type.as_pointer()), [i])
        return emit(builder, builder.load(builder.bitcast(at, kind.as_pointer()), align=1))

    return simd.instruction(result, types.int64, types.int64)(emit_read)


def writing(value_type, emit):
    """An intrinsic (address, i, value): emit(builder, value) becomes element i there, or sixteen from it on."""

    def emit_write(builder, address, i, value):
        value = emit(builder, value)
        element_type = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        at = builder.gep(builder.inttoptr(address, element_type.as_pointer()), [i])
        builder.store(value, builder.bitcast(at, value.type.as_pointer()), align=1)

    return simd.instruction(types.void, types.int64, types.int64, value_type)(emit_write)


def sixteen(kind):
    return ir.VectorType(kind, LANES)


def emit_half(builder, v):
    """Of f16 bits. LLVM's own instructions wait for the last use of a register: half the speed of a dot product."""
    if not F16C:
        return builder.fpext(builder.bitcast(v, HALF), F32)
    form = ir.FunctionType(F32, [I32])
    return builder.asm(
        form, "vmovd $1, $0; vcvtph2ps $0, $0", "=x,r", [builder.zext(v, I32)], False
    )


bytes_at = reading(sixteen(I8), i32x16, lambda builder, v: builder.zext(v, BITS))
chars_at = reading(sixteen(I8), i32x16, lambda builder, v: builder.sext(v, BITS))
shorts_at = reading(sixteen(I16), i32x16, lambda builder, v: builder.zext(v, BITS))
halves_at = reading(sixteen(HALF), f32x16, lambda builder, v: builder.fpext(v, VECTOR))
byte_at = reading(I8, types.int64, lambda builder, v: builder.zext(v, I64))
char_at = reading(I8, types.int64, lambda builder, v: builder.sext(v, I64))
short_at = reading(I16, types.int64, lambda builder, v: builder.zext(v, I64))
word_at = reading(I32, types.int64, lambda builder, v: builder.zext(v, I64))
half_at = reading(I16, types.float32, emit_half)
put_byte = writing(types.int64, lambda builder, v: builder.trunc(v, I8))
put_bytes = writing(i32x16, lambda builder, v: builder.trunc(v, sixteen(I8)))
put_short = writing(types.int64, lambda builder, v: builder.trunc(v, I16))
put_word = writing(types.int64, lambda builder, v: builder.trunc(v, I32))
put_half = writing(types.float32, lambda builder, v: builder.fptrunc(v, HALF))


def emit_pick(builder, values, numbers):
    """values[numbers] by lane; only the low four bits of a number count."""
    if AVX512:  # one permutation, which LLVM finds in the other form only at times
        return simd.call(builder, "llvm.x86.avx512.permvar.sf.512", VECTOR, values, numbers)
    if AVX2:
        return emit_pick_by_eight(builder, values, numbers)
    picked = ir.Constant(VECTOR, ir.Undefined)
    for lane in map(I32, range(LANES)):
        number = builder.and_(builder.extract_element(numbers, lane), I32(LANES - 1))
        picked = builder.insert_element(picked, builder.extract_element(values, number), lane)
    return picked


def emit_pick_by_eight(builder, values, numbers):
    """The same from the lower and the upper half of the table; the fourth bit of an index chooses."""
    eight, places = ir.VectorType(F32, 8), ir.VectorType(I32, 8)

    def half(v, first):
        lanes = ir.Constant(places, list(range(first, first + 8)))
        return builder.shuffle_vector(v, v, lanes)

    picked_halves = []
    for index in (half(numbers, 0), half(numbers, 8)):
        low, high = (
            simd.call(builder, "llvm.x86.avx2.permps", eight, half(values, first), index)
            for first in (0, 8)
        )
        fourth = builder.and_(index, ir.Constant(places, [8] * 8))
        upper = builder.icmp_signed("!=", fourth, ir.Constant(places, [0] * 8))
        picked_halves.append(builder.select(upper, high, low))
    return builder.shuffle_vector(*picked_halves, ir.Constant(BITS, list(range(LANES))))


pick = simd.instruction(f32x16, f32x16, i32x16)(emit_pick)


def low_bits(count):
    """An intrinsic (b, d, m): the value of the low `count` bits of each lane, times d, plus m.

    With AVX-512 a permutation of the possible results, which are the same for many b.
    """
    code_mask = (1 << count) - 1
    each = ir.Constant(VECTOR, [float(lane & code_mask) for lane in range(LANES)])

    def emit(builder, b, d, m):
        code = each
        if not AVX512:
            code = builder.sitofp(builder.and_(b, ir.Constant(BITS, [code_mask] * LANES)), VECTOR)
        values = simd.call(builder, "llvm.fma.v16f32", VECTOR, code, d, m)
        return emit_pick(builder, values, b) if AVX512 else values

    return simd.instruction(f32x16, i32x16, f32x16, f32x16)(emit)


low_2 = low_bits(2)


def where_set(emit):
    """An intrinsic (v, bits, w): emit(builder, v, w) in lane i where bit i is set, elsewhere v."""

    def emit_where(builder, v, bits, w):
        mask = builder.bitcast(builder.trunc(bits, I16), MASK)
        return builder.select(mask, emit(builder, v, w), v)

    return simd.instruction(f32x16, f32x16, types.int64, f32x16)(emit_where)


put_where = where_set(lambda builder, v, w: w)


@simd.instruction(i32x16, types.int64, types.int64)
def bytes_of(builder, low, high):
    """The sixteen bytes of two int64."""
    both = ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
    for place, word in enumerate((low, high)):
        both = builder.insert_element(both, word, I32(place))
    return builder.zext(builder.bitcast(both, sixteen(I8)), BITS)


@simd.instruction(i32x16)
def lane_numbers(builder):
    """0 .. 15."""
    return ir.Constant(BITS, list(range(LANES)))


def converting(vector_type, result, emit):
    """An intrinsic on one vector: emit(builder, vector)."""
    return simd.instruction(result, vector_type)(emit)


spread_bits = converting(i32x16, i32x16, lambda builder, v: v)
to_floats = converting(i32x16, f32x16, lambda builder, v: builder.sitofp(v, VECTOR))
as_ints = converting(f32x16, i32x16, lambda builder, v: builder.bitcast(v, BITS))
as_floats = converting(i32x16, f32x16, lambda builder, v: builder.bitcast(v, VECTOR))
to_bits = converting(f32x16, i32x16, lambda builder, v: builder.fptosi(v, BITS))  # towards zero


def emit_set_lanes(builder, v):
    nonzero = builder.icmp_signed("!=", v, ir.Constant(BITS, [0] * LANES))
    return builder.zext(builder.bitcast(nonzero, I16), I64)


set_lanes = converting(i32x16, types.int64, emit_set_lanes)  # bit i: lane i is not zero


class Sums(types.Type):
    """The numba type of 16 f64 in LLVM vectors, to which squares of f32 are added."""

    def __init__(self):
        super().__init__(name="f64x16")


f64x16 = Sums()


@register_model(Sums)
class SumsModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, WIDE)


@simd.instruction(f64x16)
def no_sums(builder):
    return ir.Constant(WIDE, [0.0] * LANES)


@simd.instruction(f64x16, f64x16, f32x16)
def add_squares(builder, sums, v):
    """sums + v * v by lane."""
    wide = builder.fpext(v, WIDE)
    return simd.call(builder, "llvm.fma.v16f64", WIDE, wide, wide, sums)


@simd.instruction(types.float64, f64x16)
def total_of(builder, sums):
    return simd.fold(builder, sums, lambda builder, a, b: builder.fadd(a, b))
