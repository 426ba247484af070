"""Offsets for buffers of given (start, end, size) in one address range. Knows no tensors.

`pack` returns offsets; `packings` yields better and better ones, each with its certificate, until the caller
stops. Intervals are half-open, sizes multiples of the alignment, offsets count
from zero and are multiples of the sizes' greatest common divisor. `clash` checks any offsets.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packtrain.packing import exact
from packtrain.packing.clock import Clock

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Offsets and their certificate: `bound` bytes are alive at step `witness`, so no packing needs less.

    proved  nbytes is optimal: it equals the bound, or the search has excluded everything below
    """

    offsets: Ints
    nbytes: int
    bound: int
    witness: int
    proved: bool

    @property
    def gap(self) -> float:
        """Bytes above the bound, as a fraction of it."""
        return self.nbytes / self.bound - 1 if self.bound else 0.0


def pack(start: Ints, end: Ints, size: Ints) -> Ints:
    """Offsets (n,) at which n buffers, alive during steps [start, end), need as few bytes as the search finds.

        pack([0, 1, 2], [2, 3, 4], [64, 128, 64])  ->  [128, 0, 128]

    Heuristics come first and mostly reach the lower bound; otherwise an exact search follows, limited by work
    and not by time: equal buffers get equal offsets on every machine.
    """
    *_, best = packings(start, end, size)
    return best.offsets


def packings(
    start: npt.ArrayLike,
    end: npt.ArrayLike,
    size: npt.ArrayLike,
    *,
    enough: int = 0,
    seconds: float | None = None,
) -> Iterator[Packing]:
    """Yields packings, each smaller than the one before, or equal and now proved. The last is the best.

    enough   stop at a packing of at most this many bytes
    seconds  time limit, instead of the limit on work
    """
    start, end, size = _checked(start, end, size)
    bound, witness = lower_bound(start, end, size)
    best: Packing | None = None
    for offsets in _guesses(start, end, size):
        nbytes = height(size, offsets)
        if best is None or nbytes < best.nbytes:
            best = Packing(offsets, nbytes, bound, witness, nbytes <= bound)
            yield best
        if nbytes <= max(bound, enough):
            return
    assert best is not None
    for offsets, proved in exact.lower(
        start, end, size, best.offsets, bound, enough, Clock(seconds)
    ):
        yield Packing(offsets, height(size, offsets), bound, witness, proved)


def lower_bound(start: Ints, end: Ints, size: Ints) -> tuple[int, int]:
    """The most bytes alive at once, and the first step at which they are: no packing can need less."""
    if not len(size):
        return 0, 0
    times, nbytes = alive(start, end, size)
    at = int(nbytes.argmax())
    return int(nbytes[at]), int(times[at])


def alive(start: Ints, end: Ints, size: Ints) -> tuple[Ints, Ints]:
    """The steps at which something starts or ends, and the bytes alive from each to the next."""
    times, event = np.unique(np.concatenate((start, end)), return_inverse=True)
    change = np.zeros(len(times), np.int64)
    np.add.at(change, event[: len(size)], size)
    np.subtract.at(change, event[len(size) :], size)
    return times, np.cumsum(change)


def height(size: Ints, offsets: Ints) -> int:
    """The end of the highest buffer, in bytes."""
    return int((offsets + size).max()) if len(size) else 0


def clash(start: Ints, end: Ints, size: Ints, offsets: Ints) -> tuple[int, int] | None:
    """Two buffers that share a byte at one time, if there are any. Shares no code with the packers."""
    order = np.argsort(start, kind="stable")
    first, last, low = start[order], end[order], offsets[order]
    top = low + size[order]
    stop = np.searchsorted(first, last)  # the buffers that start before the end of each
    for i in range(len(order)):
        later = slice(i + 1, int(stop[i]))
        shared = np.flatnonzero((low[later] < top[i]) & (low[i] < top[later]))
        if len(shared):
            return int(order[i]), int(order[i + 1 + shared[0]])
    return None


# ---- heuristics ----------------------------------------------------------------------------------------------


def _guesses(start: Ints, end: Ints, size: Ints) -> Iterator[Ints]:
    """First fit from the peak outwards suits a single peak, the skylines several; the others sometimes help."""
    _, peak = lower_bound(start, end, size)
    distance = np.maximum(np.maximum(start - peak, peak + 1 - end), 0)
    life = end - start
    yield first_fit(start, end, size, np.lexsort((start, -size, distance)))
    crowd = _crowd(start, end, size)
    keys: tuple[Ints, ...]
    for keys in ((-size, -life, -crowd), (-crowd, -size, -life), (-life, -size, -crowd)):
        yield skyline(start, end, size, np.lexsort(keys))
    octave = -np.log2(np.maximum(life, 1)).astype(np.int64)
    for keys in ((start, -size), (-size, octave), (-size, -life, distance), (-life, -size)):
        yield first_fit(start, end, size, np.lexsort(keys))


def _crowd(start: Ints, end: Ints, size: Ints) -> Ints:
    """The most bytes alive during the life of each buffer."""
    times, nbytes = alive(start, end, size)
    spans = zip(np.searchsorted(times, start), np.searchsorted(times, end), strict=True)
    return np.array([nbytes[first:last].max() for first, last in spans], np.int64)


def first_fit(start: Ints, end: Ints, size: Ints, order: Ints) -> Ints:
    """Put each buffer, in order, into the lowest gap between buffers that overlap it in time."""
    offsets = np.zeros(len(size), np.int64)
    spans = np.zeros((2, len(size)), np.int64)  # of the placed buffers, by offset: interval,
    extents = np.zeros((2, len(size)), np.int64)  # bottom and top
    for n, i in enumerate(order):
        (first, last), (bottom, top) = spans[:, :n], extents[:, :n]
        near = np.flatnonzero((first < end[i]) & (last > start[i]))
        floors = np.zeros(len(near) + 1, np.int64)
        np.maximum.accumulate(top[near], out=floors[1:])
        fits = bottom[near] - floors[:-1] >= size[i]
        at = int(floors[int(fits.argmax()) if fits.any() else len(near)])
        offsets[i] = at
        slot = int(np.searchsorted(bottom, at))
        for rows, new in ((spans, (start[i], end[i])), (extents, (at, at + size[i]))):
            rows[:, slot + 1 : n + 1] = rows[:, slot:n].copy()
            rows[:, slot] = new
    return offsets


def skyline(start: Ints, end: Ints, size: Ints, order: Ints) -> Ints:
    """Repeatedly place the buffer that can go lowest; the first in the order on ties."""
    n = len(size)
    rank = np.empty(n, np.int64)
    rank[order] = np.arange(n)
    offsets, key = np.zeros(n, np.int64), rank.copy()  # key: how low it can lie, then rank
    for _ in range(n):
        i = int(key.argmin())
        offsets[i] = key[i] // n
        key[i] = np.iinfo(np.int64).max
        top = (offsets[i] + size[i]) * n
        raised = np.flatnonzero((start < end[i]) & (start[i] < end) & (key < top))
        key[raised] = top + rank[raised]
    return offsets


def _checked(
    start: npt.ArrayLike, end: npt.ArrayLike, size: npt.ArrayLike
) -> tuple[Ints, Ints, Ints]:
    columns = [np.asarray(column, np.int64) for column in (start, end, size)]
    if {c.shape for c in columns} != {(len(columns[0]),)}:
        raise ValueError("start, end and size must be lists of one length")
    for bad, rule in ((columns[1] <= columns[0], "end > start"), (columns[2] < 1, "size > 0")):
        if bad.any():
            at = int(bad.argmax())
            values = "start {}, end {}, size {}".format(*(int(c[at]) for c in columns))
            raise ValueError(f"buffer {at} has {values}; {rule} is needed")
    total = sum(columns[2].tolist())
    if total * len(columns[2]) >= 1 << 62:
        raise ValueError(f"the sizes add up to {total}, which is too much for 64 bits")
    return columns[0], columns[1], columns[2]
