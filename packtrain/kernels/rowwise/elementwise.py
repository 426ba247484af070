"""Compute element-wise functions on flat arrays; the result may be one of the inputs."""

from functools import partial

from llvmlite import ir
from numba.core import cgutils

from packtrain.kernels.rowwise.counter_rng import GOLDEN, MIX_FACTOR_1, MIX_FACTOR_2
from packtrain.kernels.runtime.jit import emit_part, parallel, part
from packtrain.kernels.runtime.kernel_types import f32, i64
from packtrain.kernels.simd.simd_f32 import (
    BITS, F32, I64, LANES, VECTOR, absolute, cos, emit_switch, exp, f32x16, fma, instruction, intrinsic_of, load_part,
    log, maximum, neg, select_less, sigmoid, sin, splat, spread, sqrt, store_part, tanh,
)  # fmt: skip

SERIAL = 1 << 15  # below this many elements a parallel region does not pay
GELU_CUBE, GELU_FACTOR = 0.044715, 1.5957691216057308  # gelu(x) = x sigmoid(FACTOR (x + CUBE x**3))

BINARY = {name: op_code for op_code, name in enumerate(["add", "sub", "mul", "div"])}
ADD, SUB, MUL, DIV = BINARY.values()


@part("f32x16(f32x16)")
def erf(x):
    """Return erf(x), off by less than 5e-7. Abramowitz and Stegun 7.1.26."""
    t = 1.0 / (1.0 + 0.3275911 * absolute(x))
    p = fma(fma(t, 1.061405429, -1.453152027), t, 1.421413741)
    p = fma(fma(p, t, -0.284496736), t, 0.254829592) * t
    y = 1.0 - p * exp(neg(x * x))
    return select_less(x, 0.0, neg(y), y)


def chosen_lanes(functions):
    """Return an intrinsic (number, x) that applies the function with that number to a vector."""
    lane_signature = f32x16(f32x16)
    parts = [part(lane_signature)(function) for function in functions]

    def codegen(context, builder, sig, args):
        result = cgutils.alloca_once(builder, VECTOR)

        def emit_case(function):
            builder.store(emit_part(context, builder, function, lane_signature, args[1:]), result)

        cases = {i: partial(emit_case, function) for i, function in enumerate(parts)}
        emit_switch(builder, args[0], cases)
        return builder.load(result)

    return intrinsic_of(2, lambda typingctx, *_: (f32x16(i64, f32x16), codegen))


UNARY_LANES = {
    "neg": lambda x: neg(x),
    "abs": lambda x: absolute(x),
    "sgn": lambda x: select_less(x, 0.0, -1.0, select_less(0.0, x, 1.0, x)),
    "step": lambda x: select_less(0.0, x, 1.0, 0.0),
    "sqr": lambda x: x * x,
    "sqrt": lambda x: sqrt(x),
    "log": lambda x: log(x),
    "exp": lambda x: exp(x),
    "sin": lambda x: sin(x),
    "cos": lambda x: cos(x),
    "relu": lambda x: maximum(x, 0.0),
    "sigmoid": lambda x: sigmoid(x),
    "silu": lambda x: x * sigmoid(x),
    "tanh": lambda x: tanh(x),
    # the tanh variant, (1 + tanh(u)) / 2 = sigmoid(2 u)
    "gelu": lambda x: x * sigmoid(fma(x * x, x * GELU_CUBE, x) * GELU_FACTOR),
    "gelu_quick": lambda x: x * sigmoid(x * 1.702),
    "elu": lambda x: select_less(0.0, x, x, exp(x) - 1.0),
    "softplus": lambda x: maximum(x, 0.0) + log(1.0 + exp(neg(absolute(x)))),
    "erf": lambda x: erf(x),
}
UNARY = {name: op_code for op_code, name in enumerate(UNARY_LANES)}
unary_lanes = chosen_lanes(UNARY_LANES.values())


@part("f32x16(i64, f32x16, f32x16)")
def two(code, a, b):
    """Apply the operator `code`, a number in BINARY, to two vectors; returns a vector."""
    if code == ADD:
        return a + b
    if code == SUB:
        return a - b
    if code == MUL:
        return a * b
    return a / b


@parallel("i64, out1, in1", lambda x: (x.size, 1), serial=SERIAL)
def unary(code, y, x, span_start, span_stop):
    """y = f(x), f the function that UNARY numbers `code`; x, y (N,) f32; y may be x."""
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        store_part(y, i, unary_lanes(code, load_part(x, i, num_left)), num_left)


@parallel("i64, out1, in1, in1", lambda y: (y.size, 1), serial=SERIAL)
def binary(code, y, a, b, span_start, span_stop):
    """y = a (+ - * /) b, whichever BINARY numbers `code`; a, b, y (N,) f32; y may be a or b."""
    for i in range(span_start, span_stop, LANES):
        left = span_stop - i
        store_part(y, i, two(code, load_part(a, i, left), load_part(b, i, left)), left)


@parallel("i64, out2, in2, in1", lambda a: a.shape, serial=SERIAL)
def binary_rows(code, y, a, b, row_start, row_stop):
    """y = a (+ - * /) b with b (C,) the same for every row of a and y (N, C), f32; code from BINARY; y may be a."""
    width = b.size
    for row in range(row_start, row_stop):
        for i in range(0, width, LANES):
            left = width - i
            at = row * width + i
            store_part(y, at, two(code, load_part(a, at, left), load_part(b, i, left)), left)


@parallel("i64, out1, in1, in1", lambda y: (y.size, 1), serial=SERIAL)
def binary_scalar(code, y, a, b, span_start, span_stop):
    """y = a (+ - * /) b[0], whichever BINARY numbers `code`; a, y (N,), b (1,), f32; y may be a."""
    b_lanes = splat(b[0])
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        store_part(y, i, two(code, load_part(a, i, num_left), b_lanes), num_left)


@parallel("out1, in1, f32, f32", lambda x: (x.size, 1), serial=SERIAL)
def scale(y, x, by, bias, span_start, span_stop):
    """y = x * by + bias; x, y (N,) f32; y may be x."""
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        store_part(y, i, load_part(x, i, num_left) * by + bias, num_left)


@parallel("out1, in1, f32, f32, f32", lambda x: (x.size, 1), serial=SERIAL)
def bounded(y, x, negative_slope, low, high, span_start, span_stop):
    """y = max(x, negative_slope * x), at least low and at most high; x, y (N,) f32; y may be x."""
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        v = load_part(x, i, num_left)
        v = maximum(maximum(v, v * negative_slope), low)
        store_part(y, i, select_less(high, v, high, v), num_left)


@part("f32x16(boolean, f32x16)")
def sigmoid_argument(use_gelu, x):
    """Return u with silu(x) = x * sigmoid(u), or gelu(x) if use_gelu: x itself, or gelu's polynomial of x."""
    return fma(x * x, x * GELU_CUBE, x) * GELU_FACTOR if use_gelu else x


@part("f32x16(boolean, f32x16, f32x16, f32x16)")
def gate_slope(use_gelu, dy, x, s):
    """Return dy times the slope of silu, or gelu if use_gelu, at x; s is sigmoid(sigmoid_argument(x))."""
    argument_slope = fma(x * x, x * (3.0 * GELU_CUBE), x) * GELU_FACTOR if use_gelu else x
    return dy * s * fma(argument_slope, 1.0 - s, 1.0)


@parallel("out1, in1, in1", lambda x: (x.size, 1), serial=SERIAL)
def silu_back(dx, dy, x, span_start, span_stop):
    """dx = dy * s * (1 + x * (1 - s)), s = sigmoid(x); dx, dy, x (N,) f32; dx may be dy or x."""
    for i in range(span_start, span_stop, LANES):
        left = span_stop - i
        v = load_part(x, i, left)
        store_part(dx, i, gate_slope(False, load_part(dy, i, left), v, sigmoid(v)), left)


@parallel("boolean, out1, in1, in1", lambda y: (y.size, 1), serial=SERIAL)
def gated(use_gelu, y, gate, up, span_start, span_stop):
    """y = silu(gate) * up, or gelu(gate) * up if use_gelu; gate, up, y (N,) f32; y may be gate or up."""
    for i in range(span_start, span_stop, LANES):
        left = span_stop - i
        v = load_part(gate, i, left)
        store_part(y, i, v * sigmoid(sigmoid_argument(use_gelu, v)) * load_part(up, i, left), left)


@parallel("boolean, out1, out1, in1, in1, in1", lambda dy: (dy.size, 1), serial=SERIAL)
def gated_back(use_gelu, dgate, dup, dy, gate, up, span_start, span_stop):
    """Write the gradients of gated; dgate and dup may each be any of dy, gate, up, but not each other.

    dgate, dup, dy, gate, up  (N,)  f32
    """
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        v = load_part(gate, i, num_left)
        w = load_part(up, i, num_left)
        d = load_part(dy, i, num_left)
        s = sigmoid(sigmoid_argument(use_gelu, v))
        store_part(dgate, i, gate_slope(use_gelu, d * w, v, s), num_left)
        store_part(dup, i, d * v * s, num_left)


def emit_mix(builder, z):
    for shift, factor in ((30, MIX_FACTOR_1), (27, MIX_FACTOR_2), (31, 1)):
        by, factor_vector = (ir.Constant(z.type, [n] * z.type.count) for n in (shift, factor))
        z = builder.mul(builder.xor(z, builder.lshr(z, by)), factor_vector)
    return z


@instruction(f32x16, i64, i64)
def uniform(builder, key, index):
    """Return uniform numbers index … index + 15 of the stream of `key` (see counter_rng.stream_key); index is even."""
    wide_type = ir.VectorType(I64, LANES // 2)
    first = spread(builder, builder.add(builder.lshr(index, I64(1)), I64(1)), wide_type)
    counter = builder.add(first, ir.Constant(wide_type, list(range(LANES // 2))))
    golden_vector = ir.Constant(wide_type, [GOLDEN] * (LANES // 2))
    z = builder.add(builder.mul(counter, golden_vector), spread(builder, key, wide_type))
    bits = builder.bitcast(emit_mix(builder, z), BITS)
    bits = builder.lshr(bits, ir.Constant(BITS, [8] * LANES))
    return builder.fmul(
        builder.sitofp(bits, VECTOR), spread(builder, ir.Constant(F32, 2.0**-24), VECTOR)
    )


@instruction(i64, i64)
def mix(builder, z):
    """Scramble a 64-bit integer as counter_rng.mix does."""
    wide_type = ir.VectorType(I64, 2)
    z = spread(builder, builder.add(z, I64(GOLDEN)), wide_type)
    return builder.extract_element(emit_mix(builder, z), I64(0))


@parallel("out1, in1, i64, i64, i64, i64, f32", lambda x: (x.size, 1), serial=SERIAL)
def dropout(y, x, seed, step, stream, first, p, span_start, span_stop):
    """y = x / (1 - p) where uniform(seed, step, stream, first + index) >= p, else 0; y may be x; first is even.

    x, y  (N,)  f32
    """
    key = mix(mix(mix(seed) + step) + stream)
    factor = splat(f32(1.0) / (f32(1.0) - p))
    for i in range(span_start, span_stop, LANES):
        num_left = span_stop - i
        keep_factor = select_less(uniform(key, first + i), p, 0.0, factor)
        store_part(y, i, load_part(x, i, num_left) * keep_factor, num_left)
