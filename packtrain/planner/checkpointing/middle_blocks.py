"""Measures the middle block of a short chain that saves everything: its values, their bytes, its seconds.

`middle` returns a MiddleBlock, in which tensors are numbers, so that the chain's graph can be freed. The numbers stay:
a search that returns to a variant need not build it again, which saves a fifth to a third of its time if blocks differ.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from packtrain.engine.memory_plan.lifetimes import lifetime_columns, storage_lifetimes
from packtrain.engine.ops.stored_values import rereads_stored_weight
from packtrain.engine.placement import Placed
from packtrain.engine.tensor import Call, Tensor
from packtrain.planner.checkpointing import saved_values
from packtrain.planner.checkpointing.pareto_front import BlockCall, KeptSet, front
from packtrain.planner.checkpointing.saved_values import BuiltGraph, inner_values

NUM_CHAIN_BLOCKS = 3  # blocks of the chain; the middle one counts


@dataclass(frozen=True)
class MiddleBlock:
    """A block between equal blocks, for pricing what it saves: the first of num_parts parts of rows. See `middle`.

    stream_nbytes  bytes of a value of the stream between two blocks; each block has `num_parts` of them
    calls          calls of the part, as written, from value `input_id` to value `output_id`
    value_ids      numbers of the values that the part could save, by place; `nbytes` are the bytes of each
    read           numbers of the values that the backward pass reads
    needed_nbytes  bytes alive at each step of the backward pass, whatever is saved
    kept_nbytes    (places, steps): bytes that each saved value adds to them
    """

    num_parts: int
    stream_nbytes: int
    calls: list[BlockCall]
    input_id: int
    output_id: int
    value_ids: list[int]
    nbytes: list[int]
    read: set[int]
    needed_nbytes: np.ndarray
    kept_nbytes: np.ndarray

    @cached_property
    def forward_seconds(self) -> float:
        """Seconds of the part's forward pass."""
        return sum(call.seconds for call in self.calls)

    @cached_property
    def read_places(self) -> list[int]:
        """Indices, in `value_ids`, of the values that the backward pass reads."""
        return [place for place, t in enumerate(self.value_ids) if t in self.read]

    @cached_property
    def cuts(self) -> list[int]:
        """Indices of values on every path through the block: each side is recomputed without the other."""
        between = ((i, self._needed({self.output_id}, {t})) for i, t in enumerate(self.value_ids))
        return [i for i, calls in between if all(self.input_id not in c.reads for c in calls)]

    @cached_property
    def front(self) -> list[KeptSet]:
        """Sets of values worth saving: no other set saves as few bytes and recomputes in as few seconds."""
        return front(self.calls, self.value_ids, self.nbytes, self.input_id, self.read, self.cuts)

    def num_recomputed_calls(self, places: Iterable[int]) -> int:
        """Return how many calls the backward pass recomputes if these values, by index in the block, are saved."""
        kept_values = {self.input_id, *(self.value_ids[place] for place in places)}
        return sum(call.is_counted for call in self._needed(self.read - kept_values, kept_values))

    def places(self, seconds: float) -> tuple[int, ...]:
        """Return indices of values to save so that recomputing others, cheapest per byte, takes at most `seconds`."""
        kept_values, nbytes = set(self.read), dict(zip(self.value_ids, self.nbytes, strict=True))
        price = {t: self._seconds({t}, kept_values - {t}) / nbytes[t] for t in self.value_ids}
        for t in sorted(kept_values, key=lambda t: (price[t], self.value_ids.index(t))):
            if self._seconds(self.read, kept_values - {t}) <= seconds:
                kept_values.remove(t)
        return tuple(place for place, t in enumerate(self.value_ids) if t in kept_values)

    def _seconds(self, targets: set[int], kept_values: set[int]) -> float:
        """Return the seconds to compute the values `targets` from the block's input and `kept_values`."""
        calls = self._needed(targets - kept_values, {self.input_id, *kept_values})
        return sum(call.seconds for call in calls)

    @cached_property
    def _call_by_result(self) -> dict[int, BlockCall]:
        return {t: call for call in self.calls for t in call.results}

    def _needed(self, targets: Iterable[int], kept_values: Collection[int]) -> set[BlockCall]:
        """Return the calls that compute the values `targets` from `kept_values`, directly or through others."""
        needed_calls, stack = set[BlockCall](), list(targets)
        while stack:
            t = stack.pop()
            call = None if t in kept_values else self._call_by_result.get(t)
            if call is not None and call not in needed_calls:
                needed_calls.add(call)
                stack.extend(call.reads)
        return needed_calls


def middle(
    built: BuiltGraph, placed: Placed, space: str, call_price: Callable[[Call], float]
) -> MiddleBlock:
    """Return calls, values and bytes of the middle one of three blocks, given their training graph, which saves
    everything. `space` is the memory whose bytes count; `call_price` gives the seconds of a call."""
    num_parts = len(built.stream) // (NUM_CHAIN_BLOCKS + 1)
    # the calls of each part; first those before any block
    part_calls = saved_values.split_calls(built.stream)
    calls, values = part_calls[2 * num_parts], inner_values(part_calls[2 * num_parts])
    start, block_output = built.stream[num_parts], built.stream[2 * num_parts]
    tensor_ids = dict[Tensor, int]()
    for t in (start, *(t for call in calls for t in (*call.reads, *call.results))):
        tensor_ids.setdefault(t, len(tensor_ids))

    def to_block_call(call: Call) -> BlockCall:
        result_ids, reads = ([tensor_ids[t] for t in ts] for ts in (call.results, call.reads))
        is_counted = not is_free_call(call)
        return BlockCall(tuple(result_ids), tuple(reads), call_price(call), is_counted)

    backward = (call for call in built.graph.calls if call.phase == "backward")
    inner_tensors = {t for call in calls for t in call.results} - {block_output}
    read = {tensor_ids[t.base] for call in backward for t in call.reads if t.base in inner_tensors}
    needed_nbytes, kept_nbytes = _live_nbytes(built, placed, num_parts, part_calls, space)
    aligned_nbytes = saved_values.aligned_nbytes
    return MiddleBlock(
        num_parts, aligned_nbytes(start.spec), [to_block_call(call) for call in calls], tensor_ids[start],
        tensor_ids[block_output], [tensor_ids[t] for t in values], [aligned_nbytes(t.spec) for t in values], read,
        needed_nbytes, kept_nbytes,
    )  # fmt: skip


def _live_nbytes(
    built: BuiltGraph, placed: Placed, num_parts: int, split: list[list[Call]], space: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return `needed_nbytes` and `kept_nbytes` of the middle block's backward pass, see MiddleBlock; `split`: calls by
    part of a block, see split_calls. A step counts with what it reads or writes, not with values for later steps or
    values that other blocks save."""
    first_step, last_step = backward_steps(placed, built, num_parts)[1]
    steps, stored = placed.steps[first_step : last_step + 1], storage_lifetimes(placed, space)
    blocks = [inner_values(calls) for calls in split[2 * num_parts : 3 * num_parts]]
    place_of = {t: place for stored_values in blocks for place, t in enumerate(stored_values)}
    block_tensors = {t for calls in split[num_parts:] for call in calls for t in call.results}
    block_tensors.update(built.stream)
    written_at = {t: i for i, step in enumerate(placed.steps) for t in step.results}
    touched = [{t.base for t in (*step.reads, *step.results)} for step in steps]
    always, kept_nbytes = np.zeros(len(steps), int), np.zeros((len(blocks[0]), len(steps)), int)
    columns = lifetime_columns(stored, saved_values.ALIGNMENT)
    for storage, start, end_step, nbytes in zip(stored, *columns, strict=True):
        stored_values = [t for t in storage.tensors if t in block_tensors]
        outside = (t for t in storage.tensors if t not in block_tensors)
        other_starts = (written_at[t] for t in outside if t in written_at)
        values_end = min(other_starts, default=end_step) if stored_values else start
        always[max(values_end - first_step, 0) : max(end_step - first_step, 0)] += nbytes
        place = place_of.get(stored_values[-1]) if stored_values else None
        if place is None:
            continue
        for i in range(max(start - first_step, 0), min(values_end - first_step, len(steps))):
            (kept_nbytes[place] if touched[i].isdisjoint(stored_values) else always)[i] += nbytes
    return always, kept_nbytes


def is_free_call(call: Call) -> bool:
    """Whether recomputing a call costs nothing: a view, or a stored weight that the backward pass unpacks anyway."""
    return call.op.view or rereads_stored_weight(call)


def backward_steps(placed: Placed, built: BuiltGraph, num_parts: int) -> dict[int, tuple[int, int]]:
    """Return, by block, the first and last step of its backward pass: where bytes are measured to price recomputation.
    The pass begins where the gradient of the block's output is complete and ends with that of its input, each in all
    `num_parts` parts of the rows. The first block is left out if no gradient of its input is computed."""
    serials = [step.call.serial for step in placed.steps]
    end_steps = list[list[int]]()
    for at in range(0, len(built.stream), num_parts):
        output_gradients = (built.gradients.get(t) for t in built.stream[at : at + num_parts])
        writers = (d.call.serial for d in output_gradients if d is not None and d.call is not None)
        end_steps.append(sorted(bisect_left(serials, serial) for serial in writers))
    step_pairs = enumerate(pairwise(end_steps))
    return {i: (end[-1], beginning[-1]) for i, (beginning, end) in step_pairs if beginning and end}
