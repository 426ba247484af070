"""Cross-entropy, on logits and fused with the output projection. A negative target is ignored."""

from functools import partial

import numpy as np

from packtrain import kernels
from packtrain.dtypes import READABLE, TRAINABLE, f16, f32, i32
from packtrain.engine.ops import arrays, costs, torch_loss
from packtrain.engine.ops.arrays import flatten, flatten_or_absent, rows, rows_or_absent, times
from packtrain.engine.ops.elementwise import mul
from packtrain.engine.ops.shape import reshape
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require


def _check_targets(targets: Tensor, weights: Tensor, shape: tuple[int, ...]) -> None:
    Spec(shape, i32).require(targets=targets)
    Spec(shape).require(weights=weights)


def _row_losses(logits, targets):
    """Return each row's loss, log-sum-exp minus the target's logit (0 if the target is negative), and the softmax."""
    max_logit = logits.max(-1, keepdims=True)
    e = np.exp(logits - max_logit)
    sum_exp = e.sum(-1, keepdims=True)
    target_logits = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)
    losses = (np.log(sum_exp) + max_logit - target_logits)[..., 0]
    return np.where(targets < 0, 0, losses), e / sum_exp


def _target_is_largest(logits, targets):
    target_logits = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)
    return (target_logits >= logits.max(-1, keepdims=True))[..., 0] & (targets >= 0)


def _logit_grads(p, targets, weights):
    weights = np.where(targets < 0, 0, weights)[..., None]
    columns = np.maximum(targets, 0)[..., None]
    d = p * weights
    np.put_along_axis(d, columns, np.take_along_axis(d, columns, -1) - weights, -1)
    return d


def _softcapped_logits(logits, softcap):
    """Return softcap * tanh(logits / softcap) and its slope; the logits and 1 for a softcap of 0."""
    if not softcap:
        return logits, 1
    tanh_logits = np.tanh(logits / softcap)
    return softcap * tanh_logits, 1 - tanh_logits**2


@op()
def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Spec, ...]:
    """loss = sum of weights * losses, losses = log-sum-exp(logits) - logits[target]. ggml_cross_entropy_loss.

    logits   (..., V)  f32
    targets  (...)     i32; negative: no loss, no gradient
    weights  (...)     f32; 1 / number of targets gives the mean
    loss     ()        f32, first result
    losses   (...)     f32, second result
    """
    arrays.f32_rows(logits, "logits")
    _check_targets(targets, weights, logits.shape[:-1])
    return Spec(()), Spec(targets.shape)


@cross_entropy.vjp
def cross_entropy_vjp(dy, y, logits, targets, weights):
    require(dy[1] is None, "only the loss has a gradient, not the losses by row")
    return cross_entropy_back(dy[0], logits, targets, weights), None, mul(y[1], dy[0])


@cross_entropy.kernel("numpy")
def cross_entropy_numpy(out, logits, targets, weights):
    arrays.check_targets("cross_entropy", targets, logits.shape[-1])
    loss, losses = out
    losses[...] = _row_losses(logits, targets)[0]
    loss[...] = (losses * weights).sum(dtype=np.float64)


@cross_entropy.kernel("cpu")
def cross_entropy_cpu(out, logits, targets, weights):
    check = partial(arrays.check_targets, "cross_entropy", targets, logits.shape[-1])
    args = *map(flatten, out), rows(logits), flatten(targets), flatten(weights)
    return arrays.run_replayable(kernels.loss.cross_entropy, *args, before=check)


def _targets(shape, v):
    """Return sample targets below v, some of them none (-1), and an input leaf of their weights."""
    n = int(np.prod(shape))
    targets = (np.arange(n) * 5 + 2) % v
    targets[n // 2 :: 4] = -1 if n > 2 else targets[0]
    return constant("targets", targets.reshape(shape), i32), input("weights", shape)


cross_entropy.kernel("torch")(torch_loss.cross_entropy)
cross_entropy.cost(costs.elementwise_cost())


@cross_entropy.samples
def cross_entropy_samples():
    for n, v in ((1, 1), (3, 15), (17, 64), (260, 130)):
        yield cross_entropy(input("logits", (n, v)), *_targets((n,), v))[0]
    yield cross_entropy(input("logits", (2, 3, 7)), *_targets((2, 3), 7))[0]


@op(inplace=(1,))
def cross_entropy_back(dloss: Tensor, logits: Tensor, targets: Tensor, weights: Tensor) -> Spec:
    """dlogits = dloss * weights * (softmax(logits) - onehot(targets)). ggml_cross_entropy_loss_back."""
    require(logits.dtype == f32, f"logits is {logits.spec}; it must be f32[..., V]")
    _check_targets(targets, weights, logits.shape[:-1])
    Spec(()).require(dloss=dloss)
    return logits.spec


@cross_entropy_back.kernel("numpy")
def cross_entropy_back_numpy(dlogits, dloss, logits, targets, weights):
    arrays.check_targets("cross_entropy_back", targets, logits.shape[-1])
    dlogits[...] = dloss * _logit_grads(_row_losses(logits, targets)[1], targets, weights)


@cross_entropy_back.kernel("cpu")
def cross_entropy_back_cpu(dlogits, dloss, logits, targets, weights):
    check = partial(arrays.check_targets, "cross_entropy_back", targets, logits.shape[-1])
    args = rows(dlogits), flatten(dloss), rows(logits), flatten(targets), flatten(weights)
    return arrays.run_replayable(kernels.loss.cross_entropy_back, *args, before=check)


cross_entropy_back.kernel("torch")(torch_loss.cross_entropy_back)


@cross_entropy_back.cost
def cross_entropy_back_cost(dlogits, dloss, logits, targets, weights):
    return costs.Cost({"exp": 2 * logits.spec.size})  # once for the sum, once for the probabilities


cross_entropy_back.samples(arrays.gradient_samples(cross_entropy, cross_entropy_back))


def _check_head(x: Tensor, w: Tensor, b: Tensor | None, chunk: int, softcap: float) -> None:
    fact = f"x is {x.spec} and w is {w.spec}; x must be f32 and w [V, C] of a type that can be read"
    require(x.dtype == f32 and len(w.shape) == 2 and w.dtype in READABLE, fact)
    fact = f"last axis of x {x.spec} must equal last axis of w {w.spec}"
    require(x.shape[-1:] == w.shape[1:], fact)
    Spec(w.shape[:1]).require(b=b)
    fact = f"chunk is {chunk}, softcap {softcap}; chunk must be above 0, softcap 0 or more"
    require(chunk > 0 <= softcap, fact)


@op(optional=(2, 3, 4, 5), inplace={3: (0,)})
def linear_cross_entropy(
    x: Tensor, w: Tensor, targets: Tensor, weights: Tensor, b: Tensor | None = None, *, chunk: int = 256,
    softcap: float = 0.0, precision: str = "f32",
) -> tuple[Spec, ...]:  # fmt: skip
    """Cross-entropy of the logits x @ w.T (+ b), `chunk` rows at a time, so that all logits never exist at once.

    In bf16 with AMX, chunks have up to 4 * chunk rows, and logits are computed twice. With a softcap of c, of c *
    tanh(logits / c). Gradients for a loss gradient of 1 come from the same logits, unless the graph reads none.

        x        (..., C)  f32
        w        (V, C)    any readable type
        targets  (...)     i32; negative: no loss, no gradient
        weights  (...)     f32
        b        (V,)      f32, or None for 0
        loss     ()        f32
        losses   (...)     f32, by row, not weighted
        correct  (...)     f32, 1 where no logit is larger than the target's, else 0
        dx, dw, db         f32, as x, w and b; no dw if w is neither f32 nor bf16
    Gradients of `losses` use dx if weights are constant 1 and w is frozen; else logits are computed again.
    precision as in matmul. Chunks as in Liger-Kernel's fused linear cross-entropy.
    """
    arrays.check_precision(precision)
    _check_head(x, w, b, chunk, softcap)
    _check_targets(targets, weights, x.shape[:-1])
    dw = (Spec(w.shape),) if w.dtype in TRAINABLE else ()
    return Spec(()), weights.spec, weights.spec, x.spec, *dw, *(() if b is None else (b.spec,))


@linear_cross_entropy.vjp
def linear_cross_entropy_vjp(dy, y, x, w, targets, weights, b, **attrs):
    (dloss, dlosses, *other_grads), losses, dx, (dw, db) = dy, y[1], y[3], _weight_grads(y, b)
    _check_gradients(dloss, dlosses, other_grads)
    if dlosses is not None:
        return _row_loss_grads(dlosses, dx, x, w, targets, weights, b, attrs)
    w_grad, b_grad = (d and _scale_grad(dloss, d) for d in (dw, db))
    return _scale_grad(dloss, dx), w_grad, None, _scale_grad(dloss, losses), b_grad


def _store_outputs(outputs, output_values):
    for output, value in zip(outputs, output_values, strict=True):
        if output is not None:
            output[...] = value


def _check_gradients(dloss, dlosses, other_grads):
    require(dloss is None or dlosses is None, "the loss has a gradient or losses by row, not both")
    require(not any(other_grads), "what is right and gradients have no gradients")


def _weight_grads(outputs, b):
    """Return dw and db among the results of linear_cross_entropy, None for one that is missing."""
    num_outputs = len(outputs) - (b is not None)
    return (outputs[4] if num_outputs > 4 else None), (None if b is None else outputs[-1])


def _row_loss_grads(dlosses, dx, x, w, targets, weights, b, attrs):
    """Return gradients of linear_cross_entropy for x, w, targets, weights and b, given those of the losses by row."""
    is_frozen = w.dtype not in TRAINABLE and b is None
    if is_frozen and weights.kind == "constant" and np.all(weights.value == 1):
        return mul(dx, reshape(dlosses, shape=(*dlosses.shape, 1))), None, None, None, None
    # computes the logits again, with the gradients of the losses as weights
    recomputed_outputs = linear_cross_entropy(x, w, targets, dlosses, b, **attrs)
    dw, db = _weight_grads(recomputed_outputs, b)
    return recomputed_outputs[3], dw, None, None, db


def _scale_grad(dloss: Tensor, d: Tensor) -> Tensor:
    """Return d times the loss's gradient; d itself if that is 1."""
    return d if dloss.kind == "constant" and dloss.value == 1 else mul(d, dloss)


@linear_cross_entropy.workspace("cpu")
def linear_cross_entropy_workspace(x, w, targets, weights, b, *, chunk, precision, **attrs):
    return tuple(map(Spec, costs.head_room(*w.shape, targets.spec.size, chunk, precision)))


@linear_cross_entropy.kernel("numpy")
def linear_cross_entropy_numpy(out, x, w, targets, weights, b, *, chunk, softcap, precision):
    arrays.check_targets("linear_cross_entropy", targets, len(w))
    (loss, losses, correct, dx), (dw, db) = out[:4], _weight_grads(out, b)
    w = arrays.floats(w)
    logits = times(x, w.T, precision) + (0 if b is None else b)
    if correct is not None:
        correct[...] = _target_is_largest(logits, targets)
    logits, slope = _softcapped_logits(logits, softcap)
    losses[...], p = _row_losses(logits, targets)
    loss[...] = (losses * weights).sum(dtype=np.float64)
    logit_grads = _logit_grads(p, targets, weights) * slope
    dx_dw = times(logit_grads, w, precision), times(rows(logit_grads).T, rows(x), precision)
    _store_outputs((dx, dw, db), (*dx_dw, rows(logit_grads).sum(0)))


@linear_cross_entropy.kernel("cpu")
def linear_cross_entropy_cpu(out, x, w, targets, weights, b, *, chunk, softcap, precision, work):
    check = partial(arrays.check_targets, "linear_cross_entropy", targets, len(w))
    (loss, losses, correct, dx), (dw, db) = out[:4], _weight_grads(out, b)
    by_row = flatten(loss), flatten(losses), flatten_or_absent(correct)
    output_arrays = *by_row, rows_or_absent(dx), rows_or_absent(dw), flatten_or_absent(db), *work
    args = rows(x), *arrays.packed(w), flatten_or_absent(b), flatten(targets), flatten(weights)
    module = kernels.fused_head if costs.in_tiles(precision, x.shape[-1]) else kernels.loss
    args = *output_arrays, *args, softcap, arrays.num_bf16_terms(precision)
    return arrays.run_replayable(module.linear_cross_entropy, *args, before=check)


linear_cross_entropy.kernel("torch")(torch_loss.linear_cross_entropy)
linear_cross_entropy.kernel("cuda")(torch_loss.triton_linear_cross_entropy)


@linear_cross_entropy.cost
def linear_cross_entropy_cost(out, x, w, targets, weights, b, *, chunk, softcap, precision):
    return costs.head_cost(x, w, out[3], _weight_grads(out, b)[0], chunk, precision)


@linear_cross_entropy.samples
def linear_cross_entropy_samples():
    for n, c, v, chunk in ((1, 1, 1, 4), (17, 256, 64, 8), (65, 16, 130, 64), (64, 33, 1000, 64)):
        x, w = input("x", (n, c)), input("w", (v, c))
        yield linear_cross_entropy(x, w, *_targets((n,), v), chunk=chunk)[0]
    x, w = input("x", (2, 3, 8)), input("w", (7, 8))
    yield linear_cross_entropy(x, w, *_targets((2, 3), 7), chunk=4)[0]
    capped_inputs = input("x", (70, 9)), input("w", (150, 9)), *_targets((70,), 150)
    yield linear_cross_entropy(*capped_inputs, chunk=32, softcap=2.5)[0]
    biased = input("x", (70, 2)), input("w", (150, 2)), *_targets((70,), 150), input("b", (150,))
    yield linear_cross_entropy(*biased, chunk=64, softcap=20.0)[0]
    half_weights = np.random.default_rng(1).standard_normal((150, 33)).astype(np.float16)
    x, w = input("x", (70, 33)), constant("w", half_weights, f16)
    yield linear_cross_entropy(x, w, *_targets((70,), 150), chunk=64)[0]
    yield linear_cross_entropy(x, w, *_targets((70,), 150), input("b", (150,)), chunk=64)[0]
