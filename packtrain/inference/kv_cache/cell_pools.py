"""Which cells of the KV cache each sequence of a context has, by pool: `cell_`, `ring_` and `state_`.

`cell_` has a cell for every token; `ring_` only those in the sliding windows of some blocks, reused once no window has
them (until then a sequence can be taken back); `state_` has the states of scans. Knows no session: it says which cells
to read and write, and which to move."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtrain.common.text import plural
from packtrain.inference.kv_cache import kv_cells
from packtrain.inference.kv_cache.kv_cells import CacheFull, CellTable, bit, state_slot_inputs
from packtrain.models.cached_transformer import STATES, CacheLayout, count_lines
from packtrain.models.config import Config

MAX_POSITION = 2**31 - 1
RING_MARGIN = 32  # positions before its window that a sequence keeps in the ring
CHECKPOINT_SPACING = 256  # tokens between checkpoints of states, which are large
STATE = "state_"  # the pool of states: a sequence has one, at its last position


class ContextError(ValueError):
    """A call asks for what a context cannot do; the context stays as it was."""


def at_least(min_value: int, **arguments: Any) -> None:
    """Raise ContextError for an argument, given by its name, that is no whole number of at least `min_value`."""
    for argument_name, value in arguments.items():
        is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not is_integer or value < min_value:
            fact = f"{argument_name} is {value!r}; it must be a whole number, at least {min_value}"
            raise ContextError(fact)


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """The tokens of a run: their graph inputs, the cells they took by pool, their sequences, the states they read."""

    inputs: dict[str, np.ndarray]
    cells: dict[str, np.ndarray]
    seqs: list[int]
    state_source: np.ndarray

    def goes_on(self, seq: int, rows: Sequence[int]) -> bool:
        """Return whether a run with recurrent states ended inside a prompt of `seq`; `rows`: tokens with logits."""
        if not self.state_source.size:
            return False
        seq_tokens = np.flatnonzero(self.inputs["line"] == self.seqs.index(seq))
        return len(seq_tokens) > 1 and seq_tokens[-1] not in rows


@dataclass(frozen=True, slots=True)
class CellMove:
    """Cells `source` of a pool whose values are copied to cells `to`, with positions changed by `by`; i32 arrays."""

    source: np.ndarray
    to: np.ndarray
    by: np.ndarray


@dataclass(slots=True)
class CellPools:
    """The cells of `sequences` sequences; `parts`: each has its own equal part of them.

    ring_cells      cells of the ring, of blocks with a window; 0: none
    window          tokens of that window
    tokens          (cells,)  i32  the token at each cell
    learned         positions that the model has learned; 0: it computes with any position
    width           width of the model's convolutions; 0: it has none
    has_plain_ring  only convolutions read the ring
    num_states      number of states of scans
    is_ring_only    all blocks use the ring
    llama.cpp keeps only the last inputs of a short convolution, which cannot go back. As cells of the ring they cost 34
    tokens per sequence, and copies and saved states need no rule of their own.
    """

    cells: int
    sequences: int
    ring_cells: int = 0
    window: int = 0
    parts: bool = False
    learned: int = 0
    width: int = 0
    has_plain_ring: bool = False
    num_states: int = 0
    is_ring_only: bool = False
    pools: dict[str, CellTable] = field(init=False)
    tokens: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.sequences <= kv_cells.SEQUENCES:
            fact = f"sequences is {self.sequences}; it must be from 1 to {kv_cells.SEQUENCES}"
            raise ContextError(fact)
        num_tables = self.sequences if self.parts else 1
        self.pools = {"cell_": CellTable(self.cells, num_tables, self.width)}
        if self.ring_cells:
            self.pools["ring_"] = CellTable(self.ring_cells, 1, self.width)
        if self.num_states:
            self.pools[STATE] = CellTable(self.num_states)
        self.tokens = np.zeros(self.cells, np.int32)

    @classmethod
    def of(cls, config: Config, cache: CacheLayout, sequences: int, parts: bool) -> "CellPools":
        window = max((config.visible_tokens_of(i) for i in range(config.block_count)), default=0)
        learned = config.context_length if config.traits.learned_positions else 0
        width, is_unwindowed = config.conv_width, not config.has_windows
        sizes = cache.num_cells, sequences, cache.ring, window, parts, learned, width, is_unwindowed
        is_ring_only = "cell_" not in cache.pools(config)
        return cls(*sizes, STATES * cache.max_sequences if config.scan else 0, is_ring_only)

    @property
    def all(self) -> CellTable:
        """The pool of the blocks that see all positions."""
        return self.pools["cell_"]

    @property
    def checkpoint_spacing(self) -> int:
        """Default number of tokens between two saved states of a sequence."""
        return max(self.window, CHECKPOINT_SPACING if self.num_states else 0)

    def check_positions(self, seq: int, since: int = 0, until: int | None = None) -> None:
        """Raise ContextError for a sequence that does not exist, or if `since` or `until` is below 0."""
        if not isinstance(seq, int | np.integer) or not 0 <= seq < self.sequences:
            raise ContextError(f"there is no sequence {seq}; there are {self.sequences}, from 0 on")
        at_least(0, since=since, until=0 if until is None else until)

    # ---- taking cells

    def place_tokens(self, tokens: np.ndarray, sets: Sequence[tuple[int, ...]]) -> PlacedTokens:
        """Take cells for the next tokens; return the placed tokens. sets: sequences by token. Raises CacheFull."""
        seqs = np.array([token_seqs[0] for token_seqs in sets], np.int32)
        token_positions = self.next_positions(sets)
        cells_by_pool = {"cell_": self.all.find_free_cells(seqs)}
        if self.ring_cells:
            self.expire_ring(len(tokens))
            cells_by_pool["ring_"] = self.pools["ring_"].find_free_cells(seqs)
        unique_seqs = list(dict.fromkeys(seqs.tolist()))
        token_lines = np.array([unique_seqs.index(seq) for seq in seqs], np.int32)
        inputs = {"tokens": tokens, "pos": token_positions, "line": token_lines}
        cells_to_read = {
            pool: cells
            for pool, cells in cells_by_pool.items()
            if pool != "cell_" or not self.is_ring_only
        }
        inputs |= {pool.rstrip("_"): cells for pool, cells in cells_to_read.items()}
        since = [self.all.next(seq) for seq in unique_seqs]
        for pool, cells in cells_by_pool.items():
            self.pools[pool].append(cells, token_positions, sets)
        self.tokens[cells_by_pool["cell_"]] = tokens
        state_source = np.empty(0, np.int32)
        if self.num_states:
            for seq in range(self.sequences):  # a state stays until the run after it is done
                first = since[unique_seqs.index(seq)] if seq in unique_seqs else self.all.next(seq)
                self.pools[STATE].drop_positions(seq, until=first - 1)
            at = [int(np.flatnonzero(token_lines == i)[-1]) for i in range(len(unique_seqs))]
            last_seq_sets, last_positions = [sets[i] for i in at], token_positions[at].tolist()
            state_source, cells_by_pool[STATE] = self.pools[STATE].advance_states(
                unique_seqs, since, last_positions, last_seq_sets
            )
        return PlacedTokens(inputs, cells_by_pool, unique_seqs, state_source)

    def next_positions(self, sets: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Return the next tokens' positions, i32; sets: each token's sequences. ContextError if theirs differ."""
        next_pos = {seq: self.all.next(seq) for token_seqs in sets for seq in token_seqs}
        pos = np.empty(len(sets), np.int32)
        for i, token_seqs in enumerate(sets):
            pos[i] = next_pos[token_seqs[0]]
            for seq in token_seqs:
                if next_pos[seq] != pos[i]:
                    raise ContextError(
                        f"a token is for sequences {token_seqs[0]} and {seq}, whose next positions are {pos[i]} and"
                        f" {next_pos[seq]}; they must be equal"
                    )
                next_pos[seq] += 1
        if self.learned and max(next_pos.values()) > self.learned:
            raise ContextError(f"the model has learned {self.learned} positions; there are no more")
        return pos

    def purged(self, seqs: np.ndarray, idle_seqs: list[int]) -> list[int]:
        """Return the first idle_seqs, as many as must go for `seqs`, one for each token, to get cells. CacheFull."""
        for num_purged in range(len(idle_seqs) + 1):
            try:
                self.all.find_free_cells(seqs, sum(map(bit, idle_seqs[:num_purged])))
                return idle_seqs[:num_purged]
            except CacheFull as error:
                full_error = error
        fact = f"{plural(len(seqs), 'token')} wanted: {full_error}"
        raise CacheFull(f"{fact}; remove or release a sequence, or give more cells")

    def inputs(
        self, piece: PlacedTokens, size: int, *, flash: bool = True
    ) -> dict[str, np.ndarray]:
        """Return graph inputs for the cells of a run of `size` tokens, padding included; flash: attention is fused."""
        num_lines = count_lines(size, self.sequences)
        run_inputs = kv_cells.pad_inputs(piece.inputs, size, num_lines)
        for pool, cells in self.pools.items():
            if (pool == "cell_" and not self.is_ring_only) or (
                pool == "ring_" and not self.has_plain_ring
            ):
                run_inputs |= cells.line_inputs(piece.seqs, num_lines, pool, flash=flash)
        if self.num_states:
            run_inputs |= state_slot_inputs(piece.state_source, piece.cells[STATE], num_lines)
        if self.width:  # convolutions read the ring if there is one
            conv_pool = "ring_" if self.ring_cells else "cell_"
            new, line = run_inputs[conv_pool.rstrip("_")], run_inputs["line"]
            run_inputs[f"{conv_pool}before"] = self.pools[conv_pool].before(piece.seqs, new, line)
        return run_inputs

    def free_tokens(self, piece: PlacedTokens) -> None:
        """Free the cells of placed tokens that did not run."""
        for pool, cells in piece.cells.items():
            self.pools[pool].release_cells(cells)

    def first_needed_pos(self, pool: str, seq: int, num_margin: int = RING_MARGIN) -> int:
        """Return the first position that a sequence's next tokens read in a pool; in the ring, `num_margin` earlier."""
        if pool == STATE:
            return max(self.all.next(seq) - 1, 0)
        return max(self.all.next(seq) - self.window + 1 - num_margin, 0) if pool == "ring_" else 0

    def expire_ring(self, num_needed: int, freed_mask: int = 0) -> None:
        """Free cells of the ring outside all windows if fewer than `num_needed` are free, counting those that only
        sequences of the bit mask `freed_mask` have."""
        ring = self.pools["ring_"]
        for num_margin in (RING_MARGIN, 0):
            if len(ring.free_cells(0, freed_mask)) >= num_needed:
                return
            for seq in range(self.sequences):
                ring.drop_positions(seq, until=self.first_needed_pos("ring_", seq, num_margin))

    def is_complete(self, seq: int) -> bool:
        """Return whether the cache has what a sequence's next token reads: its window in the ring, its scan state."""
        has_state = self.num_states and len(self.all.of(seq))
        if has_state and not len(self.pools[STATE].of(seq, self.first_needed_pos(STATE, seq))):
            return False
        if not self.ring_cells:
            return True
        start_pos = self.first_needed_pos("ring_", seq, 0)
        return len(self.pools["ring_"].of(seq, start_pos)) >= len(self.all.of(seq, start_pos))

    def check_complete(self, seq: int) -> None:
        """Raise ContextError if the cache lacks what a sequence's next token reads, see `is_complete`."""
        if not self.is_complete(seq):
            raise ContextError(
                f"sequence {seq} was taken back further than its window or state is kept: remove it whole, or call"
                " `reuse`"
            )

    # ---- changing sequences

    def copy(self, seq: int, to: int, since: int, until: int | None) -> dict[str, CellMove]:
        """Give sequence `to` the positions of `seq` from `since` on, below `until`, instead of its own there; returns
        the copies of cells, by pool, that the caller must carry out: none where sequences can share cells."""
        moves = dict[str, CellMove]()
        if self.parts:
            num_new_cells = len(self.all.of(seq, since, until)) - len(self.all.of(to, since, until))
            self.all.find_free_cells(np.full(max(num_new_cells, 0), to))  # before anything changes
        self.drop_positions(to, since, until)
        for pool, cells in self.pools.items():
            if cells.num_parts == 1:
                cells.share_cells(seq, to, since, until)
                continue
            source_cells = cells.of(seq, since, until)
            new = cells.find_free_cells(np.full(len(source_cells), to))
            cells.assign_cells(new, cells.pos[source_cells], bit(to))
            self.tokens[new] = self.tokens[source_cells]
            moves[pool] = CellMove(source_cells.astype(np.int32), new, np.zeros(len(new), np.int32))
        return moves

    def drop_positions(
        self, seq: int, since: int = 0, until: int | None = None, pools: Iterable[str] | None = None
    ) -> None:
        for pool in self.pools if pools is None else pools:
            self.pools[pool].drop_positions(seq, since, until)

    def change_positions(
        self, seq: int, since: int, until: int | None, by: int = 0, divisor: int = 1
    ) -> dict[str, CellMove]:
        """Change positions of a sequence from `since` on, below `until`, to pos // divisor + by, dropping those below
        0; returns moves of cells that the caller must run, by pool. Cells that other sequences have, too, are copied
        first. The run of the moves also rotates keys. Raises ContextError, and CacheFull for such copies."""
        at_least(-MAX_POSITION, by=by)
        at_least(1, divisor=divisor)
        if max(self.all.next(seq) + by, by, divisor) > MAX_POSITION:
            raise ContextError(f"positions are at most {MAX_POSITION}")
        if self.learned:
            raise ContextError("learned positions are in keys and values already: none can change")
        if self.width and divisor > 1:
            raise ContextError("convolutions take tokens in their order: positions must differ")
        plans = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]()
        if self.num_states:
            self.pools[STATE].drop_positions(seq, until=self.all.next(seq) - 1)
        for pool, cells in self.pools.items():
            source_cells = cells.of(seq, since, until)
            new_positions = cells.pos[source_cells] // divisor + by
            other_cells = np.setdiff1d(cells.of(seq), source_cells)
            taken_positions = np.intersect1d(cells.pos[other_cells], new_positions)
            if pool == "cell_" and taken_positions.size:
                raise ContextError(
                    f"sequence {seq} has position {taken_positions[0]} already; positions may"
                    " not meet when they are changed"
                )
            is_shared = (cells.sets[source_cells] & ~bit(seq) != 0) & (new_positions >= 0)
            if pool == "ring_":
                self.expire_ring(int(is_shared.sum()))
            target_cells = source_cells.astype(np.int32)
            target_cells[is_shared] = cells.find_free_cells(np.full(is_shared.sum(), seq))
            plans[pool] = source_cells, target_cells, new_positions
        return {pool: self._move_cells(seq, pool, *move_args) for pool, move_args in plans.items()}

    def _move_cells(
        self, seq: int, pool: str, source: np.ndarray, to: np.ndarray, new_positions: np.ndarray
    ) -> CellMove:
        cells = self.pools[pool]
        position_shift = (new_positions - cells.pos[source]).astype(np.int32)
        cells.assign_cells(source, cells.pos[source], cells.sets[source] & ~bit(seq))
        is_kept = new_positions >= 0
        cells.assign_cells(to[is_kept], new_positions[is_kept], cells.sets[to[is_kept]] | bit(seq))
        if pool == "cell_":
            self.tokens[to[is_kept]] = self.tokens[source[is_kept]]
        is_moved = is_kept & ((position_shift != 0) | (to != source))
        return CellMove(source[is_moved].astype(np.int32), to[is_moved], position_shift[is_moved])


def move_inputs(
    moves: Mapping[str, CellMove], pools: Sequence[str], move_start: int, num_moves: int, input_names: Container[str],
) -> dict[str, np.ndarray]:  # fmt: skip
    """Return inputs, those of `input_names`, of a run with room for `num_moves` moves of each pool: from the move with
    index `move_start` on, then padding."""
    inputs = dict[str, np.ndarray]()
    for pool in pools:
        empty_array = np.empty(0, np.int32)
        move = moves.get(pool, CellMove(empty_array, empty_array, empty_array))
        for name, move_values in (("from", move.source), ("to", move.to), ("by", move.by)):
            padded_values = np.full(num_moves, 0 if name == "by" else -1, np.int32)
            move_part = move_values[move_start : move_start + num_moves]
            padded_values[: len(move_part)] = move_part
            inputs[pool + name] = padded_values
    return {name: move_values for name, move_values in inputs.items() if name in input_names}
