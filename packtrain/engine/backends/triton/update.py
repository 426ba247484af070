"""An optimizer's step, and the sum of squares for clipping."""

import torch
import triton
import triton.language as tl

from packtrain.engine.backends.triton import blocks, launch, power_of_two

BLOCK = 1024
PARTS = 512  # most partial sums: as many on every GPU, so that bits are equal


@triton.jit
def _adamw_block(w, g, m, v, hyper, gate, n, DECAY: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(gate) + tl.zeros((BLOCK,), tl.float32)
    mask = (at < n) & (factor - factor == 0)
    lr, beta1, beta2 = tl.load(hyper), tl.load(hyper + 1), tl.load(hyper + 2)
    eps, decay = tl.load(hyper + 3), tl.load(hyper + 4)
    c1, c2 = tl.load(hyper + 5), tl.load(hyper + 6)
    scaled_grad = tl.load(g + at, mask=mask, other=0.0) * factor
    first = beta1 * tl.load(m + at, mask=mask, other=0.0) + (1 - beta1) * scaled_grad
    second = beta2 * tl.load(v + at, mask=mask, other=0.0) + (1 - beta2) * scaled_grad * scaled_grad
    weight_value = tl.load(w + at, mask=mask, other=0.0)
    if DECAY:
        weight_value *= 1 - lr * decay
    tl.store(m + at, first, mask=mask)
    tl.store(v + at, second, mask=mask)
    tl.store(w + at, weight_value - lr * (first / c1) / (tl.sqrt(second / c2) + eps), mask=mask)


@triton.jit
def _partial_squares(partial_sums, x, n, BLOCK: tl.constexpr):
    """Store this program's share of the sum of x**2, in f64: of every k-th block, for k programs."""
    program, block_sums = tl.program_id(0).to(tl.int64), tl.zeros((BLOCK,), tl.float64)
    for block_start in range(program * BLOCK, n, tl.num_programs(0) * BLOCK):
        offsets = block_start + tl.arange(0, BLOCK)
        value = tl.load(x + offsets, mask=offsets < n, other=0.0).to(tl.float64)
        block_sums += value * value
    tl.store(partial_sums + program, tl.sum(block_sums))


@triton.jit
def _sum_partials(y, partial_sums, acc, num_partials, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    """y = sum of num_partials partial sums of squares, plus acc if ADDED."""
    offsets = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(partial_sums + offsets, mask=offsets < num_partials, other=0.0))
    if ADDED:
        total += tl.load(acc).to(tl.float64)
    tl.store(y, total.to(tl.float32))


def adamw(w, g, m, v, hyper, gate, decay):
    """Update w, m, v (f32) in place as opt_step_adamw, by its `hyper`, decaying w if `decay`, if `gate` is finite."""
    n = w.numel()
    launch(_adamw_block, (blocks(n, BLOCK),), w, g, m, v, hyper, gate, n, DECAY=decay, BLOCK=BLOCK)


def sum_squares(y, x, acc):
    n = x.numel()
    num_partials = min(max(blocks(n, BLOCK), 1), PARTS)
    partial_sums = torch.empty(num_partials, dtype=torch.float64, device=x.device)
    launch(_partial_squares, (num_partials,), partial_sums, x, n, BLOCK=BLOCK)
    options = {"ADDED": acc is not None, "BLOCK": power_of_two(num_partials)}
    launch(_sum_partials, (1,), y, partial_sums, x if acc is None else acc, num_partials, **options)
