"""Losses of the output head by rows, with an online log-sum-exp; gradients are written over the logits."""

import triton
import triton.language as tl

from packtrain.engine.backends.triton import launch, power_of_two

BLOCK = 4096


@triton.jit
def _logit(logits, bias, offsets, num_columns, softcap, BIASED: tl.constexpr, CAPPED: tl.constexpr):
    """Load some logits of a row, plus bias; return them with and without the softcap, -inf beyond the last column."""
    mask = offsets < num_columns
    z = tl.load(logits + offsets, mask=mask, other=-float("inf"))
    if BIASED:
        z += tl.load(bias + offsets, mask=mask, other=0.0)
    uncapped = z
    if CAPPED:
        z = tl.where(mask, softcap * (1 - 2 / (tl.exp(2 * z / softcap) + 1)), -float("inf"))
    return z, uncapped


@triton.jit
def _to_grads(
    logits, bias, target, weight, lse, num_columns, softcap,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn a row's logits into the gradients of its loss, in place: (softmax - onehot(target)) * weight."""
    for start in range(0, num_columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        z, _ = _logit(logits, bias, offsets, num_columns, softcap, BIASED, CAPPED)
        d = (tl.exp(z - lse) - (offsets == target).to(tl.float32)) * weight
        if CAPPED:
            d *= 1 - (z / softcap) * (z / softcap)
        tl.store(logits + offsets, d, mask=offsets < num_columns)


@triton.jit
def _row(
    logits, bias, losses, right, targets, weights, num_columns, softcap,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, RIGHT: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's loss, `right` if RIGHT, and if BACK the gradients over its logits; see losses_and_gradients."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    target = tl.load(targets + row)
    offsets, inf = tl.arange(0, BLOCK), float("inf")
    row_max, row_sum = tl.full((BLOCK,), -inf, tl.float32), tl.zeros((BLOCK,), tl.float32)
    max_logits = tl.full((BLOCK,), -inf, tl.float32)
    is_nan = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_columns, BLOCK):
        z, raw_logits = _logit(logits, bias, start + offsets, num_columns, softcap, BIASED, CAPPED)
        new_max = tl.maximum(row_max, z)
        finite_max = tl.where(new_max == -inf, 0.0, new_max)
        row_sum = row_sum * tl.exp(row_max - finite_max) + tl.exp(z - finite_max)
        row_max = new_max
        max_logits = tl.maximum(max_logits, raw_logits)
        is_nan |= (raw_logits != raw_logits).to(tl.int32)
    max_logit = tl.max(row_max)
    finite_max = tl.where(max_logit == -inf, 0.0, max_logit)
    lse = tl.log(tl.sum(row_sum * tl.exp(row_max - finite_max))) + finite_max
    lse = tl.where(tl.max(is_nan) > 0, float("nan"), lse)
    aim = tl.maximum(target, 0) + tl.zeros((1,), tl.int32)
    target_logit, uncapped = _logit(logits, bias, aim, num_columns, softcap, BIASED, CAPPED)
    tl.store(losses + row, tl.where(target < 0, 0.0, lse - tl.sum(target_logit)))
    if RIGHT:
        is_correct = (tl.sum(uncapped) >= tl.max(max_logits)) & (tl.max(is_nan) == 0)
        tl.store(right + row, (is_correct & (target >= 0)).to(tl.float32))
    if BACK:
        tl.debug_barrier()
        weight = tl.where(target < 0, 0.0, tl.load(weights + row))
        _to_grads(logits, bias, target, weight, lse, num_columns, softcap, BIASED, CAPPED, BLOCK)


def losses_and_gradients(logits, losses, right, targets, weights, bias, softcap, has_gradients):
    """Write the cross-entropy losses (N,) of logits (N, V) f32, and if not None `right` (N,), 1 where the target's
    logit is largest; with `has_gradients`, write gradients over the logits and return them."""
    rows, columns = logits.shape
    optional_inputs = (logits if t is None else t for t in (bias, losses, right, targets, weights))
    flags = {"BIASED": bias is not None, "CAPPED": softcap > 0}
    flags |= {"RIGHT": right is not None, "BACK": has_gradients}
    options = flags | {"BLOCK": min(BLOCK, power_of_two(columns)), "num_warps": 8}
    launch(_row, (rows,), logits, *optional_inputs, columns, softcap, **options)
    return logits if has_gradients else None
