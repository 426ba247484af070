"""Dynamic programming over a chain of blocks: a strategy for each block and what to recompute, for least added seconds.

ChainSolver returns a ChainSolution for measured options and bytes. Beaumont et al. 2021 (rotor), Chen et al. 2016.

Worked example: three blocks with forward passes of 1 s; a value between blocks takes 1 slot of memory, the head 1, and
gradients leave at once (reserve 0). Option S saves 3 slots of values in the block; option R saves none and adds 1 s. A
block's backward pass needs 4 slots. Seconds that n blocks add, by slots, the chain's input not counted; "." if nothing
fits. `outer` rows end with the head, `inner` rows are blocks that a split recomputes (inner[1] is 0 from 4 slots on):

    slots                      4   5   6   7   8   9   10  13
    outer[1]                   1   0   0   0   0   0   0   0    n = 1: R fits 4, S fits 3 + 1 + 1 of the head
    inner[2]                   .   1   1   1   0   0   0   0    two blocks without the head
    outer[2]                   .   2   1   1   1   0   0   0
    outer[3]                   .   4   3   2   2   2   1   0

outer[3] in 7 slots: R keeps the first block's output (1 slot), 1 s + outer[2] in 6 slots = 2 s.
outer[3] in 5 slots: R leaves 4 slots, too few for outer[2]. A split before the last block recomputes the first two:
2 s + outer[1] in 4 slots (1 s) + inner[2] in 5 slots (1 s) = 4 s."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from packtrain.planner.checkpointing import saved_values
from packtrain.planner.checkpointing.block_costs import BlockCosts
from packtrain.planner.checkpointing.saved_values import ALWAYS_OFFLOAD, BlockOption, InnerRanks

NUM_SLOTS = 4_000  # memory is counted in this many parts of the budget, rounded up
SlotRows = list[np.ndarray]  # by number of blocks: added seconds by slots
# first block, number of blocks, slots, rank, and the table: inner or outer
BlockRun = tuple[int, int, int, int, SlotRows]


@dataclass(frozen=True, slots=True)
class ChainSolution:
    """The fastest choice of recomputation that a solver found, with the estimated seconds and calls that it adds.

    two_pass_strategies  strategies of the blocks that run backward twice
    """

    choice: saved_values.RecomputeChoice
    strategies: frozenset[InnerRanks]
    seconds: float
    calls: int
    two_pass_strategies: frozenset[InnerRanks] = frozenset()


class ChoiceBuilder:
    """Collects a RecomputeChoice, its strategies and the calls it adds while a solver walks back through its table."""

    def __init__(self, count: int) -> None:
        self.stream_ranks, self.inner = [0] * (count + 1), [InnerRanks()] * count
        self.strategies, self.calls = set[InnerRanks](), 0

    @property
    def choice(self) -> saved_values.RecomputeChoice:
        return saved_values.RecomputeChoice(tuple(self.stream_ranks), tuple(self.inner))

    def add_block(self, at: int, option: BlockOption, rank: int) -> None:
        """Let block `at` save and recompute by `option`; it runs `rank` recomputations deep, 0 if only once."""
        self.strategies.add(option.keep)
        self.calls += option.calls
        self.inner[at] = tuple((place, rank + extra_rank) for place, extra_rank in option.keep)


class SolverMove(NamedTuple):
    """A move: option k for the first block of a run (`move` k), or a split before block j (`move` -j).

    min_slots  fewest slots with which the move is possible
    seconds    seconds of the move itself; each row of `rest` adds its own
    rest       rows of the table for the remaining blocks, from `min_slots` on
    """

    move: int
    min_slots: int
    seconds: float
    rest: list[np.ndarray]


class ChainSolver:
    """Finds the fewest seconds that recomputing adds to n of `count` equal blocks in m slots (units) of memory.

    A run of blocks begins with an option, which processes the first block and saves its output, or with a split: only
    the input of block j is saved, the blocks from j on are processed, and then the first j blocks run again.

    inner       table of runs whose output gradient is known, by number of blocks
    outer_rows  table of runs that end with the head
    """

    def __init__(
        self, block: BlockCosts, count: int, head_work: int, options: Sequence[BlockOption], max_nbytes: int,
        input_nbytes: int,
    ) -> None:  # fmt: skip
        self.block, self.count = block, count
        self.max_nbytes, self.slot_nbytes = max_nbytes, max(max_nbytes / NUM_SLOTS, 1.0)
        self.num_slots = int(max_nbytes / self.slot_nbytes)
        self.stream_slots = self._slots(block.stream_nbytes)
        self.input_slots = self._slots(input_nbytes)
        self.reserve = self._slots(block.reserve)
        self.head_slots, self.head_reserve = self._slots(head_work), self._slots(block.head_reserve)
        self.options = undominated(options)
        sizes = [(self._slots(option.saved), self._slots(option.work)) for option in self.options]
        self.sizes = [(saved_slots + self.stream_slots, work) for saved_slots, work in sizes]
        self.inner = [np.zeros(self.num_slots + 1)]
        self._fill_table(self.inner)

    @cached_property
    def outer_rows(self) -> SlotRows:
        """The table: by number of blocks, the least added seconds for each number of free slots."""
        slot_rows = [np.where(np.arange(self.num_slots + 1) >= self.head_slots, 0.0, np.inf)]
        self._fill_table(slot_rows)
        return slot_rows

    def _fill_table(self, rows: SlotRows) -> None:
        """Append to the table a row for each number of blocks, from the best move and the rows before."""
        for n in range(1, self.count + 1):
            slot_row = np.full(self.num_slots + 1, np.inf)
            for move in self._moves(n, rows):
                moved = slot_row[move.min_slots :]
                np.minimum(moved, move.seconds + sum(move.rest), out=moved)
            rows.append(slot_row)

    def _slots(self, nbytes: int) -> int:
        return math.ceil(nbytes / self.slot_nbytes)

    def _moves(self, n: int, rows: SlotRows) -> Iterator[SolverMove]:
        """Yield the possible moves, ways to begin a run of n blocks; `rows` is the table `inner` or `outer_rows`."""
        waiting_slots = 0 if rows is self.inner else self.head_reserve
        for k, option in enumerate(self.options):
            kept_slots, work_slots = self.sizes[k]
            may_keep = self.block.offload_mode != ALWAYS_OFFLOAD or n == 1 or rows is self.inner
            if not (rows is not self.inner if option.is_offloaded else may_keep):
                continue  # only values of the forward pass are offloaded
            min_slots = max(kept_slots, work_slots + waiting_slots + (n - 1) * self.reserve)
            if min_slots <= self.num_slots:
                remaining = rows[n - 1][min_slots - kept_slots : self.num_slots + 1 - kept_slots]
                yield SolverMove(k, min_slots, option.seconds, [remaining])
        for j in range(1, n):
            rest_slots, rerun_slots = self.stream_slots, waiting_slots + (n - j) * self.reserve
            min_slots, end_slot = max(rest_slots, rerun_slots), self.num_slots + 1
            if min_slots <= self.num_slots:
                remaining_rows = [
                    rows[n - j][min_slots - rest_slots : end_slot - rest_slots],
                    self.inner[j][min_slots - rerun_slots : end_slot - rerun_slots],
                ]
                yield SolverMove(-j, min_slots, j * self.block.forward_seconds, remaining_rows)

    def best_choice(self, nbytes: int) -> ChainSolution | None:
        """Return what to save within `nbytes` so that recomputing the rest adds the fewest seconds; None if too few."""
        num_blocks, num_slots = self.count, self.chain_slots(nbytes)
        if num_slots < 0 or not np.isfinite(self.outer_rows[num_blocks][num_slots]):
            return None
        builder = ChoiceBuilder(num_blocks)
        self.add_moves((0, num_blocks, num_slots, 0, self.outer_rows), builder)
        seconds = float(self.outer_rows[num_blocks][num_slots])
        return ChainSolution(builder.choice, frozenset(builder.strategies), seconds, builder.calls)

    def chain_slots(self, nbytes: int) -> int:
        """Return how many of the table's slots (units of memory) are in `nbytes`, less those of the chain's input."""
        return min(int(nbytes / self.slot_nbytes), self.num_slots) - self.input_slots

    def add_moves(self, block_run: BlockRun, builder: ChoiceBuilder) -> None:
        """Walk back through the table from a run of blocks; add each block's best option or split to the builder."""
        runs = [block_run]
        while runs:
            first_block, n, m, rank, slot_rows = runs.pop()
            if n == 0:
                continue
            move = self._best_move(n, m, slot_rows)
            if move < 0:
                builder.stream_ranks[first_block - move] = rank
                builder.calls -= move * self.block.forward_calls
                waiting_slots = 0 if slot_rows is self.inner else self.head_reserve
                rerun_slots = m - waiting_slots - (n + move) * self.reserve
                runs.append((first_block - move, n + move, m - self.stream_slots, rank, slot_rows))
                runs.append((first_block, -move, rerun_slots, rank + 1, self.inner))
                continue
            builder.add_block(first_block, self.options[move], rank)
            if n > 1 or slot_rows is not self.inner:
                builder.stream_ranks[first_block + 1] = rank
            runs.append((first_block + 1, n - 1, m - self.sizes[move][0], rank, slot_rows))

    def _best_move(self, n: int, m: int, rows: SlotRows) -> int:
        """Return the best way to begin a run of n blocks in m slots: k for option k, -j for a split before block j."""
        moves = (move for move in self._moves(n, rows) if move.min_slots <= m)
        return min(
            moves, key=lambda move: move.seconds + sum(row[m - move.min_slots] for row in move.rest)
        ).move

    @property
    def min_nbytes(self) -> int:
        """The fewest bytes within which some choice of saved values fits; `max_nbytes` if none does."""
        return self.min_fitting(self.outer_rows[self.count])

    def min_fitting(self, slot_row: np.ndarray) -> int:
        """Return the fewest bytes for which a row (seconds by slots of memory) is finite; `max_nbytes` if none is."""
        fitting = np.flatnonzero(np.isfinite(slot_row))
        min_slots = int(fitting[0]) + self.input_slots if len(fitting) else self.num_slots
        return min(math.ceil((min_slots + 0.5) * self.slot_nbytes), self.max_nbytes)


def undominated(options: Sequence[BlockOption]) -> list[BlockOption]:
    """Return the options that no other option beats or equals in seconds, saved bytes and work."""
    front = list[BlockOption]()
    for option in sorted(options, key=lambda option: (option.seconds, option.saved, option.work)):
        if all(option.saved < peer.saved or option.work < peer.work for peer in front):
            front.append(option)
    return front
