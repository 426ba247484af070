"""What a block can keep: sets of its values on the Pareto front of bytes and seconds."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

PLACES = 16  # values of a block, the largest, from which sets are formed
OPTIONS = 12  # sets of a block, spread over each Pareto front


class Kept(NamedTuple):
    """Bytes that a block keeps, seconds to recompute the rest, places of the kept values."""

    saved: int
    again: float
    places: tuple[int, ...]


class Made(NamedTuple):
    """A call of a block: numbers of its results and of what it reads, and the seconds that it takes."""

    results: tuple[int, ...]
    reads: tuple[int, ...]
    seconds: float
    counts: bool  # whether recomputing it is a call


def front(
    calls: Sequence[Made],
    values: Sequence[int],
    nbytes: Sequence[int],
    start: int,
    wanted: Collection[int],
    cuts: Collection[int],
) -> list[Kept]:
    """Sets of values of a block on the Pareto front of sets with the same cuts.

    calls   of the block, from `start` on
    values  that could be kept, by place, and the bytes of each
    wanted  values that the backward pass reads
    cuts    places of values on every path through the block: keeping one makes the working set smaller, which
            neither bytes nor seconds show
    """
    places = [i for i, t in enumerate(values) if t in wanted]
    places = sorted(sorted(places, key=lambda i: -nbytes[i])[:PLACES])
    sets = np.arange(1 << len(places))
    kept = {place: sets >> bit & 1 > 0 for bit, place in enumerate(places)}
    saved = sum((nbytes[at] * there for at, there in kept.items()), np.zeros(len(sets), int))
    again = _again(calls, start, wanted, {values[at]: there for at, there in kept.items()})
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
    calls: Sequence[Made], start: int, wanted: Collection[int], kept: Mapping[int, np.ndarray]
) -> np.ndarray:
    """Seconds to recompute `wanted`, for each of many sets; kept[t]: which of them keep t."""
    absent = {t: ~there for t, there in kept.items()} | {start: np.False_}
    asked: dict[int, np.ndarray | np.bool_] = dict.fromkeys(wanted, np.True_)
    total = np.zeros(len(next(iter(kept.values()), (0,))))
    for call in reversed(calls):
        need: np.ndarray | np.bool_ = np.False_
        for t in call.results:
            need = need | (asked.get(t, np.False_) & absent.get(t, np.True_))
        total += call.seconds * need
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
