"""Mamba-2: a convolution, a scan of states, and a gate. Dao & Gu 2024, arXiv 2405.21060.

Gated delta nets, likewise, with the gated delta rule. Yang et al. 2024, arXiv 2412.06464.
"""

from packtrain.engine import ops
from packtrain.engine.tensor import Tensor
from packtrain.models.arch.architecture import BARE, DELTA_EACH, DELTA_HEADS, DELTA_IN, SCAN_IN
from packtrain.models.block_weights import Block, Mixer


def mixed(part: Block, x: Tensor, mixer: Mixer) -> Tensor:
    """What a scan gives for x: (..., C) -> (..., inner)."""
    gate, x, step = (part.saved(part.linear(name, x)) for name in SCAN_IN)
    sizes, i = part.config.scan, part.number
    assert sizes is not None
    y = mixer.filter(i, x, part.weight("ssm_conv1d"))
    if "ssm_conv1d.bias" in part.config.optional:
        y = ops.add(y, part.weight("ssm_conv1d", "bias"))
    y = part.saved(part.named("ssm_conv1d", ops.silu(part.saved(y))))
    delta = part.saved(ops.softplus(part.saved(ops.add(step, part.weight("ssm_dt", "bias")))))
    a, skip = (ops.reshape(part.w[f"blk.{i}.{name}"], shape=(sizes.heads,)) for name in BARE)
    y = part.saved(part.named("ssm_scan", mixer.scan(i, y, delta, a, skip)))
    y = part.named("ssm_gated", ops.swiglu(gate, y))
    if part.config.has("ssm_norm"):
        groups = (*y.shape[:-1], sizes.groups, sizes.inner // sizes.groups)
        if part.weight("ssm_norm").shape == groups[-2:]:
            y = ops.reshape(y, shape=groups)
        y = part.norm("ssm_norm", part.saved(y))
        y = ops.reshape(y, shape=(*x.shape[:-1], sizes.inner))
    return part.saved(y)


def ruled(part: Block, x: Tensor, mixer: Mixer) -> Tensor:
    """What a gated delta net gives for x: (..., C) -> (..., inner)."""
    sizes, i, lead = part.config.scan, part.number, x.shape[:-1]
    assert sizes is not None
    beta, step = _of_heads(part, x)
    x, gate = (part.saved(part.linear(name, x)) for name in DELTA_IN)
    y = mixer.filter(i, x, part.weight("ssm_conv1d"))
    y = part.saved(part.named("ssm_conv1d", ops.silu(part.saved(y))))
    step = ops.softplus(part.saved(ops.add(step, part.weight("ssm_dt", "bias"))))
    decay = part.saved(ops.mul(part.saved(step), part.w[f"blk.{i}.{BARE[0]}"]))
    y = part.named("delta_rule", mixer.delta(i, y, decay, part.saved(ops.sigmoid(beta))))
    heads = (*lead, sizes.heads, sizes.inner // sizes.heads)
    y = part.saved(part.norm("ssm_norm", ops.reshape(part.saved(y), shape=heads)))
    y = ops.reshape(y, shape=(*lead, sizes.inner))
    return part.saved(part.named("ssm_gated", ops.swiglu(gate, y)))


def _of_heads(part: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    """Betas and steps (..., H) before their activations; joined, each group has its betas, then its steps."""
    if part.config.traits.delta == "tiled":
        beta, step = (part.saved(part.linear(name, x)) for name in DELTA_EACH)
        return beta, step
    assert part.config.scan is not None
    heads, groups = part.config.scan.heads, part.config.scan.groups
    y = ops.reshape(part.linear(DELTA_HEADS, x), shape=(*x.shape[:-1], groups, 2, heads // groups))
    each = (ops.narrow(y, axis=len(y.shape) - 2, start=n, length=1) for n in (0, 1))
    beta, step = (
        part.saved(ops.reshape(ops.cont(half), shape=(*x.shape[:-1], heads))) for half in each
    )
    return beta, step
