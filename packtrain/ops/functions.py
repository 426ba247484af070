"""More functions of one value: absolute value and sign, sine and cosine, activations, bounds."""

import math

import numpy as np

from packtrain import kernels
from packtrain.ops.arrays import flat
from packtrain.ops.costs import elementwise
from packtrain.ops.elementwise import (
    exp,
    f32_only,
    mul,
    neg,
    relu,
    scale,
    sigmoid,
    sqr,
    step,
    sub,
    unary_cpu,
    unary_numpy,
)
from packtrain.ops.torch import copied, filled, filled_by_aten, torch
from packtrain.tensor import Spec, Tensor, constant, input, op, want

QUICK = 1.702  # gelu_quick(x) = x sigmoid(QUICK x)
# gelu(x) = x sigmoid(FACTOR (x + CUBE x**3))
GELU_CUBE, GELU_FACTOR = (0.044715, (8 / math.pi) ** 0.5)


@op(inplace=(0,))
def abs(x: Tensor) -> Spec:
    """y = |x|. Its gradient is 0 at 0. ggml_abs."""
    return f32_only(x)


@op(inplace=(0,))
def sgn(x: Tensor) -> Spec:
    """y = -1, 0 or 1, the sign of x. Its gradient is 0. ggml_sgn."""
    return f32_only(x)


@op(inplace=(0,))
def sin(x: Tensor) -> Spec:
    """y = sin(x), x in radians. ggml_sin."""
    return f32_only(x)


@op(inplace=(0,))
def cos(x: Tensor) -> Spec:
    """y = cos(x), x in radians. ggml_cos."""
    return f32_only(x)


@op(inplace=(0,))
def elu(x: Tensor) -> Spec:
    """y = x where x > 0, else e**x - 1. ggml_elu; Clevert et al. 2015, arXiv 1511.07289."""
    return f32_only(x)


@op(inplace=(0,))
def softplus(x: Tensor) -> Spec:
    """y = ln(1 + e**x). ggml_softplus."""
    return f32_only(x)


@op(inplace=(0,))
def erf(x: Tensor) -> Spec:
    """y = the error function of x."""
    return f32_only(x)


@op(inplace=(0,))
def gelu(x: Tensor) -> Spec:
    """y = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2. ggml_gelu; Hendrycks 2016, arXiv 1606.08415."""
    return f32_only(x)


@gelu.vjp
def gelu_vjp(dy, y, x):
    cubed = scale(sqr(x), by=GELU_CUBE, bias=1.0)
    s = sigmoid(scale(mul(x, cubed), by=GELU_FACTOR))
    inner = mul(x, scale(sqr(x), by=3 * GELU_CUBE * GELU_FACTOR, bias=GELU_FACTOR))
    return (mul(dy, mul(s, scale(mul(inner, scale(s, by=-1.0, bias=1.0)), by=1.0, bias=1.0))),)


@op(inplace=(0,))
def gelu_quick(x: Tensor) -> Spec:
    """y = x * sigmoid(1.702 * x). ggml_gelu_quick."""
    return f32_only(x)


@gelu_quick.vjp
def gelu_quick_vjp(dy, y, x):
    s = sigmoid(scale(x, by=QUICK))
    rest = mul(scale(x, by=QUICK), scale(s, by=-1.0, bias=1.0))
    return (mul(dy, mul(s, scale(rest, by=1.0, bias=1.0))),)


def gelu_erf(x: Tensor) -> Tensor:
    """y = x * (1 + erf(x / sqrt(2))) / 2, exact. ggml_gelu_erf."""
    return mul(x, scale(erf(scale(x, by=math.sqrt(0.5))), by=0.5, bias=0.5))


def _unary_samples(unary):
    def samples():
        for n in (1, 16, 65, 40_000):
            yield unary(constant("x", 0.3 + 0.01 * ((np.arange(n) * 37) % 211)))
        yield unary(input("x", (5, 13)))

    return samples


def _gelu_numpy(x):
    return x / (1 + np.exp(-GELU_FACTOR * (x + GELU_CUBE * x**3)))


for _unary, _function in (
    (abs, np.abs), (sgn, np.sign), (sin, np.sin), (cos, np.cos), (gelu, _gelu_numpy),
    (elu, lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0)))), (softplus, lambda x: np.logaddexp(0, x)),
    (gelu_quick, lambda x: x / (1 + np.exp(-QUICK * x))), (erf, np.vectorize(math.erf, otypes=[float])),
):  # fmt: skip
    _unary.kernel("numpy")(unary_numpy(_function))
    _unary.kernel("cpu")(unary_cpu(_unary.name))
    _unary.samples(_unary_samples(_unary))
    if _unary not in (abs, sgn):
        _unary.cost(elementwise())


for _unary, _run in (
    (abs, filled("abs")), (sgn, filled("sign")), (sin, filled("sin")), (cos, filled("cos")), (erf, filled("erf")),
    (gelu, filled_by_aten("gelu", approximate="tanh")), (elu, filled_by_aten("elu")),
    (softplus, filled_by_aten("softplus", 1, 20)), (gelu_quick, copied(lambda x: x * (QUICK * x).sigmoid())),
):  # fmt: skip
    _unary.kernel("torch", strided=True)(_run)


# their gradients
abs.vjp(lambda dy, y, x: (mul(dy, sgn(x)),))
sgn.vjp(lambda dy, y, x: (scale(dy, by=0.0),))
sin.vjp(lambda dy, y, x: (mul(dy, cos(x)),))
cos.vjp(lambda dy, y, x: (neg(mul(dy, sin(x))),))
elu.vjp(lambda dy, y, x: (mul(dy, scale(sub(y, relu(y)), by=1.0, bias=1.0)),))
softplus.vjp(lambda dy, y, x: (mul(dy, sigmoid(x)),))
erf.vjp(lambda dy, y, x: (mul(dy, scale(exp(neg(sqr(x))), by=2 / math.sqrt(math.pi))),))


# ---- with bounds ---------------------------------------------------------------------------------------------


@op(inplace=(0,))
def clamp(x: Tensor, *, low: float = -math.inf, high: float = math.inf) -> Spec:
    """y = x, but at least `low` and at most `high`; beyond them the gradient is 0. ggml_clamp."""
    want(low <= high, f"low is {low} and high is {high}; low must not be above high")
    return f32_only(x)


@clamp.vjp
def clamp_vjp(dy, y, x, *, low, high):
    for beyond, sign in ((low, 1.0), (high, -1.0)):
        if math.isfinite(beyond):  # 1 - step(sign * (bound - x))
            outside = step(scale(x, by=-sign, bias=sign * beyond))
            dy = mul(dy, scale(outside, by=-1.0, bias=1.0))
    return (dy,)


@clamp.kernel("numpy")
def clamp_numpy(y, x, *, low, high):
    np.clip(x, low, high, out=y)


@clamp.kernel("cpu")
def clamp_cpu(y, x, *, low, high):
    kernels.elementwise.bounded(flat(y), flat(x), 1.0, low, high)


@clamp.kernel("torch", strided=True)
def clamp_torch(y, x, *, low, high):
    torch.clamp(x, low, high, out=y)


@clamp.samples
def clamp_samples():
    x = constant("x", _off_bounds(40_000))
    yield clamp(x, low=-0.5, high=0.7)
    yield clamp(x, low=0.1)
    yield clamp(constant("x", _off_bounds(65).reshape(5, 13)), high=0.2)


def _off_bounds(n):
    """Values that stay on one side of a bound when a gradient is measured."""
    return -1.005 + 0.01 * ((np.arange(n) * 37) % 211)


@op(inplace=(0,))
def leaky_relu(x: Tensor, *, slope: float) -> Spec:
    """y = x where x > 0, else slope * x. ggml_leaky_relu."""
    want(0 <= slope <= 1, f"slope is {slope}; it must be from 0 to 1")
    return f32_only(x)


@leaky_relu.vjp
def leaky_relu_vjp(dy, y, x, *, slope):
    return (mul(dy, scale(step(x), by=1.0 - slope, bias=slope)),)


@leaky_relu.kernel("numpy")
def leaky_relu_numpy(y, x, *, slope):
    y[...] = np.where(x > 0, x, x * x.dtype.type(slope))


@leaky_relu.kernel("cpu")
def leaky_relu_cpu(y, x, *, slope):
    kernels.elementwise.bounded(flat(y), flat(x), slope, -math.inf, math.inf)


@leaky_relu.kernel("torch", strided=True)
def leaky_relu_torch(y, x, *, slope):
    torch.ops.aten.leaky_relu.out(x, slope, out=y)


@leaky_relu.samples
def leaky_relu_samples():
    for n in (1, 17, 40_000):
        yield leaky_relu(constant("x", _off_bounds(n)), slope=0.1)
