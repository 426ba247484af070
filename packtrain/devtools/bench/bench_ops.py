"""Times each op of a training step beside its floor, the least time the processor or its memory need for the work."""

import math
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from packtrain.devtools.bench.bench_table import BenchTable
from packtrain.devtools.bench.machine_rates import MachineRates
from packtrain.devtools.bench.timing import CLOCK, Clock, time_call
from packtrain.devtools.bench.training import TrainingBench
from packtrain.dtypes import f32
from packtrain.engine.executor import Executor
from packtrain.engine.ops.costs import Cost, call_cost, traffic_nbytes
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import Tensor

# floating-point operations per unit of work, see ops.costs.Cost; ops that only move values have none
FLOPS = {"multiply": 2.0, "attend": 2.0, "attend back": 2.0, "exp": 16.0}
FORWARD, BACK, WEIGHT = "y = x Wᵀ", "dx = dy W", "dW = dyᵀ x"
MIN_FLOOR_SECONDS = 1e-6  # below it a call costs more than its work, and no ratio is shown
COLUMNS = {
    "op": "", "form": "", "M × N × K": "", "calls": "d", "ms": ".2f", "share": ".1%", "floor ms": ".2f",
    "× floor": ".2f", "lost ms": ".2f",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """A product with a matrix W (N, K) for M tokens; `form` is y = x Wᵀ, dx = dy W or dW = dyᵀ x."""

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
class OpGroup:
    """Key of the calls that are counted together: op, form and shape of the product."""

    op: str
    form: str = ""
    shape: str = ""


@dataclass(slots=True)
class OpTime:
    """Time of a group of calls in a step: number of calls, seconds, and the least seconds possible (`floor`)."""

    calls: int = 0
    seconds: float = 0.0
    floor: float = 0.0

    @property
    def seconds_over_floor(self) -> float:
        return self.seconds - self.floor


def product_of(step: KernelStep) -> MatrixProduct | None:
    """Return the matrix product that a kernel call computes, or None for other ops."""
    if step.op.name == "out_prod":
        a, b = step.reads[:2]
        n, k = a.shape[-1], b.shape[-1]
        return MatrixProduct(WEIGHT, a.spec.size // n, n, k)
    if step.op.name not in ("matmul", "matmul_back"):
        return None
    x, w = step.reads[:2]
    m = x.spec.size // x.shape[-1]
    is_transposed = w.dtype == f32 and w.strides[-1] != w.dtype.numpy.itemsize
    n, k = w.shape[-2:]
    if step.op.name == "matmul_back":
        return MatrixProduct(BACK, m, n, k)
    return MatrixProduct(BACK, m, k, n) if is_transposed else MatrixProduct(FORWARD, m, n, k)


def op_group_of(step: KernelStep) -> OpGroup:
    product = product_of(step)
    if product is None:
        return OpGroup(step.op.name)
    types = {t.dtype for t in step.reads} - {f32}
    return OpGroup(" ".join(["product", *map(str, types)]), product.form, product.shape)


def call_floor(step: KernelStep, rates: MachineRates, read: Collection[Tensor] = ()) -> float:
    """Return the least seconds of a call: for its arithmetic at peak, or for copying its bytes, whichever is more.
    `read`: tensors that some step reads, see cost_model.call_seconds."""
    cost, product = call_cost(step, read), product_of(step)
    flops = sum(FLOPS.get(work_kind, 0.0) * amount for work_kind, amount in cost.work.items())
    flops = product.flops if product else flops
    nbytes = min(traffic_nbytes(step, cost), traffic_nbytes(step, Cost()))
    return max(flops / rates.fma, rates.copy_seconds(nbytes))


class CallTimer:
    """Times every call of an executor in every step from now on: wraps each of `run.calls`."""

    def __init__(self, run: Executor, clock: Clock = CLOCK) -> None:
        self.run, self.clock = run, clock
        self.seconds: list[list[float]] = [[] for _ in run.calls]
        run.calls = [partial(self._time_call, i, call) for i, call in enumerate(run.calls)]

    def _time_call(self, i: int, call: Callable[[], None]) -> None:
        self.seconds[i].append(time_call(call, self.clock))

    def spent(self, rates: MachineRates) -> dict[OpGroup, OpTime]:
        """Return the time of each group of calls of a step; a call's seconds are its median over the steps."""
        times_by_group: dict[OpGroup, OpTime] = {}
        steps = self.run.placed.steps
        read_tensors = {t for step in steps for t in step.reads}
        for step, times in zip(steps, self.seconds, strict=True):
            op_time = times_by_group.setdefault(op_group_of(step), OpTime())
            op_time.calls += 1
            op_time.seconds += statistics.median(times)
            op_time.floor += call_floor(step, rates, read_tensors)
        return times_by_group


def measure_ops(
    training: TrainingBench, rates: MachineRates, rounds: int, clock: Clock = CLOCK
) -> tuple[BenchTable, float]:
    """Time `rounds` training steps; returns (the table of their ops, the median seconds of a step)."""
    training.step()  # loads kernels and pages
    timer = CallTimer(training.run, clock)
    step_seconds = statistics.median(time_call(training.step, clock) for _ in range(rounds))
    return table(training, timer.spent(rates), step_seconds), step_seconds


def table(training: TrainingBench, spent: dict[OpGroup, OpTime], step_seconds: float) -> BenchTable:
    """Return a table of a step's ops, those that lose most above their floor first, and a last row for all."""
    total_seconds = math.fsum(op_time.seconds for op_time in spent.values())
    floor_seconds = math.fsum(op_time.floor for op_time in spent.values())
    groups = sorted(spent, key=lambda group: -spent[group].seconds_over_floor)
    rows = [op_row(group, spent[group], total_seconds) for group in groups]
    all_calls = OpTime(sum(s.calls for s in spent.values()), total_seconds, floor_seconds)
    rows.append(op_row(OpGroup("all"), all_calls, total_seconds))
    note = (
        f"A step takes {step_seconds * 1e3:.1f} ms, {training.tokens / step_seconds:,.0f} tokens a second;"
        f" its calls {total_seconds * 1e3:.1f} ms. The floor of a call is the larger of two: its"
        " arithmetic at the rate of multiply-adds in registers, and its bytes at the rate of"
        " copying. Sorted by what is lost above it."
    )
    return BenchTable("ops", f"Ops of a step: {training.name}", COLUMNS, rows, (note,))


def op_row(group: OpGroup, spent: OpTime, total_seconds: float) -> list[str | int | float | None]:
    ratio = spent.seconds / spent.floor if spent.floor > MIN_FLOOR_SECONDS * spent.calls else None
    time_share = spent.seconds / total_seconds if total_seconds else 0.0
    ms = [1e3 * seconds for seconds in (spent.seconds, spent.floor, spent.seconds_over_floor)]
    return [group.op, group.form, group.shape, spent.calls, ms[0], time_share, ms[1], ratio, ms[2]]
