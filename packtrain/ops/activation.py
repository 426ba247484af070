"""What a llama block and its training put between matrix products: swiglu, dropout."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32, i64
from packtrain.kernels.counter import uniform_numpy
from packtrain.ops.arrays import flat
from packtrain.tensor import Spec, Tensor, constant, input, op, want


@op(inplace=(0, 1))
def swiglu(gate: Tensor, up: Tensor) -> Spec:
    """y = silu(gate) * up; all (..., F) f32. Shazeer 2020, arXiv 2002.05202."""
    want(
        gate.spec == up.spec and gate.dtype == f32,
        f"gate is {gate.spec} and up is {up.spec}; they must be equal and f32",
    )
    return gate.spec


@swiglu.vjp
def swiglu_vjp(dy, y, gate, up):
    return swiglu_back(dy, gate, up)


@swiglu.kernel("numpy")
def swiglu_numpy(y, gate, up):
    y[...] = gate / (1 + np.exp(-gate)) * up


@swiglu.kernel("cpu")
def swiglu_cpu(y, gate, up):
    kernels.elementwise.swiglu(flat(y), flat(gate), flat(up))


@swiglu.samples
def swiglu_samples():
    for n in (1, 15, 63, 40_000):
        yield swiglu(input("gate", (n,)), input("up", (n,)))


@op(inplace={0: (0, 1), 1: (2, 1, 0)})
def swiglu_back(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Spec, ...]:
    """Gradients of swiglu: dgate = dy * up * silu'(gate), dup = dy * silu(gate)."""
    want(
        dy.spec == gate.spec == up.spec,
        f"dy {dy.spec}, gate {gate.spec} and up {up.spec} must be equal",
    )
    return gate.spec, up.spec


@swiglu_back.kernel("numpy")
def swiglu_back_numpy(out, dy, gate, up):
    s = 1 / (1 + np.exp(-gate))
    both = dy * up * s * (1 + gate * (1 - s)), dy * gate * s
    for d, value in zip(out, both, strict=True):
        d[...] = value


@swiglu_back.kernel("cpu")
def swiglu_back_cpu(out, dy, gate, up):
    dgate, dup = out
    kernels.elementwise.swiglu_back(flat(dgate), flat(dup), flat(dy), flat(gate), flat(up))


@swiglu_back.samples
def swiglu_back_samples():
    for n in (1, 17, 65, 40_000):
        yield from swiglu_back(input("dy", (n,)), input("gate", (n,)), input("up", (n,)))


# ---- dropout -------------------------------------------------------------------------------------------------


@op(inplace=(0,))
def dropout(x: Tensor, key: Tensor, *, p: float, stream: int) -> Spec:
    """Zero elements with probability p and scale the rest by 1 / (1 - p).

    Element i is kept iff uniform(seed, step, stream, i) >= p: recomputation and threads change nothing.

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


@dropout.samples
def dropout_samples():
    for n in (1, 16, 63, 40_000):
        yield dropout(input("x", (n,)), constant("key", np.array([3, n]), i64), p=0.25, stream=7)
