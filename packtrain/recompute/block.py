"""The ways to run a block of a chain: what each keeps, and its bytes and seconds.

Returns Options, given a function that builds the training graph for a number of equal blocks. Bytes of a way have a
lower bound from a short chain that keeps everything, and are measured by real lifetimes on request.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from packtrain import cost
from packtrain.backends import CPU, Target, cpu
from packtrain.cost import Rates
from packtrain.ops.stored import reads_again
from packtrain.packing import alive
from packtrain.placing import Placed, place
from packtrain.planning.lifetimes import columns, storages
from packtrain.recompute.choice import (
    ALIGNMENT,
    INPUT,
    NEVER,
    Built,
    Choice,
    Inner,
    Option,
    aligned,
    inner_values,
    is_away,
    put_away,
    stretches,
)
from packtrain.recompute.front import Kept, front, least_again
from packtrain.tensor import Call, Tensor

SAMPLED = 3  # blocks of the chain on which ways are measured; the middle one counts
OF_SHORT = "_short", "_split", "_calls", "values", "_read"  # what has tensors of that chain

Build = Callable[[int, Choice | None], Built]


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

    def forget(self) -> None:
        """Free the short chain, which is built again if it is needed."""
        for name in OF_SHORT:
            self.__dict__.pop(name, None)

    # ---- the middle block of a short chain that keeps everything

    @cached_property
    def _short(self) -> Built:
        return self.build(SAMPLED, None)

    @cached_property
    def parts(self) -> int:
        """Number of parts in which a block processes its rows; the stream has as many values for each block."""
        return len(self._short.stream) // (SAMPLED + 1)

    @cached_property
    def _split(self) -> list[list[Call]]:
        """The calls of each part of each block; first those before any block."""
        return stretches(self._short.stream)

    @cached_property
    def _calls(self) -> list[Call]:
        """The calls of the first part."""
        return self._split[2 * self.parts]

    @property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """The input and the output of these calls."""
        return self._short.stream[self.parts], self._short.stream[2 * self.parts]

    @cached_property
    def stream_nbytes(self) -> int:
        return self.parts * aligned(self._short.stream[0].spec)

    @cached_property
    def forward_seconds(self) -> float:
        return self.parts * sum(map(self.seconds, self._calls))

    @cached_property
    def forward_calls(self) -> int:
        return self.parts * len(self._calls)

    def seconds(self, call: Call) -> float:
        return 0.0 if _costs_nothing(call) else cost.call_seconds(call, self.rates)

    @cached_property
    def values(self) -> list[Tensor]:
        """Values that the first part could keep."""
        return inner_values(self._calls)

    @cached_property
    def _read(self) -> set[Tensor]:
        """Values of it that the backward pass reads."""
        inside, (_, end) = set(self._calls), self._ends
        backward = (call for call in self._short.graph.calls if call.phase == "backward")
        return {t.base for call in backward for t in call.reads if t.base.call in inside} - {end}

    @property
    def read(self) -> list[int]:
        """Their places."""
        return [place for place, t in enumerate(self.values) if t in self._read]

    @cached_property
    def _cuts(self) -> list[int]:
        """Places of values on every path through the block."""
        inside, (start, end) = set(self._calls), self._ends
        return [
            i
            for i, t in enumerate(self.values)
            if all(start not in call.reads for call in needed({end}, {t}, inside))
        ]

    # ---- ways to run it

    @cached_property
    def _front(self) -> list[Kept]:
        """Sets of values that the first part can keep."""
        return front(self._calls, self.values, self._ends[0], self._read, self._cuts, self.seconds)

    @cached_property
    def ways(self) -> list[Inner]:
        """The ways on the Pareto front of bytes kept and seconds added, in all their forms."""
        return [way for kept in self._front for way in self._forms(kept.places)]

    def _forms(self, keep: tuple[int, ...]) -> list[Inner]:
        """If a cut of the block is not kept, another form recomputes it first, and then each side; and all these with
        what is kept away."""
        plain = tuple((place, 0) for place in keep)
        near = [plain, *((*plain, (cut, 1)) for cut in self._cuts if cut not in keep)]
        return [*near, *map(put_away, near)] if self.offload else near

    def saved(self, way: Inner) -> int:
        """Bytes of the space that a way keeps, in addition to the block's input."""
        return -self.stream_nbytes if is_away(way) else self._nbytes(way)

    def _nbytes(self, way: Inner) -> int:
        return self.parts * sum(aligned(self.values[at].spec) for at in _kept(way))

    @property
    def saved_all(self) -> int:
        """Bytes that it keeps if it keeps everything, with its input."""
        return self.stream_nbytes + self.parts * self._read_nbytes

    @cached_property
    def _read_nbytes(self) -> int:
        return sum(aligned(t.spec) for t in self._read)

    def crossing(self, way: Inner) -> float:
        """Seconds for what a way keeps away, there and back."""
        return self._there_and_back(self.stream_nbytes + self._nbytes(way)) if is_away(way) else 0.0

    def _there_and_back(self, nbytes: float) -> float:
        names = [b.name for b in self.target.every if b.space == self.space]
        return 2 * cost.crossing(nbytes, *map(self.rates.on, (*names[:1], cpu.name)))

    @property
    def options(self) -> list[Option]:
        """All ways, measured or with lower bounds."""
        return [self._known.get(way) or self._bounds[way] for way in self.ways]

    @property
    def bare(self) -> list[Option]:
        """The ways that keep nothing, measured."""
        self.measure(self._forms(()))
        return [self._known[way] for way in self._forms(())]

    def least_again(self, nbytes: float) -> float:
        """Least seconds of recomputation for keeping `nbytes` less than everything."""
        whole = self._read_nbytes
        if nbytes > whole * self.parts:
            return np.inf
        points = self._front
        if self.offload:
            moved = ((self.stream_nbytes / self.parts + one.saved, one) for one in points)
            points = [
                *points,
                *(Kept(0, one.again + self._there_and_back(n), ()) for n, one in moved),
            ]
        return self.parts * least_again(points, whole - nbytes / self.parts)

    def free(self, seconds: float) -> tuple[int, ...]:
        """Places of values to keep; the others, the cheapest by byte, take at most `seconds` to recompute."""
        inside, kept = set(self._calls), set(self._read)
        price = {t: self._again({t}, kept - {t}, inside) / t.spec.nbytes for t in self.values}
        for t in sorted(kept, key=lambda t: (price[t], self.values.index(t))):
            if self._again(self._read, kept - {t}, inside) <= seconds:
                kept.remove(t)
        return tuple(place for place, t in enumerate(self.values) if t in kept)

    def _again(self, wanted: set[Tensor], kept: set[Tensor], inside: set[Call]) -> float:
        """Seconds to compute `wanted` from kept values."""
        again = needed(wanted - kept, {self._ends[0], *kept}, inside)
        return self.parts * sum(map(self.seconds, again))

    # ---- lower bounds

    @cached_property
    def _bounds(self) -> dict[Inner, Option]:
        """Lower bounds: as if recomputed values were alive only while they are read."""
        needed_nbytes, kept_nbytes = self._alive
        bounds = dict[Inner, Option]()
        for kept in self._front:
            calls = self.parts * self._calls_again(kept.places)
            seconds = self.parts * kept.again
            nbytes = needed_nbytes + kept_nbytes[list(kept.places)].sum(axis=0)
            for way in self._forms(kept.places):
                took = seconds + self.crossing(way)
                bounds[way] = Option(way, self.saved(way), took, calls, int(nbytes.max()))
        return bounds

    @property
    def least_work(self) -> int:
        """Least bytes of its backward pass, whatever it keeps."""
        return int(self._alive[0].max())

    def _calls_again(self, places: tuple[int, ...]) -> int:
        kept = {self._ends[0], *(self.values[at] for at in places)}
        again = needed(self._read - kept, kept, set(self._calls))
        return sum(not _costs_nothing(call) for call in again)

    @cached_property
    def _alive(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes alive at each step of the backward pass whatever is kept, and additional bytes by kept value.

        Counts what a step reads or writes; not values for later steps, or those that other blocks keep.
        """
        placed, parts = place(self._short.graph, self.target), self.parts
        first, last = backward_steps(placed, self._short, parts)[1]
        steps, stored = placed.steps[first : last + 1], storages(placed, self.space)
        blocks = [inner_values(calls) for calls in self._split[2 * parts : 3 * parts]]
        own = {t: at for values in blocks for at, t in enumerate(values)}
        inside = {t for calls in self._split[parts:] for call in calls for t in call.results}
        inside.update(self._short.stream)
        begun = {t: i for i, step in enumerate(placed.steps) for t in step.results}
        touched = [{t.base for t in (*step.reads, *step.results)} for step in steps]
        always, kept = np.zeros(len(steps), int), np.zeros((len(self.values), len(steps)), int)
        for storage, start, end, nbytes in zip(stored, *columns(stored, ALIGNMENT), strict=True):
            values = [t for t in storage.tensors if t in inside]
            others = (begun[t] for t in storage.tensors if t not in inside and t in begun)
            taken = min(others, default=end) if values else start
            always[max(taken - first, 0) : max(end - first, 0)] += nbytes
            at = own.get(values[-1]) if values else None
            if at is None:
                continue
            for i in range(max(start - first, 0), min(taken - first, len(steps))):
                (kept[at] if touched[i].isdisjoint(values) else always)[i] += nbytes
        later = self.head_reserve + (SAMPLED - 2) * self.reserve
        return always - later - self.twice * self.stream_nbytes, kept

    # ---- measurements

    def measure(self, ways: Iterable[Inner]) -> bool:
        """Measure unknown ways, in all their forms, together in one chain; returns whether there were any."""
        wanted = {_kept(way) for way in ways if way not in self._known}
        asked = [way for way in self.ways if way not in self._known and _kept(way) in wanted]
        for at in range(0, len(asked), self.together):
            self._measure(asked[at : at + self.together])
        return bool(asked)

    def _measure(self, ways: Sequence[Inner]) -> None:
        """Bytes exclude what earlier blocks keep and what later ones leave, or keep.

        Where all of them go back twice, the gradient behind the last one stays, too, but not the output of that one.
        """
        inner = (ways[0], *ways, ways[-1])
        built = self.build(len(inner), Choice((0,) * (len(inner) + 1), inner))
        placed = place(built.graph, self.target)
        curve, spans = Alive(placed, self.space), backward_steps(placed, built, self.parts)
        saved = list(map(self.saved, inner))
        whole = sum(saved) + (len(inner) + 1) * self.stream_nbytes
        for i, way in enumerate(inner):
            before = sum(saved[: i + 1]) + (i + 1) * self.stream_nbytes
            others = (whole if self.twice else before) - saved[i]
            if not 0 < i < len(inner) - 1:
                continue
            first, last = spans[i]
            again = [s.call for s in placed.steps[first : last + 1] if s.recomputes]
            later = self.head_reserve + (len(inner) - 1 - i) * self.reserve
            work = max(curve.most(first, last) - others - later, 0)
            seconds = sum(map(self.seconds, again)) + self.crossing(way)
            self._known[way] = Option(way, saved[i], seconds, len(again), work)


def _costs_nothing(call: Call) -> bool:
    """A view, or what is stored in another form, which the backward pass computes again in any case."""
    return call.op.view or reads_again(call)


def _kept(way: Inner) -> tuple[int, ...]:
    return tuple(at for at, rank in way if rank <= 0 and at != INPUT)


def needed(wanted: set[Tensor], kept: set[Tensor], inside: set[Call]) -> set[Call]:
    """The calls inside a block that compute `wanted` from `kept`."""
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
    """For each block, the first step with a gradient of its output, and the last that computes one of its input.

    All parts of a block come before those of the block below. The first block has none if nothing before it is
    trained.
    """
    serials = [step.call.serial for step in placed.steps]
    ends = list[list[int]]()
    for at in range(0, len(built.stream), parts):
        found = (built.gradients.get(t) for t in built.stream[at : at + parts])
        writers = (d.call.serial for d in found if d is not None and d.call is not None)
        ends.append(sorted(bisect_left(serials, serial) for serial in writers))
    pairs = enumerate(pairwise(ends))
    return {i: (end[-1], beginning[-1]) for i, (beginning, end) in pairs if beginning and end}


class Alive:
    """Bytes of a space that are alive at the steps of a placed graph."""

    def __init__(self, placed: Placed, space: str) -> None:
        self._times, self._nbytes = alive(*columns(storages(placed, space), ALIGNMENT))

    def most(self, first: int, last: int) -> int:
        """Most bytes at any step from the first to the last."""
        begin, end = np.searchsorted(self._times, (first, last), side="right")
        return int(self._nbytes[max(begin - 1, 0) : end].max(initial=0))
