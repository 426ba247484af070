"""Mamba-2: a convolution, a scan of states, and a gate. Dao & Gu 2024, arXiv 2405.21060.

Gated delta nets replace the scan by the gated delta rule. Yang et al. 2024, arXiv 2412.06464."""

from packtrain.engine import ops
from packtrain.engine.tensor import Tensor
from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import DELTA_EACH, DELTA_HEADS, DELTA_IN, SCAN_IN
from packtrain.models.block_weights import BlockBuilder, Mixer


def mix_scan(block: BlockBuilder, x: Tensor, mixer: Mixer) -> Tensor:
    """Compute a Mamba-2 scan of x: (..., C) -> (..., inner), all heads' values side by side."""
    gate, x, step = (block.saved(block.linear(name, x)) for name in SCAN_IN)
    scan_sizes, i = block.config.scan, block.block_index
    assert scan_sizes is not None
    y = mixer.convolve_states(i, x, block.weight("ssm_conv1d"))
    if "ssm_conv1d.bias" in block.config.optional:
        y = ops.add(y, block.weight("ssm_conv1d", "bias"))
    y = block.saved(block.named("ssm_conv1d", ops.silu(block.saved(y))))
    delta = block.saved(ops.softplus(block.saved(ops.add(step, block.weight("ssm_dt", "bias")))))
    a, skip = (
        ops.reshape(block.w[f"blk.{i}.{name}"], shape=(scan_sizes.heads,))
        for name in arch.UNSUFFIXED_SCAN_WEIGHTS
    )
    y = block.saved(block.named("ssm_scan", mixer.scan(i, y, delta, a, skip)))
    y = block.named("ssm_gated", ops.swiglu(gate, y))
    if block.config.has_weight("ssm_norm"):
        group_shape = (*y.shape[:-1], scan_sizes.groups, scan_sizes.inner // scan_sizes.groups)
        if block.weight("ssm_norm").shape == group_shape[-2:]:
            y = ops.reshape(y, shape=group_shape)
        y = block.norm("ssm_norm", block.saved(y))
        y = ops.reshape(y, shape=(*x.shape[:-1], scan_sizes.inner))
    return block.saved(y)


def mix_delta_rule(block: BlockBuilder, x: Tensor, mixer: Mixer) -> Tensor:
    """Compute a gated delta net of x: (..., C) -> (..., inner), all heads' values side by side."""
    scan_sizes, i, leading_shape = block.config.scan, block.block_index, x.shape[:-1]
    assert scan_sizes is not None
    beta, time_step = _head_betas_and_steps(block, x)
    x, gate = (block.saved(block.linear(name, x)) for name in DELTA_IN)
    y = mixer.convolve_states(i, x, block.weight("ssm_conv1d"))
    y = block.saved(block.named("ssm_conv1d", ops.silu(block.saved(y))))
    time_step = ops.softplus(block.saved(ops.add(time_step, block.weight("ssm_dt", "bias"))))
    a = block.w[f"blk.{i}.{arch.UNSUFFIXED_SCAN_WEIGHTS[0]}"]
    decay = block.saved(ops.mul(block.saved(time_step), a))
    y = block.named("delta_rule", mixer.delta_rule(i, y, decay, block.saved(ops.sigmoid(beta))))
    head_shape = (*leading_shape, scan_sizes.heads, scan_sizes.inner // scan_sizes.heads)
    y = block.saved(block.norm("ssm_norm", ops.reshape(block.saved(y), shape=head_shape)))
    y = ops.reshape(y, shape=(*leading_shape, scan_sizes.inner))
    return block.saved(block.named("ssm_gated", ops.swiglu(gate, y)))


def _head_betas_and_steps(block: BlockBuilder, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (betas, decay steps) of the gated delta rule, both (..., H), before their activations; some models store a
    group's rows of both side by side in one matrix."""
    if block.config.traits.delta == "tiled":
        beta, time_step = (block.saved(block.linear(name, x)) for name in DELTA_EACH)
        return beta, time_step
    assert block.config.scan is not None
    heads, groups = block.config.scan.heads, block.config.scan.groups
    y = ops.reshape(block.linear(DELTA_HEADS, x), shape=(*x.shape[:-1], groups, 2, heads // groups))
    halves = (ops.narrow(y, axis=len(y.shape) - 2, start=n, length=1) for n in (0, 1))
    beta, time_step = (
        block.saved(ops.reshape(ops.cont(half), shape=(*x.shape[:-1], heads))) for half in halves
    )
    return beta, time_step
