"""Gated activations and dropout."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import i64
from packtrain.engine.backends import triton
from packtrain.engine.ops.arrays import assigned, flatten, gradient_samples, run_replayable
from packtrain.engine.ops.costs import elementwise_cost
from packtrain.engine.ops.elementwise import silu_back_torch
from packtrain.engine.ops.torch_kernels import CHUNK, chunk_bounds, key_of, torch, uniform
from packtrain.engine.ops.unary_functions import GELU_CUBE, GELU_FACTOR
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require
from packtrain.kernels.rowwise.counter_rng import uniform_numpy


def _check_same_spec(*tensors: Tensor) -> Spec:
    spec_list = ", ".join(str(t.spec) for t in tensors)
    require({t.spec for t in tensors} == {Spec(tensors[0].shape)}, f"{spec_list} must be equal f32")
    return tensors[0].spec


def _silu_terms(gate):
    return 1 / (1 + np.exp(-gate)), gate


def _gelu_terms(gate):
    """Return the sigmoid in gelu's tanh form, and the gate times the slope of the sigmoid's argument."""
    tanh_argument = GELU_FACTOR * (gate + GELU_CUBE * gate**3)
    return 1 / (1 + np.exp(-tanh_argument)), GELU_FACTOR * (gate + 3 * GELU_CUBE * gate**3)


@op(inplace=(0, 1))
def swiglu(gate: Tensor, up: Tensor) -> Spec:
    """y = silu(gate) * up; all (..., F) f32. Shazeer 2020, arXiv 2002.05202; ggml_swiglu_split."""
    return _check_same_spec(gate, up)


@op(inplace={0: (0, 1), 1: (2, 1, 0)})
def swiglu_back(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Spec, ...]:
    """Gradients of swiglu: dgate = dy * up * silu'(gate), dup = dy * silu(gate)."""
    return _check_same_spec(dy, gate, up), up.spec


@op(inplace=(0, 1))
def geglu(gate: Tensor, up: Tensor) -> Spec:
    """y = gelu(gate) * up, gelu in its tanh form; all (..., F) f32. ggml_geglu_split; arXiv 2002.05202."""
    return _check_same_spec(gate, up)


@op(inplace={0: (0, 1), 1: (2, 1, 0)})
def geglu_back(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Spec, ...]:
    """Gradients of geglu: dgate = dy * up * gelu'(gate), dup = dy * gelu(gate)."""
    return _check_same_spec(dy, gate, up), up.spec


def _declare_gated(gated, gated_back, gelu, numpy_terms, torch_activation, torch_back):
    """Declare kernels and samples of a gated activation and its gradient; `numpy_terms`: _silu_terms or _gelu_terms."""

    def run_cpu(*args):
        return run_replayable(kernels.elementwise.gated, gelu, *map(flatten, args))

    def back_cpu(out, *inputs):
        return run_replayable(kernels.elementwise.gated_back, gelu, *map(flatten, (*out, *inputs)))

    def back_numpy(out, dy, gate, up):
        s, gate_slope = numpy_terms(gate)
        grads = dy * up * s * (1 + gate_slope * (1 - s)), dy * gate * s
        for d, grad in zip(out, grads, strict=True):
            d[...] = grad

    def run_torch(y, gate, up):
        torch.mul(torch_activation(gate), up, out=y)

    def back_torch(out, dy, gate, up):
        dup = dy * torch_activation(gate)
        torch_back(out[0], dy * up, gate)
        out[1].copy_(dup)

    gated.vjp(lambda dy, y, gate, up: gated_back(dy, gate, up))
    gated.kernel("numpy")(assigned(lambda gate, up: gate * numpy_terms(gate)[0] * up))
    gated_back.kernel("numpy")(back_numpy)
    kernels_by_op = {gated: (run_cpu, run_torch), gated_back: (back_cpu, back_torch)}
    for declared, (cpu_kernel, torch_kernel) in kernels_by_op.items():
        declared.kernel("cpu")(cpu_kernel)
        declared.kernel("torch")(torch_kernel)
        declared.kernel("cuda")(triton.lazy_kernel("elementwise", declared.name))
    gated.samples(
        lambda: (gated(input("gate", (n,)), input("up", (n,))) for n in (1, 15, 65, 40_000))
    )
    gated_back.samples(gradient_samples(gated, gated_back))
    gated.cost(elementwise_cost())
    gated_back.cost(elementwise_cost(1.3))


def _silu_torch(gate):
    return torch.nn.functional.silu(gate)


def _gelu_torch(gate):
    return torch.nn.functional.gelu(gate, approximate="tanh")


def _gelu_back_torch(dx, dy, x):
    dx.copy_(torch.ops.aten.gelu_backward(dy, x, approximate="tanh"))


_declare_gated(swiglu, swiglu_back, False, _silu_terms, _silu_torch, silu_back_torch)
_declare_gated(geglu, geglu_back, True, _gelu_terms, _gelu_torch, _gelu_back_torch)


# ---- dropout -------------------------------------------------------------------------------------------------


@op(inplace=(0,))
def dropout(x: Tensor, key: Tensor, *, p: float, stream: int) -> Spec:
    """Zero elements with probability p and scale the rest by 1 / (1 - p).

    Element i is kept iff uniform(seed, step, stream, i) >= p: independent of recomputation and threads. Micro-batch m
    takes the numbers that follow those of m - 1: a step drops the same however it is split.

        x    (...)         f32
        key  (2,) or (3,)  i64   seed, step, and the number of the micro-batch in the step (0 without)
    """
    Spec((3 if key.shape == (3,) else 2,), i64).require(key=key)
    require(0 <= p < 1, f"p is {p}; it must be at least 0 and below 1")
    return Spec(x.shape).require(x=x)


dropout.vjp(lambda dy, y, x, key, *, p, stream: (dropout(dy, key, p=p, stream=stream), None))


def _first_element(key, size: int) -> int:
    """Return the index in its step of a micro-batch's first element of `size`: even, as pairs share 64 random bits."""
    return int(key[2]) * (size + size % 2) if len(key) == 3 else 0


@dropout.kernel("numpy")
def dropout_numpy(y, x, key, *, p, stream):
    first = _first_element(key, x.size)
    uniform_values = uniform_numpy(int(key[0]), int(key[1]), stream, x.size, first).reshape(x.shape)
    y[...] = np.where(uniform_values >= np.float32(p), x * x.dtype.type(1 / (1 - p)), 0)


@dropout.kernel("cpu")
def dropout_cpu(y, x, key, *, p, stream):
    first = _first_element(key, x.size)
    kernels.elementwise.dropout(flatten(y), flatten(x), int(key[0]), int(key[1]), stream, first, p)


@dropout.kernel("torch")
def dropout_torch(y, x, key, *, p, stream):
    mixed_key, y, x = key_of(key, stream), y.view(-1), x.view(-1)
    first, threshold = _first_element(key, len(x)), float(np.float32(p))
    for chunk_start, chunk_end in chunk_bounds(len(x), CHUNK, x):
        is_dropped = uniform(mixed_key, first + chunk_start, first + chunk_end) < threshold
        torch.mul(x[chunk_start:chunk_end], 1 / (1 - p), out=y[chunk_start:chunk_end])
        y[chunk_start:chunk_end].masked_fill_(is_dropped, 0)


dropout.cost(elementwise_cost())  # a random number takes as long as an exp


@dropout.samples
def dropout_samples():
    for n in (1, 16, 63, 40_000):
        for key in ([3, n], [3, n, 2]):
            yield dropout(input("x", (n,)), constant("key", np.array(key), i64), p=0.25, stream=7)
