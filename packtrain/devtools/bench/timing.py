"""How things are timed here: with a clock that a test may replace, and with a look at who else used the processor."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from packtrain.common.memory import Peak
from packtrain.planner.speed_probe import waited

Clock = Callable[[], float]
CLOCK: Clock = time.perf_counter
BURST = 0.02  # seconds for which a short call is repeated in one turn
MOST = 200  # calls of a burst
PAUSE = 0.02  # seconds before a turn, in which the other side's threads stop waiting actively


def took(work: Callable[[], object], clock: Clock = CLOCK) -> float:
    """Seconds of one call."""
    start_time = clock()
    work()
    return clock() - start_time


def burst(work: Callable[[], object], clock: Clock = CLOCK) -> float:
    """Median seconds of a call that is repeated for BURST seconds, at least once; the first does not count."""
    time.sleep(PAUSE)
    work()
    times = [took(work, clock)]
    while sum(times) < BURST and len(times) < MOST:
        times.append(took(work, clock))
    return statistics.median(times)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times as fast we are: the median of what they took over what we took, round by round."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


@dataclass
class Quiet:
    """`with Quiet() as quiet:` whether other programs left the processor to this process.

    wall    seconds of the block
    waited  seconds for which its threads waited for the processor
    """

    wall: float = 0.0
    waited: float = 0.0

    def __enter__(self) -> "Quiet":
        self._began = time.perf_counter(), waited()
        return self

    def __exit__(self, *error: object) -> None:
        wall, before = self._began
        self.wall, self.waited = time.perf_counter() - wall, waited() - before

    @property
    def share(self) -> float:
        return self.waited / self.wall if self.wall else 0.0


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step of a peer: seconds, private bytes at its peak if it was watched, and what `Quiet` counts."""

    seconds: float
    nbytes: int
    wall: float
    waited: float
    loss: float


@dataclass(slots=True, kw_only=True)
class Side:
    """A program's steps, whose first `warm` do not count; the last of those is watched for memory."""

    program: str
    precision: str = "f32"
    warm: int
    steps: list[Stepped] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [step.seconds for step in self.steps[self.warm :]]

    @property
    def nbytes(self) -> int:
        return self.steps[self.warm - 1].nbytes

    @property
    def waited(self) -> float:
        """The share of the time in which its threads waited for the processor."""
        return sum(step.waited for step in self.steps) / sum(step.wall for step in self.steps)


def stepping(step: Callable[[], float]) -> Callable[..., Stepped]:
    """Steps that are timed; those `watched` for private memory are a little slower, and should not count."""

    def turn(watched: bool = False) -> Stepped:
        time.sleep(PAUSE)
        with Quiet() as quiet, Peak() if watched else nullcontext() as peak:
            start_time = CLOCK()
            loss = step()
            seconds = CLOCK() - start_time
        nbytes = peak.nbytes if peak else 0
        return Stepped(seconds, nbytes, quiet.wall, quiet.waited, loss)

    return turn
