"""Compute element-wise functions on flat arrays; the result may be one of the inputs."""

from llvmlite import ir
from numba import types

from packtrain.kernels import simd
from packtrain.kernels.call import kernel, part, spans
from packtrain.kernels.counter import GOLDEN, MIX_FACTOR_1, MIX_FACTOR_2
from packtrain.kernels.simd import BITS, F32, I64, LANES, VECTOR, f32x16, fma, in1, load_part, out1

i64, f32, void = types.int64, types.float32, types.void
SERIAL = 1 << 15  # below this many elements a parallel region does not pay
BLOCK = 1 << 13
GELU_CUBE, GELU_FACTOR = 0.044715, 1.5957691216057308  # gelu(x) = x sigmoid(FACTOR (x + CUBE x**3))

UNARY_NAMES = "neg abs sgn step sqr sqrt log exp sin cos relu sigmoid silu tanh gelu gelu_quick elu softplus erf"
UNARY = {name: op_code for op_code, name in enumerate(UNARY_NAMES.split())}
BINARY = {name: op_code for op_code, name in enumerate(["add", "sub", "mul", "div"])}
(
    NEG, ABS, SGN, STEP, SQR, SQRT, LOG, EXP, SIN, COS, RELU, SIGMOID, SILU, TANH, GELU, GELU_QUICK, ELU, SOFTPLUS, ERF,
) = UNARY.values()  # fmt: skip
ADD, SUB, MUL, DIV = BINARY.values()


@part(f32x16(f32x16))
def erf(x):
    """Return erf(x), off by less than 5e-7. Abramowitz and Stegun 7.1.26."""
    t = 1.0 / (1.0 + 0.3275911 * simd.absolute(x))
    p = fma(fma(t, 1.061405429, -1.453152027), t, 1.421413741)
    p = fma(fma(p, t, -0.284496736), t, 0.254829592) * t
    y = 1.0 - p * simd.exp(simd.neg(x * x))
    return simd.select_less(x, 0.0, simd.neg(y), y)


@part(f32x16(i64, f32x16), forceinline=False)
def rare_unary(code, x):
    if code == SIN:
        return simd.sin(x)
    if code == COS:
        return simd.cos(x)
    if code == LOG:
        return simd.log(x)
    if code == ELU:
        return simd.select_less(0.0, x, x, simd.exp(x) - 1.0)
    if code == SOFTPLUS:
        return simd.maximum(x, 0.0) + simd.log(1.0 + simd.exp(simd.neg(simd.absolute(x))))
    if code == ERF:
        return erf(x)
    return simd.tanh(x)


@part(f32x16(i64, f32x16))
def unary_lanes(code, x):
    """Apply the function `code`, from UNARY; gelu is the tanh variant, (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    if code == NEG:
        return simd.neg(x)
    if code == ABS:
        return simd.absolute(x)
    if code == SGN:
        return simd.select_less(x, 0.0, -1.0, simd.select_less(0.0, x, 1.0, x))
    if code == STEP:
        return simd.select_less(0.0, x, 1.0, 0.0)
    if code == SQR:
        return x * x
    if code == SQRT:
        return simd.sqrt(x)
    if code == EXP:
        return simd.exp(x)
    if code == RELU:
        return simd.maximum(x, 0.0)
    if code == SIGMOID:
        return simd.sigmoid(x)
    if code == SILU:
        return x * simd.sigmoid(x)
    if code == GELU:
        return x * simd.sigmoid(fma(x * x, x * GELU_CUBE, x) * GELU_FACTOR)
    if code == GELU_QUICK:
        return x * simd.sigmoid(x * 1.702)
    return rare_unary(code, x)


@part(f32x16(i64, f32x16, f32x16))
def two(code, a, b):
    """Apply the operator `code`, from BINARY, to two vectors."""
    if code == ADD:
        return a + b
    if code == SUB:
        return a - b
    if code == MUL:
        return a * b
    return a / b


@kernel(void(i64, out1, in1, i64, i64))
def unary_span(code, y, x, span_start, span_stop):
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        simd.store_part(y, i, unary_lanes(code, load_part(x, i, num_left)), num_left)


@kernel(void(i64, out1, in1))
def unary(code, y, x):
    """y = f(x), code from UNARY; y may be x.

    x, y  (N,)  f32
    """
    n = x.size
    spans(unary_span, (code, y, x), n, BLOCK if n > SERIAL else n)


@kernel(void(i64, out1, in1, in1, i64, i64))
def binary_span(code, y, a, b, span_start, span_stop):
    for i in range(span_start, span_stop, LANES):
        left = span_stop - i
        simd.store_part(y, i, two(code, load_part(a, i, left), load_part(b, i, left)), left)


@kernel(void(i64, out1, in1, in1))
def binary(code, y, a, b):
    """y = a (+ - * /) b, code from BINARY; y may be a or b.

    a, b, y  (N,)  f32
    """
    n = y.size
    spans(binary_span, (code, y, a, b), n, BLOCK if n > SERIAL else n)


@kernel(void(i64, simd.out2, simd.in2, in1, i64, i64))
def rows_span(code, y, a, b, row_start, row_stop):
    width = b.size
    for row in range(row_start, row_stop):
        for i in range(0, width, LANES):
            left = width - i
            at = row * width + i
            simd.store_part(y, at, two(code, load_part(a, at, left), load_part(b, i, left)), left)


@kernel(void(i64, simd.out2, simd.in2, in1))
def binary_rows(code, y, a, b):
    """y = a (+ - * /) b with b the same for every row; y may be a.

    a, y  (N, C)  f32
    b     (C,)    f32
    """
    n = a.shape[0]
    spans(rows_span, (code, y, a, b), n, BLOCK // max(1, b.size) if a.size > SERIAL else n)


@kernel(void(i64, out1, in1, f32, i64, i64))
def scalar_span(code, y, a, b, span_start, span_stop):
    b_lanes = simd.splat(b)
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        simd.store_part(y, i, two(code, load_part(a, i, num_left), b_lanes), num_left)


@kernel(void(i64, out1, in1, in1))
def binary_scalar(code, y, a, b):
    """y = a (+ - * /) b[0]; y may be a.

    a, y  (N,)  f32
    b     (1,)  f32
    """
    n = y.size
    scalar = b[0]
    spans(scalar_span, (code, y, a, scalar), n, BLOCK if n > SERIAL else n)


@kernel(void(out1, in1, f32, f32, i64, i64))
def scale_span(y, x, by, bias, span_start, span_stop):
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        simd.store_part(y, i, load_part(x, i, num_left) * by + bias, num_left)


@kernel(void(out1, in1, f32, f32))
def scale(y, x, by, bias):
    """y = x * by + bias; y may be x.

    x, y  (N,)  f32
    """
    n = x.size
    spans(scale_span, (y, x, by, bias), n, BLOCK if n > SERIAL else n)


@kernel(void(out1, in1, f32, f32, f32, i64, i64))
def bounded_span(y, x, negative_slope, low, high, span_start, span_stop):
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        v = load_part(x, i, num_left)
        v = simd.maximum(simd.maximum(v, v * negative_slope), low)
        simd.store_part(y, i, simd.select_less(high, v, high, v), num_left)


@kernel(void(out1, in1, f32, f32, f32))
def bounded(y, x, negative_slope, low, high):
    """y = max(x, negative_slope * x), at least low and at most high; y may be x.

    x, y  (N,)  f32
    """
    n = x.size
    spans(bounded_span, (y, x, negative_slope, low, high), n, BLOCK if n > SERIAL else n)


flag_type = types.boolean


@part(f32x16(flag_type, f32x16))
def inner(use_gelu, x):
    """Return the argument of the sigmoid in silu or gelu."""
    return fma(x * x, x * GELU_CUBE, x) * GELU_FACTOR if use_gelu else x


@part(f32x16(flag_type, f32x16, f32x16, f32x16))
def gate_slope(use_gelu, dy, x, s):
    """Return dy times the slope of x * s, s = sigmoid(inner(x))."""
    argument_slope = fma(x * x, x * (3.0 * GELU_CUBE), x) * GELU_FACTOR if use_gelu else x
    return dy * s * fma(argument_slope, 1.0 - s, 1.0)


@kernel(void(out1, in1, in1, i64, i64))
def silu_back_span(dx, dy, x, span_start, span_stop):
    for i in range(span_start, span_stop, LANES):
        left = span_stop - i
        v = load_part(x, i, left)
        simd.store_part(dx, i, gate_slope(False, load_part(dy, i, left), v, simd.sigmoid(v)), left)


@kernel(void(out1, in1, in1))
def silu_back(dx, dy, x):
    """dx = dy * s * (1 + x * (1 - s)), s = sigmoid(x); dx may be dy or x.

    dx, dy, x  (N,)  f32
    """
    n = x.size
    spans(silu_back_span, (dx, dy, x), n, BLOCK if n > SERIAL else n)


@kernel(void(flag_type, out1, in1, in1, i64, i64))
def gated_span(use_gelu, y, gate, up, span_start, span_stop):
    for i in range(span_start, span_stop, LANES):
        left = span_stop - i
        v = load_part(gate, i, left)
        simd.store_part(y, i, v * simd.sigmoid(inner(use_gelu, v)) * load_part(up, i, left), left)


@kernel(void(flag_type, out1, in1, in1))
def gated(use_gelu, y, gate, up):
    """y = silu(gate) * up, or gelu(gate) * up; y may be gate or up.

    gate, up, y  (N,)  f32
    """
    n = y.size
    spans(gated_span, (use_gelu, y, gate, up), n, BLOCK if n > SERIAL else n)


@kernel(void(flag_type, out1, out1, in1, in1, in1, i64, i64))
def gated_back_span(use_gelu, dgate, dup, dy, gate, up, span_start, span_stop):
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        v = load_part(gate, i, num_left)
        w = load_part(up, i, num_left)
        d = load_part(dy, i, num_left)
        s = simd.sigmoid(inner(use_gelu, v))
        simd.store_part(dgate, i, gate_slope(use_gelu, d * w, v, s), num_left)
        simd.store_part(dup, i, d * v * s, num_left)


@kernel(void(flag_type, out1, out1, in1, in1, in1))
def gated_back(use_gelu, dgate, dup, dy, gate, up):
    """Write the gradients of gated; dgate and dup may each be any of dy, gate, up, but not each other.

    dgate, dup, dy, gate, up  (N,)  f32
    """
    n = dy.size
    spans(gated_back_span, (use_gelu, dgate, dup, dy, gate, up), n, BLOCK if n > SERIAL else n)


def emit_mix(builder, z):
    for shift, factor in ((30, MIX_FACTOR_1), (27, MIX_FACTOR_2), (31, 1)):
        by, factor_vector = (ir.Constant(z.type, [n] * z.type.count) for n in (shift, factor))
        z = builder.mul(builder.xor(z, builder.lshr(z, by)), factor_vector)
    return z


@simd.instruction(f32x16, types.int64, types.int64)
def uniform(builder, key, index):
    """Return uniform numbers index … index + 15 of a stream (see counter.py); index is even."""
    wide_type = ir.VectorType(I64, LANES // 2)
    first = spread_wide(builder, builder.add(builder.lshr(index, I64(1)), I64(1)), wide_type)
    counter = builder.add(first, ir.Constant(wide_type, list(range(LANES // 2))))
    golden_vector = ir.Constant(wide_type, [GOLDEN] * (LANES // 2))
    z = builder.add(builder.mul(counter, golden_vector), spread_wide(builder, key, wide_type))
    bits = builder.bitcast(emit_mix(builder, z), BITS)
    bits = builder.lshr(bits, ir.Constant(BITS, [8] * LANES))
    return builder.fmul(
        builder.sitofp(bits, VECTOR), simd.spread(builder, ir.Constant(F32, 2.0**-24), VECTOR)
    )


def spread_wide(builder, value, vector_type):
    first_lane = builder.insert_element(ir.Constant(vector_type, ir.Undefined), value, I64(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector_type.count), [0] * vector_type.count)
    return builder.shuffle_vector(first_lane, first_lane, zeros)


@simd.instruction(types.int64, types.int64)
def mix(builder, z):
    """Scramble a 64-bit integer as counter.mix does."""
    wide_type = ir.VectorType(I64, 2)
    z = spread_wide(builder, builder.add(z, I64(GOLDEN)), wide_type)
    return builder.extract_element(emit_mix(builder, z), I64(0))


@kernel(void(out1, in1, i64, f32, i64, i64))
def dropout_span(y, x, key, p, span_start, span_stop):
    factor = simd.splat(f32(1.0) / (f32(1.0) - p))
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        keep_factor = simd.select_less(uniform(key, i), p, 0.0, factor)
        simd.store_part(y, i, load_part(x, i, num_left) * keep_factor, num_left)


@kernel(void(out1, in1, i64, i64, i64, f32))
def dropout(y, x, seed, step, stream, p):
    """y = x / (1 - p) where uniform(seed, step, stream, index) >= p, else 0; y may be x.

    x, y  (N,)  f32
    """
    n = x.size
    key = mix(mix(mix(seed) + step) + stream)
    spans(dropout_span, (y, x, key, p), n, BLOCK if n > SERIAL else n)
