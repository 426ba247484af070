"""Improves packings by exact depth-first search, one part of the problem after the other. Knows no tensors.

Parts are time intervals that no buffer crosses. The highest part is searched at several heights, in several
orders, with doubling limits (round robin as in MiniMalloc; Moffitt 2023, doi 10.1145/3623278.3624752); the
search itself is kernels/packing.py, `pack` has an example. Limits count work, so that results do not depend on the
machine. A step costs only the change it makes, and the stack holds one frame plus what steps lifted: parts of tens of
thousands of buffers can be searched where time intervals divide them.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from packtrain import kernels

Ints = npt.NDArray[np.int64]

# sort keys before and after the most bytes alive, which the kernel knows: W life, A life times size, largest first
ORDERS = (("", "WA"), ("WA", ""), ("", "AW"))
KEY = 62  # bits of the search's keys: a height, and two numbers of buffers
MAX_WORK = 100_000_000  # limit of the total work, if no time is given: a second or two
UNLIMITED_WORK = 1 << 62
ROOM = 1 << 26  # most numbers in the search's own stack; few of them are ever used
STACK, STEP = 16 << 20, 2 << 10  # bytes of the thread's stack: at least, and for each buffer
# seconds that must be left to begin loading kernels, or compiling them
LOADING, COMPILING = 0.5, 15.0
LOOK = 0.02  # seconds between two looks at the clock
SOLVED, STOPPED = 1, 2  # 0: no solution exists
NO_END = float("inf")


class SearchClock:
    """Says whether a number of seconds is over (None: never). `now` returns the time in seconds."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.end_seconds = NO_END if seconds is None else now() + seconds

    @property
    def is_limited(self) -> bool:
        return self.end_seconds < NO_END

    @property
    def left(self) -> float:
        return self.end_seconds - self.now()

    @property
    def is_over(self) -> bool:
        return self.is_limited and self.left <= 0


UNLIMITED_CLOCK = SearchClock(None)


def lower(
    start: Ints, end: Ints, size: Ints, offsets: Ints, bound: int, target_height: int = 0,
    clock: SearchClock = UNLIMITED_CLOCK,
) -> Iterator[tuple[Ints, bool]]:  # fmt: skip
    """Yield packings of fewer bytes than `offsets`: (offsets, whether proved optimal); buffers as in `pack`.

    bound          lower bound of the bytes
    target_height  bytes at which to stop
    clock          when to stop; a limited clock replaces the limit on work
    """
    if not has_time_to_load(clock):
        return
    unit = int(np.gcd.reduce(size))
    columns = start, end, size, offsets, unit
    packing_parts = [_PackingPart(*columns, members) for members in _split_parts(start, end)]
    budget = _WorkBudget(clock)
    offsets = offsets.copy()
    while True:
        highest_part = max(packing_parts, key=lambda p: p.height)
        previous_height, is_proved = highest_part.height, highest_part.is_proved
        if (
            previous_height * unit <= max(bound, target_height)
            or is_proved
            or not highest_part.is_searchable
            or budget.is_spent
        ):
            return
        highest_part.lower_once(bound // unit, target_height // unit, budget)
        offsets[highest_part.members] = highest_part.offsets * unit
        new_highest_part = max(packing_parts, key=lambda p: p.height)
        is_proved = new_highest_part.is_proved or new_highest_part.height * unit <= bound
        if new_highest_part.height < previous_height or is_proved:
            yield offsets.copy(), is_proved


def has_time_to_load(clock: SearchClock) -> bool:
    """Whether enough time is left to load the search's kernels; compiling them first needs more."""
    if kernels.is_loaded("packing"):
        return not clock.is_over
    is_compiled = not kernels.kernel_cache.missing_modules(["packing"])
    return clock.left > (LOADING if is_compiled else COMPILING)


def _split_parts(start: Ints, end: Ints) -> list[Ints]:
    """Return the indices of buffers in groups, by time intervals that none crosses: groups can be packed separately."""
    order = np.argsort(start, kind="stable")
    is_cut = start[order][1:] >= np.maximum.accumulate(end[order])[:-1]
    return np.split(order, np.flatnonzero(is_cut) + 1)


def _life_sections(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return each buffer's first section and one past its last: the kernel searches by sections instead of steps. A
    section is an instant just before a buffer ends, if one has started since the last section: any two buffers that
    overlap do so in a section, and no section's buffers are a subset of another's."""
    times = np.unique(np.concatenate((start, end)))
    start_indices = np.searchsorted(times, np.unique(start))
    end_indices = np.searchsorted(times, np.unique(end))
    section_ends = np.unique(end_indices[np.searchsorted(end_indices, start_indices, side="right")])
    first_section = np.searchsorted(section_ends, np.searchsorted(times, start), side="right")
    last_section = np.searchsorted(section_ends, np.searchsorted(times, end), side="right")
    return first_section, last_section


class _WorkBudget:
    """The steps that the search may still take: a fixed number, or as many as the clock allows."""

    def __init__(self, clock: SearchClock) -> None:
        self.clock = clock
        self.work_left = UNLIMITED_WORK if clock.is_limited else MAX_WORK

    @property
    def is_spent(self) -> bool:
        return self.work_left <= 0 or self.clock.is_over


class _PackingPart:
    """The buffers of a time interval, with their best offsets so far, in units; no packing is below `min_height`."""

    def __init__(
        self, start: Ints, end: Ints, size: Ints, offsets: Ints, unit: int, members: Ints
    ) -> None:
        self.members = members
        self.start, self.end = start[members], end[members]
        self.size, self.offsets = size[members] // unit, offsets[members] // unit
        self.height = int((self.offsets + self.size).max())
        self.min_height = 0
        self.index_bits = len(members).bit_length()
        self.is_searchable = self.height < 1 << (KEY - 2 * self.index_bits)
        self.work_limit = min(len(members) * (len(members) + 1_000), MAX_WORK // 4)

    @property
    def is_proved(self) -> bool:
        return self.height <= self.min_height

    def lower_once(self, bound: int, target_height: int, budget: _WorkBudget) -> None:
        """Search for fewer bytes at `target_height`, else at the bound, then by bisection; double the work limit."""
        self.min_height = max(self.min_height, bound)
        if self.min_height <= target_height < self.height:
            self._search_height(target_height, self.work_limit, budget)
        else:
            self._search_height(self.min_height, self.work_limit, budget)
            infeasible_height, tolerance = self.min_height, (self.height - self.min_height) // 64
            while self.height - 1 - infeasible_height > tolerance:
                middle_height = (infeasible_height + self.height) // 2
                if not self._search_height(middle_height, self.work_limit // 4, budget):
                    infeasible_height = middle_height
        self.work_limit *= 2

    def _search_height(self, target_height: int, work_limit: int, budget: _WorkBudget) -> bool:
        """Search offsets of at most `target_height` units in several orders; return whether such are known now."""
        for sort_columns in ORDERS:
            if not self.min_height <= target_height < self.height or budget.is_spent:
                break
            status, offsets = self._search_in_order(sort_columns, target_height, work_limit, budget)
            if status == SOLVED:
                self.offsets, self.height = offsets, int((offsets + self.size).max())
            elif status != STOPPED:
                self.min_height = target_height + 1
        return self.height <= target_height

    def _search_in_order(
        self, by: tuple[str, str], target_height: int, work_limit: int, budget: _WorkBudget
    ) -> tuple[int, Ints]:
        """Run the compiled search, with buffers in the order of columns by[1] and ranked by columns by[0] (W: longest
        life, A: largest life * size); return its status and offsets."""
        width = self.end - self.start
        columns = {"W": -width, "A": -width * self.size}
        rank_columns, order_columns = by
        order = np.lexsort([columns[k] for k in reversed(order_columns)] or [np.arange(len(width))])
        first_section, last_section = _life_sections(self.start, self.end)
        rank = _row_ranks([columns[k][order] for k in rank_columns], len(width))
        buffers = np.stack((first_section[order], last_section[order], self.size[order], rank))
        n = len(order)
        offsets, stack = np.zeros((2, n), np.int64), np.empty(min(3 * n * (n + 2), ROOM), np.int64)
        sections = np.zeros((3, int(last_section.max()) + 1), np.int64)
        used_limit = min(work_limit, budget.work_left)
        limits = np.array([used_limit, 0, target_height, self.index_bits])
        kernel: Any = kernels.packing
        run_search = partial(kernel.pack, buffers, sections, stack, offsets, limits)
        # a stack that is deep enough for n levels of recursion
        previous_nbytes = threading.stack_size(max(STACK, n * STEP))
        try:
            status = run_until(budget.clock, run_search, limits)
        finally:
            threading.stack_size(previous_nbytes)
        budget.work_left -= used_limit - int(limits[0])
        result = np.empty(n, np.int64)
        result[order] = offsets[0]
        return status, result


def run_until(clock: SearchClock, run_search: Callable[[], int], limits: Ints) -> int:
    """Call `run_search` in a thread, stopped by limits[1] = 1 when the clock is over; return its status, as SOLVED."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run_search)
        try:
            while not wait([future], max(0.0, min(LOOK, clock.left))).done and not clock.is_over:
                pass
        finally:
            limits[1] = 1
        return future.result()


def _row_ranks(columns: list[Ints], num_rows: int) -> Ints:
    """Return ranks 0, 1, … of rows by several columns, int64 (rows,); equal rows have equal ranks."""
    if not columns:
        return np.zeros(num_rows, np.int64)
    _, rank = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)
    return np.asarray(rank, np.int64).reshape(num_rows)
