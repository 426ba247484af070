"""Keeps to `--memory` and the limits of devices: finds the fastest plan that fits, or a refusal with advice.

plan_within_limits returns TrainingPlans for a StepShape and a PlanRequest. The search changes results only by the
order of floating-point additions, which is printed. It runs in a child process, so that its memory is freed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from packtrain.common.child_process import run_in_child
from packtrain.common.memory import private_nbytes, release_memory
from packtrain.engine.backends import HOST
from packtrain.engine.memory_plan import size_text
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import find_fastest_shape, smallest, unlimited
from packtrain.planner.plan_table import choice_texts, table_lines
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import TrainingPlans

ReportFunction = Callable[[str], None]
NUM_PEAK_BUFFERS = 10
MIB = 1 << 20
KERNEL_MARGIN_NBYTES = 1 << 20  # by how much the memory of kernels differs between processes
# By how much estimate and process differ, so that a second search is rare. With 1.5 MiB, a glm4moe run was refused a
# budget that a refusal had just named; Python's arenas of 1 MiB may be a part of the difference.
ASIDE_NBYTES = 1 << 21
SPARE_NBYTES = 4 << 20  # by how much equal processes differ
REUSABLE_NBYTES = 4 << 20  # most free memory that this process uses again when it loads kernels
SEARCH_CHILD_NBYTES = 40 << 20  # a searching child that loads kernels; 27 MiB before it searches
SEARCH_BLOCK_NBYTES = 900_000  # added to the searching child by each block
SEARCH_GROWTH_NBYTES = 1 << 19  # most bytes by which a search leaves this process larger
MAX_SEARCHES = 3  # searches, each with lower limits, until the result fits the process


def plan_within_limits(
    shape: StepShape, request: PlanRequest, report: ReportFunction = print
) -> TrainingPlans:
    """Return plans within the limits, or the smallest plans with a refusal; searches before the kernels are loaded."""
    kernels, host_limit, change = request.kernels, request.limits.get(HOST, math.inf), ""
    if not request.limits:
        if request.loads_kernels:
            kernels.load()
        plans = plan_in_process(unlimited(shape, request), request)
    else:
        direct = None  # plans without a search, where a search would exceed the limit
        direct_nbytes = math.inf
        if private_nbytes() + search_child_nbytes(shape) > host_limit:
            direct = plan_in_process(unlimited(shape, request), request)
            direct_nbytes = nbytes_with_margin(direct, HOST)
        if direct and direct_nbytes <= host_limit and not full(direct, request.limits, ""):
            plans = direct
        else:
            plans, change = search_plans(shape, request, report)
            plans = replace(plans, search_nbytes=int(min(plans.search_nbytes, direct_nbytes)))
        del direct
        uncertain_nbytes = kernels.uncertain_nbytes + REUSABLE_NBYTES * request.loads_kernels
        may_load = request.loads_kernels or kernels.uncertain_nbytes
        if may_load and plans.needed_nbytes - uncertain_nbytes <= host_limit:
            kernels.load()
            plans = with_process_baseline(plans, plans.search_nbytes)
            replan_nbytes = private_nbytes() + search_child_nbytes(shape)
            if plans.needed_nbytes > host_limit >= replan_nbytes:  # kernels took more than expected
                updated_request = replace(request, baseline_nbytes=plans.baseline_nbytes)
                del plans
                plans, change = search_plans(shape, updated_request, report)
    refusal_text = full(plans, request.limits, change)
    if refusal_text is None and plans.needed_nbytes > host_limit:
        refusal_text = host_refusal(plans, change or "a little more would do", int(host_limit))
    return plans if refusal_text is None else replace(plans, refusal=refusal_text)


def followed(shape: StepShape, request: PlanRequest) -> TrainingPlans:
    """Return plans of a shape that another rank has decided, with a refusal if they exceed this process's limit."""
    request.kernels.load()
    plans, host_limit = plan_in_process(shape, request), request.limits.get(HOST)
    if host_limit is None or plans.needed_nbytes <= host_limit:
        return plans
    return replace(plans, refusal=host_refusal(plans, "a little more would do", host_limit))


def search_plans(
    shape: StepShape, request: PlanRequest, report: ReportFunction
) -> tuple[TrainingPlans, str]:
    """Search plans within the limits in a child; also return a change of settings that would fit if none do."""
    limits = dict(request.limits)
    if HOST in limits:
        limits |= {s: limits.get(s, limits[HOST]) for s in request.target.aside}
    shown_limit = limits.get(request.target.space, min(limits.values()))

    @cache
    def announce() -> None:
        report(f"planning a run that fits into {size_text(shown_limit)} …")

    search_nbytes, reserves = 0, {space: ASIDE_NBYTES * (space == HOST) for space in limits}
    for _ in range(MAX_SEARCHES):
        search_nbytes = max(search_nbytes, private_nbytes() + search_child_nbytes(shape))
        reduced = {space: limit - reserves[space] for space, limit in limits.items()}
        answer = run_in_child(announce, find_fastest_shape, shape, replace(request, limits=reduced))
        plans = plan_in_process(answer.shape, request, search_nbytes)
        excess = {s: max(nbytes_with_margin(plans, s) - limit, 0) for s, limit in limits.items()}
        excess |= dict.fromkeys(request.target.aside & excess.keys(), excess.get(HOST, 0))
        if not answer.is_within_limits or not any(excess.values()):
            return plans, answer.suggested_change
        # reserve twice the excess: each search leaves the process a little larger
        for space, nbytes in excess.items():
            reserves[space] += 2 * nbytes + SEARCH_GROWTH_NBYTES * (nbytes > 0)
        del answer, plans  # the process would grow if the next plans were made beside these
        release_memory()
    smallest_shape = run_in_child(announce, smallest, shape, request)
    return plan_in_process(smallest_shape, request, search_nbytes), ""


def nbytes_with_margin(plans: TrainingPlans, space: str) -> int:
    """Return the bytes of a memory space, with a margin for kernels if the space is the process's own."""
    return plans.total_nbytes + KERNEL_MARGIN_NBYTES if space == HOST else plans.nbytes_in(space)


def plan_in_process(shape: StepShape, request: PlanRequest, search: int = 0) -> TrainingPlans:
    """Make plans in this process; if packing loads some kernels, load the others, too."""
    plans = request.make_plans(shape)
    request.kernels.load_remaining()
    return with_process_baseline(plans, search, request.kernels.pending_nbytes)


def with_process_baseline(plans: TrainingPlans, search: int = 0, extra: int = 0) -> TrainingPlans:
    """Return the plans with the memory of this process now, plus `extra` that it will take before the run."""
    release_memory()
    return replace(plans, baseline_nbytes=private_nbytes() + extra, search_nbytes=search)


def search_child_nbytes(shape: StepShape) -> int:
    return SEARCH_CHILD_NBYTES + SEARCH_BLOCK_NBYTES * shape.config.block_count


def minimum_budget(shape: StepShape, request: PlanRequest, report: ReportFunction) -> int:
    """Return the smallest budget, in bytes, within which a plan fits."""

    def report_start() -> None:
        report("searching the smallest plan …")

    return enough(plan_in_process(run_in_child(report_start, smallest, shape, request), request))


def enough(plans: TrainingPlans) -> int:
    """Return a budget that is enough for these plans in any process."""
    return plans.needed_nbytes + SPARE_NBYTES


# ---- refusal


def full(plans: TrainingPlans, limits: Mapping[str, int], suggested_change: str) -> str | None:
    """Return a refusal if a memory space other than the process's own would exceed its limit, else None."""
    for space in plans.device_spaces:
        nbytes = plans.nbytes_in(space)
        if nbytes > limits.get(space, nbytes):
            capacity_text = size_text(limits[space])
            lines = [
                f"this does not fit into the memory of {space}: it has {capacity_text}, {size_text(nbytes)} are needed;"
                f" the smallest --device-memory that would do is {mib(nbytes)}",
                f"  {_plan_summary(plans)}",
                *table_lines(plans),
                *_owners(plans, space),
            ]
            return "\n".join([*lines, f"  {suggested_change or 'a little more would do'}"])
    return None


def host_refusal(plans: TrainingPlans, suggested_change: str, limit: int) -> str:
    """Return the refusal text: the limit, the smallest limit that fits, the largest buffers, the cheapest change."""
    min_nbytes = enough(plans)
    lines = [
        f"this does not fit into {size_text(limit)}; the smallest --memory that would do is {mib(min_nbytes)}, or up to"
        f" {size_text(SPARE_NBYTES)} less",
        f"  {_plan_summary(plans)}",
        *table_lines(plans, -(-min_nbytes // MIB) * MIB - plans.total_nbytes),
        *_owners(plans, HOST),
    ]
    return "\n".join([*lines, f"  {suggested_change}"])


def _owners(plans: TrainingPlans, space: str) -> list[str]:
    """Return lines with the largest buffers at the peak of an arena."""
    plan = plans.largest_plan_in(space)
    if not plan.arena(space).nbytes:
        return []
    return [
        f"  the peak of its arena, {size_text(plan.arena(space).nbytes)}, belongs to",
        *(
            f"    {size_text(b.nbytes):>10}  {b.name}  ({b.op}, {b.category})"
            for b in plan.peak(space)[:NUM_PEAK_BUFFERS]
        ),
    ]


def mib(nbytes: int) -> str:
    """Return a number of bytes in the format of --memory, rounded up to MiB."""
    return f"{-(-nbytes // MIB)}MiB"


def _plan_summary(plans: TrainingPlans) -> str:
    shape = plans.shape
    chosen = "".join(f"; {text}" for text in choice_texts(plans))
    return f"that is with {shape.num_micro_batches} × {shape.micro_batch_size} × {shape.seq_len} tokens a step{chosen}"
