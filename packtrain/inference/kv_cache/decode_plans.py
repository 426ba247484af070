"""The placed graphs of a context: runs of several sizes, and moving cells."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packtrain.dtypes import DTYPES, Dtype
from packtrain.engine.backends import CPU, Target
from packtrain.engine.graph import Graph
from packtrain.engine.placement import Placed, place
from packtrain.engine.tensor import Tensor, input
from packtrain.inference.kv_cache.cell_pools import RING_MARGIN, ContextError, at_least
from packtrain.inference.kv_cache.results import HIDDEN_STATES, sampler_outputs
from packtrain.models import transformer
from packtrain.models.cached_transformer import CacheLayout, generation, move_cells
from packtrain.models.config import Config

CACHE_TYPES = "f16", "f32", "q8_0"  # element types of KV cache cells
PROMPT_SIZES = 512, 128, 32  # tokens of a prompt per run
CHECKPOINTS = 8  # saved states of a sequence's window, by default
SMALL_RUN_SIZES = 8, 1
STATE_DISTANCE = 4  # tokens before the end of a prompt where a state is saved
MIN_PROMPT_TOKENS = 16  # fewest tokens of a prompt whose state is saved
MOVED = 64  # cells that one run moves
FIXED = 16  # a run costs as much as this many tokens, for reading the weights
MOVE_RUN, HEAD_RUN = "move", "head"
MAX_HEAD_LOGITS, MAX_HEAD_ROWS = 1 << 22, 64  # logits and rows of a run of the head
RunKey = int | str


@dataclass(frozen=True, slots=True)
class RunSizes:
    """The numbers of tokens for which a context has a graph, descending to 1, and the most rows of results of a run."""

    token_counts: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, num_cells: int, rows: int, prompts: Sequence[int] = PROMPT_SIZES) -> "RunSizes":
        """Choose sizes of runs: `prompts`, and powers of two up to `rows` results; rows 0: a result for each token."""
        for prompt_size in prompts:
            at_least(1, prompts=prompt_size)
        powers_of_two = (1 << n for n in range(max(rows - 1, 0).bit_length() + 1))
        run_sizes = {n for n in (*prompts, *SMALL_RUN_SIZES, *powers_of_two) if n <= num_cells}
        token_counts = tuple(sorted(run_sizes, reverse=True))
        return cls(token_counts, rows or token_counts[0])

    def num_rows(self, size: int) -> int:
        """Return for how many results a run of `size` tokens has room."""
        return min(size, self.rows)

    def next_size(self, left: int) -> int:
        """Return the size of the next run for `left` tokens: larger than `left` where padding costs less."""
        return min(self.token_counts, key=lambda size: ((FIXED + size) / min(size, left), size))

    def parts(
        self, tokens: Sequence[int], sets: list[tuple[int, ...]], rows: list[int], *, states: bool = False,
    ) -> Iterator[tuple[np.ndarray, list[tuple[int, ...]], list[int]]]:  # fmt: skip
        """Divide tokens into runs; yields each run's tokens, their sequences, and which of them (indices) have results.

        sets    sequences of each token; rows: indices of tokens with results
        states  the model has scans: sequences of a run share all tokens or none, and a run ends near a prompt's end
        """
        cuts = state_cuts(sets, rows) if states else []
        at = 0
        while at < len(tokens):
            run_size = self.next_size(len(tokens) - at)
            run_end = min(at + run_size, len(tokens))
            run_rows = [output_row for output_row in rows if at <= output_row < run_end]
            max_rows = self.num_rows(run_size)
            if len(run_rows) > max_rows:
                run_end = run_rows[max_rows]
            if states:
                run_end = shared_end(sets, at, min([run_end, *(cut for cut in cuts if cut > at)]))
            run_rows = [output_row for output_row in run_rows if output_row < run_end]
            token_ids = np.array(tokens[at:run_end], np.int32)
            yield token_ids, sets[at:run_end], [output_row - at for output_row in run_rows]
            at = run_end


def state_cuts(sets: list[tuple[int, ...]], rows: list[int]) -> list[int]:
    """Return indices of tokens, shortly before prompts end, where runs end to save scan states; see RunSizes.parts."""
    tokens_by_seq = dict[int, list[int]]()
    for i, token_seqs in enumerate(sets):
        tokens_by_seq.setdefault(token_seqs[0], []).append(i)
    requested_rows = {*rows}
    return [
        at[-STATE_DISTANCE]
        for at in tokens_by_seq.values()
        if len(at) >= MIN_PROMPT_TOKENS and at[-1] in requested_rows
    ]


def shared_end(sets: list[tuple[int, ...]], run_start: int, run_end: int) -> int:
    """Return the first index where a sequence shares a token with others than before, from `run_start` on: a run must
    end there; else `run_end`, as runs with states take sequences sharing all or none. sets: each token's sequences."""
    seqs_by_member = dict[int, frozenset[int]]()
    for i in range(run_start, run_end):
        token_seqs = frozenset(sets[i])
        if any(seqs_by_member.setdefault(seq, token_seqs) != token_seqs for seq in token_seqs):
            return i
    return run_end


def make_cache(
    config: Config, num_cells: int, num_sequences: int, dtype: str, max_run_tokens: int, swa_full: bool, *,
    longest: int = 0,
) -> CacheLayout:  # fmt: skip
    """Create the cache layout of a context whose runs take `max_run_tokens`; windows get a ring if that is smaller,
    unless `swa_full`. `longest`: most tokens of one sequence; 0: all cells."""
    if dtype not in CACHE_TYPES:
        raise ContextError(f"cache is {dtype!r}; it must be one of {', '.join(CACHE_TYPES)}")
    block_size = DTYPES[dtype].block
    for _, head_width in map(config.cached_heads, range(config.block_count)):
        if head_width % block_size:
            fact = f"cache is {dtype!r}, which packs {block_size} values"
            raise ContextError(f"{fact}, and heads have {head_width}; use 'f16' or 'f32'")
    window_sizes = {config.visible_tokens_of(i) for i in range(config.block_count)} - {0}
    ring = num_sequences * (max(window_sizes, default=0) - 1 + RING_MARGIN) + max_run_tokens
    uses_ring = window_sizes and ring < num_cells and not swa_full
    return CacheLayout(num_cells, ring if uses_ring else 0, DTYPES[dtype], num_sequences, longest)


def place_runs(
    config: Config, cache: CacheLayout, run_sizes: RunSizes, weight_types: Mapping[str, Dtype] = transformer.NO_TYPES,
    target: Target = CPU, *, hidden: bool = False, has_moves: bool = False, has_hidden_states: bool = False,
) -> dict[RunKey, Placed]:  # fmt: skip
    """Place the graphs of a context: of runs, by number of tokens, and if it `has_moves`, `move`, which moves cells.

    weight_types  element types of weights that are not f32
    hidden        the results are the output of the last norm instead of logits
    has_hidden_states    runs can also return `hidden_states`, from which `head` computes logits, some rows at a time
    """
    placed_graphs = dict[RunKey, Placed]()
    for run_size in run_sizes.token_counts:
        weight_leaves = transformer.weights(config, weight_types)
        num_rows = run_sizes.num_rows(run_size)
        hidden_states = list[Tensor]()
        run_result, handles = generation(
            config, weight_leaves, run_size, cache, num_rows, return_hidden=hidden, hidden_states=hidden_states,
        )  # fmt: skip
        graph_outputs = {"result": run_result} if hidden else sampler_outputs(run_result)
        graph_outputs |= {HIDDEN_STATES: hidden_states[0]} if has_hidden_states else {}
        placed_graphs[run_size] = place(Graph(graph_outputs, handles), target)
    if has_moves:
        handles = move_cells(config, transformer.weights(config, weight_types), MOVED, cache)
        placed_graphs[MOVE_RUN] = place(Graph({}, handles), target)
    if has_hidden_states:
        placed_graphs[HEAD_RUN] = place(head_graph(config, weight_types), target)
    return placed_graphs


def head_graph(config: Config, weight_types: Mapping[str, Dtype]) -> Graph:
    """Return the graph from hidden states (rows, C) to logits, with as many rows as MAX_HEAD_LOGITS allow."""
    num_rows = max(min(MAX_HEAD_LOGITS // config.vocab_size, MAX_HEAD_ROWS), 1)
    states = input(HIDDEN_STATES, (num_rows, config.embedding_length))
    exact, leaves = replace(config, precision="f32"), transformer.weights(config, weight_types)
    return Graph({"result": transformer.logits(exact, leaves, states)})
