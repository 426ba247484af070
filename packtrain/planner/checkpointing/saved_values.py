"""RecomputeChoice: which values each block of a chain saves, by place, so that it fits any graph of the same chain."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from packtrain.engine.graph import Graph
from packtrain.engine.tensor import Call, Spec, Tensor

ALIGNMENT = 64
OFFLOADED = -1  # rank of values that wait in the process's memory, see Graph.offloaded
INPUT_PLACE = -1  # place of a block's input among the values that it may offload
NEVER_OFFLOAD, MAY_OFFLOAD, ALWAYS_OFFLOAD = range(3)  # whether blocks offload saved values
InnerRanks = tuple[tuple[int, int], ...]  # (place, rank) pairs of a block, see RecomputeChoice


class BuiltGraph(NamedTuple):
    """A training graph, the residual stream (the values between its blocks), and the gradient of each forward value."""

    graph: Graph
    stream: list[Tensor]
    gradients: dict[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """Which values a chain of blocks saves, as ranks by place: of values between blocks, and inside blocks.

    Rank 0 is saved, OFFLOADED saved in the process's memory, 1 saved when the segment after a saved one is recomputed.

    stream  ranks of the values between blocks, each block's input
    inner   by block: (place, rank) pairs; a place is a value's index in the block; INPUT_PLACE is the block's input
    """

    stream: tuple[int, ...]
    inner: tuple[InnerRanks, ...]

    def as_offloaded(self) -> "RecomputeChoice":
        """Return the choice with all saved values offloaded, except the last block's, which are read at once."""
        *blocks, last_block = zip(self.stream, self.inner, strict=False)
        moved_inner = (offload_ranks(inner, with_input=rank == 0) for rank, inner in blocks)
        return RecomputeChoice(self.stream, (*moved_inner, last_block[1]))

    def tensor_ranks(self, stream: Sequence[Tensor], with_input: bool = True) -> dict[Tensor, int]:
        """Return the choice for a newly built graph, given its residual stream (the values between blocks): tensor ->
        rank, 0 to save it, more to recompute it, see `differentiate`. What several blocks read is saved. The stream's
        first value is saved `with_input`; else, as embeddings, it is looked up again just before use. If blocks process
        their rows in parts, the stream has a value for each part, and all parts save equally."""
        num_parts = len(stream) // len(self.stream)
        split = split_calls(stream)
        first_calls = split[:num_parts] if with_input else []
        ranks = {t: 0 for calls in first_calls for call in calls for t in call.results}
        ranks |= dict.fromkeys(_shared_values(split), 0)
        for at, t in enumerate(stream):
            ranks[t] = self.stream[at // num_parts]
        for t in () if with_input else stream[:num_parts]:
            del ranks[t]
        # a place means the same value in each block: if a block lacks an op of others, such as rope in some of
        # SmolLM3's, the input of that op takes its place
        blocks = [inner_values(calls) for calls in split[num_parts:]]
        longest_block = max(blocks, key=len, default=[])
        for at, values in enumerate([_match_values(values, longest_block) for values in blocks]):
            for place, rank in self.inner[at // num_parts]:
                if place < len(values):  # where blocks differ, some have fewer values
                    t = stream[at] if place == INPUT_PLACE else values[place]
                    ranks[t] = min(rank, ranks.get(t, rank))
        return ranks


def offload_ranks(inner: InnerRanks, with_input: bool = True) -> InnerRanks:
    """Return a block's (place, rank) pairs with the saved values moved to host memory; `with_input`: its input, too."""
    moved_ranks = tuple((place, OFFLOADED if rank == 0 else rank) for place, rank in inner)
    return ((INPUT_PLACE, OFFLOADED), *moved_ranks) if with_input else moved_ranks


def is_offloaded(inner: InnerRanks) -> bool:
    return (INPUT_PLACE, OFFLOADED) in inner


def split_calls(stream: Sequence[Tensor]) -> list[list[Call]]:
    """Return the calls that compute each value of the residual stream from the one before: a block's, or those of a
    part of its rows. The first list has the calls before any block."""
    end_serials = [t.call.serial for t in stream if t.call is not None]
    calls_by_value: list[list[Call]] = [[] for _ in stream]
    for call in Graph({str(index): t for index, t in enumerate(stream)}).calls:
        calls_by_value[bisect_left(end_serials, call.serial)].append(call)
    return calls_by_value


def _shared_values(split: Sequence[Sequence[Call]]) -> set[Tensor]:
    """Return the values of blocks that later blocks read: shared keys and values, and the residual stream itself."""
    home = {t: at for at, calls in enumerate(split) for call in calls for t in call.results}
    reads = [(at, t) for at, calls in enumerate(split) for call in calls for t in call.reads]
    bases = [(at, t.shared or t) for at, t in reads]
    return {t for part_index, t in bases if home.get(t, part_index) != part_index}


def inner_values(calls: Sequence[Call]) -> list[Tensor]:
    """Return the values within a block that it could save: results with bytes but the last, the next block's input."""
    return [t for call in calls if not call.op.view for t in call.results][:-1]


def _match_values(inner_tensors: list[Tensor], template: list[Tensor]) -> list[Tensor]:
    """Return, for each value of the block `template`, this block's value; for one it lacks, that op's input."""
    if len(inner_tensors) == len(template):
        return inner_tensors
    remaining, matched = deque(inner_tensors), dict[Tensor, Tensor]()
    for t in template:
        if remaining and _is_alike(remaining[0], t):
            matched[t] = remaining.popleft()
        else:
            sources = (matched[x.base] for x in _producer(t).reads if x.base in matched)
            matched[t] = next(sources, inner_tensors[0])
    return list(matched.values())


def _is_alike(tensor: Tensor, peer: Tensor) -> bool:
    """Whether values of two blocks match by op, name within the block and number of axes: widths may differ."""
    tensor_key, peer_key = (
        (_producer(t).op.name, (t.name or "").split(".")[2:], len(t.shape)) for t in (tensor, peer)
    )
    return tensor_key == peer_key


def _producer(t: Tensor) -> Call:
    assert t.call is not None
    return t.call


@dataclass(frozen=True, slots=True)
class BlockOption:
    """A strategy of a block (`keep`) with the bytes it takes, and the seconds and recomputed calls it adds.

    keep   (place, rank) pairs; rank 0 is saved, OFFLOADED waits in the process's memory, rank 1 is recomputed first
    saved  bytes that the block saves; below 0 if its input is offloaded
    work   bytes of the block's backward pass, its saved values included
    """

    keep: InnerRanks
    saved: int
    seconds: float
    calls: int
    work: int

    @property
    def is_offloaded(self) -> bool:
        return is_offloaded(self.keep)


def aligned_nbytes(spec: Spec) -> int:
    """Return the bytes that a tensor takes in an arena, rounded up to ALIGNMENT."""
    return -(-spec.nbytes // ALIGNMENT) * ALIGNMENT


def uniform_choice(count: int, kept_places: Sequence[int]) -> RecomputeChoice:
    """Return a choice by which all `count` blocks save their input and their values with the indices `kept_places`."""
    inner = tuple((place, 0) for place in kept_places)
    return RecomputeChoice((0,) * (count + 1), (inner,) * count)


def spaced_choice(count: int, spacing: int) -> RecomputeChoice:
    """Return a choice of recomputation that saves the input of every `spacing`-th block and nothing else."""
    stream = [0 if i % spacing == 0 or i == count else 1 for i in range(count + 1)]
    return RecomputeChoice(tuple(stream), ((),) * count)
