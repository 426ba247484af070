"""Mamba-2: a convolution, a scan of states, and a gate. Dao & Gu 2024, arXiv 2405.21060."""

from packtrain import ops
from packtrain.models.arch.architecture import BARE, SCAN_IN
from packtrain.models.part import Block, Mixer
from packtrain.tensor import Tensor


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
