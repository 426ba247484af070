"""The rows of the output head: log-sum-exp on the fly, and gradients of the logits where the logits were."""

import triton
import triton.language as tl

from packtrain.engine.backends.triton import launch, power_of_two

BLOCK = 4096


@triton.jit
def _logit(logits, bias, at, columns, softcap, BIASED: tl.constexpr, CAPPED: tl.constexpr):
    """Capped and uncapped, -inf beyond the last."""
    mask = at < columns
    z = tl.load(logits + at, mask=mask, other=-float("inf"))
    if BIASED:
        z += tl.load(bias + at, mask=mask, other=0.0)
    uncapped = z
    if CAPPED:
        z = tl.where(mask, softcap * (1 - 2 / (tl.exp(2 * z / softcap) + 1)), -float("inf"))
    return z, uncapped


@triton.jit
def _turn(
    logits, bias, target, weight, lse, columns, softcap,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Products of a row become their gradients."""
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z, _ = _logit(logits, bias, at, columns, softcap, BIASED, CAPPED)
        d = (tl.exp(z - lse) - (at == target).to(tl.float32)) * weight
        if CAPPED:
            d *= 1 - (z / softcap) * (z / softcap)
        tl.store(logits + at, d, mask=at < columns)


@triton.jit
def _row(
    logits, bias, losses, right, targets, weights, columns, softcap,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, RIGHT: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    target = tl.load(targets + row)
    at, inf = tl.arange(0, BLOCK), float("inf")
    top, total = tl.full((BLOCK,), -inf, tl.float32), tl.zeros((BLOCK,), tl.float32)
    max_logits = tl.full((BLOCK,), -inf, tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        z, raw_logits = _logit(logits, bias, start + at, columns, softcap, BIASED, CAPPED)
        higher = tl.maximum(top, z)
        safe = tl.where(higher == -inf, 0.0, higher)
        total = total * tl.exp(top - safe) + tl.exp(z - safe)
        top = higher
        max_logits = tl.maximum(max_logits, raw_logits)
        bad |= (raw_logits != raw_logits).to(tl.int32)
    highest = tl.max(top)
    safe = tl.where(highest == -inf, 0.0, highest)
    lse = tl.log(tl.sum(total * tl.exp(top - safe))) + safe
    lse = tl.where(tl.max(bad) > 0, float("nan"), lse)
    aim = tl.maximum(target, 0) + tl.zeros((1,), tl.int32)
    aimed, uncapped = _logit(logits, bias, aim, columns, softcap, BIASED, CAPPED)
    tl.store(losses + row, tl.where(target < 0, 0.0, lse - tl.sum(aimed)))
    if RIGHT:
        largest = (tl.sum(uncapped) >= tl.max(max_logits)) & (tl.max(bad) == 0)
        tl.store(right + row, (largest & (target >= 0)).to(tl.float32))
    if BACK:
        tl.debug_barrier()
        weight = tl.where(target < 0, 0.0, tl.load(weights + row))
        _turn(logits, bias, target, weight, lse, columns, softcap, BIASED, CAPPED, BLOCK)


def rated(logits, losses, right, targets, weights, bias, softcap, back):
    """Losses (N,) of products (N, V) f32, and where asked which are right (N,); with `back`, gradients of the products
    take their place, and are returned."""
    rows, columns = logits.shape
    optional_inputs = (logits if t is None else t for t in (bias, losses, right, targets, weights))
    flags = {
        "BIASED": bias is not None,
        "CAPPED": softcap > 0,
        "RIGHT": right is not None,
        "BACK": back,
    }
    block = min(BLOCK, power_of_two(columns))
    launch(
        _row, (rows,), logits, *optional_inputs, columns, softcap, **flags, BLOCK=block, num_warps=8
    )
    return logits if back else None
