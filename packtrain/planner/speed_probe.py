"""Measures the speed of this machine: each kind of work, by a small call that does mostly that.

Other work of a call is subtracted at the rates known so far. The fastest of several rounds counts.
A call that is repeated alone finds its inputs in a cache and the other threads awake. In a step it does not:
all rates are lowered by how much longer two layers take than the sum of their calls.
On a busy machine, rates come from one thread's processor time, by the median of rounds.
"""

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from packtrain import kernels
from packtrain.dtypes import PRECISIONS, Dtype, f32
from packtrain.engine import ops
from packtrain.engine.backends import CPU, Target
from packtrain.engine.executor import Executor, Session
from packtrain.engine.graph import Graph
from packtrain.engine.ops.costs import laying, multiplying
from packtrain.engine.placement import Placed, place
from packtrain.engine.step import Step
from packtrain.engine.tensor import Spec, Tensor, input, weight
from packtrain.kernels.runtime import multiplies
from packtrain.planner.cost_model import Rates, call_seconds, cost_of, idle, moved, seconds

# rounds of a call, and seconds after which there are no more
LEAST_ROUNDS, ROUNDS, SPENT = 3, 30, 0.04
WAITED = (
    0.15  # share of the time for which another program delayed a thread: then the machine is busy
)
BEGIN = Rates(1e11, 1e10)
PASSES = 8  # over the calls: each subtracts with the rates of the last pass
LEAST = 0.1  # least share of a call's time that counts for the kind it measures
MEMORY = "near", "far"
COPIED = 16 << 20  # bytes between two memories


def probes(types: Collection[Dtype]) -> Iterator[tuple[str, Tensor]]:
    """A call for each kind of work, with at most 48 MiB in use, more than caches hold."""
    yield "call", ops.scale(input("x", (1,)), by=2.0)
    yield "region", ops.scale(input("x", ((1 << 15) + 1,)), by=2.0)
    yield "near", ops.scale(input("x", (1 << 17,)), by=2.0)
    yield "far", ops.scale(input("x", (6 << 20,)), by=2.0)
    yield "multiply", ops.matmul(input("x", (480, 512)), weight("w", (256, 512)))
    for precision in PRECISIONS[1:]:
        if multiplies(precision):
            x, w = input("x", (480, 512)), weight("w", (256, 512))
            yield multiplying(precision), ops.matmul(x, w, precision=precision)
    yield "pack", ops.out_prod(input("a", (2048, 480)), input("b", (2048, 32)))
    yield "exp", ops.swiglu(input("gate", (1 << 17,)), input("up", (1 << 17,)))
    for kind, heads, width in (("attend", 4, 64), ("score", 16, 8)):
        q, k, v = (input(name, (1, 256, heads, width)) for name in "qkv")
        y, lse = ops.attention(q, k, v, scale=1.0)
        yield kind, y
        dy, y, lse = input("dy", y.shape), input("y", y.shape), input("lse", lse.shape)
        yield f"{kind} back", ops.attention_back(dy, y, lse, q, k, v, scale=1.0)[0]
    for dtype in types:
        yield laying(dtype), ops.matmul(input("x", (24, 1024)), weight("w", (512, 1024), dtype))


def layers() -> Tensor:
    """Two layers in sequence, as in a step: 13 MiB."""
    x = input("x", (256, 512))
    for i in range(2):
        gate, up_weight = (weight(f"{name}.{i}", (1024, 512)) for name in ("gate", "up"))
        y = ops.rms_norm(x, weight(f"norm.{i}", (512,)), eps=1e-6)
        y = ops.swiglu(ops.matmul(y, gate), ops.matmul(y, up_weight))
        x = ops.add(x, ops.matmul(y, weight(f"down.{i}", (512, 1024))))
    return x


@dataclass
class Timing:
    """Timed calls, and how long other programs used the processor.

    clock   wall or processor time: other programs only add to the first, but change the second both ways
    choose  which of several rounds counts
    target  where the calls run
    step    all calls of `layers`, and their total time
    """

    clock: Callable[[], float] = time.perf_counter
    choose: Callable[[list[float]], float] = min
    target: Target = CPU
    calls: list[tuple[str, Step, float]] = field(default_factory=list)
    step: tuple[Placed, float] | None = None
    wall: float = 0.0
    waited: float = 0.0

    def add(self, kind: str, y: Tensor) -> None:
        """Time the call that computes y, without computing its inputs."""
        run = ready(y, self.target)
        times = self.rounds([*run.calls[-1:], *run.syncs])
        self.calls.append((kind, run.placed.steps[-1], self.choose(times)))

    def add_layers(self) -> None:
        run = ready(layers(), self.target)
        self.step = run.placed, statistics.median(self.rounds([*run.calls, *run.syncs]))

    def rounds(self, calls: Sequence[Callable[[], None]]) -> list[float]:
        """The total time of all calls, for each of several rounds."""
        times, waited_before, start = list[float](), waited(), time.perf_counter()
        while len(times) < LEAST_ROUNDS or (len(times) < ROUNDS and sum(times) < SPENT):
            start_time = self.clock()
            for call in calls:
                call()
            times.append(self.clock() - start_time)
        self.wall += time.perf_counter() - start
        self.waited += waited() - waited_before
        return times

    @property
    def quiet(self) -> bool:
        """Whether no other program used the processor."""
        return self.waited < WAITED * self.wall

    def rates(self, threads: int, fallback: Rates = BEGIN) -> Rates:
        """The rates that explain the times of all calls; rates without a call are taken from `fallback`."""
        rates = replace(fallback, threads=threads)
        for _ in range(PASSES):
            for kind, step, took in self.calls:
                rates = solved(rates, kind, step, took)
        if self.step is None:
            return rates
        placed, took = self.step
        return rates.slower(max(took / seconds(placed, rates), 1.0))


def ready(y: Tensor, target: Target = CPU) -> Executor:
    """An executor that computes y from zeros, after one warm-up run."""
    session = Session()
    run = session.executor(place(Graph([y]), target))
    for leaf in run.placed.graph.leaves:
        if leaf.kind == "weight":
            session.fill(leaf.label, lambda array: array.view(np.uint8).fill(0))
    run({name: np.zeros(spec.shape, np.float32) for name, (_, _, spec) in run.inputs.items()})
    return run


def solved(rates: Rates, kind: str, step: Step, took: float) -> Rates:
    """The rates with a new one for `kind` that explains the time of the call."""
    cost = cost_of(step, step.results)
    if kind == "call":
        return replace(rates, call=took)
    if kind == "region":
        base_seconds = call_seconds(step, replace(rates, region=0.0))
        return replace(rates, region=max(took - base_seconds, 0.0))
    left = took - rates.call - rates.region
    if kind in MEMORY:
        rate = moved(step, cost) / max(left, LEAST * took)
        return replace(rates, near=rate) if kind == "near" else replace(rates, nbytes=rate)
    amount = cost.work[kind]
    other_seconds = sum(
        n / rates.of(work_kind) for work_kind, n in cost.work.items() if work_kind != kind
    )
    left = left / idle(cost.tasks, threads=rates.threads) - other_seconds
    rate = amount / max(left, LEAST * took)
    flops = 2 * rate if kind == "multiply" else rates.flops
    return replace(rates, flops=flops, kinds={**rates.kinds, kind: rate})


def measured(
    types: Collection[Dtype] = (), fallback: Rates = BEGIN, target: Target = CPU
) -> tuple[Rates, bool]:
    """Measure the rates in about a second; also returns whether the machine was quiet.

    On a busy machine, one thread's processor time, times the threads; a backend apart from the processor has none.
    """
    threads = kernels.threads()
    timing = timed(Timing(target=target), types)
    if timing.quiet or target.apart:
        new_rates = timing.rates(threads, fallback)
        return replace(new_rates, link=copying(timing)) if target.apart else new_rates, True
    kernels.set_threads(1)
    try:
        single_thread = timed(Timing(time.thread_time, statistics.median), types).rates(1, fallback)
    finally:
        kernels.set_threads(threads)
    return single_thread.times(threads), False


def copying(timing: Timing) -> float:
    """Bytes per second between the memory of the target and the process's, there and back."""
    host, (backend, *_) = np.ones(COPIED, np.uint8), timing.target.backends
    spec = Spec((COPIED // f32.block_nbytes,))
    device_array = backend.view(backend.alloc(COPIED), 0, spec, spec.strides)
    values = host.view(np.float32)

    def back() -> None:
        backend.sync()
        backend.fetch(device_array, values)

    took = timing.rounds([lambda: backend.write(device_array, values), back])
    return 2 * COPIED / timing.choose(took)


def timed(timing: Timing, types: Collection[Dtype]) -> Timing:
    for kind, y in probes(types):
        timing.add(kind, y)
    timing.add_layers()
    return timing


def waited() -> float:
    """Seconds so far in which threads of this process waited for the processor.

    Linux counts that; elsewhere it is the time in which this thread did not run.
    """
    try:
        counts = [path.read_text().split() for path in Path("/proc/self/task").glob("*/schedstat")]
    except OSError:  # a thread has just ended
        return waited()
    if not counts:
        return time.perf_counter() - time.thread_time()
    return sum(int(delay) for _, delay, _ in counts) / 1e9
