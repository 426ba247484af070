"""The same for a chain of whose first blocks the backward pass runs twice, first for the norm of their gradients.

What these blocks keep stays until the second time, and none of their gradients waits. So at each of them there must be
room for all that they keep, the gradients of later blocks, and what its own backward pass needs beside what it keeps.
Where that is at most `work`, a choice needs no more than the sum of what is kept: a knapsack for each amount of work.
"""

from collections.abc import Iterator

import numpy as np

from packtrain.planner.checkpointing.chain_solver import ChainSolver, Rows, Solved, Trace, Way

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
        works = {self._beside(kept_slots, work) for kept_slots, work in first.sizes}
        works |= {int(np.isfinite(row).argmax()) for row in first.inner if np.isfinite(row[-1])}
        sorted_works = sorted(works)
        return [sorted_works[at * (len(sorted_works) - 1) // (WORKS - 1)] for at in range(WORKS)]

    def _beside(self, kept_slots: int, work: int) -> int:
        return max(work - (kept_slots - self.first.passed), 0)

    def _rows(self, work: int) -> Rows:
        later = self.later
        left = np.arange(later.slots + 1) - later.head_reserve - later.count * later.reserve
        rows = [np.where(left >= work, later.outer[-1], np.inf)]
        for _ in range(self.first.count):
            row = np.full(later.slots + 1, np.inf)
            for move in self._ways(rows, work):
                np.minimum(row[move.least :], move.seconds + move.rest[0], out=row[move.least :])
            rows.append(row)
        return rows

    def _ways(self, rows: Rows, work: int) -> Iterator[Way]:
        """The possible moves for the block before those that rows are known of: rows[m] is of m of the first blocks,
        and the later ones."""
        first, end = self.first, self.first.slots + 1
        for k, (option, (kept_slots, needed)) in enumerate(
            zip(first.options, first.sizes, strict=True)
        ):
            if kept_slots < end and not option.away and self._beside(kept_slots, needed) <= work:
                yield Way(k, kept_slots, 2 * option.seconds, [rows[-1][: end - kept_slots]])
        for j in range(1, len(rows) + (self.later.count > 0)):
            rerun_seconds = j * first.block.forward_seconds + float(
                first.inner[j][min(work, end - 1)]
            )
            if first.passed < end and np.isfinite(rerun_seconds):
                yield Way(-j, first.passed, 2 * rerun_seconds, [rows[-j][: end - first.passed]])

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
        trace, at = Trace(first.count + later.count), 0
        while at < first.count:
            ahead = rows[: first.count - at]
            moves = (move for move in self._ways(ahead, work) if move.least <= slots)
            best = min(moves, key=lambda move: move.seconds + move.rest[0][slots - move.least])
            slots -= best.least
            if best.move >= 0:
                trace.take(at, first.options[best.move], 0)
                at += 1
                continue
            trace.calls -= best.move * first.block.forward_calls
            first.follow((at, -best.move, min(work, first.slots), 1, first.inner), trace)
            at -= best.move
        rerun_strategies, calls = frozenset(trace.ways), 2 * trace.calls
        trace.ways, trace.calls = set(), 0
        later.follow((at, later.count, slots, 0, later.outer), trace)
        return Solved(
            trace.choice, frozenset(trace.ways), seconds, calls + trace.calls, rerun_strategies
        )

    @property
    def least(self) -> int:
        """As ChainSolver's."""
        return self.later.least_of(np.minimum.reduce([rows[-1] for rows in self.rows.values()]))
