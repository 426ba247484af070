"""How long a plan will take: the work that its ops declare, over rates measured on this machine."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from packtrain.ops.costs import Cost
from packtrain.place import Placed, Step
from packtrain.tensor import Call, Tensor

CALL_SECONDS, REGION_SECONDS = 3e-6, 5e-6
CACHE = 1 << 22  # bytes of a call that are still in a cache when it comes
PARALLEL = 1 << 17  # bytes that pay for a parallel region
MANY = 64  # tasks that keep all threads busy to the end
# of the floating-point operations of a second: what a kind of work that was not measured is done in
SHARES = {"multiply": 0.5, "attend": 0.4, "pack": 0.03, "unpack": 0.02, "exp": 0.02, "score": 0.02}


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine does in a second, all threads together.

    flops    floating-point operations of a large matrix product
    nbytes   bytes moved, of many; `near` of few, which are in a cache (0: as many)
    kinds    other work, see `ops.costs.Cost`; what is missing gets a typical share of `flops`
    threads  a task that is alone gets that part of a rate
    call     seconds of a call beside its work, `region` more where its tasks go side by side
    seen     part of what a causal mask lets through that attention looks at: a fact about data, see design.pace
    """

    flops: float
    nbytes: float
    near: float = 0.0
    kinds: Mapping[str, float] = field(default_factory=dict)
    threads: int = 1
    call: float = CALL_SECONDS
    region: float = REGION_SECONDS
    seen: float = 1.0

    def of(self, kind: str) -> float:
        """How much of a kind of work is done in a second."""
        known = self.kinds.get(kind)
        return SHARES[kind.split()[0]] * self.flops if known is None else known

    def times(self, threads: int) -> "Rates":
        """What so many threads do if each does as much as all do now."""
        return replace(self._more(threads), threads=threads * self.threads)

    def slower(self, by: float) -> "Rates":
        """Everything takes so many times as long."""
        return replace(self._more(1 / by), call=by * self.call, region=by * self.region)

    def _more(self, by: float) -> "Rates":
        kinds = {kind: by * rate for kind, rate in self.kinds.items()}
        more = {name: by * getattr(self, name) for name in ("flops", "nbytes", "near")}
        return replace(self, kinds=kinds, **more)

    def moving(self, nbytes: float) -> float:
        """Seconds to move bytes."""
        return nbytes / (self.near if self.near and nbytes <= CACHE else self.nbytes)


def seconds(placed: Placed, rates: Rates) -> float:
    """Expected time of one run."""
    read = {t for step in placed.steps for t in step.reads}
    return sum(call_seconds(step, rates, read) for step in placed.steps)


def call_seconds(call: Call | Step, rates: Rates, read: Collection[Tensor] = ()) -> float:
    """Expected time of one call: of its arithmetic or its bytes, whichever takes longer, and of calling it.

    read  tensors that some step reads: optional results are made only if they are among them
    """
    cost = cost_of(call, read)
    work = sum(amount / rates.of(kind) for kind, amount in cost.work.items())
    if cost.masked:
        work *= rates.seen
    around = rates.call + (rates.region if cost.tasks > 1 else 0.0)
    return around + max(work * idle(cost.tasks, rates.threads), rates.moving(moved(call, cost)))


def idle(tasks: float, threads: int) -> float:
    """How much longer so many equal tasks take than if they kept all threads busy to the end."""
    return 1.0 if tasks >= MANY else math.ceil(tasks / threads) * threads / tasks


def cost_of(call: Call | Step, read: Collection[Tensor] = ()) -> Cost:
    """What the call's op declares of it; only that it moves its bytes where it declares nothing."""
    op, attrs = call.op, call.attrs if isinstance(call, Call) else call.call.attrs
    if op.cost_rule is None:
        return Cost(tasks=math.inf if moved(call, Cost()) > PARALLEL else 1)
    wanted = [t if i not in op.optional or t in read else None for i, t in enumerate(call.results)]
    several = len(wanted) > 1 or op.writes
    cost: Cost = op.cost_rule(wanted if several else wanted[0], *call.inputs, **attrs)
    return cost


def moved(call: Call | Step, cost: Cost) -> float:
    """Bytes that a call reads and makes, or what its cost says."""
    if cost.nbytes is not None:
        return cost.nbytes
    return float(sum(t.spec.nbytes for t in (*call.results, *call.reads)))
