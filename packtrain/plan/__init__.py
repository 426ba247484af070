"""From a placed graph to offsets: lifetimes, packing, the Plan, and a verifier that replays it."""

from packtrain.plan.pack import best_fit, lower_bound, pack
from packtrain.plan.plan import Arena, Buffer, Plan, make_plan, size_text
from packtrain.plan.verify import PlanError, verify

__all__ = [
    "Arena", "Buffer", "Plan", "PlanError", "best_fit", "lower_bound", "make_plan", "pack", "size_text", "verify",
]  # fmt: skip
