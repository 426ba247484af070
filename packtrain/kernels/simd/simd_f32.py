"""Vectors of 16 f32 for kernels: `v = load(x, i)`, `v * w + 1.0`, `fma`, `exp`, `store(y, i, v)`.

`x` is an f32 array of any rank, counted flat from its first element, or an address (int64).
`load_part(x, i, left)` touches only the first `left` lanes and fills with zeros, so that a tail
runs the same instructions as the rest. A vector is one AVX-512 register, two of AVX2, four of NEON.
"""

import operator
from inspect import Parameter, Signature

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, errors
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, lower_cast, models, register_model

from packtrain.kernels.runtime.kernel_types import f32, i64, vector_types, void
from packtrain.kernels.simd.lane_reduction import fold_lanes

LANES = 16
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
BITS = ir.VectorType(I32, LANES)
MASK = ir.VectorType(ir.IntType(1), LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
INFINITY = float("inf")
NAN = float("nan")


class VectorType(types.Type):
    """numba's type of an LLVM vector."""

    def __init__(self, name, llvm_type):
        super().__init__(name=name)
        self.llvm_type = llvm_type
        vector_types[name] = self


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llvm_type)


def spread(builder, value, vector_type):
    """Emit a vector of vector_type with `value` in every lane."""
    first_lane = builder.insert_element(ir.Constant(vector_type, ir.Undefined), value, I32(0))
    lane_order = ir.Constant(ir.VectorType(I32, vector_type.count), [0] * vector_type.count)
    return builder.shuffle_vector(first_lane, first_lane, lane_order)


def call(builder, name, result_type, *args):
    """Emit a call of LLVM's intrinsic `name` with the values `args`."""
    function_type = ir.FunctionType(result_type, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def emit_switch(builder, value, cases):
    """Emit a switch: for each number in `cases` the code that its function emits, and none for other values."""
    end_block = builder.append_basic_block("chosen")
    switch = builder.switch(value, end_block)
    for number, emit_case in cases.items():
        case_block = builder.append_basic_block(f"case{number}")
        switch.add_case(I64(number), case_block)
        builder.position_at_end(case_block)
        emit_case()
        builder.branch(end_block)
    builder.position_at_end(end_block)


def computing_type(name, llvm_type, scalars, lane, operators):
    """Return numba's type of a vector that numbers of the class `scalars` become, cast to `lane` and spread.

    operators  LLVM's instructions by names of Python's module operator
    """
    vector = VectorType(name, llvm_type)

    @lower_cast(scalars, vector)
    def lower_number(context, builder, fromty, toty, value):
        return spread(builder, context.cast(builder, value, fromty, lane), llvm_type)

    for operator_name, llvm_name in operators.items():
        define_operator(vector, scalars, getattr(operator, operator_name), llvm_name)
    return vector


def define_operator(vector, scalars, python_operator, llvm_name):
    """Define a Python operator on two vectors, or a vector and a scalar, by an instruction of LLVM."""

    @infer_global(python_operator)
    class VectorOperator(AbstractTemplate):
        def generic(self, args, kws):
            if vector in args and all(a == vector or isinstance(a, scalars) for a in args):
                return signature(vector, vector, vector)
            return None

    @lower_builtin(python_operator, vector, vector)
    def lower_operator(context, builder, sig, args):
        return getattr(builder, llvm_name)(*args)


FLOAT_OPERATORS = {"add": "fadd", "sub": "fsub", "mul": "fmul", "truediv": "fdiv"}
FLOAT_OPERATORS |= {f"i{name}": llvm_name for name, llvm_name in FLOAT_OPERATORS.items()}
f32x16 = computing_type("f32x16", VECTOR, types.Number, f32, FLOAT_OPERATORS)


def intrinsic_of(count, typed):
    """Return an intrinsic of `count` parameters, which numba counts, from typed(typingctx, *types)."""
    names = ["typingctx", *(f"value{param_index}" for param_index in range(count))]
    typed.__signature__ = Signature([Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in names])
    return intrinsic(typed)


def instruction(result_type, *arg_types):
    """Return a decorator that makes an intrinsic of these types from emit(builder, *values) -> value or None."""

    def define_intrinsic(emit):
        def codegen(context, builder, sig, args):
            value = emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        return intrinsic_of(
            len(arg_types), lambda typingctx, *_: (result_type(*arg_types), codegen)
        )

    return define_intrinsic


def lanewise(emit, num_vectors):
    """Return an intrinsic on `num_vectors` vectors (numbers are spread) from emit(builder, *values) -> value."""
    return instruction(f32x16, *[f32x16] * num_vectors)(emit)


def llvm_op(function_name):
    return lambda builder, *args: call(builder, f"llvm.{function_name}.v16f32", VECTOR, *args)


def emit_max(builder, a, b):
    """Emit the larger of a and b by lane; a NaN in `a` wins: a running maximum passes the new value as `a`."""
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def emit_scaled(builder, mantissa, shifted_exponent):
    """Emit mantissa * 2**n by adding the low bits of shifted_exponent to those of the exponent."""
    power = builder.shl(builder.bitcast(shifted_exponent, BITS), ir.Constant(BITS, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(mantissa, BITS), power), VECTOR)


def emit_exponent(builder, x):
    """Emit the exponents of x, as f32: x = mantissa * 2**exponent."""
    shift, bias = (ir.Constant(BITS, [n] * LANES) for n in (23, 127))
    field = builder.ashr(builder.bitcast(x, BITS), shift)
    return builder.sitofp(builder.sub(field, bias), VECTOR)


def emit_mantissa(builder, x):
    """Emit the mantissas of x, from 1 up to 2."""
    keep, one = (ir.Constant(BITS, [n] * LANES) for n in (0x7FFFFF, 0x3F800000))
    return builder.bitcast(builder.or_(builder.and_(builder.bitcast(x, BITS), keep), one), VECTOR)


splat = lanewise(lambda builder, a: a, 1)
neg = lanewise(lambda builder, a: builder.fneg(a), 1)
fma = lanewise(llvm_op("fma"), 3)
sqrt = lanewise(llvm_op("sqrt"), 1)
absolute = lanewise(llvm_op("fabs"), 1)
copysign = lanewise(llvm_op("copysign"), 2)
sin = lanewise(llvm_op("sin"), 1)
cos = lanewise(llvm_op("cos"), 1)
maximum = lanewise(emit_max, 2)
select_less = lanewise(  # (a, b, x, y): x where a < b, else y
    lambda builder, a, b, x, y: builder.select(builder.fcmp_ordered("<", a, b), x, y), 4
)
scaled = lanewise(emit_scaled, 2)  # (p, t): p * 2**n, n the low bits of t = n + 1.5 * 2**23
exponent = lanewise(emit_exponent, 1)
mantissa = lanewise(emit_mantissa, 1)


def element_address(context, builder, numba_type, array_or_address, index):
    """Emit the pointer to element `index` of an f32 array, counted flat, or of an address."""
    if isinstance(numba_type, types.Array):
        base_pointer = context.make_array(numba_type)(context, builder, array_or_address).data
    else:
        base_pointer = builder.inttoptr(array_or_address, F32.as_pointer())
    return builder.gep(base_pointer, [index])


def first_lanes(builder, left):
    """Emit the mask of the first `left` lanes."""
    lane_indices = ir.Constant(BITS, list(range(LANES)))
    return builder.icmp_signed("<", lane_indices, spread(builder, builder.trunc(left, I32), BITS))


def read_masked(builder, pointer, mask=None):
    """Emit a load of 16 f32, zeros outside the mask if there is one."""
    if mask is None:
        return builder.load(pointer, typ=VECTOR, align=4)
    return call(builder, "llvm.masked.load.v16f32.p0", VECTOR, pointer, I32(4), mask, ZERO)


def write_masked(builder, value, pointer, mask=None):
    if mask is None:
        return builder.store(value, pointer, align=4)
    intrinsic_name, void = "llvm.masked.store.v16f32.p0", ir.VoidType()
    return call(builder, intrinsic_name, void, value, pointer, I32(4), mask)


def branch_on_full(builder, left, emit):
    """Emit emit(None) for 16 lanes left, else emit(mask of the first `left`); returns their value, if there is one."""
    with builder.if_else(builder.icmp_signed(">=", left, I64(LANES)), likely=True) as (then, other):
        with then:
            a, a_block = emit(None), builder.block
        with other:
            b, b_block = emit(first_lanes(builder, left)), builder.block
    if isinstance(a.type, ir.VoidType):
        return None
    phi = builder.phi(a.type)
    phi.add_incoming(a, a_block)
    phi.add_incoming(b, b_block)
    return phi


def array_or_address(numba_type):
    """Return numba's type of a place in memory: an f32 array or an address; raises TypingError for others."""
    if isinstance(numba_type, types.Array) and numba_type.dtype == f32:
        return numba_type
    if isinstance(numba_type, types.Integer):
        return i64
    raise errors.TypingError(f"expected an f32 array or an address, not {numba_type}")


def memory_instruction(result_type, *arg_types, pointee=VECTOR):
    """Return a decorator that makes an intrinsic (x, i, *args) from emit(builder, pointer to element i of x, *args).

    x is an f32 array of any rank, counted flat, or an address.
    """

    def define_intrinsic(emit):
        def typed(typingctx, x, i, *_):
            def codegen(context, builder, sig, args):
                pointer = element_address(context, builder, sig.args[0], *args[:2])
                pointer = builder.bitcast(pointer, pointee.as_pointer())
                value = emit(builder, pointer, *args[2:])
                return context.get_dummy_value() if result_type == void else value

            return result_type(array_or_address(x), i64, *arg_types), codegen

        return intrinsic_of(2 + len(arg_types), typed)

    return define_intrinsic


load = memory_instruction(f32x16)(read_masked)  # elements i … i + 15


@memory_instruction(f32x16, i64)
def load_part(builder, pointer, left):
    """load_part(x, i, left) gives elements i … i + min(left, 16) - 1, then zeros; nothing behind them is touched."""
    return branch_on_full(builder, left, lambda mask: read_masked(builder, pointer, mask))


@memory_instruction(void, f32x16)
def store(builder, pointer, v):
    """store(x, i, v) writes v to elements i … i + 15 of x, an array or address."""
    write_masked(builder, v, pointer)


@memory_instruction(void, f32x16, i64)
def store_part(builder, pointer, v, left):
    """store_part(x, i, v, left) writes v to elements i … i + min(left, 16) - 1 of x."""
    branch_on_full(builder, left, lambda mask: write_masked(builder, v, pointer, mask))


@memory_instruction(i64)
def address(builder, pointer):
    """address(x, i) is the address (int64) of element i of an f32 array or address; the array must stay alive."""
    return builder.ptrtoint(pointer, I64)


@memory_instruction(f32, pointee=F32)
def peek(builder, pointer):
    """peek(x, i) is element i of x, an f32 array or an address."""
    return builder.load(pointer)


@memory_instruction(void, f32, pointee=F32)
def poke(builder, pointer, value):
    """poke(x, i, value) writes element i of x, an f32 array or an address."""
    builder.store(value, pointer)


@instruction(f32x16, f32x16, i64, f32x16)
def keep_first(builder, v, num_lanes, fill):
    """Return the first num_lanes lanes of v, `fill` in the others."""
    return builder.select(first_lanes(builder, num_lanes), v, fill)


def fold_intrinsic(combine):
    return instruction(f32, f32x16)(lambda builder, v: fold_lanes(builder, v, combine))


total = fold_intrinsic(lambda builder, a, b: builder.fadd(a, b))
largest = fold_intrinsic(emit_max)


@intrinsic(prefer_literal=True)
def scratch(typingctx, num_values):
    """scratch(num_values), a literal, is the address of that many f32 on the caller's stack, 64-byte aligned."""
    if not isinstance(num_values, types.IntegerLiteral):
        raise errors.TypingError("scratch takes a literal size")

    def codegen(context, builder, sig, args):
        array_type = ir.ArrayType(F32, num_values.literal_value)
        with builder.goto_entry_block():
            buffer = builder.alloca(array_type)
        buffer.align = 64
        return builder.ptrtoint(buffer, I64)

    return i64(num_values), codegen


lanewise_function = njit(f32x16(f32x16), cache=True, forceinline=True)


@lanewise_function
def exp(x):
    """Return e**x to 1.2e-7: 0 below -87.3 (no denormals), inf above 88.72, NaN stays NaN."""
    t = fma(x, 1.4426950408889634, 12582912.0)
    n = t - 12582912.0
    r = fma(n, -0.693359375, x)
    r = fma(n, 2.12194440e-4, r)
    p = fma(r, 0.00139505, 0.00836892)
    p = fma(p, r, 0.04166621)
    p = fma(p, r, 0.16666519)
    p = fma(p, r, 0.50000001)
    p = fma(p, r * r, r) + 1.0
    y = select_less(x, -87.33654, 0.0, scaled(p, t))
    return select_less(x, 88.72284, y, x + INFINITY)


@lanewise_function
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (exp(neg(x)) + 1.0)


@lanewise_function
def tanh(x):
    """Return tanh(x), by a polynomial below 0.625, so that small x keep their digits."""
    z = x * x
    p = fma(z, -0.005717044684987945, 0.02065058695433056)
    p = fma(p, z, -0.05374349797385402)
    p = fma(p, z, 0.133314912857102)
    p = fma(p, z, -0.3333328392524079)
    small_result = fma(p * z, x, x)
    magnitude = absolute(x)
    large_result = copysign(1.0 - 2.0 / (exp(magnitude * 2.0) + 1.0), x)
    return select_less(magnitude, 0.625, small_result, large_result)


@lanewise_function
def log(x):
    """Return the natural logarithm to 1.5e-7: -inf at 0, NaN below."""
    min_normal = splat(1.1754943508222875e-38)
    normal_x = select_less(x, min_normal, x * 8388608.0, x)
    m = mantissa(normal_x)
    n = exponent(normal_x) + select_less(x, min_normal, -23.0, 0.0)
    n = select_less(1.41421356, m, n + 1.0, n)
    r = select_less(1.41421356, m, m * 0.5, m) - 1.0
    z = r * r
    p = fma(r, 0.06915111115, -0.11789680763)
    p = fma(p, r, 0.11873024298)
    p = fma(p, r, -0.12384373307)
    p = fma(p, r, 0.14218654708)
    p = fma(p, r, -0.16669249269)
    p = fma(p, r, 0.20002226735)
    p = fma(p, r, -0.2499998663)
    p = fma(p, r, 0.33333310438)
    p = fma(p * z, r, fma(n, -2.12194440e-4, z * -0.5))
    y = fma(n, 0.693359375, p + r)
    y = select_less(x, INFINITY, y, x)
    return select_less(0.0, x, y, select_less(x, 0.0, NAN, x - INFINITY))
