"""Keeps to `--resident`: a run's private memory, and the pages of its base that stay in memory, together.

Pages beyond the limit are given back and read again when a step comes to them, see engine.page_window."""

import math
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from packtrain.common.mapped_file import mapped_file
from packtrain.engine.backends import HOST
from packtrain.engine.memory_plan import size_text
from packtrain.engine.page_window import in_pages, page_schedule, smallest_window, weight_reads
from packtrain.planner.budget import ReportFunction, mib, plan_within_limits, safe_budget
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import BaseWindow, TrainingPlans, leaves, mapped_leaves, runs

NUM_LARGEST_WEIGHTS = 3  # for which a window has room: one is read, others are on their way
SCHEDULE_NBYTES, SCHEDULED_CALL_NBYTES = 2 << 20, 1_000  # of this process, and for each call
PROBE_NBYTES = 64 << 20  # read to measure how quickly a file is read
MAX_PLANS = 3  # each beside a larger window, until a call can read its weights at once


def plan_within_resident(
    shape: StepShape, request: PlanRequest, limit: int, rate: float, report: ReportFunction
) -> TrainingPlans:
    """Make plans for --resident: if the base takes at most half the limit, all its pages stay, else a window of them.

    limit  bytes of private memory and of pages together; plans that need more have a `refusal`
    rate   bytes per second at which the base's file is read
    """
    model = leaves(shape.config, shape.base)[0].values()
    sizes = sorted(in_pages(leaf.spec.nbytes) for leaf in mapped_leaves(shape, model))
    room = sum(sizes) if sum(sizes) <= limit // 2 else sum(sizes[-NUM_LARGEST_WEIGHTS:])
    private_limit = request.limits.get(HOST, limit)
    for _ in range(MAX_PLANS):
        host_limit = min(private_limit, max(limit - room, limit // 2))
        plans = plan_within_limits(shape, request.with_limit(host_limit), report)
        smallest = _base_window(plans, 0, rate)
        required = smallest.nbytes + smallest.schedule_nbytes
        is_within = plans.refusal is None and plans.total_nbytes + required <= limit
        if is_within or room == required:
            break
        room = required
    if is_within:
        nbytes = limit - plans.total_nbytes - smallest.schedule_nbytes
        return replace(plans, window=_base_window(plans, nbytes, rate))
    if host_limit == private_limit < limit:
        return plans  # --memory is the reason
    headline = (
        f"this does not fit into --resident {size_text(limit)}; about {mib(safe_budget(plans) + required)} would do,"
        f" {mib(required)} of them for what a call reads of the base"
    )
    details = (plans.refusal or "").partition("\n")[2]
    return replace(plans, refusal=f"{headline}\n{details}".rstrip())


def _base_window(plans: TrainingPlans, nbytes: int, rate: float) -> BaseWindow:
    """Return what stays in memory of the base's file, `nbytes` but at least what a call reads and at most all of it,
    and what a step then reads from the file, at `rate` bytes per second."""
    mapped = mapped_leaves(plans.shape, plans.leaves.values())
    sizes = {leaf.label: in_pages(leaf.spec.nbytes) for leaf in mapped}
    reads = {name: weight_reads(placed, sizes) for name, placed in plans.placed_graphs.items()}
    call_nbytes = max(map(smallest_window, reads.values()))
    nbytes = max(min(nbytes, sum(sizes.values())), call_nbytes)
    read_nbytes = sum(
        num_runs * page_schedule(reads[name], sizes, nbytes).loaded_nbytes
        for name, num_runs in runs(plans.shape).items()
    )
    schedule_nbytes = SCHEDULE_NBYTES + SCHEDULED_CALL_NBYTES * plans.calls
    return BaseWindow(nbytes, call_nbytes, schedule_nbytes, read_nbytes, read_nbytes / rate)


def file_rate(arrays: Iterable[np.ndarray]) -> float:
    """Measure the bytes per second read from the largest mapped array's file, after dropping its pages; inf without."""
    array = max((a for a in arrays if mapped_file(a)), key=lambda array: array.nbytes, default=None)
    if array is None or (file := mapped_file(array)) is None:
        return math.inf
    file.release_all()
    start, stop = file.byte_range(array)
    stop = min(stop, start + PROBE_NBYTES)
    begin = time.perf_counter()
    file.prefetch(start, stop)
    np.frombuffer(file, np.uint8)[start : stop : 1 << 12].max(initial=0)
    seconds = time.perf_counter() - begin
    file.release(start, stop)
    return (stop - start) / seconds
