"""Gradient clipping by global norm, and gradient accumulation over micro-batches; shared by all optimizers."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32
from packtrain.engine.backends import triton
from packtrain.engine.ops.arrays import compiled, flatten, flatten_or_absent
from packtrain.engine.ops.costs import elementwise_cost
from packtrain.engine.ops.elementwise import mul, scale
from packtrain.engine.ops.torch_kernels import sum_chunks, torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require, state


@op(acc=1)
def sum_squares(x: Tensor, acc: Tensor | None = None) -> Spec:
    """y = sum of x**2 (+ acc): x (...) f32, acc and y () f32. For clipping by global norm."""
    require(x.spec.dtype == f32, "x is {}; it must be f32", x)
    return Spec(()).require(acc=acc)


@sum_squares.vjp
def sum_squares_vjp(dy, y, x, acc):
    x_grad = scale(mul(x, dy), by=2.0)
    return x_grad, (None if acc is None else dy)


@sum_squares.kernel("numpy")
def sum_squares_numpy(y, x, acc):
    y[...] = np.square(x, dtype=np.float64).sum() + (0 if acc is None else acc)


sum_squares.kernel("cpu")(compiled("reduce.sum_squares", flatten, flatten, flatten_or_absent))


@sum_squares.kernel("torch")
def sum_squares_torch(y, x, acc):
    running_sum = sum_chunks(x, torch.square)
    y.copy_(running_sum if acc is None else running_sum.add_(acc))


sum_squares.kernel("cuda")(triton.lazy_kernel("update", "sum_squares"))
sum_squares.cost(elementwise_cost(2.5))  # in f64


@sum_squares.samples
def sum_squares_samples():
    for n in (1, 15, 64, 70_000):
        yield sum_squares(input("x", (n,)))
    yield sum_squares(input("x", (3, 5)), input("acc", ()))


@op()
def clip_gate(squares: Tensor, *, max_norm: float) -> Spec:
    """Compute the factor of gradient clipping: min(1, max_norm / (norm + 1e-6)), or NaN if the norm is not finite.

    An optimizer step changes nothing if its gate is not finite: so a bad step is skipped entirely.
    As torch.nn.utils.clip_grad_norm_.

        squares  ()  f32   the sum of squares of all gradients
        gate     ()  f32
    """
    Spec(()).require(squares=squares)
    return Spec(())


@clip_gate.kernel("numpy")
def clip_gate_numpy(gate, squares, *, max_norm):
    norm = np.sqrt(squares)
    gate[...] = np.minimum(1.0, max_norm / (norm + 1e-6)) if np.isfinite(norm) else np.nan


clip_gate.kernel("cpu")(clip_gate_numpy)


@clip_gate.kernel("torch")
def clip_gate_torch(gate, squares, *, max_norm):
    norm = squares.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    gate.copy_(factor.masked_fill_(~norm.isfinite(), np.nan))


@clip_gate.samples
def clip_gate_samples():
    for squares in (0.01, 4.0, np.inf, np.nan):
        yield clip_gate(constant("squares", np.array(squares)), max_norm=1.0)


@op(writes=(0,))
def accumulate(total: Tensor, g: Tensor, fresh: Tensor) -> Spec:
    """Add a gradient to a running sum, or start the sum with it: total = g if fresh else total + g.

    total, g  (...)  f32
    fresh     ()     f32   not 0 in the first micro-batch of a step; this also resets a NaN of an earlier step
    """
    Spec(g.shape).require(total=total, g=g)
    Spec(()).require(fresh=fresh)
    return total.spec


@accumulate.kernel("numpy")
def accumulate_numpy(out, total, g, fresh):
    total[...] = g if fresh else total + g


@accumulate.kernel("cpu")
def accumulate_cpu(out, total, g, fresh):
    if fresh:
        np.copyto(total, g)
    else:
        operation, total = kernels.elementwise.BINARY["add"], flatten(total)
        kernels.elementwise.binary(operation, total, total, flatten(g))


@accumulate.kernel("torch")
def accumulate_torch(out, total, g, fresh):
    torch.where(fresh != 0, g, total + g, out=total)


@accumulate.samples
def accumulate_samples():
    for n, fresh in ((1, 0.0), (17, 1.0), (70_000, 0.0)):
        yield accumulate(state("total", (n,)), input("g", (n,)), constant("fresh", np.array(fresh)))
