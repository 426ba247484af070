"""Keeps to `--memory` and the limits of devices: finds the fastest plan that fits, or a refusal with advice.

Returns Plans for a requested StepShape and a Request. The choice changes results only by the
order of floating-point additions, which is printed. The search runs in a child, so that its memory is freed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from packtrain.common.child_process import ask
from packtrain.common.memory import private_nbytes, settle
from packtrain.engine.backends import HOST
from packtrain.engine.memory_plan import size_text
from packtrain.planner.plan_request import Request
from packtrain.planner.plan_search import search, smallest, unlimited
from packtrain.planner.plan_table import choices, rows
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import Plans

Say = Callable[[str], None]
OWNERS = 10
MIB = 1 << 20
MARGIN_NBYTES = 1 << 20  # by how much the memory of kernels differs between processes
ASIDE_NBYTES = 1 << 21  # by how much estimate and process differ, so that a second search is rare
SPARE_NBYTES = 4 << 20  # by how much a process differs from the next one
REUSED_NBYTES = 4 << 20  # most free memory that this process uses again when it loads kernels
SEARCH_NBYTES = 40 << 20  # of a searching child that loads kernels; 27 MiB before it searches
BLOCK_NBYTES = 900_000  # in addition for each block
MISS_NBYTES = 1 << 19  # by which a search leaves this process larger, at most
ROUNDS = 3  # searches, each with lower limits, until the result fits the process


def planned(shape: StepShape, request: Request, report: Say = print) -> Plans:
    """Plans within the limits, or a refusal with advice. The search runs before the kernels are loaded."""
    kernels, host_limit, change = request.kernels, request.limits.get(HOST, math.inf), ""
    if not request.limits:
        if request.runs:
            kernels.load()
        plans = planned_here(unlimited(shape, request), request)
    else:
        direct = None  # plans without a search, where that would need most
        if private_nbytes() + searching_nbytes(shape) > host_limit:
            direct = planned_here(unlimited(shape, request), request)
        if direct and held(direct, HOST) <= host_limit and not full(direct, request.limits, ""):
            plans = direct
        else:
            plans, change = searched(shape, request, report)
            peak_nbytes = min(plans.searching, held(direct, HOST)) if direct else plans.searching
            plans = replace(plans, searching=peak_nbytes)
        del direct
        uncertain_nbytes = kernels.unsure + REUSED_NBYTES * request.runs
        if plans.needed_nbytes - uncertain_nbytes <= host_limit and (
            request.runs or kernels.unsure
        ):
            kernels.load()
            plans = in_process(plans, plans.searching)
            replan_nbytes = private_nbytes() + searching_nbytes(shape)
            if plans.needed_nbytes > host_limit >= replan_nbytes:  # they took more than expected
                updated_request = replace(request, baseline=plans.baseline)
                del plans
                plans, change = searched(shape, updated_request, report)
    refused = full(plans, request.limits, change)
    if refused is None and plans.needed_nbytes > host_limit:
        refused = refusal(plans, change or "a little more would do", int(host_limit))
    return plans if refused is None else replace(plans, refusal=refused)


def followed(shape: StepShape, request: Request) -> Plans:
    """Plans of a shape that was decided elsewhere, or a refusal."""
    request.kernels.load()
    plans, host_limit = planned_here(shape, request), request.limits.get(HOST)
    if host_limit is None or plans.needed_nbytes <= host_limit:
        return plans
    return replace(plans, refusal=refusal(plans, "a little more would do", host_limit))


def searched(shape: StepShape, request: Request, report: Say) -> tuple[Plans, str]:
    """Search plans within the limits; if none fit, also returns a change that would."""
    limits = dict(request.limits)
    if HOST in limits:
        limits |= {s: limits.get(s, limits[HOST]) for s in request.target.aside}
    shown = limits.get(request.target.space, min(limits.values()))

    @cache
    def late() -> None:
        report(f"planning a run that fits into {size_text(shown)} …")

    searching, reserves = 0, {space: ASIDE_NBYTES * (space == HOST) for space in limits}
    for _ in range(ROUNDS):
        searching = max(searching, private_nbytes() + searching_nbytes(shape))
        adjusted_limits = {space: limit - reserves[space] for space, limit in limits.items()}
        answer = ask(late, search, shape, replace(request, limits=adjusted_limits))
        plans = planned_here(answer.shape, request, searching)
        excess = {space: max(held(plans, space) - limit, 0) for space, limit in limits.items()}
        excess |= dict.fromkeys(request.target.aside & excess.keys(), excess.get(HOST, 0))
        if not answer.fits or not any(excess.values()):
            return plans, answer.change
        # twice what was missed: each search leaves the process a little larger
        reserves = {
            space: nbytes + 2 * excess[space] + MISS_NBYTES * (excess[space] > 0)
            for space, nbytes in reserves.items()
        }
        del answer, plans  # the next ones take their place: a process that had both would be larger
        settle()
    smallest_shape = ask(late, smallest, shape, request)
    return planned_here(smallest_shape, request, searching), ""


def held(plans: Plans, space: str) -> int:
    """Bytes of a space, with a margin for kernels if it is the process."""
    return plans.total_nbytes + MARGIN_NBYTES if space == HOST else plans.nbytes_in(space)


def planned_here(shape: StepShape, request: Request, searching: int = 0) -> Plans:
    """Plans computed in this process. If packing loads kernels, loads the others, too."""
    plans = request.plans(shape)
    request.kernels.load_rest()
    return in_process(plans, searching, request.kernels.to_come)


def in_process(plans: Plans, searching: int = 0, extra_nbytes: int = 0) -> Plans:
    """The plans in this process as it is now, which will grow by `extra_nbytes` bytes before the run."""
    settle()
    return replace(plans, baseline=private_nbytes() + extra_nbytes, searching=searching)


def searching_nbytes(shape: StepShape) -> int:
    """Bytes of a searching child."""
    return SEARCH_NBYTES + BLOCK_NBYTES * shape.config.block_count


def minimum(shape: StepShape, request: Request, report: Say) -> int:
    """The smallest budget that fits."""

    def late() -> None:
        report("searching the smallest plan …")

    return enough(planned_here(ask(late, smallest, shape, request), request))


def enough(plans: Plans) -> int:
    """A budget that is enough for these plans in any process."""
    return plans.needed_nbytes + SPARE_NBYTES


# ---- refusal


def full(plans: Plans, limits: Mapping[str, int], change: str) -> str | None:
    """A refusal if a memory other than the process's own would exceed its capacity."""
    for space in plans.spaces:
        nbytes = plans.nbytes_in(space)
        if nbytes > limits.get(space, nbytes):
            has = size_text(limits[space])
            lines = [
                f"this does not fit into the memory of {space}: it has {has}, {size_text(nbytes)} are needed;"
                f" the smallest --device-memory that would do is {mib(nbytes)}",
                f"  {_described(plans)}",
                *rows(plans),
                *_owners(plans, space),
            ]
            return "\n".join([*lines, f"  {change or 'a little more would do'}"])
    return None


def refusal(plans: Plans, change: str, limit: int) -> str:
    """The message: the limit, the smallest one that fits, the largest buffers at its peak, and the cheapest change."""
    min_nbytes = enough(plans)
    lines = [
        f"this does not fit into {size_text(limit)}; the smallest --memory that would do is {mib(min_nbytes)}, or up to"
        f" {size_text(SPARE_NBYTES)} less",
        f"  {_described(plans)}",
        *rows(plans, -(-min_nbytes // MIB) * MIB - plans.total_nbytes),
        *_owners(plans, HOST),
    ]
    return "\n".join([*lines, f"  {change}"])


def _owners(plans: Plans, space: str) -> list[str]:
    """The largest buffers at the peak of an arena."""
    plan = plans.largest_in(space)
    if not plan.arena(space).nbytes:
        return []
    return [
        f"  the peak of its arena, {size_text(plan.arena(space).nbytes)}, belongs to",
        *(
            f"    {size_text(b.nbytes):>10}  {b.name}  ({b.op}, {b.category})"
            for b in plan.peak(space)[:OWNERS]
        ),
    ]


def mib(nbytes: int) -> str:
    """A number of bytes in the format of --memory, rounded up."""
    return f"{-(-nbytes // MIB)}MiB"


def _described(plans: Plans) -> str:
    shape = plans.shape
    chosen = "".join(f"; {choice}" for choice in choices(plans))
    return f"that is with {shape.micros} × {shape.rows} × {shape.time} tokens a step{chosen}"
