"""Keeps to `--memory` and the limits of devices: finds the fastest plan that fits, or a refusal with advice.

plan_within_limits returns TrainingPlans for a StepShape and a PlanRequest. The search changes results only by the order
of floating-point additions, which is printed. It runs in a child process, so that its memory is freed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

from packtrain import kernels
from packtrain.common.child_process import run_in_child
from packtrain.common.memory import private_nbytes, release_memory
from packtrain.engine.backends import HOST
from packtrain.engine.memory_plan import size_text
from packtrain.planner.choice_cache import choice_key, with_saved_choice
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import find_fastest_shape, smallest, unlimited
from packtrain.planner.plan_table import choice_texts, table_lines
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import TrainingPlans

R = TypeVar("R")
ReportFunction = Callable[[str], None]
NUM_PEAK_BUFFERS = 10
MIB = 1 << 20
KERNEL_MARGIN_NBYTES = 1 << 20  # by how much the memory of kernels differs between processes
# By how much estimate and process differ, so that a second search is rare. With 1.5 MiB, a glm4moe run was refused a
# budget that a refusal had just named; Python's arenas of 1 MiB may be a part of the difference.
ASIDE_NBYTES = 1 << 21
SPARE_NBYTES = 2 << 20  # by how much equal processes differ: 0.7 MiB were measured
CHILD_NBYTES = 28 << 20  # a searching child before it searches, without PyTorch
SEARCH_NBYTES = 12 << 20  # added by a search that loads kernels
SEARCH_BLOCK_NBYTES = 900_000  # added by a search for each block
SEARCH_GROWTH_NBYTES = 1 << 19  # most bytes by which a search leaves this process larger
smallest_shapes = dict[str, StepShape]()  # that this process has searched, by _shape_key
MAX_SEARCHES = 3  # searches, each with lower limits, until the result fits the process


def plan_within_limits(
    shape: StepShape, request: PlanRequest, report: ReportFunction = print
) -> TrainingPlans:
    """Return the plans of the fastest step within `request.limits`; if none fits, the smallest plans with a `refusal`.
    The search runs before kernels are loaded, while this process is small; `report` gets its messages."""
    if not request.limits:
        request.kernels.load()
        return plan_in_process(with_saved_choice(shape, request, unlimited), request)
    host_limit = request.limits.get(HOST, math.inf)
    plans, change = _plan_before_loading(shape, request, report)
    was_within_limit = plans.needed_nbytes <= host_limit
    request.kernels.load()
    plans = with_baseline(plans, plans.search_nbytes)
    replan_nbytes = private_nbytes() + search_child_nbytes(shape, request)
    if was_within_limit and plans.needed_nbytes > host_limit >= replan_nbytes:
        request = replace(request, baseline_nbytes=plans.baseline_nbytes)
        del plans  # kernels took more than expected
        plans, change = search_plans(shape, request, report)
    refusal_text = device_refusal(plans, request.limits, change)
    if refusal_text is None and plans.needed_nbytes > host_limit:
        refusal_text = host_refusal(plans, change, int(host_limit))
    return plans if refusal_text is None else replace(plans, refusal=refusal_text)


def _plan_before_loading(
    shape: StepShape, request: PlanRequest, report: ReportFunction
) -> tuple[TrainingPlans, str]:
    """Return plans and advice like search_plans, while no kernel is loaded. If the search itself would exceed the limit
    of this process, first try two plans that need no search: the one that recomputes only what is requested or nearly
    free, and the smallest one, if this process found it before. If neither fits, search all the same."""
    if private_nbytes() + search_child_nbytes(shape, request) <= request.limits.get(HOST, math.inf):
        return search_plans(shape, request, report)
    shapes = unlimited(shape, request), smallest_shapes.get(_shape_key(shape, request))
    for shape_without_search in filter(None, shapes):
        plans = plan_in_process(shape_without_search, request)
        direct_nbytes = nbytes_with_margin(plans, HOST)
        if direct_nbytes <= request.limits[HOST] and not device_refusal(plans, request.limits, ""):
            return plans, ""
        del plans
        release_memory()
    plans, change = search_plans(shape, request, report)
    return replace(plans, search_nbytes=min(plans.search_nbytes, direct_nbytes)), change


def plan_shape(shape: StepShape, request: PlanRequest) -> TrainingPlans:
    """Make the plans of a shape that rank 0 chose for all ranks; `refusal` is set if they exceed this rank's limit."""
    request.kernels.load()
    plans, host_limit = plan_in_process(shape, request), request.limits.get(HOST)
    if host_limit is None or plans.needed_nbytes <= host_limit:
        return plans
    return replace(plans, refusal=host_refusal(plans, "", host_limit))


def search_plans(
    shape: StepShape, request: PlanRequest, report: ReportFunction
) -> tuple[TrainingPlans, str]:
    """Search the fastest plans within the limits; return them and "". If none fit, which their bytes tell, return the
    smallest plans and the first change of settings that would fit, or "" if only packing exceeded a limit."""
    limits = dict(request.limits)
    if HOST in limits:
        limits |= {s: limits.get(s, limits[HOST]) for s in request.target.aside}
    shown_limit = limits.get(request.target.space, min(limits.values()))

    @cache
    def announce() -> None:
        report(f"planning a run that fits into {size_text(shown_limit)} …")

    search_nbytes, reserves = 0, {space: ASIDE_NBYTES * (space == HOST) for space in limits}
    for _ in range(MAX_SEARCHES):
        run_search, nbytes = _place_search(shape, request)  # kernels may be loaded since the last
        if run_search is not run_in_child:
            nbytes_now = private_nbytes() + request.kernels.pending_nbytes
            request = replace(request, baseline_nbytes=nbytes_now)
        search_nbytes = max(search_nbytes, private_nbytes() + nbytes)
        reduced = {space: limit - reserves[space] for space, limit in limits.items()}
        answer = run_search(announce, find_fastest_shape, shape, replace(request, limits=reduced))
        plans = plan_in_process(answer.shape, request, search_nbytes)
        excess = {s: max(nbytes_with_margin(plans, s) - limit, 0) for s, limit in limits.items()}
        excess |= dict.fromkeys(request.target.aside & excess.keys(), excess.get(HOST, 0))
        if not answer.is_within_limits:
            smallest_shapes[_shape_key(shape, request)] = answer.shape
        if not answer.is_within_limits or not any(excess.values()):
            return plans, answer.suggested_change
        # reserve twice the excess: each search leaves the process a little larger
        for space, nbytes_over in excess.items():
            reserves[space] += 2 * nbytes_over + SEARCH_GROWTH_NBYTES * (nbytes_over > 0)
        del answer, plans  # the process would grow if the next plans were made beside these
        release_memory()
    smallest_shape = run_search(announce, smallest, shape, request)
    return plan_in_process(smallest_shape, request, search_nbytes), ""


def _place_search(shape: StepShape, request: PlanRequest) -> tuple[Callable[..., Any], int]:
    """Return the function that runs a search, in a child process or here, and the bytes that the search adds in memory.
    A search runs here if a child beside this process would exceed the limit."""
    nbytes = search_child_nbytes(shape, request)
    if private_nbytes() + nbytes <= request.limits.get(HOST, math.inf):
        return run_in_child, nbytes
    return _run_here, nbytes - CHILD_NBYTES - request.target.import_nbytes


def _run_here(announce: Callable[[], None], function: Callable[..., R], *arguments: Any) -> R:
    announce()
    return function(*arguments)


def nbytes_with_margin(plans: TrainingPlans, space: str) -> int:
    """Return the bytes of a run in a memory space; those of this process with a margin, as kernels' memory varies."""
    return plans.total_nbytes + KERNEL_MARGIN_NBYTES if space == HOST else plans.nbytes_in(space)


def plan_in_process(shape: StepShape, request: PlanRequest, search_peak: int = 0) -> TrainingPlans:
    """Make plans here, without a search; if packing loads a kernel, load all. `search_peak`: see with_baseline."""
    plans = request.make_plans(shape)
    if any(map(kernels.is_loaded, request.kernels.names)):
        request.kernels.load()
    return with_baseline(plans, search_peak, request.kernels.pending_nbytes)


def with_baseline(plans: TrainingPlans, search_peak: int = 0, extra: int = 0) -> TrainingPlans:
    """Return the plans with `baseline_nbytes`, this process's bytes now plus `extra`, by which it grows before the run,
    and `search_nbytes`, which is `search_peak`, the most bytes of this process and its child during a search."""
    release_memory()
    return replace(plans, baseline_nbytes=private_nbytes() + extra, search_nbytes=search_peak)


def search_child_nbytes(shape: StepShape, request: PlanRequest) -> int:
    block_nbytes = SEARCH_BLOCK_NBYTES * shape.config.block_count
    return CHILD_NBYTES + request.target.import_nbytes + SEARCH_NBYTES + block_nbytes


def minimum_budget(shape: StepShape, request: PlanRequest, report: ReportFunction) -> int:
    """Search the plans of the fewest bytes and return the --memory, in bytes, that suffices for them."""
    run_search, _ = _place_search(shape, request)
    announce = partial(report, "searching the smallest plan …")
    smallest_shape = run_search(announce, smallest, shape, request)
    smallest_shapes[_shape_key(shape, request)] = smallest_shape
    return safe_budget(plan_in_process(smallest_shape, request))


def _shape_key(shape: StepShape, request: PlanRequest) -> str:
    return choice_key(shape, replace(request, limits={}))


def safe_budget(plans: TrainingPlans) -> int:
    """Return the --memory, in bytes, that suffices for these plans: with 2 MiB to spare, as processes differ."""
    return plans.needed_nbytes + SPARE_NBYTES


# ---- refusal


def device_refusal(plans: TrainingPlans, limits: Mapping[str, int], advice: str) -> str | None:
    """Return a refusal text, with `advice`, if the plans exceed the limit of a device's memory, else None."""
    for space in plans.device_spaces:
        nbytes = plans.nbytes_in(space)
        if nbytes > limits.get(space, nbytes):
            headline = (
                f"this does not fit into the memory of {space}: it has {size_text(limits[space])},"
                f" {size_text(nbytes)} are needed; the smallest --device-memory that would do is {mib(nbytes)}"
            )
            return _refusal_text(headline, plans, space, advice)
    return None


def host_refusal(plans: TrainingPlans, suggested_change: str, limit: int) -> str:
    """Return the text that refuses --memory `limit` (bytes), with the least that fits, largest buffers and advice."""
    min_nbytes = safe_budget(plans)
    headline = (
        f"this does not fit into {size_text(limit)}; the smallest --memory that would do is about {mib(min_nbytes)}, or"
        f" up to {size_text(SPARE_NBYTES)} less"
    )
    spare_nbytes = -(-min_nbytes // MIB) * MIB - plans.total_nbytes
    return _refusal_text(headline, plans, HOST, suggested_change, spare_nbytes)


def _refusal_text(
    headline: str, plans: TrainingPlans, space: str, suggested_change: str, spare_nbytes: int = 0
) -> str:
    """Return `headline`, then the step's shape and choices, the bytes in `space`, its largest buffers and advice."""
    shape = plans.shape
    chosen = "".join(f"; {text}" for text in choice_texts(plans))
    size = f"{shape.num_micro_batches} × {shape.micro_batch_size} × {shape.seq_len}"
    return "\n".join(
        [
            headline, f"  that is with {size} tokens a step{chosen}", *table_lines(plans, spare_nbytes),
            *_peak_buffer_lines(plans, space), f"  {suggested_change or 'a little more would do'}",
        ]
    )  # fmt: skip


def _peak_buffer_lines(plans: TrainingPlans, space: str) -> list[str]:
    """Return lines for a refusal that name the largest buffers at the peak of a memory space's arena."""
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
    """Return a number of bytes as --memory takes it, rounded up, such as `512MiB`."""
    return f"{-(-nbytes // MIB)}MiB"
