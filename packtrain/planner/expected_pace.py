"""How data affects the time of a run, and whether its steps take as long as expected."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from packtrain.common.text import clock
from packtrain.planner.speed_probe import waited

BLOCK = 64  # positions per block of queries and of keys in attention
STEPS = 5  # steps compared; not the first of a run, which touches its memory first
# share of the expected time, and seconds until the end, below which no message is printed
OFF, WORTH = 0.2, 10.0
WAITED = 0.2  # share of the time for which other programs had the processor


def seen(batches: Iterable[Mapping[str, np.ndarray]]) -> float:
    """The share of causally visible blocks that attention must compute: document borders mask the rest."""
    looked, causal = 0, 0
    for batch in batches:
        (low_seq, high_seq), (low, high) = _ends(batch["seq"]), _ends(batch["pos"])
        is_after = high_seq[:, :, None] < low_seq[:, None]
        is_before = low_seq[:, :, None] > high_seq[:, None]
        later = high[:, :, None] < low[:, None]
        looked += int((~(is_after | is_before | later)).sum())
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


def pace(expected: float, correct: Callable[[float], None]) -> Callable[[float, int], str | None]:
    """A function to call with the seconds of each step, and the steps left.

    After STEPS of them it returns a message if they take longer or shorter than expected.

    correct  called with measured over expected if they differ and no other program is the cause
    """
    times, initial_wait = list[float](), 0.0

    def step(seconds: float, left: int) -> str | None:
        nonlocal initial_wait
        times.append(seconds)
        if len(times) == 1:
            initial_wait = waited()
        if len(times) != STEPS + 1:
            return None
        counted = times[1:]
        took, lost = statistics.median(counted), waited() - initial_wait
        deviation = abs(took - expected)
        if deviation <= OFF * expected or deviation * left < WORTH:
            return None
        text = f"a step takes {took:.3g} s, not the {expected:.3g} s expected: "
        text += f"{clock(took * left)} for the {left:,} steps left"
        if took > expected and lost > WAITED * sum(counted):
            return f"{text}; other programs are using the processor"
        correct(took / expected)
        return f"{text}; the next run expects that"

    return step
