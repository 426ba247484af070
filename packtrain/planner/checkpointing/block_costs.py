"""The ways to run a block of a chain: what each keeps, and its bytes and seconds.

Returns Options, given a function that builds the training graph for a number of equal blocks. Bytes of a way have a
lower bound from a short chain that keeps everything, and are measured by real lifetimes on request.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cached_property

import numpy as np

from packtrain.engine.backends import CPU, Target, cpu
from packtrain.engine.memory_plan.lifetimes import columns, storages
from packtrain.engine.packing import alive
from packtrain.engine.placement import Placed, place
from packtrain.engine.tensor import Call
from packtrain.planner import cost_model
from packtrain.planner.checkpointing import recompute_choice
from packtrain.planner.checkpointing.middle_blocks import (
    SAMPLED,
    Middle,
    backward_steps,
    costs_nothing,
    middle,
)
from packtrain.planner.checkpointing.pareto_front import Kept, least_again
from packtrain.planner.checkpointing.recompute_choice import (
    ALIGNMENT,
    INPUT,
    NEVER,
    Choice,
    Inner,
    Option,
    is_away,
)
from packtrain.planner.cost_model import Rates

Build = Callable[[int, Choice | None], recompute_choice.Built]


class BlockCosts:
    """A block of a training graph with a chain of equal blocks; caches measurements.

    reserved  bytes that stay after the backward pass of a block, or of the head
    together  how many ways may be measured in one chain; 1 if not all blocks are alike
    space     whose bytes count; by default the arena's
    offload   whether a block may keep what it keeps in the process's memory
    twice     the backward pass of all blocks runs twice: what they keep stays through the first time, which is measured
    """

    def __init__(
        self,
        build: Build,
        rates: Rates,
        reserved: tuple[int, int] = (0, 0),
        together: int = 1,
        target: Target = CPU,
        space: str | None = None,
        offload: int = NEVER,
        twice: bool = False,
    ) -> None:
        self.twice = twice
        self.build, self.rates, self.together, self.target = build, rates, together, target
        self.space, self.offload = space or target.space, offload
        self.reserve, self.head_reserve = reserved
        self._known: dict[Inner, Option] = {}

    @cached_property
    def _middle(self) -> Middle:
        """Of a short chain that keeps everything."""
        built = self.build(SAMPLED, None)
        return middle(built, place(built.graph, self.target), self.space, self.seconds)

    def afresh(self) -> "BlockCosts":
        """The same, as if nothing had been measured on longer chains."""
        clone = copy(self)
        clone._known = {}
        return clone

    # ---- the middle block

    @property
    def parts(self) -> int:
        """Number of parts in which a block processes its rows; the stream has as many values for each block."""
        return self._middle.parts

    @property
    def stream_nbytes(self) -> int:
        return self.parts * self._middle.stream

    @property
    def forward_seconds(self) -> float:
        return self.parts * self._middle.seconds

    @property
    def forward_calls(self) -> int:
        return self.parts * len(self._middle.calls)

    def seconds(self, call: Call) -> float:
        return 0.0 if costs_nothing(call) else cost_model.call_seconds(call, self.rates)

    @property
    def value_nbytes(self) -> list[int]:
        """Bytes of each value that the first part could keep, by place."""
        return self._middle.nbytes

    @property
    def read(self) -> list[int]:
        """Places of those that the backward pass reads."""
        return self._middle.places

    def free(self, seconds: float) -> tuple[int, ...]:
        """Places of values to keep; the others, the cheapest by byte, take at most `seconds` to recompute."""
        return self._middle.free(seconds / self.parts)

    # ---- ways to run it

    @cached_property
    def ways(self) -> list[Inner]:
        """The ways on the Pareto front of bytes kept and seconds added, in all their forms."""
        return [strategy for point in self._middle.front for strategy in self._forms(point.places)]

    def _forms(self, keep: tuple[int, ...]) -> list[Inner]:
        """If a cut of the block is not kept, another form recomputes it first, and then each side; and all these with
        what is kept away."""
        base = tuple((place, 0) for place in keep)
        resident_forms = [
            base,
            *((*base, (cut, 1)) for cut in self._middle.cuts if cut not in keep),
        ]
        return (
            [*resident_forms, *map(recompute_choice.put_away, resident_forms)]
            if self.offload
            else resident_forms
        )

    def saved(self, strategy: Inner) -> int:
        """Bytes of the space that a way keeps, in addition to the block's input."""
        return -self.stream_nbytes if is_away(strategy) else self._nbytes(strategy)

    def _nbytes(self, strategy: Inner) -> int:
        return self.parts * sum(self.value_nbytes[at] for at in _kept(strategy))

    @property
    def saved_all(self) -> int:
        """Bytes that it keeps if it keeps everything, with its input."""
        return self.stream_nbytes + self.parts * self._read_nbytes

    @cached_property
    def _read_nbytes(self) -> int:
        return sum(self.value_nbytes[at] for at in self.read)

    def crossing(self, strategy: Inner) -> float:
        """Seconds for what a way keeps away, there and back."""
        return (
            self._there_and_back(self.stream_nbytes + self._nbytes(strategy))
            if is_away(strategy)
            else 0.0
        )

    def _there_and_back(self, nbytes: float) -> float:
        names = [b.name for b in self.target.every if b.space == self.space]
        return 2 * cost_model.crossing(nbytes, *map(self.rates.on, (*names[:1], cpu.name)))

    @property
    def options(self) -> list[Option]:
        """All ways, measured or with lower bounds."""
        return [self._known.get(strategy) or self._bounds[strategy] for strategy in self.ways]

    @property
    def bare(self) -> list[Option]:
        """The ways that keep nothing, measured."""
        self.measure(self._forms(()))
        return [self._known[strategy] for strategy in self._forms(())]

    def least_again(self, nbytes: float) -> float:
        """Least seconds of recomputation for keeping `nbytes` less than everything."""
        total_nbytes = self._read_nbytes
        if nbytes > total_nbytes * self.parts:
            return np.inf
        points = self._middle.front
        if self.offload:
            moved = ((self.stream_nbytes / self.parts + point.saved, point) for point in points)
            points = [
                *points,
                *(Kept(0, point.again + self._there_and_back(n), ()) for n, point in moved),
            ]
        return self.parts * least_again(points, total_nbytes - nbytes / self.parts)

    # ---- lower bounds

    @cached_property
    def _bounds(self) -> dict[Inner, Option]:
        """Lower bounds: as if recomputed values were alive only while they are read."""
        middle_block, bounds = self._middle, dict[Inner, Option]()
        for point in middle_block.front:
            seconds, calls = self.parts * point.again, self.parts * middle_block.again(point.places)
            nbytes = self._needed + middle_block.kept[list(point.places)].sum(axis=0)
            for strategy in self._forms(point.places):
                total_seconds = seconds + self.crossing(strategy)
                bounds[strategy] = Option(
                    strategy, self.saved(strategy), total_seconds, calls, int(nbytes.max())
                )
        return bounds

    @property
    def least_work(self) -> int:
        """Least bytes of its backward pass, whatever it keeps."""
        return int(self._needed.max())

    @cached_property
    def _needed(self) -> np.ndarray:
        """Bytes of each step of the backward pass, without what stays after those of later blocks, or passes."""
        later = self.head_reserve + (SAMPLED - 2) * self.reserve
        return self._middle.needed - later - self.twice * self.stream_nbytes

    # ---- measurements

    def measure(self, strategies: Iterable[Inner]) -> bool:
        """Measure unknown ways, in all their forms, together in one chain; returns whether there were any."""
        kept_places = {_kept(strategy) for strategy in strategies if strategy not in self._known}
        unmeasured = [
            strategy
            for strategy in self.ways
            if strategy not in self._known and _kept(strategy) in kept_places
        ]
        for at in range(0, len(unmeasured), self.together):
            self._measure(unmeasured[at : at + self.together])
        return bool(unmeasured)

    def _measure(self, strategies: Sequence[Inner]) -> None:
        """Bytes exclude what earlier blocks keep and what later ones leave, or keep.

        Where all of them go back twice, the gradient behind the last one stays, too, but not the output of that one.
        """
        inner = (strategies[0], *strategies, strategies[-1])
        built = self.build(len(inner), Choice((0,) * (len(inner) + 1), inner))
        placed = place(built.graph, self.target)
        curve, spans = Alive(placed, self.space), backward_steps(placed, built, self.parts)
        saved = list(map(self.saved, inner))
        total_nbytes = sum(saved) + (len(inner) + 1) * self.stream_nbytes
        for i, strategy in enumerate(inner):
            before = sum(saved[: i + 1]) + (i + 1) * self.stream_nbytes
            other_nbytes = (total_nbytes if self.twice else before) - saved[i]
            if not 0 < i < len(inner) - 1:
                continue
            first, last = spans[i]
            recomputed = [s.call for s in placed.steps[first : last + 1] if s.recomputes]
            later = self.head_reserve + (len(inner) - 1 - i) * self.reserve
            work = max(curve.most(first, last) - other_nbytes - later, 0)
            seconds = sum(map(self.seconds, recomputed)) + self.crossing(strategy)
            self._known[strategy] = Option(strategy, saved[i], seconds, len(recomputed), work)


def _kept(strategy: Inner) -> tuple[int, ...]:
    return tuple(at for at, rank in strategy if rank <= 0 and at != INPUT)


class Alive:
    """Bytes of a space that are alive at the steps of a placed graph."""

    def __init__(self, placed: Placed, space: str) -> None:
        self._times, self._nbytes = alive(*columns(storages(placed, space), ALIGNMENT))

    def most(self, first: int, last: int) -> int:
        """Most bytes at any step from the first to the last."""
        begin, end = np.searchsorted(self._times, (first, last), side="right")
        return int(self._nbytes[max(begin - 1, 0) : end].max(initial=0))
