"""Predicts the seconds of a plan: the work that its ops declare, divided by rates measured on this machine."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

from packtrain.engine.ops.costs import call_cost, traffic_nbytes
from packtrain.engine.placement import Placed
from packtrain.engine.step import BEGIN_COPY, FINISH_COPY, KernelStep
from packtrain.engine.tensor import Call, Tensor

CALL_SECONDS, REGION_SECONDS = 3e-6, 5e-6
CACHE_NBYTES = 1 << 22  # a call with fewer bytes finds them in a cache
NUM_BALANCED_TASKS = 64  # tasks that keep all threads busy to the end
# rates of unmeasured kinds of work, as shares of the floating-point operations per second
SHARES = {
    "multiply": 0.5, "multiply bf16": 1.0, "multiply bf16x3": 0.5, "attend": 0.4, "attend back": 0.4, "pack": 0.03,
}  # fmt: skip
SHAPE_AND_TYPE = attrgetter("spec.shape", "spec.dtype")
SHARE = 0.02  # share of every other kind of work


@dataclass(frozen=True, slots=True)
class BackendRates:
    """Rates of a backend, in work per second with all threads together, measured on this machine, to predict seconds.

    flops           floating-point operations of a large matrix product
    nbytes          bytes moved from memory
    cache_nbytes    bytes moved from a cache; 0: as fast as from memory
    kinds           other work, see `ops.costs.Cost`; missing kinds get a typical share of `flops`
    threads         number of threads; a single task gets one thread's share of a rate
    call            overhead of a call in seconds
    region          seconds that a parallel region adds to a call
    link            bytes copied between its memory and the process's; 0: as fast as a copy there
    attended_share  share of causally visible blocks of positions that attention computes, see planner.expected_pace
    target_share    share of the positions that have a target, see planner.expected_pace
    backend_rates   rates of other backends by name; backends without an entry have these rates
    """

    flops: float
    nbytes: float
    cache_nbytes: float = 0.0
    kinds: Mapping[str, float] = field(default_factory=dict)
    threads: int = 1
    call: float = CALL_SECONDS
    region: float = REGION_SECONDS
    link: float = 0.0
    attended_share: float = 1.0
    target_share: float = 1.0
    backend_rates: Mapping[str, "BackendRates"] = field(default_factory=dict)

    def rate_of(self, work_kind: str) -> float:
        """Return the units of a kind of work (such as exponentials) that all threads do per second."""
        measured_rate = self.kinds.get(work_kind)
        return SHARES.get(work_kind, SHARE) * self.flops if measured_rate is None else measured_rate

    def on(self, backend: str) -> "BackendRates":
        """Return the rates of the backend with this name; these rates if it has none of its own."""
        return self.backend_rates.get(backend, self)

    def with_data_shares(self, attended: float, targets: float = 1.0) -> "BackendRates":
        """Return the rates for data whose masks leave only these shares of scores and loss targets to compute."""
        peers = {n: r.with_data_shares(attended, targets) for n, r in self.backend_rates.items()}
        return replace(self, attended_share=attended, target_share=targets, backend_rates=peers)

    def for_threads(self, threads: int) -> "BackendRates":
        """Return the rates of `threads` times as many threads, each as fast as now."""
        return replace(self._scaled_rates(threads), threads=threads * self.threads)

    def slower(self, by: float) -> "BackendRates":
        """Return the rates if everything takes `by` times as long."""
        return replace(self._scaled_rates(1 / by), call=by * self.call, region=by * self.region)

    def _scaled_rates(self, factor: float) -> "BackendRates":
        kind_rates = {kind: factor * rate for kind, rate in self.kinds.items()}
        scaled = {n: factor * getattr(self, n) for n in ("flops", "nbytes", "cache_nbytes", "link")}
        return replace(self, kinds=kind_rates, **scaled)

    def memory_seconds(self, nbytes: float) -> float:
        """Return the seconds that a call takes to move `nbytes` from memory, or from the cache if they are few."""
        is_cached = self.cache_nbytes and nbytes <= CACHE_NBYTES
        return nbytes / (self.cache_nbytes if is_cached else self.nbytes)


def graph_seconds(placed: Placed, rates: BackendRates) -> float:
    """Return the expected seconds of one run of a placed graph; copies between memories overlap other steps."""
    read_tensors = {t for step in placed.steps for t in step.reads}
    now, arrivals = 0.0, dict[Tensor | None, float]()
    for step, took in zip(
        placed.steps, step_seconds(placed.steps, rates, read_tensors), strict=True
    ):
        if step.op is BEGIN_COPY:
            arrivals[step.results[0]] = now + took
        else:
            now = max(now, arrivals[step.inputs[0]]) if step.op is FINISH_COPY else now + took
    return now


def step_seconds(
    steps: Iterable[KernelStep], rates: BackendRates, read: Collection[Tensor]
) -> list[float]:
    """Return call_seconds of each step; equal calls (op, backends, attributes, shapes, types) are computed once."""
    seconds_by_call, all_seconds = dict[tuple[Any, ...], float](), list[float]()
    for step in steps:
        place = step.backend.name, step.source and step.source.name
        call = step.op, place, *step.attrs.items(), *map(is_, step.inputs, repeat(None))
        call += *map(SHAPE_AND_TYPE, step.reads), *map(read.__contains__, step.results)
        if call not in seconds_by_call:
            seconds_by_call[call] = call_seconds(step, rates, read)
        all_seconds.append(seconds_by_call[call])
    return all_seconds


def copy_seconds(nbytes: float, *endpoints: BackendRates) -> float:
    """Return the seconds to copy bytes between two backends' memories, given their rates: those of the slower one."""
    return max(rates.call + nbytes / (rates.link or rates.nbytes / 2) for rates in endpoints)


def call_seconds(
    call: Call | KernelStep, rates: BackendRates, read: Collection[Tensor] = ()
) -> float:
    """Return the expected seconds of a call: the longer of arithmetic and memory traffic, plus overhead.

    read  tensors that some step reads: optional results are only computed if they are among them
    """
    if call.op is FINISH_COPY:
        return 0.0
    if isinstance(call, KernelStep) and call.source is not None:
        endpoints = rates.on(call.source.name), rates.on(call.backend.name)
        return copy_seconds(call.results[0].spec.nbytes, *endpoints)
    rates = rates.on(call.backend.name) if isinstance(call, KernelStep) else rates
    cost = call_cost(call, read)
    work_seconds = sum([amount / rates.rate_of(kind) for kind, amount in cost.work.items()])
    data_share = (
        rates.attended_share if cost.is_causal else rates.target_share if cost.only_targets else 1.0
    )
    overhead_seconds = rates.call + (rates.region if cost.num_tasks > 1 else 0.0)
    compute_seconds = data_share * work_seconds * idle_factor(cost.num_tasks, rates.threads)
    return overhead_seconds + max(compute_seconds, rates.memory_seconds(traffic_nbytes(call, cost)))


def idle_factor(tasks: float, threads: int) -> float:
    """Return how much longer equal `tasks` take on the threads than if all threads were busy to the end; 1 or more."""
    return 1.0 if tasks >= NUM_BALANCED_TASKS else math.ceil(tasks / threads) * threads / tasks
