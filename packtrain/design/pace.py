"""How data affects the time of a run, and whether its steps take as long as expected."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from packtrain.speed import waited
from packtrain.watch.progress import clock

BLOCK = 64  # positions per block of queries and of keys in attention
STEPS = 5  # steps compared; not the first of a run, which touches its memory first
OFF, WORTH = (
    0.2,
    10.0,
)  # share of the expected time, and seconds until the end, below which no message is printed
WAITED = 0.2  # share of the time for which other programs had the processor


def seen(batches: Iterable[Mapping[str, np.ndarray]]) -> float:
    """The share of causally visible blocks that attention must compute: document borders mask the rest."""
    looked, causal = 0, 0
    for batch in batches:
        (low_seq, high_seq), (low, high) = _ends(batch["seq"]), _ends(batch["pos"])
        after, before = (
            high_seq[:, :, None] < low_seq[:, None],
            low_seq[:, :, None] > high_seq[:, None],
        )
        later = high[:, :, None] < low[:, None]
        looked += int((~(after | before | later)).sum())
        rows, blocks = low.shape
        causal += rows * blocks * (blocks + 1) // 2
    return looked / causal if causal else 1.0


def _ends(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Minimum and maximum of each block of a row, (rows, blocks)."""
    starts = np.arange(0, ids.shape[1], BLOCK)
    return np.minimum.reduceat(ids, starts, axis=1), np.maximum.reduceat(ids, starts, axis=1)


def learnt(batches: Sequence[Mapping[str, np.ndarray]], positions: int) -> int:
    """Tokens that a step of `positions` positions trains on, if all its batches are like these."""
    weights = sum(batch["weights"].size for batch in batches)
    counted = sum(int((batch["weights"] > 0).sum()) for batch in batches)
    return round(positions * counted / weights) if weights else positions


@dataclass
class Pace:
    """Compares the first steps of a run with the expected time.

    correct  called with measured over expected if they differ and no other program is the cause
    """

    expected: float
    correct: Callable[[float], None]
    times: list[float] = field(default_factory=list)
    waited: float = field(default_factory=waited)

    def step(self, seconds: float, left: int) -> str | None:
        """Record the time of a step with `left` steps left; after STEPS of them returns a message if they are off."""
        self.times.append(seconds)
        if len(self.times) == 1:
            self.waited = waited()
        if len(self.times) != STEPS + 1:
            return None
        counted = self.times[1:]
        took, lost = statistics.median(counted), waited() - self.waited
        off = abs(took - self.expected)
        if off <= OFF * self.expected or off * left < WORTH:
            return None
        text = f"a step takes {took:.3g} s, not the {self.expected:.3g} s expected: "
        text += f"{clock(took * left)} for the {left:,} steps left"
        if took > self.expected and lost > WAITED * sum(counted):
            return f"{text}; other programs are using the processor"
        self.correct(took / self.expected)
        return f"{text}; the next run expects that"
