"""The graphs of a context, placed: runs of several sizes, and moving cells."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from packtrain.dtypes import DTYPES, Dtype
from packtrain.engine.backends import CPU, Target
from packtrain.engine.graph import Graph
from packtrain.engine.placement import Placed, place
from packtrain.inference.kv_cache.cell_pools import SPARE, ContextError, at_least
from packtrain.inference.kv_cache.results import outputs
from packtrain.models import transformer
from packtrain.models.cached_transformer import Cache, generation, moving
from packtrain.models.config import Config

CACHES = "f16", "f32", "q8_0"  # element types of its cells
PROMPTS = 512, 128, 32  # tokens of a prompt per run
FEW = 8, 1
NEAR = 4  # tokens before the end of a prompt where a state is kept
PROMPT = 16  # tokens of such a prompt at least
MOVED = 64  # cells that one run moves
FIXED = 16  # a run costs as much as this many tokens, for reading the weights
MOVE = "move"
Name = int | str


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many tokens a run can take, descending to 1, and how many rows of results it gives at most."""

    tokens: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, cells: int, rows: int, prompts: Sequence[int] = PROMPTS) -> "Sizes":
        """Those of a context: `rows` of results, 0: as many as tokens; `prompts`: sizes for reading them."""
        for size in prompts:
            at_least(1, prompts=size)
        powers = (1 << n for n in range(max(rows - 1, 0).bit_length() + 1))
        sizes = {n for n in (*prompts, *FEW, *powers) if n <= cells}
        tokens = tuple(sorted(sizes, reverse=True))
        return cls(tokens, rows or tokens[0])

    def wanted(self, size: int) -> int:
        return min(size, self.rows)

    def next(self, left: int) -> int:
        """The size of the next run for so many tokens: it may be padded where that costs less."""
        return min(self.tokens, key=lambda size: ((FIXED + size) / min(size, left), size))

    def parts(
        self,
        tokens: Sequence[int],
        sets: list[tuple[int, ...]],
        rows: list[int],
        *,
        states: bool = False,
    ) -> Iterator[tuple[np.ndarray, list[tuple[int, ...]], list[int]]]:
        """What runs together: tokens, their sequences, and the rows wanted of them.

        states  a sequence has one: its tokens are all of the same sequences, and a run ends near the end of a prompt
        """
        cuts = near_ends(sets, rows) if states else []
        at = 0
        while at < len(tokens):
            size = self.next(len(tokens) - at)
            end = min(at + size, len(tokens))
            part_rows = [row for row in rows if at <= row < end]
            max_rows = self.wanted(size)
            if len(part_rows) > max_rows:
                end = part_rows[max_rows]
            if states:
                end = alike(sets, at, min([end, *(cut for cut in cuts if cut > at)]))
            part_rows = [row for row in part_rows if row < end]
            ids = np.array(tokens[at:end], np.int32)
            yield ids, sets[at:end], [row - at for row in part_rows]
            at = end


def near_ends(sets: list[tuple[int, ...]], rows: list[int]) -> list[int]:
    """Places a few tokens before the ends of prompts: there a state is kept, to which texts often go back."""
    places_by_seq = dict[int, list[int]]()
    for i, token_seqs in enumerate(sets):
        places_by_seq.setdefault(token_seqs[0], []).append(i)
    requested_rows = {*rows}
    return [
        at[-NEAR] for at in places_by_seq.values() if len(at) >= PROMPT and at[-1] in requested_rows
    ]


def alike(sets: list[tuple[int, ...]], at: int, end: int) -> int:
    """The first place from `at` on of a sequence whose tokens before were of other sequences, too; `end` if none."""
    seqs_by_member = dict[int, frozenset[int]]()
    for i in range(at, end):
        token_seqs = frozenset(sets[i])
        if any(seqs_by_member.setdefault(seq, token_seqs) != token_seqs for seq in token_seqs):
            return i
    return end


def cache_of(
    config: Config,
    cells: int,
    sequences: int,
    dtype: str,
    largest: int,
    swa_full: bool,
    *,
    longest: int = 0,
) -> Cache:
    """The cells of a context whose runs take `largest` tokens at most; with a ring if that is smaller."""
    if dtype not in CACHES:
        raise ContextError(f"cache is {dtype!r}; it must be one of {', '.join(CACHES)}")
    block = DTYPES[dtype].block
    for _, width in map(config.cached_heads, range(config.block_count)):
        if width % block:
            raise ContextError(
                f"cache is {dtype!r}, which packs {block} values, and heads have {width}; use 'f16' or 'f32'"
            )
    windows = {config.reach_of(i) for i in range(config.block_count)} - {0}
    ring = sequences * (max(windows, default=0) - 1 + SPARE) + largest
    fits = windows and ring < cells and not swa_full
    return Cache(cells, ring if fits else 0, DTYPES[dtype], sequences, longest)


def placements(
    config: Config,
    cache: Cache,
    sizes: Sizes,
    types: Mapping[str, Dtype] = transformer.NO_TYPES,
    target: Target = CPU,
    *,
    hidden: bool = False,
    moves: bool = False,
) -> dict[Name, Placed]:
    """The graphs of a context by the number of tokens of a run, and `move`.

    types   of weights that are not f32
    hidden  the results are the output of the last norm instead of logits
    """
    placed = dict[Name, Placed]()
    for size in sizes.tokens:
        leaves = transformer.weights(config, types)
        result, handles = generation(config, leaves, size, cache, sizes.wanted(size), hidden=hidden)
        leaving = {"result": result} if hidden else outputs(result)
        placed[size] = place(Graph(leaving, handles), target)
    if moves:
        handles = moving(config, transformer.weights(config, types), MOVED, cache)
        placed[MOVE] = place(Graph({}, handles), target)
    return placed
