"""Activation checkpointing: what to keep of the forward pass, for least extra time within a number of bytes."""

from packtrain.recompute.chain import Chain, Found, spacing
from packtrain.recompute.choice import (
    ALIGNMENT,
    ALWAYS,
    AWAY,
    MAYBE,
    NEVER,
    Built,
    Choice,
    aligned,
    keep_all,
    spaced,
    uniform,
)

__all__ = [
    "ALIGNMENT", "ALWAYS", "AWAY", "MAYBE", "NEVER", "Built", "Chain", "Choice", "Found", "aligned", "keep_all",
    "spaced", "spacing", "uniform",
]  # fmt: skip
