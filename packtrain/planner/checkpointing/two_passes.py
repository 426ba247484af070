"""Solves chains whose first blocks run backward twice, so that their gradients need not wait for the clipping norm.

Values that these blocks save stay until the second pass. Each block needs room for all saved values, for the gradients
of later blocks, and for its own backward pass. Where the latter is at most `work` slots, a choice needs no more than
the sum of what is saved: a knapsack for each amount of work.
A step of `110m` takes 0.89 s in 1,730 MiB, 1.01 s in 1,690, 1.13 s in 1,640 and 1.30 s in 1,580. With all blocks
twice or none, the last two took 1.47 and 1.59 s."""

from collections.abc import Iterator

import numpy as np

from packtrain.planner.checkpointing import chain_solver
from packtrain.planner.checkpointing.chain_solver import ChainSolution, ChainSolver, SolverMove

WORKS = 12  # amounts of work for which a knapsack is solved


class TwoPassSolver:
    """Finds the least added seconds for a chain whose first blocks run backward twice, first for the gradients' norm.

    first_solver  solver of the first blocks; its `inner` table serves blocks that are recomputed together
    later         solver of the later blocks, for the same number of bytes
    rows          by amount of work and number of first blocks: added seconds by slots
    """

    def __init__(self, first_solver: ChainSolver, later: ChainSolver) -> None:
        self.first_solver, self.later, self.max_nbytes = first_solver, later, later.max_nbytes
        self.rows = {work_slots: self._work_rows(work_slots) for work_slots in self._work_amounts()}

    def _work_amounts(self) -> list[int]:
        """Return WORKS sizes, in slots, of what a backward pass may need beside saved values; each gets a table."""
        first = self.first_solver
        works = {self._extra_work(kept_slots, work_slots) for kept_slots, work_slots in first.sizes}
        works |= {int(np.isfinite(row).argmax()) for row in first.inner if np.isfinite(row[-1])}
        sorted_works = sorted(works)
        return [sorted_works[at * (len(sorted_works) - 1) // (WORKS - 1)] for at in range(WORKS)]

    def _extra_work(self, kept_slots: int, work_slots: int) -> int:
        """Return how many slots of a backward pass's `work_slots` are not those of values that its block saved."""
        return max(work_slots - (kept_slots - self.first_solver.stream_slots), 0)

    def _work_rows(self, work_slots: int) -> chain_solver.SlotRows:
        """Return rows of added seconds by number of first blocks, whose backward passes need `work_slots` at most."""
        later = self.later
        left = np.arange(later.num_slots + 1) - later.head_reserve - later.count * later.reserve
        slot_rows = [np.where(left >= work_slots, later.outer_rows[-1], np.inf)]
        for _ in range(self.first_solver.count):
            slot_row = np.full(later.num_slots + 1, np.inf)
            for move in self._moves(slot_rows, work_slots):
                moved = slot_row[move.min_slots :]
                np.minimum(moved, move.seconds + move.rest[0], out=moved)
            slot_rows.append(slot_row)
        return slot_rows

    def _moves(self, rows: chain_solver.SlotRows, work_slots: int) -> Iterator[SolverMove]:
        """Yield the possible moves, options or splits, for the next earlier block, whose backward pass has
        `work_slots`; rows[m] is the table of m blocks."""
        first, end = self.first_solver, self.first_solver.num_slots + 1
        for k, option in enumerate(first.options):
            kept_slots, extra_work = first.sizes[k][0], self._extra_work(*first.sizes[k])
            if kept_slots < end and not option.is_offloaded and extra_work <= work_slots:
                yield SolverMove(k, kept_slots, 2 * option.seconds, [rows[-1][: end - kept_slots]])
        for j in range(1, len(rows) + (self.later.count > 0)):
            inner_seconds = float(first.inner[j][min(work_slots, end - 1)])
            seconds = j * first.block.forward_seconds + inner_seconds
            if (slots := first.stream_slots) < end and np.isfinite(seconds):
                yield SolverMove(-j, slots, 2 * seconds, [rows[-j][: end - slots]])

    def best_choice(self, nbytes: int) -> ChainSolution | None:
        """Return what to save within `nbytes` so that recomputing the rest adds the fewest seconds; None if too few."""
        first, later_solver = self.first_solver, self.later
        slots = later_solver.chain_slots(nbytes)
        if slots < 0:
            return None
        work = min(self.rows, key=lambda work_slots: self.rows[work_slots][-1][slots])
        slot_rows = self.rows[work]
        seconds = float(slot_rows[-1][slots])
        if not np.isfinite(seconds):
            return None
        builder, at = chain_solver.ChoiceBuilder(first.count + later_solver.count), 0
        while at < first.count:
            remaining_rows = slot_rows[: first.count - at]
            moves = (move for move in self._moves(remaining_rows, work) if move.min_slots <= slots)
            best = min(moves, key=lambda move: move.seconds + move.rest[0][slots - move.min_slots])
            slots -= best.min_slots
            if best.move >= 0:
                builder.add_block(at, first.options[best.move], 0)
                at += 1
                continue
            builder.calls -= best.move * first.block.forward_calls
            first.add_moves((at, -best.move, min(work, first.num_slots), 1, first.inner), builder)
            at -= best.move
        rerun_strategies, num_calls = frozenset(builder.strategies), 2 * builder.calls
        builder.strategies, builder.calls = set(), 0
        later_solver.add_moves((at, later_solver.count, slots, 0, later_solver.outer_rows), builder)
        strategies, num_calls = frozenset(builder.strategies), num_calls + builder.calls
        return ChainSolution(builder.choice, strategies, seconds, num_calls, rerun_strategies)

    @property
    def min_nbytes(self) -> int:
        """The fewest bytes within which some choice of saved values fits; `max_nbytes` if none does."""
        return self.later.min_fitting(np.minimum.reduce([rows[-1] for rows in self.rows.values()]))
