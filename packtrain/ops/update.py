"""Optimizer steps: what is done to a weight once its gradient is there, and the norm that clips it."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import TRAINABLE, bf16, dtype_of, f32, i64
from packtrain.kernels.counter import key as mixed
from packtrain.kernels.counter import uniform_numpy
from packtrain.ops.arrays import flat, floats
from packtrain.ops.costs import Cost, elementwise
from packtrain.ops.elementwise import mul, scale
from packtrain.tensor import Spec, Tensor, constant, input, op, state, want, weight


@op(acc=1)
def sum_squares(x: Tensor, acc: Tensor | None = None) -> Spec:
    """y = sum of x**2 (+ acc): x (...) f32, acc and y () f32. For clipping by global norm."""
    want(x.dtype == f32, f"x is {x.spec}; it must be f32")
    want(acc is None or acc.spec == Spec(()), f"acc is {acc and acc.spec}; it must be f32[]")
    return Spec(())


@sum_squares.vjp
def sum_squares_vjp(dy, y, x, acc):
    from_x = scale(mul(x, dy), by=2.0)
    return from_x, (None if acc is None else dy)


@sum_squares.kernel("numpy")
def sum_squares_numpy(y, x, acc):
    y[...] = np.square(x, dtype=np.float64).sum() + (0 if acc is None else acc)


@sum_squares.kernel("cpu")
def sum_squares_cpu(y, x, acc):
    before = 0.0 if acc is None else float(acc)
    kernels.reduce.sum_squares(flat(y), flat(x))
    if acc is not None:
        y += np.float32(before)


sum_squares.cost(elementwise(2.5))  # in f64


@sum_squares.samples
def sum_squares_samples():
    for n in (1, 15, 64, 70_000):
        yield sum_squares(input("x", (n,)))
    yield sum_squares(input("x", (3, 5)), input("acc", ()))


@op()
def clip_gate(squares: Tensor, *, max_norm: float) -> Spec:
    """What a gradient is multiplied by: min(1, max_norm / (norm + 1e-6)), or NaN if the norm is not finite.

    An optimizer step leaves everything as it is when its gate is not finite: so a bad step is skipped whole.
    As torch.nn.utils.clip_grad_norm_.

        squares  ()  f32   the sum of squares of all gradients
        gate     ()  f32
    """
    want(squares.spec == Spec(()), f"squares is {squares.spec}; it must be f32[]")
    return Spec(())


@clip_gate.kernel("numpy")
def clip_gate_numpy(gate, squares, *, max_norm):
    norm = np.sqrt(squares)
    gate[...] = np.minimum(1.0, max_norm / (norm + 1e-6)) if np.isfinite(norm) else np.nan


clip_gate.kernel("cpu")(clip_gate_numpy)


@clip_gate.samples
def clip_gate_samples():
    for squares in (0.01, 4.0, np.inf, np.nan):
        yield clip_gate(constant("squares", np.array(squares)), max_norm=1.0)


@op(writes=(0,))
def accumulate(total: Tensor, g: Tensor, fresh: Tensor) -> Spec:
    """Add a gradient to a running sum, or begin the sum with it: total = g if fresh else total + g.

    total, g  (...)  f32
    fresh     ()     f32   not 0 in the first micro-batch of a step; a NaN of an earlier step is forgotten too
    """
    want(
        total.spec == g.spec and g.dtype == f32,
        f"total {total.spec} and g {g.spec} must be equal and f32",
    )
    want(fresh.spec == Spec(()), f"fresh is {fresh.spec}; it must be f32[]")
    return total.spec


@accumulate.kernel("numpy")
def accumulate_numpy(out, total, g, fresh):
    total[...] = g if fresh else total + g


@accumulate.kernel("cpu")
def accumulate_cpu(out, total, g, fresh):
    if fresh:
        np.copyto(total, g)
    else:
        kernels.elementwise.binary(
            kernels.elementwise.BINARY["add"], flat(total), flat(total), flat(g)
        )


@accumulate.samples
def accumulate_samples():
    for n, fresh in ((1, 0.0), (17, 1.0), (70_000, 0.0)):
        yield accumulate(state("total", (n,)), input("g", (n,)), constant("fresh", np.array(fresh)))


# ---- steps ---------------------------------------------------------------------------------------------------


def _want_weight(w: Tensor, key: Tensor | None, *others: Tensor) -> None:
    """A weight is f32, or bf16 with a key for its rounding; its gradient and moments are f32."""
    given = ", ".join(str(t.spec) for t in others)
    want(
        w.dtype in TRAINABLE and all(t.spec == Spec(w.shape) for t in others),
        f"w is {w.spec} with {given}; these must be f32{[*w.shape]}, and w f32 or bf16",
    )
    fits = key is None if w.dtype == f32 else key is not None and key.spec == Spec((2,), i64)
    want(fits, f"w is {w.spec}, key {key and key.spec}; only with a bf16 there is one, i64[2]")


def _write(w, values, key, stream):
    """Values to a weight; to a bf16 up or down at random, so that the mean over many draws is the value.

    16 random bits are added to the 16 that go, and what carries is kept.
    """
    if key is None:
        w[...] = values
        return
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    uniform = uniform_numpy(int(key[0]), int(key[1]), stream, w.size).reshape(w.shape)
    words = words + (uniform * 65536).astype(np.uint32)
    w[...] = (words >> 16).astype(np.uint16).view(w.dtype)


def _stored(w, key, stream):
    """What kernels know of a weight: ggml's number of its type, its bytes, and the key of its rounding."""
    kind = dtype_of(w).number
    number = 0 if key is None else mixed(int(key[0]), int(key[1]), stream)
    return kind, flat(w).view(np.uint8), number


def _weights():
    """For samples: a weight of each type and some lengths, its key, a gate, and whether it decays."""
    for n, gate, decay in (
        (1, 1.0, True),
        (17, 0.5, False),
        (64, np.nan, True),
        (70_000, 1.0, True),
    ):
        gate = constant("gate", np.array(gate))
        yield weight("w", (n,)), None, gate, decay
        yield weight("w", (n,), bf16), constant("key", np.array([3, n]), i64), gate, decay


ADAMW_HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "1 - beta1**t", "1 - beta2**t")


@op(writes=(0, 2, 3))
def opt_step_adamw(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    hyper: Tensor,
    gate: Tensor,
    key: Tensor | None = None,
    *,
    decay: bool,
    stream: int = 0,
) -> tuple[Spec, ...]:
    """One AdamW step in one pass; returns the new handles of w, m and v. ggml_opt_step_adamw.

    g' = gate * g;  m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2
    w = w (1 - lr * weight_decay) - lr (m / c1) / (sqrt(v / c2) + eps)

        w        (...)  f32, or bf16: rounded up or down at random by uniform(seed, step, stream, index)
        g, m, v  (...)  f32
        hyper    (7,)   f32   see ADAMW_HYPER: c1 and c2 come as numbers, so one plan serves every step
        gate     ()     f32   see clip_gate; nothing changes if it is not finite
        key      (2,)   i64   seed and step, for a bf16 alone
    Loshchilov & Hutter 2019, arXiv 1711.05101.
    """
    _want_weight(w, key, g, m, v)
    want(
        hyper.spec == Spec((7,)),
        f"hyper is {hyper.spec}; it must be f32[7]: {', '.join(ADAMW_HYPER)}",
    )
    want(gate.spec == Spec(()), f"gate is {gate.spec}; it must be f32[]")
    return w.spec, m.spec, v.spec


@opt_step_adamw.kernel("numpy")
def opt_step_adamw_numpy(out, w, g, m, v, hyper, gate, key, *, decay, stream):
    if not np.isfinite(gate):
        return
    lr, beta1, beta2, eps, weight_decay, c1, c2 = hyper
    g = g * gate
    m[...] = beta1 * m + (1 - beta1) * g
    v[...] = beta2 * v + (1 - beta2) * g * g
    kept = floats(w) * (1 - lr * weight_decay * decay)
    _write(w, kept - lr * (m / c1) / (np.sqrt(v / c2) + eps), key, stream)


@opt_step_adamw.kernel("cpu")
def opt_step_adamw_cpu(out, w, g, m, v, hyper, gate, key, *, decay, stream):
    kind, data, number = _stored(w, key, stream)
    given = flat(g), flat(m), flat(v), hyper, float(decay), flat(gate)
    kernels.update.adamw(kind, data, *given, number)


@opt_step_adamw.cost
def opt_step_adamw_cost(out, w, *given, decay, stream):
    return Cost(
        {"exp": (2 if w.dtype == f32 else 4) * w.spec.size}
    )  # a root, two divisions, a draw


@opt_step_adamw.samples
def opt_step_adamw_samples():
    hyper = constant("hyper", np.array([1e-2, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975]))
    for w, key, gate, decay in _weights():
        g, m, v = input("g", w.shape), state("m", w.shape), state("v", w.shape)
        yield from opt_step_adamw(w, g, m, v, hyper, gate, key, decay=decay, stream=7)


@op(writes=(0,))
def opt_step_sgd(
    w: Tensor,
    g: Tensor,
    hyper: Tensor,
    gate: Tensor,
    key: Tensor | None = None,
    *,
    decay: bool,
    stream: int = 0,
) -> tuple[Spec, ...]:
    """One step of gradient descent; returns the new handle of w. ggml_opt_step_sgd.

    w = w (1 - lr * weight_decay) - lr * gate * g

        w      (...)  f32, or bf16: rounded up or down at random by uniform(seed, step, stream, index)
        g      (...)  f32
        hyper  (2,)   f32   lr, weight_decay
        gate   ()     f32   see clip_gate; nothing changes if it is not finite
        key    (2,)   i64   seed and step, for a bf16 alone
    """
    _want_weight(w, key, g)
    want(hyper.spec == Spec((2,)), f"hyper is {hyper.spec}; it must be f32[2]: lr, weight_decay")
    want(gate.spec == Spec(()), f"gate is {gate.spec}; it must be f32[]")
    return (w.spec,)


@opt_step_sgd.kernel("numpy")
def opt_step_sgd_numpy(out, w, g, hyper, gate, key, *, decay, stream):
    if np.isfinite(gate):
        lr, weight_decay = hyper
        kept = floats(w) * (1 - lr * weight_decay * decay)
        _write(w, kept - lr * (g * gate), key, stream)


@opt_step_sgd.kernel("cpu")
def opt_step_sgd_cpu(out, w, g, hyper, gate, key, *, decay, stream):
    kind, data, number = _stored(w, key, stream)
    kernels.update.sgd(kind, data, flat(g), hyper, float(decay), flat(gate), number)


@opt_step_sgd.samples
def opt_step_sgd_samples():
    hyper = constant("hyper", np.array([1e-2, 0.1]))
    for w, key, gate, decay in _weights():
        g = input("g", w.shape)
        yield from opt_step_sgd(w, g, hyper, gate, key, decay=decay, stream=7)
