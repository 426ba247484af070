"""A Choice: what each block of a chain keeps, by place, so that it fits any graph of the same chain."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from packtrain.engine.graph import Graph
from packtrain.engine.tensor import Call, Spec, Tensor

ALIGNMENT = 64
AWAY = -1  # rank of what is kept in the process's memory, see Graph.away
INPUT = -1  # place of a block's input among what it may keep away
NEVER, MAYBE, ALWAYS = range(3)  # whether a block may keep what it keeps away
Inner = tuple[tuple[int, int], ...]  # (place, rank) pairs of a block, see Choice


class Built(NamedTuple):
    """A training graph, the residual stream through its blocks, and the gradient of each forward value."""

    graph: Graph
    stream: list[Tensor]
    gradients: dict[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Choice:
    """Ranks for `differentiate` by place in the chain: of stream values, and of inner values by block.

    inner  (place among the block's results, rank) pairs; of the block's input, (INPUT, AWAY)
    """

    stream: tuple[int, ...]
    inner: tuple[Inner, ...]

    def away(self) -> "Choice":
        """The same with all that is kept in the process's memory; but what the last block keeps is read at once."""
        *blocks, last = zip(self.stream, self.inner, strict=False)
        moved = (put_away(inner, whole=rank == 0) for rank, inner in blocks)
        return Choice(self.stream, (*moved, last[1]))

    def ranks(self, stream: Sequence[Tensor]) -> dict[Tensor, int]:
        """Ranks of tensors for the stream of a new graph; values before the first block are kept.

        If blocks process their rows in parts, the stream has as many values per block, and all parts keep the same.
        """
        parts = len(stream) // len(self.stream)
        split = stretches(stream)
        ranks = {t: 0 for calls in split[:parts] for call in calls for t in call.results}
        ranks |= dict.fromkeys(_read_later(split), 0)
        for at, t in enumerate(stream):
            ranks[t] = self.stream[at // parts]
        for at, values in enumerate(by_place([inner_values(calls) for calls in split[parts:]])):
            for place, rank in self.inner[at // parts]:
                if place < len(values):  # where blocks differ, some have fewer
                    t = stream[at] if place == INPUT else values[place]
                    ranks[t] = min(rank, ranks.get(t, rank))
        return ranks


def put_away(inner: Inner, whole: bool = True) -> Inner:
    """What a block keeps in the process's memory instead; `whole`: its input, too."""
    moved = tuple((place, AWAY if rank == 0 else rank) for place, rank in inner)
    return ((INPUT, AWAY), *moved) if whole else moved


def is_away(inner: Inner) -> bool:
    return (INPUT, AWAY) in inner


def stretches(stream: Sequence[Tensor]) -> list[list[Call]]:
    """The calls that lead to each value of the stream, as written; first those before any block."""
    end_serials = [t.call.serial for t in stream if t.call is not None]
    split: list[list[Call]] = [[] for _ in stream]
    for call in Graph({str(at): t for at, t in enumerate(stream)}).calls:
        split[bisect_left(end_serials, call.serial)].append(call)
    return split


def _read_later(split: Sequence[Sequence[Call]]) -> set[Tensor]:
    """Values of a block that later ones read, such as keys, and the stream."""
    home = {t: at for at, calls in enumerate(split) for call in calls for t in call.results}
    reads = ((at, t.base) for at, calls in enumerate(split) for call in calls for t in call.reads)
    return {t for at, t in reads if home.get(t, at) != at}


def inner_values(calls: Sequence[Call]) -> list[Tensor]:
    """Values that a block could keep: results with bytes, except the last, which is the next stream value."""
    values = [t for call in calls if not call.op.view for t in call.results]
    return values[:-1]


def by_place(blocks: Sequence[list[Tensor]]) -> list[list[Tensor]]:
    """Inner values of blocks, aligned so that a place means the same in each.

    If a block lacks an op of others, such as rope in some of SmolLM3's, the input of that op takes its place.
    """
    longest = max(blocks, key=len, default=[])
    return [_placed_like(values, longest) for values in blocks]


def _placed_like(values: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    if len(values) == len(like):
        return values
    rest, matched = deque(values), dict[Tensor, Tensor]()
    for t in like:
        if rest and _same(rest[0], t):
            matched[t] = rest.popleft()
        else:
            sources = (matched[x.base] for x in _call(t).reads if x.base in matched)
            matched[t] = next(sources, values[0])
    return list(matched.values())


def _same(tensor: Tensor, other: Tensor) -> bool:
    """By op, name within the block and number of axes: widths of blocks may differ."""
    of, like = (
        (type(_call(t).op), (t.name or "").split(".")[2:], len(t.shape)) for t in (tensor, other)
    )
    return of == like


def _call(t: Tensor) -> Call:
    assert t.call is not None
    return t.call


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a block: inner values it keeps, their bytes, extra seconds and calls, bytes of its backward.

    keep  (place, rank) pairs; rank 0 is kept from the forward pass, AWAY in the process's memory, rank 1 is
          recomputed first
    saved of the space: below 0 if the block's input is away
    """

    keep: Inner
    saved: int
    seconds: float
    calls: int
    work: int

    @property
    def away(self) -> bool:
        return is_away(self.keep)


def aligned(spec: Spec) -> int:
    """Bytes in an arena."""
    return -(-spec.nbytes // ALIGNMENT) * ALIGNMENT


def uniform(count: int, keep: Sequence[int]) -> Choice:
    """Every block keeps the same inner values, and all stream values are kept."""
    inner = tuple((place, 0) for place in keep)
    return Choice((0,) * (count + 1), (inner,) * count)


def keep_all(count: int, inner: int) -> Choice:
    return uniform(count, range(inner))


def spaced(count: int, spacing: int) -> Choice:
    """Keep every `spacing`-th stream value and nothing else."""
    stream = [0 if i % spacing == 0 or i == count else 1 for i in range(count + 1)]
    return Choice(tuple(stream), ((),) * count)
