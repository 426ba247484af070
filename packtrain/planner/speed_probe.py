"""Measures the speed of this machine: each kind of work, by a small call that does mostly that work.

Other work of a call is subtracted at the rates known so far. The fastest of several rounds counts.
A call that is repeated alone finds its inputs in a cache and the other threads awake, so it is 1.2 to 1.5 times as
fast as in a step: all rates are lowered by how much longer two layers take than the sum of their calls.
On a busy machine, rates come from one thread's processor time, by the median of rounds."""

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
from packtrain.engine.ops.costs import call_cost, multiply_kind, pack_kind, traffic_nbytes
from packtrain.engine.placement import Placed, place
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import Spec, Tensor, input, weight
from packtrain.kernels.runtime.environment import supports_precision
from packtrain.planner import cost_model
from packtrain.planner.cost_model import BackendRates, call_seconds, graph_seconds

# rounds of a call, and seconds after which no further round begins
MIN_ROUNDS, MAX_ROUNDS, SPENT = 3, 30, 0.04
# share of the time for which other programs delayed a thread, above which the machine is busy
MAX_WAIT_SHARE = 0.15
DEFAULT_RATES = BackendRates(1e11, 1e10)
SOLVE_PASSES = 8  # passes over the calls; each subtracts other work at the rates of the last pass
MIN_TIME_SHARE = 0.1  # least share of a call's time that counts for the kind it measures
MEMORY_KINDS = "near", "far"
COPY_NBYTES = 16 << 20  # bytes of a timed copy between two memories


def probes(types: Collection[Dtype]) -> Iterator[tuple[str, Tensor]]:
    """Yield a kind of work and the result of a call that does mostly that work; calls use at most 48 MiB."""
    yield "call", ops.scale(input("x", (1,)), by=2.0)
    yield "region", ops.scale(input("x", ((1 << 15) + 1,)), by=2.0)
    yield "near", ops.scale(input("x", (1 << 17,)), by=2.0)
    yield "far", ops.scale(input("x", (6 << 20,)), by=2.0)
    yield "multiply", ops.matmul(input("x", (480, 512)), weight("w", (256, 512)))
    for precision in PRECISIONS[1:]:
        if supports_precision(precision):
            x, w = input("x", (480, 512)), weight("w", (256, 512))
            yield multiply_kind(precision), ops.matmul(x, w, precision=precision)
    yield "pack", ops.out_prod(input("a", (2048, 480)), input("b", (2048, 32)))
    yield "exp", ops.swiglu(input("gate", (1 << 17,)), input("up", (1 << 17,)))
    for work_kind, heads, width in (("attend", 4, 64), ("score", 16, 8)):
        q, k, v = (input(name, (1, 256, heads, width)) for name in "qkv")
        y, lse = ops.attention(q, k, v, scale=1.0)
        yield work_kind, y
        dy, y, lse = input("dy", y.shape), input("y", y.shape), input("lse", lse.shape)
        yield f"{work_kind} back", ops.attention_back(dy, y, lse, q, k, v, scale=1.0)[0]
    for dtype in types:
        yield pack_kind(dtype), ops.matmul(input("x", (24, 1024)), weight("w", (512, 1024), dtype))


def probe_layers() -> Tensor:
    """Build the result of two layers in sequence, as in a training step (13 MiB), to see how calls slow each other."""
    x = input("x", (256, 512))
    for i in range(2):
        gate, up_weight = (weight(f"{name}.{i}", (1024, 512)) for name in ("gate", "up"))
        y = ops.rms_norm(x, weight(f"norm.{i}", (512,)), eps=1e-6)
        y = ops.swiglu(ops.matmul(y, gate), ops.matmul(y, up_weight))
        x = ops.add(x, ops.matmul(y, weight(f"down.{i}", (512, 1024))))
    return x


@dataclass
class ProbeTimings:
    """Times of calls on a backend, and how long other programs used the processor meanwhile; solves them for rates.

    clock        wall or processor time: other programs only add to the first, but change the second both ways
    choose_time  picks one of several rounds' times
    timed_calls  kind of work, step and seconds of each call
    step         the placed graph of `probe_layers`, and its seconds
    """

    clock: Callable[[], float] = time.perf_counter
    choose_time: Callable[[list[float]], float] = min
    target: Target = CPU
    timed_calls: list[tuple[str, KernelStep, float]] = field(default_factory=list)
    step: tuple[Placed, float] | None = None
    wall_seconds: float = 0.0
    waited: float = 0.0

    def time_call(self, work_kind: str, y: Tensor) -> None:
        """Time the call that computes y, without computing its inputs, as a measurement of `work_kind`."""
        run = warm_executor(y, self.target)
        round_times = self.time_rounds([*run.calls[-1:], *run.syncs])
        self.timed_calls.append((work_kind, run.placed.steps[-1], self.choose_time(round_times)))

    def time_layers(self) -> None:
        run = warm_executor(probe_layers(), self.target)
        self.step = run.placed, statistics.median(self.time_rounds([*run.calls, *run.syncs]))

    def time_rounds(self, calls: Sequence[Callable[[], None]]) -> list[float]:
        """Run all calls several times and return the seconds of each round."""
        times, waited_before, start = list[float](), processor_wait_seconds(), time.perf_counter()
        while len(times) < MIN_ROUNDS or (len(times) < MAX_ROUNDS and sum(times) < SPENT):
            start_time = self.clock()
            for call in calls:
                call()
            times.append(self.clock() - start_time)
        self.wall_seconds += time.perf_counter() - start
        self.waited += processor_wait_seconds() - waited_before
        return times

    @property
    def is_quiet(self) -> bool:
        return self.waited < MAX_WAIT_SHARE * self.wall_seconds

    def solve_rates(self, num_threads: int, fallback: BackendRates = DEFAULT_RATES) -> BackendRates:
        """Return the rates that explain the measured seconds; rates without a call come from `fallback`."""
        rates = replace(fallback, threads=num_threads)
        for _ in range(SOLVE_PASSES):
            for work_kind, step, measured_seconds in self.timed_calls:
                rates = solve_rate(rates, work_kind, step, measured_seconds)
        if self.step is None:
            return rates
        placed, measured_seconds = self.step
        return rates.slower(max(measured_seconds / graph_seconds(placed, rates), 1.0))


def warm_executor(y: Tensor, target: Target = CPU) -> Executor:
    """Return an executor that computes y from zeros, after one run, so that nothing is allocated when it is timed."""
    session = Session()
    run = session.executor(place(Graph([y]), target))
    for leaf in run.placed.graph.leaves:
        if leaf.kind == "weight":
            session.fill(leaf.label, lambda array: array.view(np.uint8).fill(0))
    run({name: np.zeros(spec.shape, np.float32) for name, (_, _, spec) in run.inputs.items()})
    return run


def solve_rate(rates: BackendRates, kind: str, step: KernelStep, seconds: float) -> BackendRates:
    """Return the rates with the rate of `kind` replaced, so that they predict the `seconds` of this call."""
    cost = call_cost(step, step.results)
    if kind == "call":
        return replace(rates, call=seconds)
    if kind == "region":
        base_seconds = call_seconds(step, replace(rates, region=0.0))
        return replace(rates, region=max(seconds - base_seconds, 0.0))
    left = seconds - rates.call - rates.region
    if kind in MEMORY_KINDS:
        rate = traffic_nbytes(step, cost) / max(left, MIN_TIME_SHARE * seconds)
        return replace(rates, cache_nbytes=rate) if kind == "near" else replace(rates, nbytes=rate)
    work_amount = cost.work[kind]
    other_seconds = sum(n / rates.rate_of(k) for k, n in cost.work.items() if k != kind)
    left = left / cost_model.idle_factor(cost.num_tasks, threads=rates.threads) - other_seconds
    rate = work_amount / max(left, MIN_TIME_SHARE * seconds)
    flops = 2 * rate if kind == "multiply" else rates.flops
    return replace(rates, flops=flops, kinds={**rates.kinds, kind: rate})


def measure_rates(
    types: Collection[Dtype] = (), fallback: BackendRates = DEFAULT_RATES, target: Target = CPU
) -> tuple[BackendRates, bool]:
    """Measure a backend's rates in about a second; also return whether the machine was quiet. On a busy machine, one
    thread's processor time counts, times the threads; a device has no processor time."""
    num_threads = kernels.threads()
    timing = time_probes(ProbeTimings(target=target), types)
    if timing.is_quiet or target.is_separate:
        new_rates = timing.solve_rates(num_threads, fallback)
        return replace(new_rates, link=link_rate(timing)) if target.is_separate else new_rates, True
    kernels.set_threads(1)
    try:
        timing = ProbeTimings(time.thread_time, statistics.median)
        single_thread = time_probes(timing, types).solve_rates(1, fallback)
    finally:
        kernels.set_threads(num_threads)
    return single_thread.for_threads(num_threads), False


def link_rate(timing: ProbeTimings) -> float:
    """Measure the bytes per second that are copied between a device's memory and the process's, there and back."""
    host, (backend, *_) = np.ones(COPY_NBYTES, np.uint8), timing.target.backends
    spec = Spec((COPY_NBYTES // f32.block_nbytes,))
    device_array = backend.view(backend.alloc(COPY_NBYTES), 0, spec, spec.strides)
    host_values = host.view(np.float32)

    def fetch_back() -> None:
        backend.sync()
        backend.fetch(device_array, host_values)

    round_times = timing.time_rounds([lambda: backend.write(device_array, host_values), fetch_back])
    return 2 * COPY_NBYTES / timing.choose_time(round_times)


def time_probes(timing: ProbeTimings, types: Collection[Dtype]) -> ProbeTimings:
    for work_kind, y in probes(types):
        timing.time_call(work_kind, y)
    timing.time_layers()
    return timing


def processor_wait_seconds() -> float:
    """Return the seconds so far in which threads of this process waited for the processor: Linux counts them.
    Elsewhere, they are the time in which this thread did not run."""
    try:
        counts = [path.read_text().split() for path in Path("/proc/self/task").glob("*/schedstat")]
    except OSError:  # a thread has just ended
        return processor_wait_seconds()
    if not counts:
        return time.perf_counter() - time.thread_time()
    return sum(int(delay) for _, delay, _ in counts) / 1e9
