"""A Choice: what each block of a chain keeps, by place, so that it fits any graph of the same chain."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from packtrain.engine.graph import Graph
from packtrain.engine.tensor import Call, Spec, Tensor

ALIGNMENT = 64
OFFLOADED = -1  # rank of what is kept in the process's memory, see Graph.away
INPUT_PLACE = -1  # place of a block's input among what it may keep away
NEVER_OFFLOAD, MAY_OFFLOAD, ALWAYS_OFFLOAD = range(3)  # whether a block may keep what it keeps away
InnerRanks = tuple[tuple[int, int], ...]  # (place, rank) pairs of a block, see Choice


class BuiltGraph(NamedTuple):
    """A training graph, the residual stream through its blocks, and the gradient of each forward value."""

    graph: Graph
    stream: list[Tensor]
    gradients: dict[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """Ranks for `differentiate` by place in the chain: of stream values, and of inner values by block.

    inner  (place among the block's results, rank) pairs; of the block's input, (INPUT, AWAY)
    """

    stream: tuple[int, ...]
    inner: tuple[InnerRanks, ...]

    def as_offloaded(self) -> "RecomputeChoice":
        """The same with all that is kept in the process's memory; but what the last block keeps is read at once."""
        *blocks, last_block = zip(self.stream, self.inner, strict=False)
        moved_inner = (offload_ranks(inner, with_input=rank == 0) for rank, inner in blocks)
        return RecomputeChoice(self.stream, (*moved_inner, last_block[1]))

    def tensor_ranks(self, stream: Sequence[Tensor]) -> dict[Tensor, int]:
        """Ranks of tensors for the stream of a new graph; values before the first block are kept.

        If blocks process their rows in parts, the stream has as many values per block, and all parts keep the same.
        """
        num_parts = len(stream) // len(self.stream)
        split = split_calls(stream)
        ranks = {t: 0 for calls in split[:num_parts] for call in calls for t in call.results}
        ranks |= dict.fromkeys(_shared_values(split), 0)
        for at, t in enumerate(stream):
            ranks[t] = self.stream[at // num_parts]
        for at, values in enumerate(by_place([inner_values(calls) for calls in split[num_parts:]])):
            for place, rank in self.inner[at // num_parts]:
                if place < len(values):  # where blocks differ, some have fewer
                    t = stream[at] if place == INPUT_PLACE else values[place]
                    ranks[t] = min(rank, ranks.get(t, rank))
        return ranks


def offload_ranks(inner: InnerRanks, with_input: bool = True) -> InnerRanks:
    """What a block keeps in the process's memory instead; `with_input`: its input, too."""
    moved_ranks = tuple((place, OFFLOADED if rank == 0 else rank) for place, rank in inner)
    return ((INPUT_PLACE, OFFLOADED), *moved_ranks) if with_input else moved_ranks


def is_offloaded(inner: InnerRanks) -> bool:
    return (INPUT_PLACE, OFFLOADED) in inner


def split_calls(stream: Sequence[Tensor]) -> list[list[Call]]:
    """The calls that lead to each value of the stream, as written; first those before any block."""
    end_serials = [t.call.serial for t in stream if t.call is not None]
    calls_by_value: list[list[Call]] = [[] for _ in stream]
    for call in Graph({str(index): t for index, t in enumerate(stream)}).calls:
        calls_by_value[bisect_left(end_serials, call.serial)].append(call)
    return calls_by_value


def _shared_values(split: Sequence[Sequence[Call]]) -> set[Tensor]:
    """Values of a block that later ones read, such as keys, and the stream."""
    home = {t: at for at, calls in enumerate(split) for call in calls for t in call.results}
    reads = ((at, t.base) for at, calls in enumerate(split) for call in calls for t in call.reads)
    return {t for part_index, t in reads if home.get(t, part_index) != part_index}


def inner_values(calls: Sequence[Call]) -> list[Tensor]:
    """Values that a block could keep: results with bytes, except the last, which is the next stream value."""
    result_tensors = [t for call in calls if not call.op.view for t in call.results]
    return result_tensors[:-1]


def by_place(blocks: Sequence[list[Tensor]]) -> list[list[Tensor]]:
    """Inner values of blocks, aligned so that a place means the same in each.

    If a block lacks an op of others, such as rope in some of SmolLM3's, the input of that op takes its place.
    """
    longest_block = max(blocks, key=len, default=[])
    return [_aligned_like(values, longest_block) for values in blocks]


def _aligned_like(inner_tensors: list[Tensor], template: list[Tensor]) -> list[Tensor]:
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
    """By op, name within the block and number of axes: widths of blocks may differ."""
    tensor_key, peer_key = (
        (type(_producer(t).op), (t.name or "").split(".")[2:], len(t.shape)) for t in (tensor, peer)
    )
    return tensor_key == peer_key


def _producer(t: Tensor) -> Call:
    assert t.call is not None
    return t.call


@dataclass(frozen=True, slots=True)
class BlockOption:
    """One way to run a block: inner values it keeps, their bytes, extra seconds and calls, bytes of its backward.

    keep  (place, rank) pairs; rank 0 is kept from the forward pass, AWAY in the process's memory, rank 1 is
          recomputed first
    saved of the space: below 0 if the block's input is away
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
    """Bytes in an arena."""
    return -(-spec.nbytes // ALIGNMENT) * ALIGNMENT


def uniform_choice(count: int, kept_places: Sequence[int]) -> RecomputeChoice:
    """Every block keeps the same inner values, and all stream values are kept."""
    inner = tuple((place, 0) for place in kept_places)
    return RecomputeChoice((0,) * (count + 1), (inner,) * count)


def keep_all(count: int, num_inner: int) -> RecomputeChoice:
    return uniform_choice(count, range(num_inner))


def spaced_choice(count: int, spacing: int) -> RecomputeChoice:
    """Keep every `spacing`-th stream value and nothing else."""
    stream = [0 if i % spacing == 0 or i == count else 1 for i in range(count + 1)]
    return RecomputeChoice(tuple(stream), ((),) * count)
