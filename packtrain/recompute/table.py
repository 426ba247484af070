"""The dynamic programme over a chain: which option for which block, and what to pass over, for least extra time.

In go measured options and a number of bytes, out comes a Choice. Beaumont et al. 2021 (rotor), Chen et al. 2016.
"""

import math
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
    def options(self) -> list[Option]: ...
    @property
    def stream_nbytes(self) -> int: ...
    @property
    def head_work(self) -> int: ...
    @property
    def forward_seconds(self) -> float: ...


class Table:
    """Least extra seconds for n blocks in m slots of memory, and what to do with the first of them.

    A run of blocks is processed either by an option for its first block, which then keeps its output for the
    next, or by a split: forward to a later block, which alone is kept, all of that block's part, then this part anew.
    inner   runs whose end gradient is there, by number of blocks; outer: runs that end with the head
    """

    def __init__(self, chain: Measured, nbytes: int) -> None:
        self.chain, self.unit = chain, max(nbytes / SLOTS, 1.0)
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
        best, move = np.full(self.slots + 1, np.inf), np.zeros(self.slots + 1)
        for k, option in enumerate(self.chain.options):
            kept = shifted(rest[n - 1][0], self._slots(option.saved) + self.passed)
            kept[: self._slots(option.work) + later + (n - 1) * self.reserve] = np.inf
            better = kept + option.seconds < best
            best[better], move[better] = (kept + option.seconds)[better], k
        for j in range(1, n):
            behind = shifted(rest[n - j][0], self.passed)
            again = shifted(self.inner[j][0], later + (n - j) * self.reserve)
            seconds = behind + again + j * self.chain.forward_seconds
            better = seconds < best
            best[better], move[better] = seconds[better], -j
        return best, move

    def choice(self) -> Choice | None:
        """What is best with all slots; None where nothing fits."""
        count, slots = self.chain.count, self.slots - self.passed
        if slots < 0 or not np.isfinite(self.outer[count][0][slots]):
            return None
        stream, inner = [0] * (count + 1), [tuple[tuple[int, int], ...]()] * count
        runs = [(0, count, slots, 0, self.outer)]
        while runs:
            first, n, m, rank, rows = runs.pop()
            if n == 0:
                continue
            move = int(rows[n][1][m])
            if move < 0:
                stream[first - move] = rank
                reserve = (n + move) * self.reserve
                reserve += self._slots(self.chain.head_reserve) if rows is self.outer else 0
                runs.append((first - move, n + move, m - self.passed, rank, rows))
                runs.append((first, -move, m - reserve, rank + 1, self.inner))
                continue
            option = self.chain.options[move]
            inner[first] = tuple((place, rank + beyond) for place, beyond in option.keep)
            if n > 1 or rows is self.outer:
                stream[first + 1] = rank
            runs.append((first + 1, n - 1, m - self._slots(option.saved) - self.passed, rank, rows))
        return Choice(tuple(stream), tuple(inner))


def solve(chain: Measured, nbytes: int) -> Choice | None:
    """The choice with the least extra time that should fit into so many bytes, by the measured options."""
    return Table(chain, nbytes).choice() if nbytes > 0 else None


def shifted(row: np.ndarray, by: int) -> np.ndarray:
    """Row by memory, for whoever has `by` slots more; infinite where there are fewer."""
    moved = np.full(len(row), np.inf)
    if by < len(row):
        moved[by:] = row[: len(row) - by]
    return moved
