"""What a block can keep: sets of its values on the Pareto front of bytes and seconds."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from packtrain.recompute.choice import aligned
from packtrain.tensor import Call, Tensor

PLACES = 16  # values of a block, the largest, from which sets are formed
OPTIONS = 12  # sets of a block, spread over each Pareto front


class Kept(NamedTuple):
    """Bytes that a block keeps, seconds to recompute the rest, places of the kept values."""

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
    """Sets of values of a block on the Pareto front of sets with the same cuts.

    calls   of the block, from `start` on, and the time that each takes
    wanted  values that the backward pass reads
    cuts    places of values on every path through the block: keeping one makes the working set smaller, which
            neither bytes nor seconds show
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
    """Seconds to recompute `wanted`, for each of many sets; kept[t]: which of them keep t."""
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
    """The Pareto front, thinned to OPTIONS: the ends, and the points farthest below their neighbours."""
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
    """The least added seconds for saving this many bytes on average: the lower convex hull of the points."""
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
