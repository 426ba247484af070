"""The dynamic programme over a chain: which option for which block, and what to pass over, for least extra time.

In go measured options and a number of bytes, out comes a Choice. Beaumont et al. 2021 (rotor), Chen et al. 2016.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from packtrain.recompute.choice import Choice, Option

SLOTS = 4_000  # memory is counted in so many parts of the budget, rounded up
Row = tuple[np.ndarray, np.ndarray]


class Measured(Protocol):
    """What is known of a chain of `count` equal blocks, in bytes and seconds."""

    count: int
    block_reserve: int
    head_reserve: int

    @property
    def stream_nbytes(self) -> int: ...
    @property
    def head_work(self) -> int: ...
    @property
    def forward_seconds(self) -> float: ...
    @property
    def forward_calls(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Solved:
    """A choice, and the seconds and calls that it should add."""

    choice: Choice
    seconds: float
    calls: int


class Table:
    """Least extra seconds for n blocks in m slots of memory, and what to do with the first of them.

    A run of blocks is processed either by an option for its first block, which then keeps its output for the
    next, or by a split: forward to a later block, which alone is kept, all of that block's part, then this part anew.
    inner   runs whose end gradient is there, by number of blocks; outer: runs that end with the head
    """

    def __init__(self, chain: Measured, options: Sequence[Option], nbytes: int) -> None:
        self.chain, self.options = chain, options
        self.nbytes, self.unit = nbytes, max(nbytes / SLOTS, 1.0)
        self.slots = int(nbytes / self.unit)
        self.passed = self._slots(chain.stream_nbytes)
        self.reserve = self._slots(chain.block_reserve)
        head = np.where(np.arange(self.slots + 1) >= self._slots(chain.head_work), 0.0, np.inf)
        nothing = np.zeros(self.slots + 1)
        self.inner, self.outer = [(nothing, nothing)], [(head, head)]
        for n in range(1, chain.count + 1):
            self.inner.append(self._row(n, self.inner, 0))
            self.outer.append(self._row(n, self.outer, self._slots(chain.head_reserve)))

    def _slots(self, nbytes: int) -> int:
        return math.ceil(nbytes / self.unit)

    def _row(self, n: int, rest: list[Row], later: int) -> Row:
        """Seconds by slots, and the move: option k as k, a split before block j as -j."""
        moves, ways = [], []
        for k, option in enumerate(self.options):
            kept = shifted(rest[n - 1][0], self._slots(option.saved) + self.passed)
            kept[: self._slots(option.work) + later + (n - 1) * self.reserve] = np.inf
            moves.append(k)
            ways.append(kept + option.seconds)
        for j in range(1, n):
            behind = shifted(rest[n - j][0], self.passed)
            again = shifted(self.inner[j][0], later + (n - j) * self.reserve)
            moves.append(-j)
            ways.append(behind + again + j * self.chain.forward_seconds)
        every = np.stack(ways)
        best = every.argmin(axis=0)
        return every[best, np.arange(len(best))], np.array(moves)[best]

    def choice(self, nbytes: int) -> Solved | None:
        """What is best with so many bytes, of those that the table is for; None where nothing fits."""
        chain = self.chain
        slots = min(int(nbytes / self.unit), self.slots) - self.passed
        if slots < 0 or not np.isfinite(self.outer[chain.count][0][slots]):
            return None
        stream, inner, calls = (
            [0] * (chain.count + 1),
            [tuple[tuple[int, int], ...]()] * chain.count,
            0,
        )
        runs = [(0, chain.count, slots, 0, self.outer)]
        while runs:
            first, n, m, rank, rows = runs.pop()
            if n == 0:
                continue
            move = int(rows[n][1][m])
            if move < 0:
                stream[first - move] = rank
                calls -= move * chain.forward_calls
                reserve = (n + move) * self.reserve
                reserve += self._slots(chain.head_reserve) if rows is self.outer else 0
                runs.append((first - move, n + move, m - self.passed, rank, rows))
                runs.append((first, -move, m - reserve, rank + 1, self.inner))
                continue
            option = self.options[move]
            calls += option.calls
            inner[first] = tuple((place, rank + beyond) for place, beyond in option.keep)
            if n > 1 or rows is self.outer:
                stream[first + 1] = rank
            runs.append((first + 1, n - 1, m - self._slots(option.saved) - self.passed, rank, rows))
        seconds = float(self.outer[chain.count][0][slots])
        return Solved(Choice(tuple(stream), tuple(inner)), seconds, calls)

    @property
    def least(self) -> int:
        """The fewest bytes with which something fits; all where nothing does."""
        fitting = np.flatnonzero(np.isfinite(self.outer[self.chain.count][0]))
        slots = int(fitting[0]) + self.passed if len(fitting) else self.slots
        return min(math.ceil((slots + 0.5) * self.unit), self.nbytes)


def shifted(row: np.ndarray, by: int) -> np.ndarray:
    """Row by memory, for whoever has `by` slots more; infinite where there are fewer."""
    moved = np.full(len(row), np.inf)
    if by < len(row):
        moved[by:] = row[: len(row) - by]
    return moved
