"""Improves packings by exact depth-first search, one part of the problem after the other. Knows no tensors.

Parts are time intervals that no buffer crosses. The highest one is searched at several heights, in several
orders, with doubling limits (round robin as in MiniMalloc; Moffitt 2023, doi 10.1145/3623278.3624752); the
search itself is kernels/packing.py. Limits count work, so that results do not depend on the machine.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from packtrain import kernels
from packtrain.engine.packing.search_clock import Clock

Ints = npt.NDArray[np.int64]

# largest first, by W life and A life times size: before and after the most bytes alive, which the kernel knows
ORDERS = (("", "WA"), ("WA", ""), ("", "AW"))
KEY = 62  # bits of the search's keys: a height, and two numbers of buffers
WORK = 100_000_000  # limit of the total work, if no time is given: a second or two
ENDLESS = 1 << 62
ROOM = 1 << 26  # most numbers in the search's own stack; few of them are ever used
STACK, STEP = 16 << 20, 2 << 10  # bytes of a thread's stack: least, for each buffer; one is a level
# seconds without which kernels are not begun to be loaded, or compiled
LOADING, COMPILING = 0.5, 15.0
LOOK = 0.02  # seconds between two looks at the clock
FOUND, STOPPED = 1, 2  # 0: no solution exists
UNLIMITED = Clock(None)


def lower(
    start: Ints,
    end: Ints,
    size: Ints,
    offsets: Ints,
    bound: int,
    target_height: int = 0,
    clock: Clock = UNLIMITED,
) -> Iterator[tuple[Ints, bool]]:
    """Yields better and better offsets than those given, and whether they are proved optimal.

    bound    lower bound of the bytes
    target_height   bytes at which to stop
    clock    when to stop; one that is limited replaces the limit on work
    """
    if not can_load(clock):
        return
    unit = int(np.gcd.reduce(size))
    parts = [_Part(start, end, size, offsets, unit, members) for members in _parts(start, end)]
    budget = _Budget(clock)
    offsets = offsets.copy()
    while True:
        part = max(parts, key=lambda p: p.height)
        before, proved = part.height, part.proved
        if (
            before * unit <= max(bound, target_height)
            or proved
            or not part.countable
            or budget.spent
        ):
            return
        part.try_lower(bound // unit, target_height // unit, budget)
        offsets[part.members] = part.offsets * unit
        highest = max(parts, key=lambda p: p.height)
        proved = highest.proved or highest.height * unit <= bound
        if highest.height < before or proved:
            yield offsets.copy(), proved


def can_load(clock: Clock) -> bool:
    """Whether there is time for loading the search's kernels."""
    if kernels.is_loaded("packing"):
        return not clock.over
    return clock.left > (COMPILING if kernels.store.missing(["packing"]) else LOADING)


def _parts(start: Ints, end: Ints) -> list[Ints]:
    """Indices of the buffers of each part."""
    order = np.argsort(start, kind="stable")
    cut = start[order][1:] >= np.maximum.accumulate(end[order])[:-1]
    return np.split(order, np.flatnonzero(cut) + 1)


def _sections(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """First section and one past the last of each buffer.

    A section is an instant just before a buffer ends, if one has started since the last section: any two buffers
    that overlap do so in a section, and no section's buffers are a subset of another's.
    """
    times = np.unique(np.concatenate((start, end)))
    births = np.searchsorted(times, np.unique(start))
    deaths = np.searchsorted(times, np.unique(end))
    following = np.unique(deaths[np.searchsorted(deaths, births, side="right")])
    first = np.searchsorted(following, np.searchsorted(times, start), side="right")
    last = np.searchsorted(following, np.searchsorted(times, end), side="right")
    return first, last


class _Budget:
    """What may still be searched: a fixed amount of work, or all that can be done by the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.left = ENDLESS if clock.limited else WORK

    @property
    def spent(self) -> bool:
        return self.left <= 0 or self.clock.over


class _Part:
    """Buffers of one part, in units; the best offsets so far; heights below `least` are impossible."""

    def __init__(
        self, start: Ints, end: Ints, size: Ints, offsets: Ints, unit: int, members: Ints
    ) -> None:
        self.members = members
        self.start, self.end = start[members], end[members]
        self.size, self.offsets = size[members] // unit, offsets[members] // unit
        self.height = int((self.offsets + self.size).max())
        self.least = 0
        self.bits = len(members).bit_length()
        self.countable = self.height < 1 << (KEY - 2 * self.bits)
        self.limit = min(len(members) * (len(members) + 1_000), WORK // 4)  # of work

    @property
    def proved(self) -> bool:
        return self.height <= self.least

    def try_lower(self, bound: int, target_height: int, budget: _Budget) -> None:
        """One round, doubling the limit for the next: tries `target_height` or the bound, then bisects above it."""
        self.least = max(self.least, bound)
        if self.least <= target_height < self.height:
            self._search(target_height, self.limit, budget)
        else:
            self._search(self.least, self.limit, budget)
            hard, tolerance = self.least, (self.height - self.least) // 64
            while self.height - 1 - hard > tolerance:
                target = (hard + self.height) // 2
                if not self._search(target, self.limit // 4, budget):
                    hard = target
        self.limit *= 2

    def _search(self, target: int, limit: int, budget: _Budget) -> bool:
        """Try all orders at one height; record the result, also if there is none."""
        for order in ORDERS:
            if not self.least <= target < self.height or budget.spent:
                break
            status, offsets = self._search_in_order(order, target, limit, budget)
            if status == FOUND:
                self.offsets, self.height = offsets, int((offsets + self.size).max())
            elif status != STOPPED:
                self.least = target + 1
        return self.height <= target

    def _search_in_order(
        self, by: tuple[str, str], target: int, limit: int, budget: _Budget
    ) -> tuple[int, Ints]:
        """Run the kernel on the buffers, ranked and numbered `by` columns; returns its status and offsets."""
        width = self.end - self.start
        columns = {"W": -width, "A": -width * self.size}
        ranked, numbered = by
        order = np.lexsort([columns[k] for k in reversed(numbered)] or [np.arange(len(width))])
        first, last = _sections(self.start, self.end)
        rank = _dense([columns[k][order] for k in ranked], len(width))
        buffers = np.stack((first[order], last[order], self.size[order], rank))
        n = len(order)
        offsets, stack = np.zeros((2, n), np.int64), np.empty(min(3 * n * (n + 2), ROOM), np.int64)
        sections = np.zeros((3, int(last.max()) + 1), np.int64)
        work_limit = min(limit, budget.left)
        limits = np.array([work_limit, 0, target, self.bits])
        kernel: Any = kernels.packing
        run = partial(kernel.pack, buffers, sections, stack, offsets, limits)
        status = _deep(run, n, budget.clock, limits)
        budget.left -= work_limit - int(limits[0])
        result = np.empty(n, np.int64)
        result[order] = offsets[0]
        return status, result


def _deep(run: Callable[[], int], depth: int, clock: Clock, limits: Ints) -> int:
    """The same in a thread whose stack is deep enough."""
    before = threading.stack_size(max(STACK, depth * STEP))
    try:
        return stopped_by(clock, run, limits)
    finally:
        threading.stack_size(before)


def stopped_by(clock: Clock, run: Callable[[], int], limits: Ints) -> int:
    """Call `run` in a thread, and have it stop by limits[1] when the clock says so."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            while not wait([running], max(0.0, min(LOOK, clock.left))).done and not clock.over:
                pass
        finally:
            limits[1] = 1
        return running.result()


def _dense(columns: list[Ints], n: int) -> Ints:
    """Ranks by several columns, equal for equal rows."""
    if not columns:
        return np.zeros(n, np.int64)
    _, rank = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)
    return np.asarray(rank, np.int64).reshape(n)
