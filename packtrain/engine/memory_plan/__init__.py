"""From a placed graph to offsets: lifetimes, the Plan, and a verifier that replays a Plan. `packing` finds offsets."""

from packtrain.engine.memory_plan.memory_order import least_order
from packtrain.engine.memory_plan.memory_plan import (
    Arena, ArenaKey, Buffer, Plan, make_plan, size_text,
)  # fmt: skip
from packtrain.engine.memory_plan.plan_verifier import PlanError, verify
