"""What to keep of the forward pass of a chain of equal blocks, for least extra time within a number of bytes.

In go a way to build the training graph for a number of blocks and a Choice; out come Choices. A dynamic programme over
the chain combines ways to run a block, and measures those that it would take; the real planner has the last word.
Beaumont et al. 2021 (rotor) and Chen et al. 2016 (arXiv 1604.06174) for the chain.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from packtrain.backends import CPU, Target
from packtrain.cost import Rates
from packtrain.packing import lower_bound
from packtrain.place import Placed, place
from packtrain.planning.lifetimes import columns, storages
from packtrain.recompute.block import Alive, Block, Build, backward_steps
from packtrain.recompute.choice import ALIGNMENT, Choice, aligned, uniform
from packtrain.recompute.table import Solved, Table

ROUNDS = 4
HEADED = 2  # blocks of the chain that the head is measured on
SLACK = 0.03  # how far estimates may be off
CLOSE = 0.01  # of what was built, others are not farther
SPARE = 500  # a share of the room that is left where estimates were too low again
AIMS = 12  # sizes at which the least one is looked for
FEW = 4  # ways to run a block that are measured in one graph, at least, where a chain has fewer blocks


@dataclass(frozen=True, slots=True)
class Found:
    """A choice that was built: bytes that must be alive at once, bytes with those of its calls, what it adds.

    arena    lower bound of its arena, which the planner reaches but for rare cases
    seconds  of what is computed again, and how many calls that are
    """

    choice: Choice | None
    arena: int
    nbytes: int
    seconds: float
    calls: int


class Chain:
    """A training graph whose middle is `count` equal blocks; remembers what it has measured.

    reserved     bytes that stay once a block's, or the head's, backward is done: gradients that wait for clipping
    call_nbytes  what each call of the graph takes of the process, beside the arena
    calls        how many a graph has that keeps everything
    like         a chain with the same blocks, which has measured them
    together     how many ways to run a block may be measured in one chain
    target       where it runs; bytes are those of the space of its arena
    """

    def __init__(
        self,
        build: Build,
        count: int,
        rates: Rates,
        reserved: tuple[int, int] = (0, 0),
        call_nbytes: int = 0,
        calls: int = 0,
        like: "Like | None" = None,
        together: int = 1,
        target: Target = CPU,
    ) -> None:
        self.call_nbytes, self.calls, self.target = call_nbytes, calls, target
        self.build, self.count, self.like = build, count, like
        together = max(min(count - 2, together), FEW)
        own = Block(build, rates, reserved, together, target)
        self.block: Block = own if like is None else like.chain.block
        self.found: dict[Choice | None, Found] = {}

    @cached_property
    def head_work(self) -> int:
        """Most bytes from the last block's end to the beginning of its backward, without what blocks keep."""
        placed, first = self._head if self.like is None else self.like.chain._head
        if self.like is not None:
            placed = self.like.headed(placed)
        most = Alive(placed, self.target.space).most(0, first - 1)
        return most - (HEADED + 1) * self.block.stream_nbytes

    @cached_property
    def _head(self) -> tuple[Placed, int]:
        """A chain that keeps its stream alone, and the step at which the backward pass reaches the last block."""
        built = self.build(HEADED, uniform(HEADED, ()))
        placed = place(built.graph, self.target)
        first, _ = backward_steps(placed, built, self.block.parts)[HEADED - 1]
        return placed, first

    def least_seconds(self, nbytes: int) -> float:
        """Seconds that must be added, at least, for so many bytes less than what everything takes."""
        wanted = nbytes / self.count - self.block.stream_nbytes if self.count else 0.0
        return self.count * self.block.least_again(wanted) if wanted > 0 else 0.0

    # ---- choices

    def plan(self, choice: Choice | None) -> Found:
        """The choice in the whole chain, measured; None keeps everything."""
        if choice not in self.found:
            graph = self.build(self.count, choice).graph
            made = storages(place(graph, self.target), self.target.space)
            arena, _ = lower_bound(*columns(made, ALIGNMENT))
            again = [call for call in graph.calls if call.phase == "recomputed"]
            nbytes = arena + self.call_nbytes * len(graph.calls)
            seconds = sum(map(self.block.seconds, again))
            self.found[choice] = Found(choice, arena, nbytes, seconds, len(again))
        return self.found[choice]

    @property
    def _calls_nbytes(self) -> int:
        """Of the process, for the calls of a whole chain that keeps everything."""
        return self.call_nbytes * self.calls

    def bound(self, nbytes: int) -> float:
        """Seconds that a choice of so many bytes adds, at least; what is known of ways must do."""
        solved = self._solved(Table(self, self.block.options, nbytes), nbytes)
        return math.inf if solved is None else solved.seconds

    def within(self, nbytes: int, below: float = math.inf) -> Found | None:
        """The fastest known choice that takes at most so many bytes; None if none does.

        below  seconds that it may add, by estimate; nothing is built that should add more
        """
        aim = nbytes
        for at in range(ROUNDS):
            solved = self._measured(nbytes + nbytes // 16, aim, below)
            if solved is None or solved.seconds >= below:
                break
            over = self.plan(solved.choice).nbytes - nbytes
            if -nbytes // 50 <= over <= 0:
                break
            aim -= over + at * nbytes // SPARE if over > 0 else over // 2
        if solved is None and self._may_fit(nbytes, below):
            self._plan_around(self.smallest.choice, nbytes)
        fitting = [found for found in self.found.values() if found.nbytes <= nbytes]
        return min(fitting, key=lambda found: (found.seconds, found.nbytes), default=None)

    def _may_fit(self, nbytes: int, below: float) -> bool:
        """Whether the choice that takes the least bytes is worth building."""
        most = nbytes * (1 + SLACK)
        if self.floor() > most or self.smallest.nbytes > most:
            return False
        return self.smallest.seconds < below

    def _measured(self, nbytes: int, aim: int, below: float) -> Solved | None:
        """The fastest choice that takes at most `aim` bytes, by a table for `nbytes`, of ways that are all measured.

        Ways that are not count as what they take at least, so no other choice is faster.
        """
        while True:
            solved = self._solved(Table(self, self.block.options, nbytes), aim)
            if solved is None or solved.seconds >= below or not self.block.measure(solved.ways):
                return solved

    def _plan_around(self, choice: Choice, nbytes: int) -> None:
        """The choice; if it takes about so many bytes, also others whose last block keeps a little more.

        Its backward pass comes first and often has room.
        """
        if self.plan(choice).nbytes > nbytes * (1 + CLOSE):
            return
        for way in self.block.ways:
            if 0 < self.block.saved(way) <= self.block.stream_nbytes:
                self.plan(replace(choice, inner=(*choice.inner[:-1], way)))

    def _solved(self, table: Table, nbytes: int) -> Solved | None:
        """The fastest choice by the table that leaves room for its own calls."""
        aim = nbytes - self._calls_nbytes
        while (solved := table.choice(aim)) is not None:
            over = aim + self._calls_nbytes + self.call_nbytes * solved.calls - nbytes
            if over <= 0:
                break
            aim -= over
        return solved

    def floor(self, waiting: bool = True) -> int:
        """Bytes that the arena takes at least: those of the backward pass of the second block.

        waiting  gradients of blocks and head wait for clipping
        """
        if self.count < 2:
            return 0
        block = self.block
        later = block.head_reserve + (self.count - 2) * block.reserve if waiting else 0
        return block.stream_nbytes + block.least_work + later

    @cached_property
    def smallest(self) -> "Smallest":
        """By estimate."""
        block, options = self.block, self.block.bare
        high = 2 * self.head_work + (self.count + 1) * (block.stream_nbytes + block.reserve)
        high += block.head_reserve + 2 * max(option.work for option in options)
        coarse = Table(self, options, high)
        fine = Table(self, options, coarse.least + coarse.least // 20)
        found = []
        for aim in (fine.least, *np.geomspace(fine.nbytes, high, AIMS).astype(int).tolist()):
            solved = (fine if aim <= fine.nbytes else coarse).choice(aim)
            assert solved is not None
            nbytes = aim + self._calls_nbytes + self.call_nbytes * solved.calls
            found.append(Smallest(nbytes, solved.seconds, solved.choice))
        return min(found, key=lambda one: one.nbytes)

    def least(self) -> Found:
        """The choice that takes the least bytes, calls included."""
        self.plan(self.smallest.choice)
        self.plan(uniform(self.count, ()))
        return min(self.found.values(), key=lambda found: (found.nbytes, found.seconds))


@dataclass(frozen=True, slots=True)
class Like:
    """A chain of the same blocks, and what makes a graph of its head into one of the other's."""

    chain: Chain
    headed: Callable[[Placed], Placed]


@dataclass(frozen=True, slots=True)
class Smallest:
    """The choice that should take the least bytes, calls included: how many, and the seconds that it adds."""

    nbytes: int
    seconds: float
    choice: Choice


def spacing(chain: Chain) -> int:
    """a = sqrt(n v / u): of n blocks with u bytes inside and v between, every a-th is kept. Chen et al. 2016."""
    block = chain.block
    inside = block.parts * sum(aligned(t.spec) for t in block.values)
    return max(round(math.sqrt(chain.count * block.stream_nbytes / inside)), 1)
