"""Root-mean-square normalisation: a program for each row, whose gradient for the weight is summed by groups of rows."""

import torch
import triton
import triton.language as tl

from packtrain.engine.backends.triton import launch, power_of_two

GROUPS = 256  # sums of the weight's gradient, which are added up last; the same on every GPU, so that bits are


@triton.jit
def _forward(y, x, w, columns, eps, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = at < columns
    value = tl.load(x + row * columns + at, mask=mask, other=0.0)
    r = 1 / tl.sqrt(tl.sum(value * value) / columns + eps)
    u = value * r
    if WEIGHTED:
        u *= tl.load(w + at, mask=mask, other=0.0)
    tl.store(y + row * columns + at, u, mask=mask)


@triton.jit
def _backward(
    dx, parts, dy, x, w, acc, rows, columns, eps,
    TO_X: tl.constexpr, TO_W: tl.constexpr, WEIGHTED: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = at < columns
    factor = (
        tl.load(w + at, mask=mask, other=0.0) if WEIGHTED else tl.full((BLOCK,), 1.0, tl.float32)
    )
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(group, rows, tl.num_programs(0)):
        begin = row * columns
        value = tl.load(x + begin + at, mask=mask, other=0.0)
        slope = tl.load(dy + begin + at, mask=mask, other=0.0)
        r = 1 / tl.sqrt(tl.sum(value * value) / columns + eps)
        u, g = value * r, slope * factor
        total += slope * u
        if TO_X:
            d = (g - u * (tl.sum(g * u) / columns)) * r
            if ADDED:
                d += tl.load(acc + begin + at, mask=mask, other=0.0)
            tl.store(dx + begin + at, d, mask=mask)
    if TO_W:
        tl.store(parts + group * columns + at, total, mask=mask)


def _warps(block):
    return min(max(block // 256, 1), 16)


def rms_norm(y, x, w, *, eps):
    columns = x.shape[-1]
    block = power_of_two(columns)
    kernel_args = y, x, x if w is None else w, columns, eps
    rows = x.numel() // max(columns, 1)
    launch(
        _forward,
        (rows,),
        *kernel_args,
        WEIGHTED=w is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )


def rms_norm_back(out, dy, x, w, acc, *, eps):
    dx, dw = out
    columns = x.shape[-1]
    rows = x.numel() // max(columns, 1)
    block, groups = power_of_two(columns), min(rows, GROUPS)
    parts = x.new_empty((groups, columns)) if dw is not None else x
    kernel_args = (x if t is None else t for t in (dx, parts, dy, x, w, acc))
    flags = {
        "TO_X": dx is not None,
        "TO_W": dw is not None,
        "WEIGHTED": w is not None,
        "ADDED": acc is not None,
    }
    options = flags | {"BLOCK": block, "num_warps": _warps(block)}
    launch(_backward, (groups,), *kernel_args, rows, columns, eps, **options)
    if dw is not None:
        torch.sum(parts, 0, out=dw)
