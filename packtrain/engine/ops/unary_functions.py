"""More functions of one value: absolute value and sign, sine and cosine, activations, bounds."""

import math

import numpy as np

from packtrain import kernels
from packtrain.engine.ops import elementwise
from packtrain.engine.ops.arrays import assigned, flatten
from packtrain.engine.ops.costs import elementwise_cost
from packtrain.engine.ops.elementwise import mul, neg, relu, scale, sigmoid, sqr, sub, unary
from packtrain.engine.ops.torch_kernels import filled, filled_by_aten, torch
from packtrain.engine.tensor import Spec, Tensor, constant, op, require

QUICK = 1.702  # gelu_quick(x) = x sigmoid(QUICK x)
# gelu(x) = x sigmoid(FACTOR (x + CUBE x**3))
GELU_CUBE, GELU_FACTOR = (0.044715, (8 / math.pi) ** 0.5)


abs = unary("abs", "y = |x|. Its gradient is 0 at 0. ggml_abs.", np.abs, filled("abs"))
sgn = unary(
    "sgn", "y = -1, 0 or 1, the sign of x. Its gradient is 0. ggml_sgn.", np.sign, filled("sign")
)  # fmt: skip
sin = unary("sin", "y = sin(x), x in radians. ggml_sin.", np.sin, filled("sin"))
cos = unary("cos", "y = cos(x), x in radians. ggml_cos.", np.cos, filled("cos"))
elu = unary(
    "elu", "y = x where x > 0, else e**x - 1. ggml_elu; Clevert et al. 2015, arXiv 1511.07289.",
    lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), filled_by_aten("elu"),
)  # fmt: skip
softplus = unary(
    "softplus", "y = ln(1 + e**x). ggml_softplus.",
    lambda x: np.logaddexp(0, x), filled_by_aten("softplus", 1, 20),
)  # fmt: skip
erf = unary(
    "erf", "y = the error function of x.", np.vectorize(math.erf, otypes=[float]), filled("erf")
)  # fmt: skip
gelu = unary(
    "gelu",
    "y = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2. ggml_gelu; Hendrycks 2016, arXiv 1606.08415.",
    lambda x: x / (1 + np.exp(-GELU_FACTOR * (x + GELU_CUBE * x**3))), filled_by_aten("gelu", approximate="tanh"),
)  # fmt: skip
gelu_quick = unary(
    "gelu_quick", "y = x * sigmoid(1.702 * x). ggml_gelu_quick.",
    lambda x: x / (1 + np.exp(-QUICK * x)), assigned(lambda x: x * (QUICK * x).sigmoid()),
)  # fmt: skip
for _function_of_x in (sin, cos, elu, softplus, erf, gelu, gelu_quick):
    _function_of_x.cost(elementwise_cost())

# their gradients
abs.vjp(lambda dy, y, x: (mul(dy, sgn(x)),))
sgn.vjp(lambda dy, y, x: (scale(dy, by=0.0),))
sin.vjp(lambda dy, y, x: (mul(dy, cos(x)),))
cos.vjp(lambda dy, y, x: (neg(mul(dy, sin(x))),))
elu.vjp(lambda dy, y, x: (mul(dy, scale(sub(y, relu(y)), by=1.0, bias=1.0)),))
softplus.vjp(lambda dy, y, x: (mul(dy, sigmoid(x)),))
erf.vjp(lambda dy, y, x: (mul(dy, scale(elementwise.exp(neg(sqr(x))), by=2 / math.sqrt(math.pi))),))


@gelu.vjp
def gelu_vjp(dy, y, x):
    cubed = scale(sqr(x), by=GELU_CUBE, bias=1.0)
    s = sigmoid(scale(mul(x, cubed), by=GELU_FACTOR))
    inner = mul(x, scale(sqr(x), by=3 * GELU_CUBE * GELU_FACTOR, bias=GELU_FACTOR))
    return (mul(dy, mul(s, scale(mul(inner, scale(s, by=-1.0, bias=1.0)), by=1.0, bias=1.0))),)


@gelu_quick.vjp
def gelu_quick_vjp(dy, y, x):
    s = sigmoid(scale(x, by=QUICK))
    slope_term = mul(scale(x, by=QUICK), scale(s, by=-1.0, bias=1.0))
    return (mul(dy, mul(s, scale(slope_term, by=1.0, bias=1.0))),)


def gelu_erf(x: Tensor) -> Tensor:
    """y = x * (1 + erf(x / sqrt(2))) / 2, exact. ggml_gelu_erf."""
    return mul(x, scale(erf(scale(x, by=math.sqrt(0.5))), by=0.5, bias=0.5))


# ---- with bounds ---------------------------------------------------------------------------------------------


@op(inplace=(0,))
def clamp(x: Tensor, *, low: float = -math.inf, high: float = math.inf) -> Spec:
    """Bound x: y = x, but at least `low` and at most `high`; beyond them the gradient is 0. ggml_clamp."""
    require(low <= high, f"low is {low} and high is {high}; low must not be above high")
    return elementwise.f32_only(x)


@clamp.vjp
def clamp_vjp(dy, y, x, *, low, high):
    for bound, sign in ((low, 1.0), (high, -1.0)):
        if math.isfinite(bound):  # 1 - step(sign * (bound - x))
            is_outside = elementwise.step(scale(x, by=-sign, bias=sign * bound))
            dy = mul(dy, scale(is_outside, by=-1.0, bias=1.0))
    return (dy,)


@clamp.kernel("numpy")
def clamp_numpy(y, x, *, low, high):
    np.clip(x, low, high, out=y)


@clamp.kernel("cpu")
def clamp_cpu(y, x, *, low, high):
    kernels.elementwise.bounded(flatten(y), flatten(x), 1.0, low, high)


@clamp.kernel("torch", strided=True)
def clamp_torch(y, x, *, low, high):
    torch.clamp(x, low, high, out=y)


@clamp.samples
def clamp_samples():
    x = constant("x", _values_off_bounds(40_000))
    yield clamp(x, low=-0.5, high=0.7)
    yield clamp(x, low=0.1)
    yield clamp(constant("x", _values_off_bounds(65).reshape(5, 13)), high=0.2)


def _values_off_bounds(n):
    """Return n sample values, none so near to clamp's bounds that finite differences cross one."""
    return -1.005 + 0.01 * ((np.arange(n) * 37) % 211)


@op(inplace=(0,))
def leaky_relu(x: Tensor, *, slope: float) -> Spec:
    """y = x where x > 0, else slope * x. ggml_leaky_relu."""
    require(0 <= slope <= 1, f"slope is {slope}; it must be from 0 to 1")
    return elementwise.f32_only(x)


leaky_relu.vjp(
    lambda dy, y, x, *, slope: (mul(dy, scale(elementwise.step(x), by=1.0 - slope, bias=slope)),)
)


leaky_relu.kernel("numpy")(
    assigned(lambda x, *, slope: np.where(x > 0, x, x * x.dtype.type(slope)))
)


@leaky_relu.kernel("cpu")
def leaky_relu_cpu(y, x, *, slope):
    kernels.elementwise.bounded(flatten(y), flatten(x), slope, -math.inf, math.inf)


@leaky_relu.kernel("torch", strided=True)
def leaky_relu_torch(y, x, *, slope):
    torch.ops.aten.leaky_relu.out(x, slope, out=y)


@leaky_relu.samples
def leaky_relu_samples():
    for n in (1, 17, 40_000):
        yield leaky_relu(constant("x", _values_off_bounds(n)), slope=0.1)
