"""Cross-entropy, on logits and fused with the output projection. A negative target is ignored."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import READABLE, TRAINABLE, f16, f32, i32
from packtrain.engine.ops import costs, torch_loss
from packtrain.engine.ops.arrays import (
    flat,
    flat_or_absent,
    floats,
    half,
    packed,
    rows,
    rows_or_absent,
    times,
    want_precision,
)
from packtrain.engine.ops.costs import Cost, elementwise
from packtrain.engine.ops.elementwise import mul
from packtrain.engine.ops.shape import reshape
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, want

# of the vocabulary, by which dx of the head is summed, and rows of w in one
PARTS, LEAST_PART = 16, 64


def _check_targets(targets: Tensor, weights: Tensor, shape: tuple[int, ...]) -> None:
    want(targets.spec == Spec(shape, i32), f"targets is {targets.spec}; it must be i32{[*shape]}")
    want(weights.spec == Spec(shape), f"weights is {weights.spec}; it must be f32{[*shape]}")


def _check_ids(op_name, targets, classes):
    top = int(targets.max(initial=-1))
    if top >= classes:
        at = int(targets.argmax())
        raise IndexError(
            f"{op_name}: target {top} at position {at} is outside the {classes} classes"
        )


def _losses(logits, targets):
    """Per row: log-sum-exp minus the target's logit, and the softmax."""
    top = logits.max(-1, keepdims=True)
    e = np.exp(logits - top)
    total = e.sum(-1, keepdims=True)
    at = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)
    losses = (np.log(total) + top - at)[..., 0]
    return np.where(targets < 0, 0, losses), e / total


def _is_largest(logits, targets):
    at = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)
    return (at >= logits.max(-1, keepdims=True))[..., 0] & (targets >= 0)


def _dlogits(p, targets, weights):
    d = p * np.where(targets < 0, 0, weights)[..., None]
    np.put_along_axis(d, np.maximum(targets, 0)[..., None], _at_target(d, targets, weights), -1)
    return d


def _capped(logits, softcap):
    """Soft-capped logits, if there is a cap, and its slope."""
    if not softcap:
        return logits, 1
    capped = np.tanh(logits / softcap)
    return softcap * capped, 1 - capped**2


def _at_target(d, targets, weights):
    at = np.take_along_axis(d, np.maximum(targets, 0)[..., None], -1)
    return at - np.where(targets < 0, 0, weights)[..., None]


@op()
def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Spec, ...]:
    """loss = sum of weights * losses, losses = log-sum-exp(logits) - logits[target]. ggml_cross_entropy_loss.

    logits   (..., V)  f32
    targets  (...)     i32; negative: no loss, no gradient
    weights  (...)     f32; 1 / number of targets gives the mean
    loss     ()        f32, first result
    losses   (...)     f32, second result
    """
    want(
        logits.dtype == f32 and len(logits.shape) > 0,
        f"logits is {logits.spec}; it must be f32[..., V]",
    )
    _check_targets(targets, weights, logits.shape[:-1])
    return Spec(()), Spec(targets.shape)


@cross_entropy.vjp
def cross_entropy_vjp(dy, y, logits, targets, weights):
    want(dy[1] is None, "only the loss has a gradient, not the losses by row")
    return cross_entropy_back(dy[0], logits, targets, weights), None, mul(y[1], dy[0])


@cross_entropy.kernel("numpy")
def cross_entropy_numpy(out, logits, targets, weights):
    _check_ids("cross_entropy", targets, logits.shape[-1])
    loss, losses = out
    losses[...] = _losses(logits, targets)[0]
    loss[...] = (losses * weights).sum(dtype=np.float64)


@cross_entropy.kernel("cpu")
def cross_entropy_cpu(out, logits, targets, weights):
    _check_ids("cross_entropy", targets, logits.shape[-1])
    loss, losses = out
    kernels.loss.cross_entropy(flat(loss), flat(losses), rows(logits), flat(targets), flat(weights))


def _targets(shape, v):
    n = int(np.prod(shape))
    targets = (np.arange(n) * 5 + 2) % v
    targets[n // 2 :: 4] = -1 if n > 2 else targets[0]
    return constant("targets", targets.reshape(shape), i32), input("weights", shape)


cross_entropy.kernel("torch")(torch_loss.cross_entropy)
cross_entropy.cost(elementwise())


@cross_entropy.samples
def cross_entropy_samples():
    for n, v in ((1, 1), (3, 15), (17, 64), (260, 130)):
        yield cross_entropy(input("logits", (n, v)), *_targets((n,), v))[0]
    yield cross_entropy(input("logits", (2, 3, 7)), *_targets((2, 3), 7))[0]


@op(inplace=(1,))
def cross_entropy_back(dloss: Tensor, logits: Tensor, targets: Tensor, weights: Tensor) -> Spec:
    """dlogits = dloss * weights * (softmax(logits) - onehot(targets)). ggml_cross_entropy_loss_back."""
    want(logits.dtype == f32, f"logits is {logits.spec}; it must be f32[..., V]")
    _check_targets(targets, weights, logits.shape[:-1])
    want(dloss.spec == Spec(()), f"dloss is {dloss.spec}; it must be f32[]")
    return logits.spec


@cross_entropy_back.kernel("numpy")
def cross_entropy_back_numpy(dlogits, dloss, logits, targets, weights):
    _check_ids("cross_entropy_back", targets, logits.shape[-1])
    dlogits[...] = dloss * _dlogits(_losses(logits, targets)[1], targets, weights)


@cross_entropy_back.kernel("cpu")
def cross_entropy_back_cpu(dlogits, dloss, logits, targets, weights):
    _check_ids("cross_entropy_back", targets, logits.shape[-1])
    kernels.loss.cross_entropy_back(
        rows(dlogits), flat(dloss), rows(logits), flat(targets), flat(weights)
    )


cross_entropy_back.kernel("torch")(torch_loss.cross_entropy_back)


@cross_entropy_back.cost
def cross_entropy_back_cost(dlogits, dloss, logits, targets, weights):
    return Cost({"exp": 2 * logits.spec.size})  # once for the sum, once for the probabilities


@cross_entropy_back.samples
def cross_entropy_back_samples():
    for n, v in ((1, 1), (3, 15), (17, 64), (260, 130)):
        yield cross_entropy_back(input("dloss", ()), input("logits", (n, v)), *_targets((n,), v))


def _check_head(x: Tensor, w: Tensor, b: Tensor | None, chunk: int, softcap: float) -> None:
    want(
        x.dtype == f32 and len(w.shape) == 2 and w.dtype in READABLE,
        f"x is {x.spec} and w is {w.spec}; x must be f32 and w [V, C] of a type that can be read",
    )
    want(x.shape[-1:] == w.shape[1:], f"last axis of x {x.spec} must equal last axis of w {w.spec}")
    fits = b is None or b.spec == Spec(w.shape[:1])
    want(fits, f"b is {b and b.spec}; for w {w.spec} it must be f32{[*w.shape[:1]]}")
    positive = chunk > 0 <= softcap
    want(positive, f"chunk is {chunk}, softcap {softcap}; chunk must be above 0, softcap 0 or more")


@op(optional=(2, 3, 4, 5))
def linear_cross_entropy(
    x: Tensor, w: Tensor, targets: Tensor, weights: Tensor, b: Tensor | None = None, *, chunk: int = 256,
    softcap: float = 0.0, precision: str = "f32",
) -> tuple[Spec, ...]:  # fmt: skip
    """Cross-entropy of the logits x @ w.T (+ b), `chunk` rows at a time, so that all logits never exist at once.

    (In bf16 with AMX up to 4 * chunk, whose logits are computed twice.) With a softcap of c, of c * tanh(logits / c).
    Gradients for a loss gradient of 1 come from the same logits; a graph that reads none (evaluation) pays for none.

        x        (..., C)  f32
        w        (V, C)    any readable type
        targets  (...)     i32; negative: no loss, no gradient
        weights  (...)     f32
        b        (V,)      f32, or None for 0
        loss     ()        f32
        losses   (...)     f32, by row, not weighted
        right    (...)     f32, 1 where no logit is larger than the target's, else 0
        dx, dw, db         f32, as x, w and b; no dw if w is neither f32 nor bf16
    Gradients of `losses` use dx if weights are constant 1 and w is frozen; else logits are computed again.
    precision as in matmul. The idea of chunks as in Liger-Kernel's fused linear cross-entropy.
    """
    want_precision(precision)
    _check_head(x, w, b, chunk, softcap)
    _check_targets(targets, weights, x.shape[:-1])
    dw = (Spec(w.shape),) if w.dtype in TRAINABLE else ()
    return Spec(()), weights.spec, weights.spec, x.spec, *dw, *(() if b is None else (b.spec,))


@linear_cross_entropy.vjp
def linear_cross_entropy_vjp(dy, y, x, w, targets, weights, b, **how):
    dloss, dlosses, *other_grads = dy
    losses, dx, (dw, db) = y[1], y[3], _of_weights(y, b)
    _check_gradients(dloss, dlosses, other_grads)
    if dlosses is not None:
        return _by_row(dlosses, dx, x, w, targets, weights, b, how)
    of_w, of_b = (d and _times(dloss, d) for d in (dw, db))
    return _times(dloss, dx), of_w, None, _times(dloss, losses), of_b


def _store(outputs, values):
    for output, value in zip(outputs, values, strict=True):
        if output is not None:
            output[...] = value


def _check_gradients(dloss, dlosses, other_grads):
    want(dloss is None or dlosses is None, "the loss has a gradient or losses by row, not both")
    want(not any(other_grads), "what is right and gradients have no gradients")


def _of_weights(results, b):
    """dw and db of all results, None for what is not there."""
    count = len(results) - (b is not None)
    return (results[4] if count > 4 else None), (None if b is None else results[-1])


def _by_row(dlosses, dx, x, w, targets, weights, b, attrs):
    """Gradients for those of the losses by row."""
    fixed = w.dtype not in TRAINABLE and b is None
    if fixed and weights.kind == "constant" and np.all(weights.value == 1):
        return mul(dx, reshape(dlosses, shape=(*dlosses.shape, 1))), None, None, None, None
    # the logits again, once it is known how much each row counts
    recomputed = linear_cross_entropy(x, w, targets, dlosses, b, **attrs)
    dw, db = _of_weights(recomputed, b)
    return recomputed[3], dw, None, None, db


def _times(dloss: Tensor, d: Tensor) -> Tensor:
    return d if dloss.kind == "constant" and dloss.value == 1 else mul(d, dloss)


@linear_cross_entropy.workspace("cpu")
def linear_cross_entropy_work(x, w, targets, weights, b, *, chunk, precision, **how):
    return tuple(map(Spec, costs.head_room(*w.shape, targets.spec.size, chunk, precision)))


@linear_cross_entropy.kernel("numpy")
def linear_cross_entropy_numpy(out, x, w, targets, weights, b, *, chunk, softcap, precision):
    _check_ids("linear_cross_entropy", targets, len(w))
    (loss, losses, right, dx), (dw, db) = out[:4], _of_weights(out, b)
    w = floats(w)
    logits = times(x, w.T, precision) + (0 if b is None else b)
    if right is not None:
        right[...] = _is_largest(logits, targets)
    logits, slope = _capped(logits, softcap)
    losses[...], p = _losses(logits, targets)
    loss[...] = (losses * weights).sum(dtype=np.float64)
    d = _dlogits(p, targets, weights) * slope
    dx_dw = times(d, w, precision), times(rows(d).T, rows(x), precision)
    _store((dx, dw, db), (*dx_dw, rows(d).sum(0)))


@linear_cross_entropy.kernel("cpu")
def linear_cross_entropy_cpu(out, x, w, targets, weights, b, *, chunk, softcap, precision, work):
    _check_ids("linear_cross_entropy", targets, len(w))
    (loss, losses, right, dx), (dw, db) = out[:4], _of_weights(out, b)
    by_row = flat(loss), flat(losses), flat_or_absent(right)
    arrays = *by_row, rows_or_absent(dx), rows_or_absent(dw), flat_or_absent(db), *work
    args = rows(x), *packed(w), flat_or_absent(b), flat(targets), flat(weights)
    by = kernels.head if costs.in_tiles(precision, x.shape[-1]) else kernels.loss
    by.linear_cross_entropy(*arrays, *args, softcap, half(precision))


linear_cross_entropy.kernel("torch")(torch_loss.linear_cross_entropy)
linear_cross_entropy.kernel("cuda")(torch_loss.fused)


@linear_cross_entropy.cost
def linear_cross_entropy_cost(out, x, w, targets, weights, b, *, chunk, softcap, precision):
    return costs.head(x, w, out[3], _of_weights(out, b)[0], chunk, precision)


@linear_cross_entropy.samples
def linear_cross_entropy_samples():
    for n, c, v, chunk in ((1, 1, 1, 4), (17, 256, 64, 8), (65, 16, 130, 64), (64, 33, 1000, 64)):
        x, w = input("x", (n, c)), input("w", (v, c))
        yield linear_cross_entropy(x, w, *_targets((n,), v), chunk=chunk)[0]
    x, w = input("x", (2, 3, 8)), input("w", (7, 8))
    yield linear_cross_entropy(x, w, *_targets((2, 3), 7), chunk=4)[0]
    capped = input("x", (70, 9)), input("w", (150, 9)), *_targets((70,), 150)
    yield linear_cross_entropy(*capped, chunk=32, softcap=2.5)[0]
    biased = input("x", (70, 2)), input("w", (150, 2)), *_targets((70,), 150), input("b", (150,))
    yield linear_cross_entropy(*biased, chunk=64, softcap=20.0)[0]
    halves = np.random.default_rng(1).standard_normal((150, 33)).astype(np.float16)
    x, w = input("x", (70, 33)), constant("w", halves, f16)
    yield linear_cross_entropy(x, w, *_targets((70,), 150), chunk=64)[0]
    yield linear_cross_entropy(x, w, *_targets((70,), 150), input("b", (150,)), chunk=64)[0]
