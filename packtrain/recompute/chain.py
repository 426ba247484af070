"""What to keep from the forward pass of a chain of equal blocks, for least extra time within a number of bytes.

In go a way to build the training graph for a number of blocks and a Choice; out come Choices. Options of one block
are measured on a short chain by the real lifetimes, a dynamic programme over the chain combines them, and the real
planner has the last word. Beaumont et al. 2021 (rotor) and Chen et al. 2016 (arXiv 1604.06174) for the chain.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from packtrain import cost
from packtrain.cost import Rates
from packtrain.packing import alive, lower_bound
from packtrain.place import Placed, place
from packtrain.plan.lifetimes import columns, storages
from packtrain.recompute.choice import (
    Built,
    Choice,
    Option,
    aligned,
    inner_values,
    stretches,
    uniform,
)
from packtrain.recompute.front import Kept, front, least_again
from packtrain.recompute.table import Solved, Table
from packtrain.tensor import Call, Tensor

ALIGNMENT = 64
ROUNDS = 4
SAMPLED = 3  # blocks of the chain that options are measured on; the middle one counts
HEADED = 2  # blocks of the chain that the head is measured on
SLACK = 0.03  # how far estimates may be off
AIMS = 12  # sizes at which the least one is looked for


Inner = tuple[tuple[int, int], ...]  # of a block: places and ranks, see Choice
Build = Callable[[int, Choice | None], Built]


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
    together     how many ways to run a block may be measured in one chain; 1 where not all blocks are alike
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
    ) -> None:
        self.call_nbytes, self.calls = call_nbytes, calls
        self.build, self.count, self.rates = build, count, rates
        self.like = None if like is None else like.chain
        self.headed = None if like is None else like.headed
        self.together = together
        self.block_reserve, self.head_reserve = reserved
        self.found: dict[Choice | None, Found] = {}

    # ---- what a block can do

    @cached_property
    def _short(self) -> Built:
        return self.build(SAMPLED, None)

    @cached_property
    def parts(self) -> int:
        """In how many parts a block takes its rows; the stream has as many values for each block."""
        if self.like is not None:
            return self.like.parts
        return len(self._short.stream) // (SAMPLED + 1)

    @cached_property
    def _calls(self) -> list[Call]:
        """Of the first part of the middle block of the short chain."""
        return stretches(self._short.stream)[2 * self.parts]

    @property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """What these calls begin with, and what they lead to."""
        return self._short.stream[self.parts], self._short.stream[2 * self.parts]

    @cached_property
    def stream_nbytes(self) -> int:
        if self.like is not None:
            return self.like.stream_nbytes
        return self.parts * aligned(self._short.stream[0])

    @cached_property
    def forward_seconds(self) -> float:
        if self.like is not None:
            return self.like.forward_seconds
        return self.parts * sum(self._seconds(call) for call in self._calls)

    @cached_property
    def forward_calls(self) -> int:
        if self.like is not None:
            return self.like.forward_calls
        return self.parts * len(self._calls)

    def _seconds(self, call: Call) -> float:
        return 0.0 if call.op.view else cost.call_seconds(call, self.rates)

    @cached_property
    def options(self) -> list[Option]:
        """The Pareto front of a block over bytes kept and seconds added, each with its measured working set."""
        if self.like is not None:
            return self.like.options
        return self._measured([form for kept in self._front for form in self._forms(kept.places)])

    @cached_property
    def least_options(self) -> list[Option]:
        """Those that keep nothing of a block."""
        if self.like is not None:
            return self.like.least_options
        return self._measured(self._forms(()))

    def _forms(self, keep: tuple[int, ...]) -> list[Inner]:
        """Where a cut of the block is not kept, another form computes it again first, and then each side."""
        plain = tuple((place, 0) for place in keep)
        return [plain, *((*plain, (cut, 1)) for cut in self._cuts if cut not in keep)]

    @cached_property
    def values(self) -> list[Tensor]:
        """What the middle block of the short chain could keep."""
        return inner_values(self._calls)

    @cached_property
    def _front(self) -> list[Kept]:
        """What the first part of a block can keep."""
        return front(self._calls, self.values, self._ends[0], self._read, self._cuts, self._seconds)

    @cached_property
    def _read(self) -> set[Tensor]:
        """What the backward pass reads of it."""
        inside, (_, end) = set(self._calls), self._ends
        backward = (call for call in self._short.graph.calls if call.phase == "backward")
        return {t.base for call in backward for t in call.reads if t.base.call in inside} - {end}

    @cached_property
    def _cuts(self) -> list[int]:
        """Places of values that every way through the block passes."""
        inside, (start, end) = set(self._calls), self._ends
        return [
            i
            for i, t in enumerate(self.values)
            if all(start not in call.reads for call in needed({end}, {t}, inside))
        ]

    def _measured(self, forms: Sequence[Inner]) -> list[Option]:
        """What these ways to run a block take, many measured in one chain, each by a block of its own in the middle."""
        size = max(min(self.count, self.together + 2) - 2, 1)
        batches = (forms[at : at + size] for at in range(0, len(forms), size))
        return [option for batch in batches for option in self._measured_together(batch)]

    def _measured_together(self, forms: Sequence[Inner]) -> list[Option]:
        """The bytes of each are without what earlier blocks keep and what later ones leave."""
        inner = (forms[0], *forms, forms[-1])
        built = self.build(len(inner), Choice((0,) * (len(inner) + 1), inner))
        placed = place(built.graph)
        curve, spans = Alive(placed), backward_steps(placed, built, self.parts)
        before, options = 0, list[Option]()
        for i, keep in enumerate(inner):
            saved = self.parts * sum(aligned(self.values[at]) for at, rank in keep if rank == 0)
            before += self.stream_nbytes + saved
            if not 0 < i < len(inner) - 1:
                continue
            first, last = spans[i]
            again = [s.call for s in placed.steps[first : last + 1] if s.call.phase == "recomputed"]
            later = self.head_reserve + (len(inner) - 1 - i) * self.block_reserve
            work = curve.most(first, last) - (before - saved) - later
            options.append(Option(keep, saved, sum(map(self._seconds, again)), len(again), work))
        return options

    @cached_property
    def head_work(self) -> int:
        """Most bytes from the last block's end to the beginning of its backward, without what blocks keep."""
        placed, first = self._head if self.like is None else self.like._head
        if self.headed is not None:
            placed = self.headed(placed)
        return Alive(placed).most(0, first - 1) - (HEADED + 1) * self.stream_nbytes

    @cached_property
    def _head(self) -> tuple[Placed, int]:
        """A chain that keeps its stream alone, and the step at which the backward pass reaches the last block."""
        built = self.build(HEADED, uniform(HEADED, ()))
        placed = place(built.graph)
        first, _ = backward_steps(placed, built, self.parts)[HEADED - 1]
        return placed, first

    def least_seconds(self, nbytes: int) -> float:
        """Seconds that must be added, at least, for so many bytes less than what everything takes."""
        if self.like is not None:
            return self.like.least_seconds(nbytes)
        wanted = nbytes / self.count - self.stream_nbytes if self.count else 0.0
        if wanted <= 0:
            return 0.0
        whole = sum(map(aligned, self._read))
        if wanted > whole * self.parts:
            return math.inf
        added = least_again(self._front, whole - wanted / self.parts)
        return self.count * self.parts * added

    # ---- choices

    def plan(self, choice: Choice | None) -> Found:
        """The choice in the whole chain, measured; None keeps everything."""
        if choice not in self.found:
            graph = self.build(self.count, choice).graph
            arena, _ = lower_bound(*columns(storages(place(graph)), ALIGNMENT))
            again = [call for call in graph.calls if call.phase == "recomputed"]
            nbytes = arena + self.call_nbytes * len(graph.calls)
            seconds = sum(map(self._seconds, again))
            self.found[choice] = Found(choice, arena, nbytes, seconds, len(again))
        return self.found[choice]

    @property
    def _calls_nbytes(self) -> int:
        """Of the process, for the calls of a whole chain that keeps everything."""
        return self.call_nbytes * self.calls

    def within(self, nbytes: int, below: float = math.inf) -> Found | None:
        """The fastest known choice that takes at most so many bytes; None if none does.

        below  seconds that it may add, by estimate; nothing is built that should add more
        """
        if self.smallest.nbytes > nbytes * (1 + SLACK):
            return None
        table, aim = Table(self, self.options, nbytes + nbytes // 16), nbytes
        for _ in range(ROUNDS):
            solved = self._solved(table, aim)
            if solved is None or solved.seconds >= below:
                break
            over = self.plan(solved.choice).nbytes - nbytes
            if -nbytes // 50 <= over <= 0:
                break
            aim -= over if over > 0 else over // 2
        if solved is None:
            self._plan_around(self.smallest.choice)
        fitting = [found for found in self.found.values() if found.nbytes <= nbytes]
        return min(fitting, key=lambda found: (found.seconds, found.nbytes), default=None)

    def _plan_around(self, choice: Choice) -> None:
        """The choice and others whose last block keeps a little more: its backward comes first and often has room."""
        self.plan(choice)
        for option in self.options:
            if 0 < option.saved <= self.stream_nbytes:
                self.plan(replace(choice, inner=(*choice.inner[:-1], option.keep)))

    def _solved(self, table: Table, nbytes: int) -> Solved | None:
        """The fastest choice by the table that leaves room for its own calls."""
        aim = nbytes - self._calls_nbytes
        while (solved := table.choice(aim)) is not None:
            over = aim + self._calls_nbytes + self.call_nbytes * solved.calls - nbytes
            if over <= 0:
                break
            aim -= over
        return solved

    @cached_property
    def smallest(self) -> "Smallest":
        """By estimate."""
        high = 2 * self.head_work + (self.count + 1) * (self.stream_nbytes + self.block_reserve)
        high += self.head_reserve + 2 * max(option.work for option in self.least_options)
        coarse = Table(self, self.least_options, high)
        fine = Table(self, self.least_options, coarse.least + coarse.least // 20)
        found = []
        for aim in (fine.least, *np.geomspace(fine.nbytes, high, AIMS).astype(int).tolist()):
            solved = (fine if aim <= fine.nbytes else coarse).choice(aim)
            assert solved is not None
            nbytes = aim + self._calls_nbytes + self.call_nbytes * solved.calls
            found.append(Smallest(nbytes, solved.choice))
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
    """The choice that should take the least bytes, calls included, and how many."""

    nbytes: int
    choice: Choice


def needed(wanted: set[Tensor], kept: set[Tensor], inside: set[Call]) -> set[Call]:
    """The calls inside a block that lead from what is kept to what is wanted."""
    calls: set[Call] = set()
    stack = list(wanted)
    while stack:
        t = stack.pop()
        if t in kept or t.call is None or t.call not in inside or t.call in calls:
            continue
        calls.add(t.call)
        stack.extend(t.call.reads)
    return calls


def backward_steps(placed: Placed, built: Built, parts: int) -> dict[int, tuple[int, int]]:
    """Of each block the first step with a gradient of its end, and the last that makes one of its beginning.

    The first block has none where nothing before it is trained.
    """
    serials = [step.call.serial for step in placed.steps]
    ends = list[list[int]]()
    for at in range(0, len(built.stream), parts):
        found = (built.gradients.get(t) for t in built.stream[at : at + parts])
        made = (d.call.serial for d in found if d is not None and d.call is not None)
        ends.append(sorted(bisect_left(serials, serial) for serial in made))
    pairs = enumerate(pairwise(ends))
    return {i: (end[0], beginning[-1]) for i, (beginning, end) in pairs if beginning and end}


def spacing(chain: Chain) -> int:
    """a = sqrt(n v / u): of n blocks with u bytes inside and v between, every a-th is kept. Chen et al. 2016."""
    inside = chain.parts * sum(map(aligned, chain.values))
    return max(round(math.sqrt(chain.count * chain.stream_nbytes / inside)), 1)


class Alive:
    """Bytes alive over the steps of a placed graph."""

    def __init__(self, placed: Placed) -> None:
        self._times, self._nbytes = alive(*columns(storages(placed), ALIGNMENT))

    def most(self, first: int, last: int) -> int:
        """Most bytes at any step from the first to the last."""
        begin, end = np.searchsorted(self._times, (first, last), side="right")
        return int(self._nbytes[max(begin - 1, 0) : end].max())
