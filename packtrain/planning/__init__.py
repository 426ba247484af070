"""From a placed graph to offsets: lifetimes, the Plan, and a verifier that replays it. `packing` finds the offsets."""

from packtrain.planning.order import least_order
from packtrain.planning.plan import Arena, Buffer, Place, Plan, make_plan, size_text
from packtrain.planning.verify import PlanError, verify

__all__ = [
    "Arena", "Buffer", "Place", "Plan", "PlanError", "least_order", "make_plan", "size_text",
    "verify",
]  # fmt: skip
