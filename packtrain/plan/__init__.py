"""From a placed graph to offsets: lifetimes, packing, the Plan, and a verifier that replays it.

`pack` and `packings` serve any list of (start, end, size), `clash` checks any offsets, `best_fit` is ggml's way.
"""

from packtrain.plan.online import Allocator, NoSpace, best_fit
from packtrain.plan.pack import Packing, clash, lower_bound, pack, packings
from packtrain.plan.plan import Arena, Buffer, Plan, make_plan, size_text
from packtrain.plan.verify import PlanError, verify

__all__ = [
    "Allocator", "Arena", "Buffer", "NoSpace", "Packing", "Plan", "PlanError", "best_fit", "clash", "lower_bound",
    "make_plan", "pack", "packings", "size_text", "verify",
]  # fmt: skip
