"""Measures how data affects the time of a run, and checks whether its steps take as long as expected."""

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from packtrain.common.text import clock
from packtrain.planner.speed_probe import processor_wait_seconds

ATTENTION_BLOCK = 64  # positions per block of queries and of keys in attention
NUM_COMPARED_STEPS = 5  # compared steps after a run's first, which touches its memory first
# share of the expected time, and seconds until the run's end, below which a deviation is not reported
MIN_DEVIATION, MIN_DEVIATION_SECONDS = 0.2, 10.0
MAX_WAIT_SHARE = 0.2  # if other programs had the processor for more of the time, they are the cause


def attended_share(batches: Iterable[Mapping[str, np.ndarray]]) -> float:
    """Return the share of causally visible 64 × 64 blocks of scores that attention must compute, as documents mask
    others. `batches` have "seq", the document of each position, and "pos", the position within that."""
    num_attended, num_causal = 0, 0
    for batch in batches:
        (min_seq, max_seq), (low, high) = _block_ranges(batch["seq"]), _block_ranges(batch["pos"])
        is_after = max_seq[:, :, None] < min_seq[:, None]
        is_before = min_seq[:, :, None] > max_seq[:, None]
        is_later = high[:, :, None] < low[:, None]
        num_attended += int((~(is_after | is_before | is_later)).sum())
        num_rows, num_blocks = low.shape
        num_causal += num_rows * num_blocks * (num_blocks + 1) // 2
    return num_attended / num_causal if num_causal else 1.0


def _block_ranges(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the minimum and maximum of each block of 64 positions of `ids` (rows, T), each (rows, blocks)."""
    starts = np.arange(0, ids.shape[1], ATTENTION_BLOCK)
    return np.minimum.reduceat(ids, starts, axis=1), np.maximum.reduceat(ids, starts, axis=1)


def num_trained_tokens(batches: Sequence[Mapping[str, np.ndarray]], num_positions: int) -> int:
    """Return how many of a step's `num_positions` tokens the loss counts, if the data are like these batches."""
    num_weights = sum(batch["weights"].size for batch in batches)
    num_weighted = sum(int((batch["weights"] > 0).sum()) for batch in batches)
    return round(num_positions * num_weighted / num_weights) if num_weights else num_positions


def pace(expected: float, correct: Callable[[float], None]) -> Callable[[float, int], str | None]:
    """Return a callback check(seconds, steps_left) for a run to call after each step. The callback returns None or,
    once, after NUM_COMPARED_STEPS steps whose median is far from `expected` seconds, a message; then correct(measured /
    expected) is called, unless other programs are the cause."""
    step_times, initial_wait = deque[float](maxlen=NUM_COMPARED_STEPS + 2), 0.0

    def check_step(seconds: float, left: int) -> str | None:
        nonlocal initial_wait
        step_times.append(seconds)
        if len(step_times) == 1:
            initial_wait = processor_wait_seconds()
        if len(step_times) != NUM_COMPARED_STEPS + 1:
            return None
        compared_times = [*step_times][1:]
        median_seconds = statistics.median(compared_times)
        wait_seconds = processor_wait_seconds() - initial_wait
        deviation = abs(median_seconds - expected)
        if deviation <= MIN_DEVIATION * expected or deviation * left < MIN_DEVIATION_SECONDS:
            return None
        message = f"a step takes {median_seconds:.3g} s, not the {expected:.3g} s expected: "
        message += f"{clock(median_seconds * left)} for the {left:,} steps left"
        if median_seconds > expected and wait_seconds > MAX_WAIT_SHARE * sum(compared_times):
            return f"{message}; other programs are using the processor"
        correct(median_seconds / expected)
        return f"{message}; the next run expects that"

    return check_step
