"""Each op of a training step beside its floor: what the processor, or its memory, needs at least for the same work."""

import math
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from packtrain.devtools.bench.bench_table import Table
from packtrain.devtools.bench.machine_rates import Rates
from packtrain.devtools.bench.timing import CLOCK, Clock
from packtrain.devtools.bench.training import Training
from packtrain.dtypes import f32
from packtrain.engine.executor import Executor
from packtrain.engine.ops.costs import Cost
from packtrain.engine.step import Step
from packtrain.engine.tensor import Tensor
from packtrain.planner.cost_model import cost_of, moved

# floating-point operations of a unit of work, see ops.costs.Cost; what only lays out values has none
FLOPS = {"multiply": 2.0, "attend": 2.0, "attend back": 2.0, "exp": 16.0}
FORWARD, BACK, WEIGHT = "y = x Wᵀ", "dx = dy W", "dW = dyᵀ x"
LEAST = 1e-6  # seconds of a floor, below which a call costs more than its work: no ratio
COLUMNS = {
    "op": "", "form": "", "M × N × K": "", "calls": "d", "ms": ".2f", "share": ".1%", "floor ms": ".2f",
    "× floor": ".2f", "lost ms": ".2f",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a matrix W (N, K) for M tokens, in one of its three forms."""

    form: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def shape(self) -> str:
        return f"{self.m} × {self.n} × {self.k}"


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls that are counted together."""

    op: str
    form: str = ""
    shape: str = ""


@dataclass(slots=True)
class Spent:
    """Calls of one kind in a step: how many, their seconds, and the least they could take."""

    calls: int = 0
    seconds: float = 0.0
    floor: float = 0.0

    @property
    def lost(self) -> float:
        return self.seconds - self.floor


def product_of(step: Step) -> Product | None:
    """The product that a call is, or None."""
    if step.op.name == "out_prod":
        a, b = step.reads[:2]
        n, k = a.shape[-1], b.shape[-1]
        return Product(WEIGHT, a.spec.size // n, n, k)
    if step.op.name not in ("matmul", "matmul_back"):
        return None
    x, w = step.reads[:2]
    m = x.spec.size // x.shape[-1]
    is_transposed = w.dtype == f32 and w.strides[-1] != w.dtype.numpy.itemsize
    n, k = w.shape[-2:]
    if step.op.name == "matmul_back":
        return Product(BACK, m, n, k)
    return Product(BACK, m, k, n) if is_transposed else Product(FORWARD, m, n, k)


def kind_of(step: Step) -> Kind:
    product = product_of(step)
    if product is None:
        return Kind(step.op.name)
    types = {t.dtype for t in step.reads} - {f32}
    return Kind(" ".join(["product", *map(str, types)]), product.form, product.shape)


def floor(step: Step, rates: Rates, read: Collection[Tensor] = ()) -> float:
    """The least seconds of a call: its arithmetic by multiply-adds in registers, or its bytes by copying.

    read  tensors that some step reads, see cost_model.call_seconds
    """
    cost, product = cost_of(step, read), product_of(step)
    flops = sum(FLOPS.get(kind, 0.0) * amount for kind, amount in cost.work.items())
    flops = product.flops if product else flops
    nbytes = min(moved(step, cost), moved(step, Cost()))
    return max(flops / rates.fma, rates.moving(nbytes))


class Timer:
    """Times every call of an executor, step by step."""

    def __init__(self, run: Executor, clock: Clock = CLOCK) -> None:
        self.run, self.clock = run, clock
        self.seconds: list[list[float]] = [[] for _ in run.calls]
        run.calls = [partial(self._timed, i, call) for i, call in enumerate(run.calls)]

    def _timed(self, i: int, call: Callable[[], None]) -> None:
        start_time = self.clock()
        call()
        self.seconds[i].append(self.clock() - start_time)

    def spent(self, rates: Rates) -> dict[Kind, Spent]:
        """By kind; seconds of a call are its median over the steps."""
        by_kind: dict[Kind, Spent] = {}
        steps = self.run.placed.steps
        read = {t for step in steps for t in step.reads}
        for step, times in zip(steps, self.seconds, strict=True):
            kind_total = by_kind.setdefault(kind_of(step), Spent())
            kind_total.calls += 1
            kind_total.seconds += statistics.median(times)
            kind_total.floor += floor(step, rates, read)
        return by_kind


def measured(
    training: Training, rates: Rates, rounds: int, clock: Clock = CLOCK
) -> tuple[Table, float]:
    """The table of a step, and the median of its seconds."""
    training.step()  # loads kernels and pages
    timer, times = Timer(training.run, clock), list[float]()
    for _ in range(rounds):
        start_time = clock()
        training.step()
        times.append(clock() - start_time)
    step_seconds = statistics.median(times)
    return table(training, timer.spent(rates), step_seconds), step_seconds


def table(training: Training, spent: dict[Kind, Spent], step_seconds: float) -> Table:
    total = math.fsum(kind_total.seconds for kind_total in spent.values())
    floor_seconds = math.fsum(kind_total.floor for kind_total in spent.values())
    kinds = sorted(spent, key=lambda kind: -spent[kind].lost)
    rows = [row(kind, spent[kind], total) for kind in kinds]
    rows.append(
        row(Kind("all"), Spent(sum(s.calls for s in spent.values()), total, floor_seconds), total)
    )
    note = (
        f"A step takes {step_seconds * 1e3:.1f} ms, {training.tokens / step_seconds:,.0f} tokens a second;"
        f" its calls {total * 1e3:.1f} ms. The floor of a call is the larger of two: its"
        " arithmetic at the rate of multiply-adds in registers, and its bytes at the rate of"
        " copying. Sorted by what is lost above it."
    )
    return Table("ops", f"Ops of a step: {training.name}", COLUMNS, rows, (note,))


def row(kind: Kind, spent: Spent, total: float) -> list[str | int | float | None]:
    ratio = spent.seconds / spent.floor if spent.floor > LEAST * spent.calls else None
    share = spent.seconds / total if total else 0.0
    ms = [1e3 * seconds for seconds in (spent.seconds, spent.floor, spent.lost)]
    return [kind.op, kind.form, kind.shape, spent.calls, ms[0], share, ms[1], ratio, ms[2]]
