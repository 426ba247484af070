"""Element-wise ops: arithmetic with broadcasting, functions of one value, and conversion to another element type."""

from collections.abc import Callable

import numpy as np

from packtrain import kernels
from packtrain.dtypes import BLOCK_TYPES, READABLE, TRAINABLE, Dtype, bf16, dtype_of, f16, f32, i32
from packtrain.engine.ops import arrays, torch_kernels
from packtrain.engine.ops.arrays import flatten, floats, rows, run_replayable
from packtrain.engine.ops.costs import elementwise_cost
from packtrain.engine.ops.reduce import sum_like
from packtrain.engine.ops.torch_kernels import filled, filled_by_aten, real, torch
from packtrain.engine.tensor import Call, Op, Spec, Tensor, constant, input, op, require
from packtrain.kernels.quant import quantized_arrays

FLOATS = (f32, f16, bf16)
MIN_PARALLEL_VALUES = 1 << 15  # below this a NumPy ufunc is faster than starting threads


def _broadcast_f32(a: Tensor, b: Tensor) -> Spec:
    require(a.dtype == f32 and b.dtype == f32, f"a is {a.spec} and b is {b.spec}; both must be f32")
    return _broadcast_spec(a, b)


def _broadcast_spec(a: Tensor, b: Tensor) -> Spec:
    try:
        shape = np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        require(False, f"a {a.spec} and b {b.spec} do not broadcast to one shape")
    return Spec(shape)


def f32_only(x: Tensor) -> Spec:
    require(x.spec.dtype == f32, "x is {}; it must be f32", x)
    return x.spec


# ---- two inputs ----------------------------------------------------------------------------------------------


@op(inplace=(0, 1))
def add(a: Tensor, b: Tensor) -> Spec:
    """y = a + b in f32, broadcast as in NumPy; a and b of any readable type. ggml_add, ggml_add1, ggml_add_cast."""
    unreadable = [t for t in (a, b) if t.dtype not in READABLE]
    fact = f"a is {a.spec} and b is {b.spec}; both must be of types that can be read"
    require(not unreadable, fact)
    return _broadcast_spec(a, b)


@add.vjp
def add_vjp(dy, y, a, b):
    return tuple(sum_like(dy, t) if t.dtype in TRAINABLE else None for t in (a, b))


add.workspace("cpu")(lambda a, b: tuple(Spec(t.shape) for t in (a, b) if t.dtype != f32))


@add.kernel("numpy")
def add_numpy(y, a, b):
    np.add(floats(a), floats(b), out=y)


@add.kernel("cpu", strided=lambda index, t: t.dtype == f32)
def add_cpu(y, a, b, *, work=()):
    workspaces = iter(work)
    a, b = _unpack_to_f32(a, workspaces), _unpack_to_f32(b, workspaces)
    call = _binary_cpu("add", np.add)(y, a, b)
    return None if work else call  # values must be unpacked again in each run


@add.kernel("torch", strided=lambda index, t: t.dtype == f32)
def add_torch(y, a, b):
    torch.add(real(a), real(b), out=y)


def _unpack_to_f32(x, workspaces):
    """Return x, or if x is not f32, its values unpacked into the next array of the iterator `workspaces`."""
    if x.dtype == np.float32:
        return x
    workspace = next(workspaces)
    quantized_arrays.unpack_into(workspace, x)
    return workspace


@op(inplace=(0, 1))
def sub(a: Tensor, b: Tensor) -> Spec:
    """y = a - b, broadcast as in NumPy. All f32. ggml_sub."""
    return _broadcast_f32(a, b)


@sub.vjp
def sub_vjp(dy, y, a, b):
    return sum_like(dy, a), sum_like(neg(dy), b)


@op(inplace=(0, 1))
def mul(a: Tensor, b: Tensor) -> Spec:
    """y = a * b, broadcast as in NumPy. All f32. ggml_mul."""
    return _broadcast_f32(a, b)


mul.vjp(lambda dy, y, a, b: (sum_like(mul(dy, b), a), sum_like(mul(dy, a), b)))


@op(inplace=(0, 1))
def div(a: Tensor, b: Tensor) -> Spec:
    """y = a / b, broadcast as in NumPy. All f32. ggml_div."""
    return _broadcast_f32(a, b)


@div.vjp
def div_vjp(dy, y, a, b):
    da = div(dy, b)
    return sum_like(da, a), sum_like(neg(mul(da, y)), b)


def _binary_cpu(name, ufunc):
    def run_binary(y, a, b):
        if y.size >= MIN_PARALLEL_VALUES and a.flags.c_contiguous and b.flags.c_contiguous:
            elementwise = kernels.elementwise
            operation, flat_arrays = elementwise.BINARY[name], (*map(flatten, (y, a, b)),)
            if a.shape == b.shape:
                return run_replayable(elementwise.binary, operation, *flat_arrays)
            if a.shape == y.shape and b.size == 1:
                return run_replayable(elementwise.binary_scalar, operation, *flat_arrays)
            if a.shape == y.shape and b.shape == a.shape[-1:]:
                return run_replayable(elementwise.binary_rows, operation, rows(y), rows(a), b)
        ufunc(a, b, out=y)
        return None

    return run_binary


def _binary_samples(binary):
    def samples():
        for n in (1, 15, 256, 40_000):
            b = constant("b", 0.5 + np.arange(n) % 7)
            yield binary(input("a", (n,)), b)
        yield binary(input("a", (3, 1, 5)), constant("b", 1.0 + np.arange(20).reshape(4, 5)))
        yield binary(input("a", (300, 128)), constant("b", np.full(128, 1.5)))
        yield binary(input("a", (300, 128)), constant("b", np.array(-2.0)))

    return samples


for _binary, _ufunc in ((sub, np.subtract), (mul, np.multiply), (div, np.divide)):
    _binary.kernel("numpy")(arrays.assigned(_ufunc))
    _binary.kernel("cpu", strided=True)(_binary_cpu(_binary.name, _ufunc))
    _binary.kernel("torch", strided=True)(filled(_binary.name))
for _binary in (add, sub, mul, div):
    _binary.samples(_binary_samples(_binary))


# ---- one input -----------------------------------------------------------------------------------------------


@op(inplace=(0,))
def scale(x: Tensor, *, by: float, bias: float = 0.0) -> Spec:
    """y = by * x + bias. ggml_scale, ggml_scale_bias."""
    return f32_only(x)


scale.vjp(lambda dy, y, x, *, by, bias: (scale(dy, by=by),))


@scale.kernel("numpy")
def scale_numpy(y, x, *, by, bias):
    np.add(x * x.dtype.type(by), x.dtype.type(bias), out=y)


scale.kernel("cpu")(arrays.compiled("elementwise.scale", flatten, flatten, "by", "bias"))


@scale.kernel("torch", strided=True)
def scale_torch(y, x, *, by, bias):
    torch.mul(x, by, out=y)
    y.add_(bias)


@scale.samples
def scale_samples():
    for n in (1, 17, 63, 40_000):
        yield scale(input("x", (n,)), by=-1.5, bias=0.25)


def unary(
    name: str, docstring: str, specification: Callable[[np.ndarray], np.ndarray], torch_kernel: Callable[..., None],
    positive_only: bool = False,
) -> Op[[Tensor], Tensor]:  # fmt: skip
    """Declare and return an element-wise op that may overwrite its input; `positive_only`: its samples are above 0."""

    def shape_rule(x: Tensor) -> Spec:
        return f32_only(x)

    def run_cpu(y, x):
        operation = kernels.elementwise.UNARY[name]
        return run_replayable(kernels.elementwise.unary, operation, flatten(y), flatten(x))

    def samples():
        for n in (1, 16, 65, 40_000):
            yield unary_op(constant("x", 0.3 + 0.01 * ((np.arange(n) * 37) % 211)))
        if not positive_only:
            yield unary_op(input("x", (5, 13)))

    shape_rule.__name__, shape_rule.__doc__ = name, docstring
    unary_op = op(inplace=(0,))(shape_rule)
    unary_op.kernel("numpy")(arrays.assigned(specification))
    unary_op.kernel("cpu")(run_cpu)
    unary_op.kernel("torch", strided=True)(torch_kernel)
    unary_op.samples(samples)
    return unary_op


neg = unary("neg", "y = -x. ggml_neg.", np.negative, filled("neg"))
sqr = unary("sqr", "y = x**2. ggml_sqr.", np.square, filled("square"))
sqrt = unary("sqrt", "y = sqrt(x). ggml_sqrt.", np.sqrt, filled("sqrt"), positive_only=True)
log = unary("log", "y = ln(x). ggml_log.", np.log, filled("log"), positive_only=True)
exp = unary("exp", "y = e**x. ggml_exp.", np.exp, filled("exp"))
step = unary(
    "step", "y = 1 where x > 0, else 0. Its gradient is 0. ggml_step.",
    lambda x: (x > 0).astype(x.dtype), filled("gt", 0),
)  # fmt: skip
relu = unary("relu", "y = max(x, 0). ggml_relu.", lambda x: np.maximum(x, 0), filled("clamp", 0))
sigmoid = unary(
    "sigmoid", "y = 1 / (1 + e**-x). ggml_sigmoid.", lambda x: 1 / (1 + np.exp(-x)), filled("sigmoid")
)  # fmt: skip
tanh = unary("tanh", "y = tanh(x). ggml_tanh.", np.tanh, filled("tanh"))
silu = unary(
    "silu", "y = x * sigmoid(x). ggml_silu.", lambda x: x / (1 + np.exp(-x)), filled_by_aten("silu")
)  # fmt: skip

# their gradients
neg.vjp(lambda dy, y, x: (neg(dy),))
sqr.vjp(lambda dy, y, x: (scale(mul(dy, x), by=2.0),))
sqrt.vjp(lambda dy, y, x: (scale(div(dy, y), by=0.5),))
log.vjp(lambda dy, y, x: (div(dy, x),))
exp.vjp(lambda dy, y, x: (mul(dy, y),))
step.vjp(lambda dy, y, x: (scale(dy, by=0.0),))
relu.vjp(lambda dy, y, x: (mul(dy, step(y)),))
sigmoid.vjp(lambda dy, y, x: (mul(dy, mul(y, scale(y, by=-1.0, bias=1.0))),))
tanh.vjp(lambda dy, y, x: (mul(dy, scale(sqr(y), by=-1.0, bias=1.0)),))


@silu.vjp
def silu_vjp(dy, y, x):
    return (silu_back(dy, x),)


@op(inplace=(0,))
def silu_back(dy: Tensor, x: Tensor) -> Spec:
    """Gradient of silu: dx = dy * s * (1 + x * (1 - s)), s = sigmoid(x). ggml_silu_back."""
    return x.spec.require(dy=dy)


@silu_back.kernel("numpy")
def silu_back_numpy(dx, dy, x):
    s = 1 / (1 + np.exp(-x))
    dx[...] = dy * s * (1 + x * (1 - s))


silu_back.kernel("cpu")(arrays.compiled("elementwise.silu_back", flatten, flatten, flatten))


@silu_back.kernel("torch")
def silu_back_torch(dx, dy, x):
    torch.ops.aten.silu_backward.grad_input(dy, x, grad_input=dx)


for _function_of_x in (exp, log, tanh, sigmoid, silu, silu_back):
    _function_of_x.cost(elementwise_cost())
silu_back.samples(arrays.gradient_samples(silu, silu_back))


@op()
def cast(x: Tensor, *, dtype: Dtype = f32) -> Spec:
    """Convert x, of any readable type or i32, to f32, f16 or bf16, rounded to nearest even. ggml_cpy, ggml_cast. The
    gradient is f32 and passes unchanged. f16 has none."""
    require(x.dtype in (*READABLE, i32), f"x is {x.spec}, a type that cannot be read")
    require(dtype in FLOATS, f"dtype is {dtype}; it must be one of {', '.join(map(str, FLOATS))}")
    return Spec(x.shape, dtype)


cast.vjp(lambda dy, y, x, *, dtype: (dy if x.dtype in TRAINABLE else None,))


@cast.kernel("numpy")
def cast_numpy(y, x, *, dtype):
    if dtype == bf16:
        x = _as_float_array(x).astype(np.float32)
        bf16_bits = np.where(np.isnan(x), 0x7FC0, arrays.round_to_bf16(x).view(np.uint32) >> 16)
        y[...] = bf16_bits.astype(np.uint16).view(bf16.numpy)
    else:
        with np.errstate(over="ignore"):  # beyond f16 is infinite
            y[...] = _as_float_array(x)


def _as_float_array(x):
    return x.astype(np.float32) if x.dtype == np.int32 else floats(x)


@cast.kernel("cpu")
def cast_cpu(y, x, *, dtype):
    if (dtype_of(y), dtype_of(x)) == (bf16, f32):
        kernels.cast.narrow(flatten(y.view(np.uint16)), flatten(x))
    elif (dtype_of(y), dtype_of(x)) == (f32, bf16):
        kernels.cast.widen(flatten(y), flatten(x.view(np.uint16)))
    else:
        cast_numpy(y, x, dtype=dtype)


@cast.kernel("torch")
def cast_torch(y, x, *, dtype):
    if isinstance(x, torch_kernels.BlockArray) and dtype == f32:
        torch_kernels.unpack(y, x)
    else:
        y.copy_(real(x))


@cast.samples
def cast_samples():
    for dtype in FLOATS:
        yield cast(input("x", (3, 256)), dtype=dtype)
    yield cast(constant("ids", [[3, -1], [1 << 24, 0]], i32))
    upper = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32).view(np.uint16)
    yield cast(constant("w", np.ascontiguousarray(upper[:, 1::2]).view(bf16.numpy), bf16))
    block_bytes = np.arange(4 * 2 * 34, dtype=np.uint8).reshape(4, 2, 34)
    block_bytes[..., :2] = np.float16([0.01]).view(np.uint8)  # scales
    q8_0 = BLOCK_TYPES["q8_0"]
    yield cast(constant("w", block_bytes.view(q8_0.numpy)[..., 0], q8_0))


def rereads_bf16_weight(call: Call | None) -> bool:
    """Whether a call only converts stored bf16 values back, so that its result need not be saved."""
    return call is not None and call.op is cast and call.reads[0].dtype == bf16


def add_cast(a: Tensor, b: Tensor) -> Tensor:
    """Add in f32: y = a + b, a of any readable type. ggml_add_cast."""
    return add(a, b)
