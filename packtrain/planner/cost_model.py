"""How long a plan will take: the work that its ops declare, over rates measured on this machine."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from packtrain.engine.ops.costs import Cost
from packtrain.engine.placement import Placed
from packtrain.engine.step import ARRIVE, BEGIN, Step
from packtrain.engine.tensor import Call, Tensor

CALL_SECONDS, REGION_SECONDS = 3e-6, 5e-6
CACHE = 1 << 22  # a call with fewer bytes finds them in a cache
PARALLEL = 1 << 17  # bytes from which a parallel region pays
MANY = 64  # tasks that keep all threads busy to the end
# rates of unmeasured kinds of work, as shares of the floating-point operations per second
SHARES = {
    "multiply": 0.5,
    "multiply bf16": 1.0,
    "multiply bf16x3": 0.5,
    "attend": 0.4,
    "attend back": 0.4,
    "pack": 0.03,
}
SHARE = 0.02  # of all others


@dataclass(frozen=True, slots=True)
class Rates:
    """Work per second of a backend, on this machine with all threads together.

    flops    floating-point operations of a large matrix product
    nbytes   bytes moved from memory; `near`: from a cache (0: the same)
    kinds    other work, see `ops.costs.Cost`; missing kinds get a typical share of `flops`
    threads  number of threads; a single task gets one thread's share of a rate
    call     overhead of a call in seconds, plus `region` for a parallel region
    link     bytes copied between its memory and the process's; 0: as fast as a copy there
    seen     share of the causally visible blocks that attention computes, which depends on data, see
    planner.expected_pace
    counted  share of the positions that have a target, likewise
    others   rates of other backends by name; those without any have the same
    """

    flops: float
    nbytes: float
    near: float = 0.0
    kinds: Mapping[str, float] = field(default_factory=dict)
    threads: int = 1
    call: float = CALL_SECONDS
    region: float = REGION_SECONDS
    link: float = 0.0
    seen: float = 1.0
    counted: float = 1.0
    others: Mapping[str, "Rates"] = field(default_factory=dict)

    def of(self, kind: str) -> float:
        """The rate of a kind of work, per second."""
        measured = self.kinds.get(kind)
        return SHARES.get(kind, SHARE) * self.flops if measured is None else measured

    def on(self, backend: str) -> "Rates":
        """The rates of a backend."""
        return self.others.get(backend, self)

    def seeing(self, share: float, counted: float = 1.0) -> "Rates":
        """The rates, of all backends, if attention computes this share of the visible blocks, and this one of positions
        has a target."""
        other_rates = {name: rates.seeing(share, counted) for name, rates in self.others.items()}
        return replace(self, seen=share, counted=counted, others=other_rates)

    def times(self, threads: int) -> "Rates":
        """The rates of this many threads, if each is as fast as all are now."""
        return replace(self._more(threads), threads=threads * self.threads)

    def slower(self, by: float) -> "Rates":
        """The rates if everything takes `by` times as long."""
        return replace(self._more(1 / by), call=by * self.call, region=by * self.region)

    def _more(self, by: float) -> "Rates":
        kinds = {kind: by * rate for kind, rate in self.kinds.items()}
        scaled = {name: by * getattr(self, name) for name in ("flops", "nbytes", "near", "link")}
        return replace(self, kinds=kinds, **scaled)

    def moving(self, nbytes: float) -> float:
        """Seconds to move bytes."""
        return nbytes / (self.near if self.near and nbytes <= CACHE else self.nbytes)


def seconds(placed: Placed, rates: Rates) -> float:
    """Expected time of one run. Copies that travel beside other steps are waited for where they arrive."""
    read = {t for step in placed.steps for t in step.reads}
    elapsed, arrivals = 0.0, dict[Tensor | None, float]()
    for step in placed.steps:
        took = call_seconds(step, rates, read)
        if step.op is BEGIN:
            arrivals[step.results[0]] = elapsed + took
        else:
            elapsed = (
                max(elapsed, arrivals[step.inputs[0]]) if step.op is ARRIVE else elapsed + took
            )
    return elapsed


def crossing(nbytes: float, *endpoints: Rates) -> float:
    """Seconds to copy bytes from one memory to another, by the slower of the two ends."""
    return max(rates.call + nbytes / (rates.link or rates.nbytes / 2) for rates in endpoints)


def call_seconds(call: Call | Step, rates: Rates, read: Collection[Tensor] = ()) -> float:
    """Expected time of one call on its backend: the longer of arithmetic and memory traffic, plus overhead.

    read  tensors that some step reads: optional results are only computed if they are among them
    """
    if call.op is ARRIVE:
        return 0.0
    if isinstance(call, Step) and call.source is not None:
        endpoints = rates.on(call.source.name), rates.on(call.backend.name)
        return crossing(call.results[0].spec.nbytes, *endpoints)
    if isinstance(call, Step):
        rates = rates.on(call.backend.name)
    cost = cost_of(call, read)
    work = sum(amount / rates.of(kind) for kind, amount in cost.work.items())
    share = rates.seen if cost.masked else rates.counted if cost.by_target else 1.0
    overhead = rates.call + (rates.region if cost.tasks > 1 else 0.0)
    computing = share * work * idle(cost.tasks, rates.threads)
    return overhead + max(computing, rates.moving(moved(call, cost)))


def idle(tasks: float, threads: int) -> float:
    """How much longer equal tasks take than if they kept all threads busy to the end."""
    return 1.0 if tasks >= MANY else math.ceil(tasks / threads) * threads / tasks


def cost_of(call: Call | Step, read: Collection[Tensor] = ()) -> Cost:
    """The cost that the call's op declares; by default only its memory traffic."""
    op, attrs = call.op, call.attrs if isinstance(call, Call) else call.call.attrs
    if op.cost_rule is None:
        return Cost(tasks=math.inf if moved(call, Cost()) > PARALLEL else 1)
    outputs = [t if i not in op.optional or t in read else None for i, t in enumerate(call.results)]
    is_multiple = len(outputs) > 1 or op.writes
    cost: Cost = op.cost_rule(outputs if is_multiple else outputs[0], *call.inputs, **attrs)
    return cost


def moved(call: Call | Step, cost: Cost) -> float:
    """Bytes that a call reads and writes, or those of its cost."""
    if cost.nbytes is not None:
        return cost.nbytes
    return float(sum(t.spec.nbytes for t in (*call.results, *call.reads)))
