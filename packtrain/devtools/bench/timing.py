"""Times calls with a clock that a test may replace, and the seconds for which threads waited for the processor."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from packtrain.common.memory import MemoryPeak
from packtrain.planner.speed_probe import processor_wait_seconds

Clock = Callable[[], float]
CLOCK: Clock = time.perf_counter
BURST_SECONDS = 0.02  # seconds for which a short call is repeated in one turn
MAX_BURST_CALLS = 200  # calls of a burst
PAUSE = 0.02  # seconds before a turn, in which the other side's threads stop spinning


def time_call(task: Callable[[], object], clock: Clock = CLOCK) -> float:
    """Return the seconds of one call."""
    start_time = clock()
    task()
    return clock() - start_time


def burst_seconds(task: Callable[[], object], clock: Clock = CLOCK) -> float:
    """Return the median seconds of calls during BURST_SECONDS, 1 to MAX_BURST_CALLS of them, after an uncounted one."""
    time.sleep(PAUSE)
    task()
    times = [time_call(task, clock)]
    while sum(times) < BURST_SECONDS and len(times) < MAX_BURST_CALLS:
        times.append(time_call(task, clock))
    return statistics.median(times)


def paired(ours: Sequence[float], peer_seconds: Sequence[float]) -> float:
    """Return how many times as fast ours is: the median over rounds of the peer's seconds / ours in the same round."""
    return statistics.median(b / a for a, b in zip(ours, peer_seconds, strict=True))


@dataclass
class ProcessorWait:
    """`with ProcessorWait() as wait:` measures how long other programs kept this process from the processor.

    wall_seconds  seconds of the block
    waited        seconds for which this process's threads waited for the processor
    """

    wall_seconds: float = 0.0
    waited: float = 0.0

    def __enter__(self) -> "ProcessorWait":
        self._start = time.perf_counter(), processor_wait_seconds()
        return self

    def __exit__(self, *error: object) -> None:
        start_time, start_waited = self._start
        self.wall_seconds = time.perf_counter() - start_time
        self.waited = processor_wait_seconds() - start_waited

    @property
    def waited_share(self) -> float:
        return self.waited / self.wall_seconds if self.wall_seconds else 0.0


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A timed step: its seconds, peak private bytes (0: not watched), the figures of `ProcessorWait`, and its loss."""

    seconds: float
    nbytes: int
    wall_seconds: float
    waited: float
    loss: float


@dataclass(slots=True, kw_only=True)
class BenchProgram:
    """A program and its timed steps; the first `num_warmup` do not count, the last of these is watched for memory."""

    name: str
    precision: str = "f32"
    num_warmup: int
    steps: list[TimedStep] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [step.seconds for step in self.steps[self.num_warmup :]]

    @property
    def nbytes(self) -> int:
        return self.steps[self.num_warmup - 1].nbytes

    @property
    def waited_share(self) -> float:
        """Return the share of the time in which the program's threads waited for the processor."""
        wall_seconds = sum(step.wall_seconds for step in self.steps)
        return sum(step.waited for step in self.steps) / wall_seconds


def timed_steps(step: Callable[[], float]) -> Callable[..., TimedStep]:
    """Wrap a step in a function that times it; `is_watched` samples private memory, which makes it a little slower."""

    def run_step(is_watched: bool = False) -> TimedStep:
        time.sleep(PAUSE)
        with ProcessorWait() as quiet, MemoryPeak() if is_watched else nullcontext() as peak:
            start_time = CLOCK()
            loss = step()
            seconds = CLOCK() - start_time
        nbytes = peak.nbytes if peak else 0
        return TimedStep(seconds, nbytes, quiet.wall_seconds, quiet.waited, loss)

    return run_step
