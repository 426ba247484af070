"""Finds the sets of a block's values that are worth saving: the Pareto front of saved bytes and recomputed seconds.

Bytes and seconds do not show that a saved cut halves the working set, so each set of saved cuts has a front of its
own. Four blocks of a 1B model at a fifth of their activations took 22 % more time with one front, 17 % with two."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

MAX_PLACES = 16  # the largest values of a block, from which sets are formed
MAX_SETS = 12  # sets of a block on each Pareto front


class KeptSet(NamedTuple):
    """A set of a block's values to save: their bytes, the seconds to recompute what else is read, and their indices."""

    saved: int
    recompute_seconds: float
    places: tuple[int, ...]


class BlockCall(NamedTuple):
    """A call of a block: the numbers of its results and of the values it reads, and its seconds."""

    results: tuple[int, ...]
    reads: tuple[int, ...]
    seconds: float
    is_counted: bool  # whether recomputing it is a call


def front(
    calls: Sequence[BlockCall], value_ids: Sequence[int], nbytes: Sequence[int], input_id: int,
    read_values: Collection[int], cuts: Collection[int],
) -> list[KeptSet]:  # fmt: skip
    """Return sets of a block's values worth saving: a Pareto front of bytes and seconds for each set of saved cuts.

    calls        calls of the block, from `input_id` on
    value_ids    values that could be saved, by place (index in the block); `nbytes` are the bytes of each
    read_values  values that the backward pass reads
    cuts         places of values on every path through the block
    """
    read_places = [i for i, t in enumerate(value_ids) if t in read_values]
    read_places = sorted(sorted(read_places, key=lambda i: -nbytes[i])[:MAX_PLACES])
    sets = np.arange(1 << len(read_places))
    keep_masks = {place: sets >> bit & 1 > 0 for bit, place in enumerate(read_places)}
    saved = sum((nbytes[at] * mask for at, mask in keep_masks.items()), np.zeros(len(sets), int))
    masks = {value_ids[at]: mask for at, mask in keep_masks.items()}
    seconds = _recompute_seconds(calls, input_id, read_values, masks)
    cut_sets = sets & sum(1 << bit for bit, place in enumerate(read_places) if place in cuts)

    def make_kept_set(set_index: int) -> KeptSet:
        kept_places = tuple(place for bit, place in enumerate(read_places) if set_index >> bit & 1)
        return KeptSet(int(saved[set_index]), float(seconds[set_index]), kept_places)

    groups = (np.flatnonzero(cut_sets == cut_set) for cut_set in np.unique(cut_sets))
    return [make_kept_set(i) for group in groups for i in _front_indices(group, saved, seconds)]


def _recompute_seconds(
    calls: Sequence[BlockCall], start: int, reads: Collection[int], masks: Mapping[int, np.ndarray]
) -> np.ndarray:
    """Return the seconds to recompute `reads` from `start`, by set of saved values; masks[t]: the sets that save t."""
    absent_masks = {t: ~mask for t, mask in masks.items()} | {start: np.False_}
    needed: dict[int, np.ndarray | np.bool_] = dict.fromkeys(reads, np.True_)
    total_seconds = np.zeros(len(next(iter(masks.values()), (0,))))
    for call in reversed(calls):
        need_mask: np.ndarray | np.bool_ = np.False_
        for t in call.results:
            need_mask = need_mask | (needed.get(t, np.False_) & absent_masks.get(t, np.True_))
        total_seconds += call.seconds * need_mask
        for t in call.reads:
            needed[t] = needed.get(t, np.False_) | need_mask
    return total_seconds


def _front_indices(set_indices: np.ndarray, saved: np.ndarray, seconds: np.ndarray) -> list[int]:
    """Return those of `set_indices` on the Pareto front of `saved` bytes and seconds, both by set, at most MAX_SETS:
    its ends and the points farthest below neighbours."""
    sorted_sets = set_indices[np.lexsort((seconds[set_indices], saved[set_indices]))]
    min_seconds = np.minimum.accumulate(seconds[sorted_sets])
    is_better = np.append(True, min_seconds[1:] < min_seconds[:-1] - 1e-12)
    points = [(int(saved[i]), float(seconds[i]), int(i)) for i in sorted_sets[is_better]]
    while len(points) > MAX_SETS:

        def bend(i: int) -> float:
            (a, s, _), (b, t, _), (c, u, _) = points[i - 1 : i + 2]
            return s + (u - s) * (b - a) / (c - a) - t

        del points[min(range(1, len(points) - 1), key=bend)]
    return [index for _, _, index in points]


def min_added_seconds(points: Sequence[KeptSet], saved: float) -> float:
    """Return the least seconds to recompute if blocks save `saved` bytes on average: the sets' lower convex hull."""
    hull: list[tuple[float, float]] = []
    for point in sorted((candidate.saved, candidate.recompute_seconds) for candidate in points):
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], point):
            hull.pop()
        hull.append(point)
    hull_saved, hull_seconds = np.array(hull).T
    return float(np.interp(saved, hull_saved, hull_seconds))


def _is_above(b: tuple[float, float], a: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether point b is on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
