"""Dynamic programming over a chain: which option for which block, and what to recompute, for least extra time.

Returns a Choice for measured options and a number of bytes. Beaumont et al. 2021 (rotor), Chen et al. 2016.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from packtrain.planner.checkpointing.block_costs import BlockCosts
from packtrain.planner.checkpointing.recompute_choice import ALWAYS, Choice, Inner, Option

SLOTS = 4_000  # memory is counted in this many parts of the budget, rounded up
Rows = list[np.ndarray]  # by number of blocks: seconds by slots
# first block, number of blocks, slots, rank, and rows: inner or outer
Run = tuple[int, int, int, int, Rows]


@dataclass(frozen=True, slots=True)
class Solved:
    """A choice, the ways to run a block in it, and the seconds and calls that it adds by estimate.

    again  ways to run one of the blocks whose backward pass runs twice
    """

    choice: Choice
    ways: frozenset[Inner]
    seconds: float
    calls: int
    again: frozenset[Inner] = frozenset()


class Trace:
    """A choice while it is found, its ways to run a block, and the calls that these add."""

    def __init__(self, count: int) -> None:
        self.stream, self.inner = [0] * (count + 1), [Inner()] * count
        self.ways, self.calls = set[Inner](), 0

    @property
    def choice(self) -> Choice:
        return Choice(tuple(self.stream), tuple(self.inner))

    def take(self, at: int, option: Option, rank: int) -> None:
        """A block by an option."""
        self.ways.add(option.keep)
        self.calls += option.calls
        self.inner[at] = tuple((place, rank + extra_rank) for place, extra_rank in option.keep)


class Way(NamedTuple):
    """A move: option k as k, a split before block j as -j; its least slots, and its seconds for more slots.

    seconds  of its own; those of each row of `rest` are added
    """

    move: int
    least: int
    seconds: float
    rest: list[np.ndarray]


class ChainSolver:
    """Least extra seconds for n of `count` equal blocks in m slots of memory.

    A run of blocks is processed either by an option for its first block, which then keeps its output for the
    next, or by a split: forward to a later block, keeping only that, all of the later part, then this part again.
    inner   runs whose output gradient is known, by number of blocks; outer: runs that end with the head
    """

    def __init__(
        self, block: BlockCosts, count: int, head_work: int, options: Sequence[Option], nbytes: int
    ) -> None:
        self.block, self.count = block, count
        self.nbytes, self.unit = nbytes, max(nbytes / SLOTS, 1.0)
        self.slots = int(nbytes / self.unit)
        self.passed, self.reserve = self._slots(block.stream_nbytes), self._slots(block.reserve)
        self.head_work, self.head_reserve = self._slots(head_work), self._slots(block.head_reserve)
        self.options = undominated(options)
        sizes = [(self._slots(option.saved), self._slots(option.work)) for option in self.options]
        self.sizes = [(saved + self.passed, work) for saved, work in sizes]
        self.inner = [np.zeros(self.slots + 1)]
        self._fill(self.inner)

    @cached_property
    def outer(self) -> Rows:
        rows = [np.where(np.arange(self.slots + 1) >= self.head_work, 0.0, np.inf)]
        self._fill(rows)
        return rows

    def _fill(self, rows: Rows) -> None:
        for n in range(1, self.count + 1):
            row = np.full(self.slots + 1, np.inf)
            for move in self._ways(n, rows):
                np.minimum(row[move.least :], move.seconds + sum(move.rest), out=row[move.least :])
            rows.append(row)

    def _slots(self, nbytes: int) -> int:
        return math.ceil(nbytes / self.unit)

    def _ways(self, n: int, rows: Rows) -> Iterator[Way]:
        """The possible moves for the first of n blocks, and what they leave to the others."""
        waiting = 0 if rows is self.inner else self.head_reserve
        for k, (option, (kept_slots, work)) in enumerate(
            zip(self.options, self.sizes, strict=True)
        ):
            may_keep = self.block.offload != ALWAYS or n == 1 or rows is self.inner
            if not (rows is not self.inner if option.away else may_keep):
                continue  # only what the forward pass computed is put away
            min_slots = max(kept_slots, work + waiting + (n - 1) * self.reserve)
            if min_slots <= self.slots:
                yield Way(
                    k,
                    min_slots,
                    option.seconds,
                    [rows[n - 1][min_slots - kept_slots : self.slots + 1 - kept_slots]],
                )
        for j in range(1, n):
            rest_slots, rerun_slots = self.passed, waiting + (n - j) * self.reserve
            min_slots, end = max(rest_slots, rerun_slots), self.slots + 1
            if min_slots <= self.slots:
                rest = [
                    rows[n - j][min_slots - rest_slots : end - rest_slots],
                    self.inner[j][min_slots - rerun_slots : end - rerun_slots],
                ]
                yield Way(-j, min_slots, j * self.block.forward_seconds, rest)

    def choice(self, nbytes: int) -> Solved | None:
        """The best choice within `nbytes` of the solver's bytes; None if nothing fits."""
        count, slots = self.count, self.slots_of(nbytes)
        if slots < 0 or not np.isfinite(self.outer[count][slots]):
            return None
        trace = Trace(count)
        self.follow((0, count, slots, 0, self.outer), trace)
        seconds = float(self.outer[count][slots])
        return Solved(trace.choice, frozenset(trace.ways), seconds, trace.calls)

    def slots_of(self, nbytes: int) -> int:
        """Slots beside the input of the chain."""
        return min(int(nbytes / self.unit), self.slots) - self.passed

    def follow(self, run: Run, trace: Trace) -> None:
        """Add the best moves of a run."""
        runs = [run]
        while runs:
            first, n, m, rank, rows = runs.pop()
            if n == 0:
                continue
            move = self._best(n, m, rows)
            if move < 0:
                trace.stream[first - move] = rank
                trace.calls -= move * self.block.forward_calls
                waiting = 0 if rows is self.inner else self.head_reserve
                m_again = m - waiting - (n + move) * self.reserve
                runs.append((first - move, n + move, m - self.passed, rank, rows))
                runs.append((first, -move, m_again, rank + 1, self.inner))
                continue
            trace.take(first, self.options[move], rank)
            if n > 1 or rows is not self.inner:
                trace.stream[first + 1] = rank
            runs.append((first + 1, n - 1, m - self.sizes[move][0], rank, rows))

    def _best(self, n: int, m: int, rows: Rows) -> int:
        """The best move for the first of n blocks in m slots."""
        moves = (move for move in self._ways(n, rows) if move.least <= m)
        return min(
            moves, key=lambda move: move.seconds + sum(row[m - move.least] for row in move.rest)
        ).move

    @property
    def least(self) -> int:
        """The fewest bytes with which something fits; the solver's bytes if nothing does."""
        return self.least_of(self.outer[self.count])

    def least_of(self, row: np.ndarray) -> int:
        fitting = np.flatnonzero(np.isfinite(row))
        slots = int(fitting[0]) + self.passed if len(fitting) else self.slots
        return min(math.ceil((slots + 0.5) * self.unit), self.nbytes)


def undominated(options: Sequence[Option]) -> list[Option]:
    """The options that no other beats or equals in every cost."""
    front = list[Option]()
    for option in sorted(options, key=lambda option: (option.seconds, option.saved, option.work)):
        if all(option.saved < other.saved or option.work < other.work for other in front):
            front.append(option)
    return front
