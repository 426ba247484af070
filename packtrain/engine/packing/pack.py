"""Offsets for buffers of given (start, end, size) in one address range, without knowledge of tensors.

`pack` returns offsets; `packings` yields better and better ones, each with its certificate, until the caller
stops. Intervals are half-open, sizes multiples of the alignment, offsets count from zero and are multiples of the
sizes' greatest common divisor. An example with five buffers [start, end) size:

    A [0, 4) 1    B [4, 6) 3    C [2, 4) 2    D [0, 3) 1    E [3, 6) 2
    lower bound     A, C and E are alive at step 3: no packing needs less than 1 + 2 + 2 = 5
    first fit       from step 3 outwards, in the order C E A B D, each in its lowest gap:
                    C at 0, E at 2 above C, A at 4 above E, B at 4 (3 do not fit below E), D at 2; height 7
    exact search    at height 5, always the lowest gap, there the longest buffer, never below the previous one:
                    A at 0, B at 0, D at 1: a dead end, because C would lie above D at 2, and C and E, which
                    are alive together at step 3, need 4 bytes above 2
                    back to A at 0, B at 0, then C at 1, D at 3, E at 3: height 5, the lower bound, so it is optimal
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from packtrain import kernels
from packtrain.engine.packing import exact
from packtrain.engine.packing.exact import NO_END, SearchClock

Ints = npt.NDArray[np.int64]
Packer = Callable[[Ints, Ints, Ints, Ints, SearchClock], Ints | None]
UNLIMITED_CLOCK = SearchClock(None)
MIN_COMPILED_BUFFERS = 8_000  # buffers with which loading kernels pays


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Offsets and their certificate: `bound_nbytes` bytes are alive at step `peak_step`, so no packing needs less.

    is_optimal  nbytes is optimal: it equals the bound, or the search has excluded everything below
    """

    offsets: Ints
    nbytes: int
    bound_nbytes: int
    peak_step: int
    is_optimal: bool

    @property
    def gap(self) -> float:
        """Bytes above the bound, as a fraction of it."""
        return self.nbytes / self.bound_nbytes - 1 if self.bound_nbytes else 0.0


def pack(start: Ints, end: Ints, size: Ints) -> Ints:
    """Return offsets (n,) at which n buffers, alive during steps [start, end), need as few bytes as the search finds.

        pack([0, 1, 2], [2, 3, 4], [64, 128, 64])  ->  [128, 0, 128]

    Heuristics come first and mostly reach the lower bound; otherwise an exact search follows, limited by work and not
    by time: equal buffers get equal offsets on every machine.
    """
    *_, best_packing = packings(start, end, size)
    return best_packing.offsets


def packings(
    start: npt.ArrayLike, end: npt.ArrayLike, size: npt.ArrayLike, *, target_height: int = 0,
    seconds: float | None = None, now: Callable[[], float] = time.monotonic,
) -> Iterator[Packing]:  # fmt: skip
    """Yield packings of the buffers, each smaller than the one before, or equal and now proved. The last is the best.

    target_height  stop at a packing of at most this many bytes
    seconds        time limit instead of the limit on work; checked for each buffer that is placed
    now            returns the time in seconds
    """
    clock = SearchClock(seconds, now)
    start, end, size = _checked_lives(start, end, size)
    bound, peak_step = lower_bound(start, end, size)
    best: Packing | None = None
    for offsets in _heuristic_offsets(start, end, size, clock):
        nbytes = packing_height(size, offsets)
        if best is None or nbytes < best.nbytes:
            best = Packing(offsets, nbytes, bound, peak_step, nbytes <= bound)
            yield best
        if nbytes <= max(bound, target_height):
            return
    assert best is not None
    for offsets, proved in exact.lower(start, end, size, best.offsets, bound, target_height, clock):
        yield Packing(offsets, packing_height(size, offsets), bound, peak_step, proved)


def lower_bound(start: Ints, end: Ints, size: Ints) -> tuple[int, int]:
    """Return the most bytes alive at once, a lower bound, and the first such step; buffers live in [start, end)."""
    if not len(size):
        return 0, 0
    times, nbytes = alive_nbytes(start, end, size)
    peak_index = int(nbytes.argmax())
    return int(nbytes[peak_index]), int(times[peak_index])


def alive_nbytes(start: Ints, end: Ints, size: Ints) -> tuple[Ints, Ints]:
    """Return the steps at which a buffer starts or ends, and the bytes alive from each step to the next, int64 both."""
    times, event_index = np.unique(np.concatenate((start, end)), return_inverse=True)
    nbytes_change = np.zeros(len(times), np.int64)
    np.add.at(nbytes_change, event_index[: len(size)], size)
    np.subtract.at(nbytes_change, event_index[len(size) :], size)
    return times, np.cumsum(nbytes_change)


def packing_height(size: Ints, offsets: Ints) -> int:
    """Return the bytes that a packing needs: the end of its highest buffer, the largest of offsets + size."""
    return int((offsets + size).max()) if len(size) else 0


# ---- heuristics ----------------------------------------------------------------------------------------------


def _heuristic_offsets(start: Ints, end: Ints, size: Ints, clock: SearchClock) -> Iterator[Ints]:
    """Yield offsets of all heuristics. First fit from the peak outwards suits one peak, skylines several. With a
    limited clock, shelves come first: if nothing else is finished in time, they are the result."""
    if clock.is_limited:
        yield shelves(start, end, size)
    orders = _packer_orders(start, end, size)
    if len(size) > MIN_COMPILED_BUFFERS and exact.has_time_to_load(clock):
        yield from _compiled_offsets(orders, np.stack((start, end, size), 1), clock)
        return
    for packer, keys in orders:
        offsets = packer(start, end, size, np.lexsort(keys), clock)
        if offsets is None:
            return
        yield offsets


def _packer_orders(start: Ints, end: Ints, size: Ints) -> Iterator[tuple[Packer, tuple[Ints, ...]]]:
    """Yield heuristics, each with the sort keys (the last counts most) of the order in which it places buffers."""
    _, peak_step = lower_bound(start, end, size)
    distance = np.maximum(np.maximum(start - peak_step, peak_step + 1 - end), 0)
    lifetime = end - start
    # this alone wastes up to 22 % where recomputation makes many peaks, hence eight orders
    yield first_fit, (start, -size, distance)
    peak_nbytes = peak_alive_nbytes(start, end, size)
    yield skyline, (-size, -lifetime, -peak_nbytes)
    yield skyline, (-peak_nbytes, -size, -lifetime)
    yield skyline, (-lifetime, -size, -peak_nbytes)
    octave = -np.log2(np.maximum(lifetime, 1)).astype(np.int64)
    yield first_fit, (start, -size)
    yield first_fit, (-size, octave)
    yield first_fit, (-size, -lifetime, distance)
    yield first_fit, (-lifetime, -size)


def peak_alive_nbytes(start: Ints, end: Ints, size: Ints) -> Ints:
    """Return the most bytes alive at once during the life of each buffer, int64 (n,)."""
    times, max_nbytes = alive_nbytes(start, end, size)
    first_step, last_step = np.searchsorted(times, start), np.searchsorted(times, end)
    octave = np.frexp(last_step - first_step)[1] - 1
    peak_nbytes = np.zeros(len(size), np.int64)
    for k in range(int(octave.max(initial=-1)) + 1):  # max_nbytes: of 2**k steps from each on
        at, width = np.flatnonzero(octave == k), 1 << k
        peak_nbytes[at] = np.maximum(max_nbytes[first_step[at]], max_nbytes[last_step[at] - width])
        max_nbytes = np.maximum(max_nbytes[:-width], max_nbytes[width:])
    return peak_nbytes


def shelves(start: Ints, end: Ints, size: Ints) -> Ints:
    """Return offsets on stacked shelves, each for buffers of one power of two; as few shelves as lifetimes allow."""
    octaves = np.frexp(size - 0.5)[1]
    shelf, free_shelves = np.zeros(len(size), np.int64), dict[int, list[int]]()
    start_events = [(t, 1, i) for i, t in enumerate(start.tolist())]
    end_events = [(t, 0, i) for i, t in enumerate(end.tolist())]
    shelf_octaves: list[int] = []  # the octave of each shelf
    for _, is_start, i in sorted(start_events + end_events):
        octave = int(octaves[i])
        unused_shelves = free_shelves.setdefault(octave, [])
        if not is_start:
            unused_shelves.append(int(shelf[i]))
        elif unused_shelves:
            shelf[i] = unused_shelves.pop()
        else:
            shelf[i] = len(shelf_octaves)
            shelf_octaves.append(octave)
    heights = np.zeros(len(shelf_octaves), np.int64)
    np.maximum.at(heights, shelf, size)
    return (np.cumsum(heights) - heights)[shelf]


def first_fit(
    start: Ints, end: Ints, size: Ints, order: Ints, clock: SearchClock = UNLIMITED_CLOCK
) -> Ints | None:
    """Return offsets: buffers by `order`, each in the lowest gap between those alive with it; None if out of time."""
    offsets = np.zeros(len(size), np.int64)
    spans = np.zeros((2, len(size)), np.int64)  # of the placed buffers, by offset: interval,
    extents = np.zeros((2, len(size)), np.int64)  # bottom and top
    for n, i in enumerate(order):
        if clock.end_seconds < NO_END and clock.is_over:
            return None
        (span_starts, span_ends), (bottom, top) = spans[:, :n], extents[:, :n]
        overlapping = np.flatnonzero((span_starts < end[i]) & (span_ends > start[i]))
        floors = np.zeros(len(overlapping) + 1, np.int64)
        np.maximum.accumulate(top[overlapping], out=floors[1:])
        is_fitting = bottom[overlapping] - floors[:-1] >= size[i]
        at = int(floors[int(is_fitting.argmax()) if is_fitting.any() else len(overlapping)])
        offsets[i] = at
        slot = int(np.searchsorted(bottom, at))
        for columns, new_column in ((spans, (start[i], end[i])), (extents, (at, at + size[i]))):
            columns[:, slot + 1 : n + 1] = columns[:, slot:n].copy()
            columns[:, slot] = new_column
    return offsets


def skyline(
    start: Ints, end: Ints, size: Ints, order: Ints, clock: SearchClock = UNLIMITED_CLOCK
) -> Ints | None:
    """Return offsets: each time, the buffer that can go lowest, on ties the first of `order`; None if out of time."""
    n = len(size)
    rank = np.empty(n, np.int64)
    rank[order] = np.arange(n)
    offsets, key = np.zeros(n, np.int64), rank.copy()  # key: how low it can lie, then rank
    for _ in range(n):
        if clock.end_seconds < NO_END and clock.is_over:
            return None
        i = int(key.argmin())
        offsets[i] = key[i] // n
        key[i] = np.iinfo(np.int64).max
        top = (offsets[i] + size[i]) * n
        raised_buffers = np.flatnonzero((start < end[i]) & (start[i] < end) & (key < top))
        key[raised_buffers] = top + rank[raised_buffers]
    return offsets


# ---- for many buffers: compiled, with equal offsets -----------------------------------------------------------


def _compiled_offsets(
    orders: Iterable[tuple[Packer, tuple[Ints, ...]]], lives: Ints, clock: SearchClock
) -> Iterator[Ints]:
    """Yield offsets of `lives` (n, 3), start, end, size, by each (heuristic, sort keys), in parallel, until timeout."""
    jobs = [(packer.__name__, np.lexsort(keys), np.zeros(4, np.int64)) for packer, keys in orders]
    with ThreadPoolExecutor(kernels.threads()) as pool:
        futures = [
            pool.submit(run_compiled, name, lives, by, stop, clock) for name, by, stop in jobs
        ]
        try:
            for future in futures:
                offsets = future.result()
                if offsets is None:
                    return
                yield offsets
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for *_, limits in jobs:
                limits[1] = 1


def run_compiled(
    name: str, lives: Ints, order: Ints, limits: Ints, clock: SearchClock
) -> Ints | None:
    """Run the compiled heuristic `name` on `lives` (n, 3), start, end, size, in this order of buffers; return offsets,
    or None if it was stopped by limits[1] = 1."""
    by = np.argsort(lives[:, 0], kind="stable")  # neighbours are alive together
    positions = np.empty_like(by)
    positions[by] = np.arange(len(by))
    scratch, packed_offsets = np.empty((len(lives), 4), np.int64), np.zeros(len(lives), np.int64)
    packer, columns = getattr(kernels.packing, name), (lives[by], positions[order])
    run_packer = partial(packer, *columns, packed_offsets, scratch, limits)
    is_solved = exact.run_until(clock, run_packer, limits) == exact.SOLVED
    return packed_offsets[positions] if is_solved else None


def _checked_lives(
    start: npt.ArrayLike, end: npt.ArrayLike, size: npt.ArrayLike
) -> tuple[Ints, Ints, Ints]:
    columns = [np.asarray(column, np.int64) for column in (start, end, size)]
    if {c.shape for c in columns} != {(len(columns[0]),)}:
        raise ValueError("start, end and size must be lists of one length")
    for bad, rule in ((columns[1] <= columns[0], "end > start"), (columns[2] < 1, "size > 0")):
        if bad.any():
            buffer_index = int(bad.argmax())
            values = "start {}, end {}, size {}".format(*(int(c[buffer_index]) for c in columns))
            raise ValueError(f"buffer {buffer_index} has {values}; {rule} is needed")
    total_nbytes = sum(columns[2].tolist())
    if total_nbytes * len(columns[2]) >= 1 << 62:
        raise ValueError(f"the sizes add up to {total_nbytes}, which is too much for 64 bits")
    return columns[0], columns[1], columns[2]
