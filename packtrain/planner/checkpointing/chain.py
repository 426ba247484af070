"""What to keep of the forward pass of a chain of equal blocks, for least extra time within a number of bytes.

Returns Choices, given a function that builds the training graph for a number of blocks and a Choice. Dynamic
programming over the chain combines ways to run a block and measures those it would choose; the real planner decides.
Beaumont et al. 2021 (rotor) and Chen et al. 2016 (arXiv 1604.06174) for the chain.
"""

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from packtrain.engine.backends import CPU, Target
from packtrain.engine.memory_plan.lifetimes import columns, storages
from packtrain.engine.packing import lower_bound
from packtrain.engine.placement import Placed, place
from packtrain.planner import cost_model
from packtrain.planner.checkpointing.block_costs import Alive, BlockCosts, Build
from packtrain.planner.checkpointing.chain_solver import ChainSolver, Solved
from packtrain.planner.checkpointing.middle_blocks import backward_steps
from packtrain.planner.checkpointing.recompute_choice import ALIGNMENT, NEVER, Choice, uniform
from packtrain.planner.checkpointing.two_passes import TwiceSolver
from packtrain.planner.cost_model import Rates

Headed = Callable[[Placed], Placed]

ROUNDS = 4
HEADED = 2  # blocks of the chain on which the head is measured
SLACK = 0.03  # relative error of estimates
CLOSE = 0.01  # relative distance to a choice that was built, within which others are built, too
SPARE = 500  # 1 / share of the bytes by which less is asked for until another choice comes
AIMS = 12  # sizes at which the smallest choice is searched
FEW = 4  # least number of ways measured in one graph, if a chain has fewer blocks


@dataclass(frozen=True, slots=True)
class Found:
    """A choice that was built: bytes of its arena, bytes including its calls, what it adds.

    arena    lower bound of its arena, which the planner nearly always reaches
    seconds  of recomputation, each time, and its number of calls, all times
    """

    choice: Choice | None
    arena: int
    nbytes: int
    seconds: float
    calls: int


class Chain:
    """A training graph with a chain of `count` equal blocks; caches measurements.

    reserved     bytes that stay after the backward pass of a block, or of the head: gradients waiting for clipping
    call_nbytes  bytes of the process for each call of the graph, outside the arena
    calls        number of calls of a graph that keeps everything
    like         a chain with the same blocks, already measured
    together     how many ways to run a block may be measured in one chain
    target       where it runs
    space        whose bytes count; by default the arena's
    offload      whether blocks may keep what they keep in the process's memory
    twice        the backward pass of so many of the first blocks runs twice; `like` is a chain in which none does
    again        builds one in which those of all do
    heads        turn a graph with its head into one with each of the heads of chains that are like this one
    head         which of them it has
    """

    def __init__(
        self,
        build: Build,
        count: int,
        rates: Rates,
        reserved: tuple[int, int] = (0, 0),
        call_nbytes: int = 0,
        calls: int = 0,
        like: "Chain | None" = None,
        together: int = 1,
        target: Target = CPU,
        space: str | None = None,
        offload: int = NEVER,
        twice: int = 0,
        again: Build | None = None,
        heads: Mapping[int, Headed] = {},
        head: int = 0,
    ) -> None:
        self.call_nbytes, self.calls, self.target = call_nbytes, calls, target
        self.twice = twice
        self.space = space or target.space
        self.build, self.count, self.like = build, count, like
        self.heads, self.head = heads, head
        together = max(min(count - 2, together), FEW)
        options = together, target, space, offload
        self.block = BlockCosts(build, rates, reserved, *options)
        self.again = BlockCosts(again or build, rates, (0, reserved[1]), *options, twice=True)
        if like is not None:
            self.block, self.again = like.block, like.again
        self.found: dict[Choice | None, Found] = {}

    def afresh(self, like: "Chain | None" = None) -> "Chain":
        """The same, as if only short chains had been measured; `like` is that of the chain that it is like."""
        clone = copy(self)
        clone.__dict__.pop("smallest", None)
        clone.found = {}
        clone.like = like
        if like is not None:
            clone.block, clone.again = like.block, like.again
        else:
            clone.block, clone.again = self.block.afresh(), self.again.afresh()
        return clone

    @property
    def head_work(self) -> int:
        """Most bytes between the last block's forward and backward pass, without what blocks keep."""
        return (self.like or self).head_works[self.head]

    @cached_property
    def head_works(self) -> dict[int, int]:
        """The same with each of the heads, of a chain that keeps only its stream."""
        built = self.build(HEADED, uniform(HEADED, ()))
        placed = place(built.graph, self.target)
        first, _ = backward_steps(placed, built, self.block.parts)[HEADED - 1]
        stream_nbytes = (HEADED + 1) * self.block.stream_nbytes
        return {
            head: Alive(headed(placed), self.space).most(0, first - 1) - stream_nbytes
            for head, headed in self.heads.items()
        }

    def least_seconds(self, nbytes: int) -> float:
        """Least added seconds for `nbytes` less than keeping everything."""
        block_nbytes = nbytes / self.count - self.block.stream_nbytes if self.count else 0.0
        return self.count * self.block.least_again(block_nbytes) if block_nbytes > 0 else 0.0

    # ---- choices

    def plan(self, choice: Choice | None) -> Found:
        """The choice in the whole chain, measured; None keeps everything."""
        if choice not in self.found:
            graph = self.build(self.count, choice).graph
            placed = place(graph, self.target)
            arena, _ = lower_bound(*columns(storages(placed, self.space), ALIGNMENT))
            recomputed = [call for call in graph.calls if call.phase == "recomputed"]
            nbytes = arena + self.call_nbytes * len(graph.calls)
            seconds = sum(map(self.block.seconds, recomputed))
            seconds += sum(cost_model.call_seconds(s, self.block.rates) for s in placed.put_away)
            self.found[choice] = Found(choice, arena, nbytes, seconds, len(recomputed))
        return self.found[choice]

    @property
    def _calls_nbytes(self) -> int:
        """Bytes of the process for the calls of a whole chain that keeps everything."""
        return self.call_nbytes * self.calls

    def bound(self, nbytes: int) -> float:
        """Least seconds that a choice of `nbytes` adds, from the ways measured so far."""
        solved = self._solved(self._solver(nbytes), nbytes)
        return math.inf if solved is None else solved.seconds

    def within(self, nbytes: int, below: float = math.inf) -> Found | None:
        """The fastest known choice of at most `nbytes`; None if there is none.

        below  limit of the estimated added seconds; choices that should add more are not built
        """
        aim = nbytes
        for _ in range(ROUNDS):
            solved = self._measured(nbytes + nbytes // 16, aim, below)
            while solved is not None and self._too_large(solved.choice, nbytes):
                aim -= nbytes // SPARE
                solved = self._measured(nbytes + nbytes // 16, aim, below)
            if solved is None or solved.seconds >= below:
                break
            over = self.plan(solved.choice).nbytes - nbytes
            if -nbytes // 50 <= over <= 0:
                break
            aim -= over if over > 0 else over // 2
        if solved is None and self._may_fit(nbytes, below):
            self._plan_around(self.smallest.choice, nbytes)
        fitting = [candidate for candidate in self.found.values() if candidate.nbytes <= nbytes]
        return min(
            fitting, key=lambda candidate: (candidate.seconds, candidate.nbytes), default=None
        )

    def _too_large(self, choice: Choice, nbytes: int) -> bool:
        """Whether the choice has been planned, and takes more."""
        return choice in self.found and self.found[choice].nbytes > nbytes

    def _may_fit(self, nbytes: int, below: float) -> bool:
        """Whether the choice with the least bytes is worth building."""
        max_nbytes = nbytes * (1 + SLACK)
        if self.floor(twice=self.twice) > max_nbytes or self.smallest.nbytes > max_nbytes:
            return False
        return self.smallest.seconds < below

    def _measured(self, nbytes: int, aim: int, below: float) -> Solved | None:
        """The fastest choice of at most `aim` bytes, by a solver for `nbytes`, in which all ways are measured.

        Unmeasured ways count with their lower bounds, so no other choice is faster.
        """
        while True:
            solved = self._solved(self._solver(nbytes), aim)
            if solved is None or solved.seconds >= below:
                return solved
            if not (self.block.measure(solved.ways) | self.again.measure(solved.again)):
                return solved

    def _plan_around(self, choice: Choice, nbytes: int) -> None:
        """Plan the choice; if it takes about `nbytes`, also others whose last block keeps a little more.

        The last block's backward pass comes first and often has bytes to spare.
        """
        if self.plan(choice).nbytes > nbytes * (1 + CLOSE):
            return
        for strategy in self.block.ways:
            if 0 < self.block.saved(strategy) <= self.block.stream_nbytes:
                self.plan(replace(choice, inner=(*choice.inner[:-1], strategy)))

    def _solved(self, solver: ChainSolver | TwiceSolver, nbytes: int) -> Solved | None:
        """The fastest choice by the solver that leaves bytes for its own calls."""
        aim = nbytes - self._calls_nbytes
        while (solved := solver.choice(aim)) is not None:
            over = aim + self._calls_nbytes + self.call_nbytes * solved.calls - nbytes
            if over <= 0:
                break
            aim -= over
        return solved

    def _solver(self, nbytes: int, keep_nothing: bool = False) -> ChainSolver | TwiceSolver:
        """A solver for the ways to run a block; `keep_nothing`: for those that keep nothing."""

        def of(block: BlockCosts, count: int, head_work: int) -> ChainSolver:
            return ChainSolver(
                block, count, head_work, block.bare if keep_nothing else block.options, nbytes
            )

        later = of(self.block, self.count - self.twice, self.head_work)
        return TwiceSolver(of(self.again, self.twice, 0), later) if self.twice else later

    def floor(self, waiting: bool = True, twice: int = 0) -> int:
        """Least bytes of the arena: those of the backward pass of the second block, or of blocks where it runs twice.

        waiting  gradients of head and blocks are kept for clipping, but those of the first `twice` blocks
        """
        if self.count < 2:
            return 0
        block = self.block
        if not waiting:
            return block.stream_nbytes + self.again.least_work
        at = max(twice + 1, 2)
        later = self.count - at
        candidates = [block.least_work + later * block.reserve] if later >= 0 else []
        candidates += (
            [self.again.least_work + (self.count - twice) * block.reserve] if twice else []
        )
        return block.stream_nbytes + block.head_reserve + max(candidates)

    @cached_property
    def smallest(self) -> "Smallest":
        """The choice with the least estimated bytes."""
        block = self.block
        high = 2 * self.head_work + (self.count + 1) * (block.stream_nbytes + block.reserve)
        high += block.head_reserve + 2 * max(option.work for option in block.bare)
        coarse = self._solver(high, keep_nothing=True)
        fine = self._solver(coarse.least + coarse.least // 20, keep_nothing=True)
        candidates = []
        for aim in (fine.least, *np.geomspace(fine.nbytes, high, AIMS).astype(int).tolist()):
            solved = (fine if aim <= fine.nbytes else coarse).choice(aim)
            assert solved is not None
            nbytes = aim + self._calls_nbytes + self.call_nbytes * solved.calls
            candidates.append(Smallest(nbytes, solved.seconds, solved.choice))
        return min(candidates, key=lambda candidate: candidate.nbytes)

    def least(self) -> Found:
        """The choice with the least bytes, including calls."""
        self.plan(self.smallest.choice)
        self.plan(uniform(self.count, ()))
        return min(self.found.values(), key=lambda candidate: (candidate.nbytes, candidate.seconds))


@dataclass(frozen=True, slots=True)
class Smallest:
    """The choice with the least estimated bytes, including calls: its bytes and added seconds."""

    nbytes: int
    seconds: float
    choice: Choice


def spacing(chain: Chain) -> int:
    """a = sqrt(n v / u): of n blocks with u bytes inside and v between, every a-th is kept. Chen et al. 2016."""
    block = chain.block
    block_nbytes = block.parts * sum(block.value_nbytes)
    return max(round(math.sqrt(chain.count * block.stream_nbytes / block_nbytes)), 1)
