"""What a block can keep: every set of its values, and those sets that no other beats in bytes and in seconds."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from packtrain.recompute.choice import aligned
from packtrain.tensor import Call, Tensor

PLACES = 16  # of a block, the largest, that sets to keep are made of
OPTIONS = 12  # of a block, spread over each of its Pareto fronts


class Kept(NamedTuple):
    """Bytes that a block keeps, seconds to compute again what it lacks, places of what it keeps."""

    saved: int
    again: float
    places: tuple[int, ...]


def front(
    calls: Sequence[Call],
    values: Sequence[Tensor],
    start: Tensor,
    wanted: Collection[Tensor],
    cuts: Collection[int],
    seconds: Callable[[Call], float],
) -> list[Kept]:
    """Sets of values of a block that no other with the same cuts beats.

    calls   of the block, from `start` on, and the time that each takes
    wanted  what the backward pass reads
    cuts    places of values that every way through the block passes: one that is kept makes the working set smaller,
            which neither bytes nor seconds tell
    """
    places = [i for i, t in enumerate(values) if t in wanted]
    places = sorted(sorted(places, key=lambda i: -aligned(values[i].spec))[:PLACES])
    sets = np.arange(1 << len(places))
    kept = {values[place]: sets >> bit & 1 > 0 for bit, place in enumerate(places)}
    saved = sum((aligned(t.spec) * there for t, there in kept.items()), np.zeros(len(sets), int))
    again = _again(calls, start, wanted, kept, seconds)
    passed = sets & sum(1 << bit for bit, place in enumerate(places) if place in cuts)

    def of(one: int) -> Kept:
        its = tuple(place for bit, place in enumerate(places) if one >> bit & 1)
        return Kept(int(saved[one]), float(again[one]), its)

    return [
        of(one)
        for alike in np.unique(passed)
        for one in _pareto(np.flatnonzero(passed == alike), saved, again)
    ]


def _again(
    calls: Sequence[Call],
    start: Tensor,
    wanted: Collection[Tensor],
    kept: Mapping[Tensor, np.ndarray],
    seconds: Callable[[Call], float],
) -> np.ndarray:
    """Seconds to compute `wanted` again, for each of many sets; kept[t] says which of them keep t."""
    absent = {t: ~there for t, there in kept.items()} | {start: np.False_}
    asked: dict[Tensor, np.ndarray | np.bool_] = dict.fromkeys(wanted, np.True_)
    total = np.zeros(len(next(iter(kept.values()), (0,))))
    for call in reversed(calls):
        need: np.ndarray | np.bool_ = np.False_
        for t in call.results:
            need = need | (asked.get(t, np.False_) & absent.get(t, np.True_))
        total += seconds(call) * need
        for t in call.reads:
            asked[t] = asked.get(t, np.False_) | need
    return total


def _pareto(sets: np.ndarray, saved: np.ndarray, again: np.ndarray) -> list[int]:
    """Sets that no other beats in both, thinned to OPTIONS: the ends, and what lies farthest below its neighbours."""
    order = sets[np.lexsort((again[sets], saved[sets]))]
    least = np.minimum.accumulate(again[order])
    better = np.append(True, least[1:] < least[:-1] - 1e-12)
    found = [(int(saved[i]), float(again[i]), int(i)) for i in order[better]]
    while len(found) > OPTIONS:

        def bend(i: int) -> float:
            (a, s, _), (b, t, _), (c, u, _) = found[i - 1 : i + 2]
            return s + (u - s) * (b - a) / (c - a) - t

        del found[min(range(1, len(found) - 1), key=bend)]
    return [one for _, _, one in found]


def least_again(points: Sequence[Kept], saved: float) -> float:
    """The least seconds that blocks add which keep so many bytes on average: the convex line below their points."""
    line: list[tuple[float, float]] = []
    for point in sorted((one.saved, one.again) for one in points):
        while len(line) > 1 and _above(line[-1], line[-2], point):
            line.pop()
        line.append(point)
    kept, again = np.array(line).T
    return float(np.interp(saved, kept, again))


def _above(b: tuple[float, float], a: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b is above the line from a to c, or on it."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
