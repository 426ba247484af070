"""Activation checkpointing: what to keep of the forward pass, for least extra time within a number of bytes."""

from packtrain.recompute.chain import Chain, Found, Like, spacing
from packtrain.recompute.choice import ALIGNMENT, Built, Choice, aligned, keep_all, spaced, uniform

__all__ = [
    "ALIGNMENT", "Built", "Chain", "Choice", "Found", "Like", "aligned", "keep_all", "spaced", "spacing", "uniform",
]  # fmt: skip
