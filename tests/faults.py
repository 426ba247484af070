"""Planted faults: what one is, the checks they are caught by, and how they are planted.

A fault is a function that patches packtrain for as long as the patch lasts. The lists are faults_kernels,
faults_gradients and faults_plans; importing one fills FAULTS.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from pytest import MonkeyPatch

from packtrain.engine.tensor import OPS
from tests import bit_checks, checks, plan_checks

Check = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Fault:
    """`plant` makes the mistake; then each check in `caught_by` must raise `raised`."""

    area: str
    caught_by: tuple[Check, ...]
    raised: type[Exception]
    plant: Callable[[MonkeyPatch], None]

    @property
    def name(self) -> str:
        return self.plant.__name__.replace("_", " ")


FAULTS: list[Fault] = []


def fault(
    area: str, *caught_by: Check, raised: type[Exception] = AssertionError
) -> Callable[[Callable[[MonkeyPatch], None]], None]:
    """Put the decorated function on the list."""

    def put(plant: Callable[[MonkeyPatch], None]) -> None:
        FAULTS.append(Fault(area, caught_by, raised, plant))

    return put


# ---- the checks that faults are caught by ----------------------------------------------------------------------


@cache
def value_check(name: str) -> Check:
    return partial(checks.check_value, name)


@cache
def gradient_check(name: str) -> Check:
    return partial(checks.check_gradient, name)


@cache
def inplace_check(name: str) -> Check:
    return partial(bit_checks.check_inplace, name)


def seeds_check(check: Callable[[int], None]) -> Check:
    """A check of random graphs, over the first 60 seeds."""

    def each() -> None:
        for seed in range(60):
            check(seed)

    return each


case_check = seeds_check(plan_checks.check_case)
verified_check = seeds_check(plan_checks.check_verified)
sequences_check = partial(plan_checks.check_sequences, range(6))
poisoned_check = seeds_check(plan_checks.check_poisoned)
recompute_check = seeds_check(plan_checks.check_recomputed)
slope_check = seeds_check(plan_checks.check_slope)
spaces_check = seeds_check(plan_checks.check_spaces)
parts_check = plan_checks.check_parts


# ---- ways to plant ---------------------------------------------------------------------------------------------

Change = Callable[[Callable[..., Any]], Callable[..., Any]]


def replace_kernel(patch: MonkeyPatch, name: str, change: Change) -> None:
    """Another cpu kernel, made from the real one."""
    real = OPS[name].kernels["cpu"]
    patch.setitem(OPS[name].kernels, "cpu", replace(real, run=change(real.run)))


def replace_vjp(patch: MonkeyPatch, name: str, change: Change) -> None:
    patch.setattr(OPS[name], "vjp_rule", change(OPS[name].vjp_rule))  # type: ignore[arg-type]


def wrap_attribute(patch: MonkeyPatch, owner: Any, name: str, change: Change) -> None:
    """Another function or method, made from the real one."""
    patch.setattr(owner, name, change(getattr(owner, name)))
