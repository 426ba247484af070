"""What the data of a run means for its time, and whether its steps take as long as was expected."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from packtrain.speed import waited
from packtrain.watch.progress import clock

BLOCK = 64  # positions that attention looks at together, as queries and as keys
STEPS = 5  # that are compared; the first of a run is not: it touches its memory first
OFF, WORTH = 0.2, 10.0  # of the expected time, and seconds until the end: less is not worth a word
WAITED = 0.2  # of the time, and other programs had the processor


def seen(batches: Iterable[Mapping[str, np.ndarray]]) -> float:
    """What part of the blocks that a causal mask lets through attention has to look at: documents hide the rest."""
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
    """The least and the largest of each block of a row, (rows, blocks)."""
    starts = np.arange(0, ids.shape[1], BLOCK)
    return np.minimum.reduceat(ids, starts, axis=1), np.maximum.reduceat(ids, starts, axis=1)


def learnt(batches: Sequence[Mapping[str, np.ndarray]], positions: int) -> int:
    """Tokens that a step of so many positions learns from, if all its batches are like these."""
    weights = sum(batch["weights"].size for batch in batches)
    counted = sum(int((batch["weights"] > 0).sum()) for batch in batches)
    return round(positions * counted / weights) if weights else positions


@dataclass
class Pace:
    """The first steps of a run beside what was expected of them.

    correct  called with measured over expected when they differ and no other program is to blame
    """

    expected: float
    correct: Callable[[float], None]
    times: list[float] = field(default_factory=list)
    waited: float = field(default_factory=waited)

    def step(self, seconds: float, left: int) -> str | None:
        """Note the time of a step with so many left; after some of them a sentence, if they are off."""
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
