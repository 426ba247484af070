"""Gated activations and dropout."""

import numpy as np

from packtrain import gpu, kernels
from packtrain.dtypes import f32, i64
from packtrain.kernels.counter import uniform_numpy
from packtrain.ops.arrays import again, flat
from packtrain.ops.costs import elementwise
from packtrain.ops.torch import CHUNK, key_of, spans, torch, uniform
from packtrain.tensor import Spec, Tensor, constant, input, op, want

GELU_CUBE, GELU_FACTOR = 0.044715, (8 / np.pi) ** 0.5  # gelu(x) = x sigmoid(FACTOR (x + CUBE x**3))


def _same(*given: Tensor) -> Spec:
    listed = ", ".join(str(t.spec) for t in given)
    want(len({t.spec for t in given}) == 1 and given[0].dtype == f32, f"{listed} must be equal f32")
    return given[0].spec


def _silu(gate):
    return 1 / (1 + np.exp(-gate)), gate


def _gelu(gate):
    """The sigmoid in gelu's tanh form, and the gate times the slope of its argument."""
    inner = GELU_FACTOR * (gate + GELU_CUBE * gate**3)
    return 1 / (1 + np.exp(-inner)), GELU_FACTOR * (gate + 3 * GELU_CUBE * gate**3)


def _gated_back(out, dy, gate, up, sigmoid):
    s, by = sigmoid(gate)
    both = dy * up * s * (1 + by * (1 - s)), dy * gate * s
    for d, value in zip(out, both, strict=True):
        d[...] = value


def _samples(gated, *names):
    def samples():
        for n in (1, 15, 65, 40_000):
            result = gated(*(input(name, (n,)) for name in names))
            yield result if isinstance(result, Tensor) else result[0]

    return samples


@op(inplace=(0, 1))
def swiglu(gate: Tensor, up: Tensor) -> Spec:
    """y = silu(gate) * up; all (..., F) f32. Shazeer 2020, arXiv 2002.05202; ggml_swiglu_split."""
    return _same(gate, up)


@swiglu.vjp
def swiglu_vjp(dy, y, gate, up):
    return swiglu_back(dy, gate, up)


@swiglu.kernel("numpy")
def swiglu_numpy(y, gate, up):
    y[...] = gate * _silu(gate)[0] * up


@swiglu.kernel("cpu")
def swiglu_cpu(y, gate, up):
    return again(kernels.elementwise.gated, False, flat(y), flat(gate), flat(up))


@swiglu.kernel("torch")
def swiglu_torch(y, gate, up):
    torch.mul(torch.nn.functional.silu(gate), up, out=y)


@op(inplace={0: (0, 1), 1: (2, 1, 0)})
def swiglu_back(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Spec, ...]:
    """Gradients of swiglu: dgate = dy * up * silu'(gate), dup = dy * silu(gate)."""
    return _same(dy, gate, up), up.spec


@swiglu_back.kernel("numpy")
def swiglu_back_numpy(out, dy, gate, up):
    _gated_back(out, dy, gate, up, _silu)


@swiglu_back.kernel("cpu")
def swiglu_back_cpu(out, dy, gate, up):
    kernels.elementwise.gated_back(False, *map(flat, (*out, dy, gate, up)))


@swiglu_back.kernel("torch")
def swiglu_back_torch(out, dy, gate, up):
    dup = dy * torch.nn.functional.silu(gate)
    torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=out[0])
    out[1].copy_(dup)


swiglu.samples(_samples(swiglu, "gate", "up"))
swiglu_back.samples(_samples(swiglu_back, "dy", "gate", "up"))
swiglu.cost(elementwise())
swiglu_back.cost(elementwise(1.3))


@op(inplace=(0, 1))
def geglu(gate: Tensor, up: Tensor) -> Spec:
    """y = gelu(gate) * up, gelu in its tanh form; all (..., F) f32. ggml_geglu_split; arXiv 2002.05202."""
    return _same(gate, up)


@geglu.vjp
def geglu_vjp(dy, y, gate, up):
    return geglu_back(dy, gate, up)


@geglu.kernel("numpy")
def geglu_numpy(y, gate, up):
    y[...] = gate * _gelu(gate)[0] * up


@geglu.kernel("cpu")
def geglu_cpu(y, gate, up):
    kernels.elementwise.gated(True, flat(y), flat(gate), flat(up))


@geglu.kernel("torch")
def geglu_torch(y, gate, up):
    torch.mul(torch.nn.functional.gelu(gate, approximate="tanh"), up, out=y)


@op(inplace={0: (0, 1), 1: (2, 1, 0)})
def geglu_back(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Spec, ...]:
    """Gradients of geglu: dgate = dy * up * gelu'(gate), dup = dy * gelu(gate)."""
    return _same(dy, gate, up), up.spec


@geglu_back.kernel("numpy")
def geglu_back_numpy(out, dy, gate, up):
    _gated_back(out, dy, gate, up, _gelu)


@geglu_back.kernel("cpu")
def geglu_back_cpu(out, dy, gate, up):
    kernels.elementwise.gated_back(True, *map(flat, (*out, dy, gate, up)))


@geglu_back.kernel("torch")
def geglu_back_torch(out, dy, gate, up):
    dup = dy * torch.nn.functional.gelu(gate, approximate="tanh")
    made = torch.ops.aten.gelu_backward(dy * up, gate, approximate="tanh")
    out[0].copy_(made)
    out[1].copy_(dup)


for _gated in (swiglu, swiglu_back, geglu, geglu_back):
    _gated.kernel("cuda")(gpu.late("elementwise", _gated.name))
geglu.samples(_samples(geglu, "gate", "up"))
geglu_back.samples(_samples(geglu_back, "dy", "gate", "up"))
geglu.cost(elementwise())
geglu_back.cost(elementwise(1.3))


# ---- dropout -------------------------------------------------------------------------------------------------


@op(inplace=(0,))
def dropout(x: Tensor, key: Tensor, *, p: float, stream: int) -> Spec:
    """Zero elements with probability p and scale the rest by 1 / (1 - p).

    Element i is kept iff uniform(seed, step, stream, i) >= p: independent of recomputation and threads.

        x    (...)  f32
        key  (2,)   i64   seed and step
    """
    want(key.spec == Spec((2,), i64), f"key is {key.spec}; it must be i64[2]: seed and step")
    want(x.dtype == f32, f"x is {x.spec}; it must be f32")
    want(0 <= p < 1, f"p is {p}; it must be at least 0 and below 1")
    return x.spec


@dropout.vjp
def dropout_vjp(dy, y, x, key, *, p, stream):
    return dropout(dy, key, p=p, stream=stream), None


@dropout.kernel("numpy")
def dropout_numpy(y, x, key, *, p, stream):
    uniform = uniform_numpy(int(key[0]), int(key[1]), stream, x.size).reshape(x.shape)
    y[...] = np.where(uniform >= np.float32(p), x * x.dtype.type(1 / (1 - p)), 0)


@dropout.kernel("cpu")
def dropout_cpu(y, x, key, *, p, stream):
    kernels.elementwise.dropout(flat(y), flat(x), int(key[0]), int(key[1]), stream, p)


@dropout.kernel("torch")
def dropout_torch(y, x, key, *, p, stream):
    mixed, y, x = key_of(key, stream), y.view(-1), x.view(-1)
    for start, end in spans(len(x), CHUNK, x):
        left_out = uniform(mixed, start, end) < float(np.float32(p))
        torch.mul(x[start:end], 1 / (1 - p), out=y[start:end])
        y[start:end].masked_fill_(left_out, 0)


dropout.cost(elementwise())  # a random number takes as long as an exp


@dropout.samples
def dropout_samples():
    for n in (1, 16, 63, 40_000):
        yield dropout(input("x", (n,)), constant("key", np.array([3, n]), i64), p=0.25, stream=7)
