"""Activation checkpointing: which forward values to save, recompute or offload, for least added time within a limit."""

from packtrain.planner.checkpointing.chain import BlockChain, PlannedChoice, checkpoint_spacing
from packtrain.planner.checkpointing.saved_values import (
    ALIGNMENT, ALWAYS_OFFLOAD, MAY_OFFLOAD, NEVER_OFFLOAD, OFFLOADED, BuiltGraph, RecomputeChoice, aligned_nbytes,
    spaced_choice, uniform_choice,
)  # fmt: skip
