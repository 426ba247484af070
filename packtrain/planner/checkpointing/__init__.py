"""Activation checkpointing: what to keep of the forward pass, for least extra time within a number of bytes."""

from packtrain.planner.checkpointing.chain import Chain, Found, spacing
from packtrain.planner.checkpointing.recompute_choice import (
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
