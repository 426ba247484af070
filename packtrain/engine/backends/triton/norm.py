"""RMS norm: a program for each row; the weight's gradient is summed by groups of rows."""

import torch
import triton
import triton.language as tl

from packtrain.engine.backends.triton import launch, power_of_two

# most partial sums of the weight's gradient: as many on every GPU, so that bits are equal
MAX_GROUPS = 256


@triton.jit
def _rms_norm_row(y, x, w, num_columns, eps, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = offsets < num_columns
    x_row = tl.load(x + row * num_columns + offsets, mask=mask, other=0.0)
    r = 1 / tl.sqrt(tl.sum(x_row * x_row) / num_columns + eps)
    u = x_row * r
    if WEIGHTED:
        u *= tl.load(w + offsets, mask=mask, other=0.0)
    tl.store(y + row * num_columns + offsets, u, mask=mask)


@triton.jit
def _rms_norm_rows_back(
    dx, partial_sums, dy, x, w, acc, num_rows, num_columns, eps,
    TO_X: tl.constexpr, TO_W: tl.constexpr, WEIGHTED: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx (if TO_X) and sums for dw (if TO_W) of a group of rows; ADDED: dx += acc, WEIGHTED: with weights w."""
    group, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = at < num_columns
    factor = (
        tl.load(w + at, mask=mask, other=0.0) if WEIGHTED else tl.full((BLOCK,), 1.0, tl.float32)
    )
    w_grad = tl.zeros((BLOCK,), tl.float32)
    for row in range(group, num_rows, tl.num_programs(0)):
        row_offset = row * num_columns
        x_row = tl.load(x + row_offset + at, mask=mask, other=0.0)
        dy_row = tl.load(dy + row_offset + at, mask=mask, other=0.0)
        r = 1 / tl.sqrt(tl.sum(x_row * x_row) / num_columns + eps)
        u, g = x_row * r, dy_row * factor
        w_grad += dy_row * u
        if TO_X:
            d = (g - u * (tl.sum(g * u) / num_columns)) * r
            if ADDED:
                d += tl.load(acc + row_offset + at, mask=mask, other=0.0)
            tl.store(dx + row_offset + at, d, mask=mask)
    if TO_W:
        tl.store(partial_sums + group * num_columns + at, w_grad, mask=mask)


def _num_warps(block):
    return min(max(block // 256, 1), 16)


def rms_norm(y, x, w, *, eps):
    num_columns = x.shape[-1]
    block = power_of_two(num_columns)
    kernel_args = y, x, x if w is None else w, num_columns, eps
    num_rows = x.numel() // max(num_columns, 1)
    options = {"WEIGHTED": w is not None, "BLOCK": block, "num_warps": _num_warps(block)}
    launch(_rms_norm_row, (num_rows,), *kernel_args, **options)


def rms_norm_back(out, dy, x, w, acc, *, eps):
    dx, dw = out
    num_columns = x.shape[-1]
    num_rows = x.numel() // max(num_columns, 1)
    block, num_groups = power_of_two(num_columns), min(num_rows, MAX_GROUPS)
    partial_sums = x.new_empty((num_groups, num_columns)) if dw is not None else x
    kernel_args = (x if t is None else t for t in (dx, partial_sums, dy, x, w, acc))
    flags = zip(("TO_X", "TO_W", "WEIGHTED", "ADDED"), (dx, dw, w, acc), strict=True)
    options = {flag: t is not None for flag, t in flags}
    options |= {"BLOCK": block, "num_warps": _num_warps(block)}
    launch(_rms_norm_rows_back, (num_groups,), *kernel_args, num_rows, num_columns, eps, **options)
    if dw is not None:
        torch.sum(partial_sums, 0, out=dw)
