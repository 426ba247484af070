"""What to keep from the forward pass of a chain of equal blocks, for least extra time within a number of bytes.

In go a way to build the training graph for a number of blocks and a Choice; out come Choices. Options of one block
are measured on a short chain by the real lifetimes, a dynamic programme over the chain combines them, and the real
planner has the last word. Beaumont et al. 2021 (rotor) and Chen et al. 2016 (arXiv 1604.06174) for the chain.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from packtrain import cost
from packtrain.cost import Rates
from packtrain.graph import Graph
from packtrain.place import Placed, place
from packtrain.plan import Plan, make_plan
from packtrain.plan.lifetimes import Storage, storages
from packtrain.recompute.choice import (
    Choice,
    Option,
    aligned,
    inner_values,
    keep_all,
    stretches,
    uniform,
)
from packtrain.recompute.table import solve
from packtrain.tensor import Call, Tensor

OPTIONS = 14  # of a block, spread over its Pareto front
ROUNDS = 4
SAMPLED = 3  # blocks of the chain that options are measured on; the middle one counts


Build = Callable[[int, "Choice | None"], tuple[Graph, list[Tensor]]]


@dataclass(frozen=True, slots=True)
class Found:
    """A choice that was built: the bytes that must be alive at once, what its calls take, and the seconds it adds.

    arena   lower bound of its arena, which the planner reaches but for rare cases
    nbytes  with the memory of the process that its calls take
    """

    choice: Choice
    arena: int
    nbytes: int
    seconds: float
    placed: Placed

    def plan(self) -> Plan:
        return make_plan(self.placed)


class Chain:
    """A training graph whose middle is `count` equal blocks; remembers every plan it has made.

    reserved     bytes that stay once a block's, or the head's, backward is done: gradients that wait for clipping
    call_nbytes  what each call of the graph takes of the process, beside the arena
    """

    def __init__(
        self,
        build: Build,
        count: int,
        rates: Rates,
        reserved: tuple[int, int] = (0, 0),
        call_nbytes: int = 0,
    ) -> None:
        self.call_nbytes = call_nbytes
        self.build, self.count, self.rates = build, count, rates
        self.block_reserve, self.head_reserve = reserved
        self.found: dict[Choice, Found] = {}

    # ---- what a block can do

    @cached_property
    def _short(self) -> tuple[Graph, list[Tensor]]:
        return self.build(SAMPLED, None)

    @cached_property
    def _calls(self) -> list[Call]:
        """Of the middle block of the short chain."""
        return stretches(self._short[1])[2]

    @cached_property
    def stream_nbytes(self) -> int:
        return aligned(self._short[1][0])

    @cached_property
    def forward_seconds(self) -> float:
        return sum(self._seconds(call) for call in self._calls)

    def _seconds(self, call: Call) -> float:
        return 0.0 if call.op.view else cost.call_seconds(call, self.rates)

    @cached_property
    def options(self) -> list[Option]:
        """The Pareto front of a block over bytes kept and seconds added, each with its measured working set.

        Where a cut of the block is not kept, a second form computes it again first, and then each side on its own.
        """
        cuts = self._cuts()
        made = []
        for keep in self._front():
            saved = sum(aligned(self.values[place]) for place in keep)
            ranked = [tuple((place, 0) for place in keep)]
            ranked += [(*ranked[0], (cut, 1)) for cut in cuts if cut not in keep]
            made += [Option(one, saved, *self._measured(one, saved)) for one in ranked]
        return made

    @cached_property
    def values(self) -> list[Tensor]:
        """What the middle block of the short chain could keep."""
        return inner_values(self._calls)

    def _front(self) -> list[tuple[int, ...]]:
        """Sets of places to keep that no other set beats in bytes and in seconds."""
        graph, stream = self._short
        inside = set(self._calls)
        backward = (call for call in graph.calls if call.phase == "backward")
        read = {t.base for call in backward for t in call.reads if t.base.call in inside}
        read.discard(stream[2])
        places = [i for i, t in enumerate(self.values) if t in read]
        weighed = []
        for mask in range(1 << len(places)):
            keep = tuple(place for bit, place in enumerate(places) if mask >> bit & 1)
            kept = {self.values[place] for place in keep} | {stream[1]}
            saved = sum(aligned(self.values[place]) for place in keep)
            weighed.append((saved, self._again(read - kept, kept, inside), keep))
        return [keep for _, _, keep in pareto(weighed)]

    def _again(self, wanted: set[Tensor], kept: set[Tensor], inside: set[Call]) -> float:
        """Seconds to compute `wanted` again from what is kept."""
        calls = needed(wanted, kept, inside)
        return sum(map(self._seconds, calls))

    def _cuts(self) -> list[int]:
        """Places of values that every way through the block passes."""
        stream = self._short[1]
        inside, start = set(self._calls), stream[1]
        return [
            i
            for i, t in enumerate(self.values)
            if all(start not in call.reads for call in needed({stream[2]}, {t}, inside))
        ]

    def _measured(self, keep: tuple[tuple[int, int], ...], saved: int) -> tuple[float, int]:
        """Seconds that the middle block computes again, and the most bytes while its backward runs.

        The bytes are without what earlier blocks keep and what later ones leave.
        """
        graph, stream = self.build(SAMPLED, Choice((0,) * (SAMPLED + 1), (keep,) * SAMPLED))
        placed = place(graph)
        first, last = backward_steps(placed, stream, 1)
        again = (step.call for step in placed.steps[first : last + 1])
        seconds = sum(self._seconds(call) for call in again if call.phase == "recomputed")
        live = live_bytes(storages(placed), len(placed.steps))
        before = 2 * self.stream_nbytes + saved
        later = self.head_reserve + self.block_reserve
        return seconds, int(live[first : last + 1].max()) - before - later

    @cached_property
    def head_work(self) -> int:
        """Most bytes from the last block's end to the beginning of its backward, without what blocks keep."""
        graph, stream = self.build(SAMPLED, uniform(SAMPLED, ()))
        placed = place(graph)
        first, _ = backward_steps(placed, stream, SAMPLED - 1)
        live = live_bytes(storages(placed), len(placed.steps))
        return int(live[:first].max()) - (SAMPLED + 1) * self.stream_nbytes

    # ---- choices

    def plan(self, choice: Choice) -> Found:
        """The choice in the whole chain, placed and planned."""
        if choice not in self.found:
            graph, _ = self.build(self.count, choice)
            placed = place(graph)
            arena = int(live_bytes(storages(placed), len(placed.steps)).max())
            nbytes = arena + self.call_nbytes * len(graph.calls)
            again = (call for call in graph.calls if call.phase == "recomputed")
            seconds = sum(map(self._seconds, again))
            self.found[choice] = Found(choice, arena, nbytes, seconds, placed)
        return self.found[choice]

    def within(self, nbytes: int) -> Found | None:
        """The fastest known choice that takes at most so many bytes; None if none does."""
        everything = self.plan(keep_all(self.count, len(self.values)))
        if everything.nbytes <= nbytes:
            return everything
        self.plan(uniform(self.count, ()))
        aim = nbytes - self.call_nbytes * len(everything.placed.graph.calls)
        for _ in range(ROUNDS):
            choice = solve(self, aim)
            if choice is None:
                break
            over = self.plan(choice).nbytes - nbytes
            if -nbytes // 50 <= over <= 0:
                break
            aim -= over if over > 0 else over // 2
        fitting = [found for found in self.found.values() if found.nbytes <= nbytes]
        return min(fitting, key=lambda found: (found.seconds, found.nbytes), default=None)

    def least(self) -> Found:
        """The choice that takes the least bytes, calls included."""
        self.plan(keep_all(self.count, len(self.values)))
        low, high = 0, self.plan(uniform(self.count, ())).arena
        while high - low > max(high // 100, 4096):
            middle = (low + high) // 2
            choice = solve(self, middle)
            if choice is not None:
                self.plan(choice)
            low, high = (middle, high) if choice is None else (low, middle)
        return min(self.found.values(), key=lambda found: (found.nbytes, found.seconds))


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


def pareto(
    weighed: list[tuple[int, float, tuple[int, ...]]],
) -> list[tuple[int, float, tuple[int, ...]]]:
    """Those that no other beats in both, thinned to OPTIONS: the ends, and what lies farthest below its neighbours."""
    front: list[tuple[int, float, tuple[int, ...]]] = []
    for one in sorted(weighed):
        if not front or one[1] < front[-1][1] - 1e-12:
            front.append(one)
    while len(front) > OPTIONS:

        def bend(i: int) -> float:
            (a, s, _), (b, t, _), (c, u, _) = front[i - 1 : i + 2]
            return s + (u - s) * (b - a) / (c - a) - t

        del front[min(range(1, len(front) - 1), key=bend)]
    return front


def backward_steps(placed: Placed, stream: Sequence[Tensor], i: int) -> tuple[int, int]:
    """The step that makes the gradient of a block's end, and the one that makes that of its beginning."""
    made = {placed.names[t]: at for at, step in enumerate(placed.steps) for t in step.results}
    return made[f"d/{stream[i + 1].name}"], made[f"d/{stream[i].name}"]


def spacing(chain: Chain) -> int:
    """a = sqrt(n v / u): of n blocks with u bytes inside and v between, every a-th is kept. Chen et al. 2016."""
    inside = sum(map(aligned, chain.values))
    return max(round(math.sqrt(chain.count * chain.stream_nbytes / inside)), 1)


def live_bytes(made: Sequence[Storage], steps: int) -> np.ndarray:
    """Bytes alive at each step."""
    change = np.zeros(steps + 2, np.int64)
    for s in made:
        size = max(-(-s.nbytes // 64), 1) * 64
        change[s.start] += size
        change[min(s.end, steps + 1)] -= size
    return np.cumsum(change)[: steps + 1]
