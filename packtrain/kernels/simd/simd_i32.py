"""Vectors of 16 i32 for kernels on quantized data: bytes and f16 in memory, f32x16 for computing.

`b >> 4`, `b & 15`, `a | b`, `b - 8` work by lane; scalars are broadcast. `byte_at(address, i)` is element i, counted in
bytes, `bytes_at` sixteen from it on; `put_byte` and `put_bytes` write them; halves are f16, shorts u16.
"""

import llvmlite.binding
from llvmlite import ir
from numba import types

from packtrain.kernels.runtime import environment
from packtrain.kernels.runtime.kernel_types import f32, f64, i32, i64, void
from packtrain.kernels.simd import simd_f32
from packtrain.kernels.simd.simd_f32 import BITS, F32, I32, I64, LANES, MASK, VECTOR, f32x16

llvmlite.binding.initialize_native_asmparser()
AVX512, AVX2, F16C = (environment.has_cpu_feature(name) for name in ("avx512f", "avx2", "f16c"))
HALF, I8, I16 = ir.HalfType(), ir.IntType(8), ir.IntType(16)
DOUBLE_VECTOR = ir.VectorType(ir.DoubleType(), LANES)


INT_OPERATORS = {"and_": "and_", "or_": "or_", "lshift": "shl", "rshift": "lshr"}
ARITHMETIC = {"add": "add", "sub": "sub", "mul": "mul"}
i32x16 = simd_f32.computing_type("i32x16", BITS, types.Integer, i32, INT_OPERATORS | ARITHMETIC)
f64x16 = simd_f32.VectorType("f64x16", DOUBLE_VECTOR)  # to which squares of f32 are added


def reading(llvm_type, numba_type, emit):
    """Return an intrinsic (address, i): emit(builder, value) of element i, or of the sixteen from i on."""

    def emit_read(builder, address, i):
        element_type = llvm_type.element if isinstance(llvm_type, ir.VectorType) else llvm_type
        at = builder.gep(builder.inttoptr(address, element_type.as_pointer()), [i])
        return emit(builder, builder.load(builder.bitcast(at, llvm_type.as_pointer()), align=1))

    return simd_f32.instruction(numba_type, i64, i64)(emit_read)


def writing_intrinsic(value_type, emit):
    """Return an intrinsic (address, i, value) that writes emit(builder, value) as element i, or sixteen from i on."""

    def emit_write(builder, address, i, value):
        value = emit(builder, value)
        element_type = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        pointer = builder.gep(builder.inttoptr(address, element_type.as_pointer()), [i])
        builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=1)

    return simd_f32.instruction(void, i64, i64, value_type)(emit_write)


def vector16(element_type):
    """Return LLVM's type of a vector of sixteen elements."""
    return ir.VectorType(element_type, LANES)


def emit_half(builder, v):
    """Emit f16 bits as f32. LLVM's own instructions wait for the last use of a register: half the speed of dots."""
    if not F16C:
        return builder.fpext(builder.bitcast(v, HALF), F32)
    function_type = ir.FunctionType(F32, [I32])
    return builder.asm(
        function_type, "vmovd $1, $0; vcvtph2ps $0, $0", "=x,r", [builder.zext(v, I32)], False
    )


bytes_at = reading(vector16(I8), i32x16, lambda builder, v: builder.zext(v, BITS))
chars_at = reading(vector16(I8), i32x16, lambda builder, v: builder.sext(v, BITS))
shorts_at = reading(vector16(I16), i32x16, lambda builder, v: builder.zext(v, BITS))
halves_at = reading(vector16(HALF), f32x16, lambda builder, v: builder.fpext(v, VECTOR))
byte_at = reading(I8, i64, lambda builder, v: builder.zext(v, I64))
char_at = reading(I8, i64, lambda builder, v: builder.sext(v, I64))
short_at = reading(I16, i64, lambda builder, v: builder.zext(v, I64))
word_at = reading(I32, i64, lambda builder, v: builder.zext(v, I64))
half_at = reading(I16, f32, emit_half)
put_byte = writing_intrinsic(i64, lambda builder, v: builder.trunc(v, I8))
put_bytes = writing_intrinsic(i32x16, lambda builder, v: builder.trunc(v, vector16(I8)))
put_short = writing_intrinsic(i64, lambda builder, v: builder.trunc(v, I16))
put_word = writing_intrinsic(i64, lambda builder, v: builder.trunc(v, I32))
put_half = writing_intrinsic(f32, lambda builder, v: builder.fptrunc(v, HALF))


def emit_pick(builder, values, lane_indices):
    """Emit values[lane_indices] by lane, from a table of 16 values; only the low four bits of an index count."""
    if AVX512:  # one permutation, which LLVM finds in the other form only at times
        return simd_f32.call(
            builder, "llvm.x86.avx512.permvar.sf.512", VECTOR, values, lane_indices
        )
    if AVX2:
        return emit_pick_by_eight(builder, values, lane_indices)
    picked = ir.Constant(VECTOR, ir.Undefined)
    for lane in map(I32, range(LANES)):
        lane_index = builder.and_(builder.extract_element(lane_indices, lane), I32(LANES - 1))
        picked = builder.insert_element(picked, builder.extract_element(values, lane_index), lane)
    return picked


def emit_pick_by_eight(builder, values, lane_indices):
    """Emit values[lane_indices] by AVX2 from both halves of the table; the fourth bit of an index chooses."""
    eight, eight_ints = ir.VectorType(F32, 8), ir.VectorType(I32, 8)

    def half_lanes(v, first_lane):
        lane_order = ir.Constant(eight_ints, list(range(first_lane, first_lane + 8)))
        return builder.shuffle_vector(v, v, lane_order)

    picked_halves = []
    for index in (half_lanes(lane_indices, 0), half_lanes(lane_indices, 8)):
        low_pick, high_pick = (
            simd_f32.call(
                builder, "llvm.x86.avx2.permps", eight, half_lanes(values, first_lane), index
            )
            for first_lane in (0, 8)
        )
        fourth_bit = builder.and_(index, ir.Constant(eight_ints, [8] * 8))
        is_upper = builder.icmp_signed("!=", fourth_bit, ir.Constant(eight_ints, [0] * 8))
        picked_halves.append(builder.select(is_upper, high_pick, low_pick))
    return builder.shuffle_vector(*picked_halves, ir.Constant(BITS, list(range(LANES))))


pick = simd_f32.instruction(f32x16, f32x16, i32x16)(emit_pick)


def low_bits_intrinsic(num_bits):
    """Return an intrinsic (b, d, m): the low `num_bits` bits of each lane of b, times d, plus m.

    AVX-512 permutes the possible results, which are equal for many b.
    """
    code_mask = (1 << num_bits) - 1
    lane_codes = ir.Constant(VECTOR, [float(lane & code_mask) for lane in range(LANES)])

    def emit(builder, b, d, m):
        code = lane_codes
        if not AVX512:
            code = builder.sitofp(builder.and_(b, ir.Constant(BITS, [code_mask] * LANES)), VECTOR)
        values = simd_f32.call(builder, "llvm.fma.v16f32", VECTOR, code, d, m)
        return emit_pick(builder, values, b) if AVX512 else values

    return simd_f32.instruction(f32x16, i32x16, f32x16, f32x16)(emit)


low_2 = low_bits_intrinsic(2)


def select_intrinsic(emit):
    """Return an intrinsic (v, bits, w): in lane i emit(builder, v, w) where bit i of `bits` is set, elsewhere v."""

    def emit_where(builder, v, lane_bits, w):
        mask = builder.bitcast(builder.trunc(lane_bits, I16), MASK)
        return builder.select(mask, emit(builder, v, w), v)

    return simd_f32.instruction(f32x16, f32x16, i64, f32x16)(emit_where)


put_where = select_intrinsic(lambda builder, v, w: w)


@simd_f32.instruction(i32x16, i64, i64)
def bytes_of(builder, low_word, high_word):
    """Return the sixteen bytes of two int64."""
    word_pair = ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
    for word_index, word in enumerate((low_word, high_word)):
        word_pair = builder.insert_element(word_pair, word, I32(word_index))
    return builder.zext(builder.bitcast(word_pair, vector16(I8)), BITS)


@simd_f32.instruction(i32x16)
def lane_numbers(builder):
    """Return the lane numbers 0 … 15."""
    return ir.Constant(BITS, list(range(LANES)))


def converting(vector_type, result_type, emit):
    """Return an intrinsic that turns one vector of vector_type into result_type by emit(builder, vector)."""
    return simd_f32.instruction(result_type, vector_type)(emit)


spread_bits = converting(i32x16, i32x16, lambda builder, v: v)
to_floats = converting(i32x16, f32x16, lambda builder, v: builder.sitofp(v, VECTOR))
as_ints = converting(f32x16, i32x16, lambda builder, v: builder.bitcast(v, BITS))
as_floats = converting(i32x16, f32x16, lambda builder, v: builder.bitcast(v, VECTOR))
to_bits = converting(f32x16, i32x16, lambda builder, v: builder.fptosi(v, BITS))  # towards zero


def emit_set_lanes(builder, v):
    nonzero = builder.icmp_signed("!=", v, ir.Constant(BITS, [0] * LANES))
    return builder.zext(builder.bitcast(nonzero, I16), I64)


set_lanes = converting(i32x16, i64, emit_set_lanes)  # bit i: lane i is not zero


@simd_f32.instruction(f64x16)
def zero_sums(builder):
    """Return sixteen sums in f64, all zero, for add_squares."""
    return ir.Constant(DOUBLE_VECTOR, [0.0] * LANES)


@simd_f32.instruction(f64x16, f64x16, f32x16)
def add_squares(builder, sums, v):
    """Return sums + v * v by lane."""
    wide_v = builder.fpext(v, DOUBLE_VECTOR)
    return simd_f32.call(builder, "llvm.fma.v16f64", DOUBLE_VECTOR, wide_v, wide_v, sums)


@simd_f32.instruction(f64, f64x16)
def sum_lanes(builder, sums):
    return simd_f32.fold_lanes(builder, sums, lambda builder, a, b: builder.fadd(a, b))
