"""How things are timed here: with a clock that a test may replace, and with a look at who else used the processor."""

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
PAUSE = 0.02  # seconds before a turn, in which the other side's threads stop waiting actively


def time_call(task: Callable[[], object], clock: Clock = CLOCK) -> float:
    """Seconds of one call."""
    start_time = clock()
    task()
    return clock() - start_time


def burst_seconds(task: Callable[[], object], clock: Clock = CLOCK) -> float:
    """Median seconds of a call that is repeated for BURST seconds, at least once; the first does not count."""
    time.sleep(PAUSE)
    task()
    times = [time_call(task, clock)]
    while sum(times) < BURST_SECONDS and len(times) < MAX_BURST_CALLS:
        times.append(time_call(task, clock))
    return statistics.median(times)


def paired(ours: Sequence[float], peer_seconds: Sequence[float]) -> float:
    """How many times as fast we are: the median of what they took over what we took, round by round."""
    return statistics.median(b / a for a, b in zip(ours, peer_seconds, strict=True))


@dataclass
class ProcessorWait:
    """`with Quiet() as quiet:` whether other programs left the processor to this process.

    wall_seconds  seconds of the block
    waited        seconds for which its threads waited for the processor
    """

    wall_seconds: float = 0.0
    waited: float = 0.0

    def __enter__(self) -> "ProcessorWait":
        self._start = time.perf_counter(), processor_wait_seconds()
        return self

    def __exit__(self, *error: object) -> None:
        start_time, start_waited = self._start
        self.wall_seconds, self.waited = (
            time.perf_counter() - start_time,
            processor_wait_seconds() - start_waited,
        )

    @property
    def waited_share(self) -> float:
        return self.waited / self.wall_seconds if self.wall_seconds else 0.0


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step of a peer: seconds, private bytes at its peak if it was watched, and what `Quiet` counts."""

    seconds: float
    nbytes: int
    wall_seconds: float
    waited: float
    loss: float


@dataclass(slots=True, kw_only=True)
class BenchProgram:
    """A program's steps, whose first `num_warmup` do not count; the last of those is watched for memory."""

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
        """The share of the time in which its threads waited for the processor."""
        return sum(step.waited for step in self.steps) / sum(
            step.wall_seconds for step in self.steps
        )


def timed_steps(step: Callable[[], float]) -> Callable[..., TimedStep]:
    """Steps that are timed; those `is_watched` for private memory are a little slower, and should not count."""

    def run_step(is_watched: bool = False) -> TimedStep:
        time.sleep(PAUSE)
        with ProcessorWait() as quiet, MemoryPeak() if is_watched else nullcontext() as peak:
            start_time = CLOCK()
            loss = step()
            seconds = CLOCK() - start_time
        nbytes = peak.nbytes if peak else 0
        return TimedStep(seconds, nbytes, quiet.wall_seconds, quiet.waited, loss)

    return run_step
