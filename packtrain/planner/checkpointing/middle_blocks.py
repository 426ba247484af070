"""The middle block of a short chain that keeps everything: what it could keep, and its bytes and seconds.

Returns a Middle, in which tensors are numbers, so that the graph of the chain can be freed.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from packtrain.engine.memory_plan.lifetimes import columns, storages
from packtrain.engine.ops.stored_values import reads_again
from packtrain.engine.placement import Placed
from packtrain.engine.tensor import Call, Tensor
from packtrain.planner.checkpointing.pareto_front import Kept, Made, front
from packtrain.planner.checkpointing.recompute_choice import (
    ALIGNMENT,
    Built,
    aligned,
    inner_values,
    stretches,
)

SAMPLED = 3  # blocks of the chain; the middle one counts


@dataclass(frozen=True)
class Middle:
    """The first part of the block, if it processes its rows in parts. `middle` makes one.

    parts    the stream has as many values for each block
    stream   bytes of a value of the stream between two blocks
    calls    of the part, as they are written
    start    the number of its input, and `end` of its output
    values   of values that it could keep, by place, and `nbytes` of each
    read     of values that the backward pass reads
    needed   bytes alive at each step of the backward pass whatever is kept, and in `kept` those of each kept value
    """

    parts: int
    stream: int
    calls: list[Made]
    start: int
    end: int
    values: list[int]
    nbytes: list[int]
    read: set[int]
    needed: np.ndarray
    kept: np.ndarray

    @cached_property
    def seconds(self) -> float:
        """Of its forward pass."""
        return sum(call.seconds for call in self.calls)

    @cached_property
    def places(self) -> list[int]:
        """Places of values that the backward pass reads."""
        return [place for place, t in enumerate(self.values) if t in self.read]

    @cached_property
    def cuts(self) -> list[int]:
        """Places of values on every path through the block."""
        return [
            place
            for place, t in enumerate(self.values)
            if all(self.start not in call.reads for call in self._needed({self.end}, {t}))
        ]

    @cached_property
    def front(self) -> list[Kept]:
        """Sets of values that it can keep."""
        return front(self.calls, self.values, self.nbytes, self.start, self.read, self.cuts)

    def again(self, places: Iterable[int]) -> int:
        """Number of calls that are recomputed if values at these places are kept."""
        kept_values = {self.start, *(self.values[at] for at in places)}
        return sum(call.counts for call in self._needed(self.read - kept_values, kept_values))

    def free(self, seconds: float) -> tuple[int, ...]:
        """Places of values to keep; the others, the cheapest by byte, take at most `seconds` to recompute."""
        kept_values, nbytes = set(self.read), dict(zip(self.values, self.nbytes, strict=True))
        price = {t: self._seconds({t}, kept_values - {t}) / nbytes[t] for t in self.values}
        for t in sorted(kept_values, key=lambda t: (price[t], self.values.index(t))):
            if self._seconds(self.read, kept_values - {t}) <= seconds:
                kept_values.remove(t)
        return tuple(place for place, t in enumerate(self.values) if t in kept_values)

    def _seconds(self, targets: set[int], kept_values: set[int]) -> float:
        """Seconds to compute `targets` from kept values."""
        calls = self._needed(targets - kept_values, {self.start, *kept_values})
        return sum(call.seconds for call in calls)

    @cached_property
    def _by_result(self) -> dict[int, Made]:
        return {t: call for call in self.calls for t in call.results}

    def _needed(self, targets: Iterable[int], kept_values: Collection[int]) -> set[Made]:
        """The calls that compute `targets` from `kept_values`."""
        calls, stack = set[Made](), list(targets)
        while stack:
            t = stack.pop()
            call = None if t in kept_values else self._by_result.get(t)
            if call is not None and call not in calls:
                calls.add(call)
                stack.extend(call.reads)
        return calls


def middle(built: Built, placed: Placed, space: str, price: Callable[[Call], float]) -> Middle:
    """The middle block of a chain, whose graph is `placed`; `price` are the seconds of a call."""
    parts = len(built.stream) // (SAMPLED + 1)
    split = stretches(built.stream)  # the calls of each part; first those before any block
    calls, values = split[2 * parts], inner_values(split[2 * parts])
    start, end = built.stream[parts], built.stream[2 * parts]
    numbers = dict[Tensor, int]()
    for t in (start, *(t for call in calls for t in (*call.reads, *call.results))):
        numbers.setdefault(t, len(numbers))

    def made(call: Call) -> Made:
        results, reads = ([numbers[t] for t in ts] for ts in (call.results, call.reads))
        counts = not costs_nothing(call)
        return Made(tuple(results), tuple(reads), price(call), counts)

    backward = (call for call in built.graph.calls if call.phase == "backward")
    inner_tensors = {t for call in calls for t in call.results} - {end}
    read = {numbers[t.base] for call in backward for t in call.reads if t.base in inner_tensors}
    needed, kept_nbytes = _alive(built, placed, parts, split, space)
    return Middle(
        parts, aligned(start.spec), [made(call) for call in calls], numbers[start],
        numbers[end], [numbers[t] for t in values], [aligned(t.spec) for t in values], read,
        needed, kept_nbytes,
    )  # fmt: skip


def _alive(
    built: Built, placed: Placed, parts: int, split: list[list[Call]], space: str
) -> tuple[np.ndarray, np.ndarray]:
    """Counts what a step reads or writes; not values for later steps, or those that other blocks keep."""
    first, last = backward_steps(placed, built, parts)[1]
    steps, stored = placed.steps[first : last + 1], storages(placed, space)
    blocks = [inner_values(calls) for calls in split[2 * parts : 3 * parts]]
    place_of = {t: at for values in blocks for at, t in enumerate(values)}
    block_tensors = {t for calls in split[parts:] for call in calls for t in call.results}
    block_tensors.update(built.stream)
    written_at = {t: i for i, step in enumerate(placed.steps) for t in step.results}
    touched = [{t.base for t in (*step.reads, *step.results)} for step in steps]
    always, kept_nbytes = np.zeros(len(steps), int), np.zeros((len(blocks[0]), len(steps)), int)
    for storage, start, end, nbytes in zip(stored, *columns(stored, ALIGNMENT), strict=True):
        values = [t for t in storage.tensors if t in block_tensors]
        other_starts = (
            written_at[t] for t in storage.tensors if t not in block_tensors and t in written_at
        )
        values_end = min(other_starts, default=end) if values else start
        always[max(values_end - first, 0) : max(end - first, 0)] += nbytes
        at = place_of.get(values[-1]) if values else None
        if at is None:
            continue
        for i in range(max(start - first, 0), min(values_end - first, len(steps))):
            (kept_nbytes[at] if touched[i].isdisjoint(values) else always)[i] += nbytes
    return always, kept_nbytes


def costs_nothing(call: Call) -> bool:
    """A view, or what is stored in another form, which the backward pass computes again in any case."""
    return call.op.view or reads_again(call)


def backward_steps(placed: Placed, built: Built, parts: int) -> dict[int, tuple[int, int]]:
    """For each block, the first step with a gradient of its output, and the last that computes one of its input.

    All parts of a block come before those of the block below. The first block has none if nothing before it is
    trained.
    """
    serials = [step.call.serial for step in placed.steps]
    end_steps = list[list[int]]()
    for at in range(0, len(built.stream), parts):
        gradients = (built.gradients.get(t) for t in built.stream[at : at + parts])
        writers = (d.call.serial for d in gradients if d is not None and d.call is not None)
        end_steps.append(sorted(bisect_left(serials, serial) for serial in writers))
    pairs = enumerate(pairwise(end_steps))
    return {i: (end[-1], beginning[-1]) for i, (beginning, end) in pairs if beginning and end}
