"""The same for a chain of whose first blocks the backward pass runs twice, first for the norm of their gradients.

What these blocks keep stays until the second time, and none of their gradients waits. So at each of them there must be
room for all that they keep, the gradients of later blocks, and what its own backward pass needs beside what it keeps.
Where that is at most `work`, a choice needs no more than the sum of what is kept: a knapsack for each amount of work.
"""

from collections.abc import Iterator

import numpy as np

from packtrain.planner.checkpointing.recompute_solver import ChainSolver, Rows, Solved, Trace, Way

WORKS = 12  # amounts of work that are tried


class TwiceSolver:
    """Least extra seconds for a chain, from solvers of its first blocks and of the later ones, of the same bytes.

    first  `inner` of it: first blocks that are computed again from what is before them, for one time
    rows   by amount of work and number of blocks, from the first later one on: seconds by slots
    """

    def __init__(self, first: ChainSolver, later: ChainSolver) -> None:
        self.first, self.later, self.nbytes = first, later, later.nbytes
        self.rows = {work: self._rows(work) for work in self._works()}

    def _works(self) -> list[int]:
        """What an option needs beside what it keeps, or a few blocks that are computed again, at least."""
        first = self.first
        works = {self._beside(kept, work) for kept, work in first.sizes}
        works |= {int(np.isfinite(row).argmax()) for row in first.inner if np.isfinite(row[-1])}
        found = sorted(works)
        return [found[at * (len(found) - 1) // (WORKS - 1)] for at in range(WORKS)]

    def _beside(self, kept: int, work: int) -> int:
        return max(work - (kept - self.first.passed), 0)

    def _rows(self, work: int) -> Rows:
        later = self.later
        left = np.arange(later.slots + 1) - later.head_reserve - later.count * later.reserve
        rows = [np.where(left >= work, later.outer[-1], np.inf)]
        for _ in range(self.first.count):
            row = np.full(later.slots + 1, np.inf)
            for way in self._ways(rows, work):
                np.minimum(row[way.least :], way.seconds + way.rest[0], out=row[way.least :])
            rows.append(row)
        return rows

    def _ways(self, rows: Rows, work: int) -> Iterator[Way]:
        """The possible moves for the block before those that rows are known of: rows[m] is of m of the first blocks,
        and the later ones."""
        first, end = self.first, self.first.slots + 1
        for k, (option, (kept, needed)) in enumerate(zip(first.options, first.sizes, strict=True)):
            if kept < end and not option.away and self._beside(kept, needed) <= work:
                yield Way(k, kept, 2 * option.seconds, [rows[-1][: end - kept]])
        for j in range(1, len(rows) + (self.later.count > 0)):
            again = j * first.block.forward_seconds + float(first.inner[j][min(work, end - 1)])
            if first.passed < end and np.isfinite(again):
                yield Way(-j, first.passed, 2 * again, [rows[-j][: end - first.passed]])

    def choice(self, nbytes: int) -> Solved | None:
        """As ChainSolver's."""
        first, later = self.first, self.later
        slots = later.slots_of(nbytes)
        if slots < 0:
            return None
        work = min(self.rows, key=lambda work: self.rows[work][-1][slots])
        rows = self.rows[work]
        seconds = float(rows[-1][slots])
        if not np.isfinite(seconds):
            return None
        found, at = Trace(first.count + later.count), 0
        while at < first.count:
            ahead = rows[: first.count - at]
            ways = (way for way in self._ways(ahead, work) if way.least <= slots)
            best = min(ways, key=lambda way: way.seconds + way.rest[0][slots - way.least])
            slots -= best.least
            if best.move >= 0:
                found.take(at, first.options[best.move], 0)
                at += 1
                continue
            found.calls -= best.move * first.block.forward_calls
            first.follow((at, -best.move, min(work, first.slots), 1, first.inner), found)
            at -= best.move
        again, calls = frozenset(found.ways), 2 * found.calls
        found.ways, found.calls = set(), 0
        later.follow((at, later.count, slots, 0, later.outer), found)
        return Solved(found.choice, frozenset(found.ways), seconds, calls + found.calls, again)

    @property
    def least(self) -> int:
        """As ChainSolver's."""
        return self.later.least_of(np.minimum.reduce([rows[-1] for rows in self.rows.values()]))
