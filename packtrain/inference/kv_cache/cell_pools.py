"""Which cells the sequences of a context have: in the pool of all blocks, and in the ring of those with a window.

Knows no session: it says which cells to read and write, and which to move. A ring's cells are taken again once no
window has them; until then a sequence can be taken back.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtrain.common.text import plural
from packtrain.models.cached_transformer import STATES, Cache
from packtrain.models.config import Config
from packtrain.models.kv_cell_table import SEQUENCES, CacheFull, Cells, bit, ends, lines, padded

MOST = 2**31 - 1
SPARE = 32  # positions before its window that a sequence keeps in the ring
SPACING = 256  # tokens between checkpoints of states, which are large
STATE = "state_"  # the pool of states: a sequence has one, at its last position


class ContextError(ValueError):
    """A context cannot do what is asked; it stays as it was."""


def at_least(min_value: int, **numbers: Any) -> None:
    """Raise ContextError for one that is not a whole number, or below `min_value`."""
    for name, number in numbers.items():
        is_integer = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if not is_integer or number < min_value:
            raise ContextError(
                f"{name} is {number!r}; it must be a whole number, at least {min_value}"
            )


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens that run together: their inputs, the cells they took, and whose lines and states they read."""

    inputs: dict[str, np.ndarray]
    cells: dict[str, np.ndarray]
    seqs: list[int]
    source: np.ndarray

    def goes_on(self, seq: int, rows: Sequence[int]) -> bool:
        """Whether several tokens are of a sequence with a state, and the last is not wanted: a prompt goes on."""
        if not self.source.size:
            return False
        seq_places = np.flatnonzero(self.inputs["line"] == self.seqs.index(seq))
        return len(seq_places) > 1 and seq_places[-1] not in rows


@dataclass(frozen=True, slots=True)
class Move:
    """Cells of a pool that are copied to others, or stay, with positions changed by `by`; i32 each."""

    source: np.ndarray
    to: np.ndarray
    by: np.ndarray


@dataclass(slots=True)
class Pools:
    """The cells of `sequences` sequences; `parts`: each has its own equal part of them.

    ring    cells of the blocks with a window; 0: none
    window  that window
    tokens  (cells,)  i32  the token at each cell
    learned how many positions the model has learned; 0: it computes with any
    width   of its convolutions; 0: it has none
    plain   only they read the ring
    states  how many there are of scans
    near    all blocks use the ring
    """

    cells: int
    sequences: int
    ring: int = 0
    window: int = 0
    parts: bool = False
    learned: int = 0
    width: int = 0
    plain: bool = False
    states: int = 0
    near: bool = False
    pools: dict[str, Cells] = field(init=False)
    tokens: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.sequences <= SEQUENCES:
            raise ContextError(f"sequences is {self.sequences}; it must be from 1 to {SEQUENCES}")
        self.pools = {"cell_": Cells(self.cells, self.sequences if self.parts else 1, self.width)}
        if self.ring:
            self.pools["ring_"] = Cells(self.ring, 1, self.width)
        if self.states:
            self.pools[STATE] = Cells(self.states)
        self.tokens = np.zeros(self.cells, np.int32)

    @classmethod
    def of(cls, config: Config, cache: Cache, sequences: int, parts: bool) -> "Pools":
        window = max((config.reach_of(i) for i in range(config.block_count)), default=0)
        learned = config.context_length if config.traits.learned_positions else 0
        width, is_unwindowed = config.conv_width, not config.windowed
        sizes = cache.cells, sequences, cache.ring, window, parts, learned, width, is_unwindowed
        is_ring_only = "cell_" not in cache.pools(config)
        return cls(*sizes, STATES * cache.sequences if config.scan else 0, is_ring_only)

    @property
    def all(self) -> Cells:
        return self.pools["cell_"]

    @property
    def spacing(self) -> int:
        """Tokens between checkpoints."""
        return max(self.window, SPACING if self.states else 0)

    def check(self, seq: int, since: int = 0, until: int | None = None) -> None:
        """Raise ContextError where there is no such sequence, or positions are none."""
        if not isinstance(seq, int | np.integer) or not 0 <= seq < self.sequences:
            raise ContextError(f"there is no sequence {seq}; there are {self.sequences}, from 0 on")
        at_least(0, since=since, until=0 if until is None else until)

    # ---- taking cells

    def place(self, tokens: np.ndarray, sets: Sequence[tuple[int, ...]]) -> Piece:
        """Take cells for the next tokens, each of one or several sequences. Raises CacheFull, and takes none."""
        seqs = np.array([token_seqs[0] for token_seqs in sets], np.int32)
        pos = self.positions(sets)
        cells_by_pool = {"cell_": self.all.find(seqs)}
        if self.ring:
            self.expire(len(tokens))
            cells_by_pool["ring_"] = self.pools["ring_"].find(seqs)
        unique_seqs = list(dict.fromkeys(seqs.tolist()))
        line = np.array([unique_seqs.index(seq) for seq in seqs], np.int32)
        inputs = {"tokens": tokens, "pos": pos, "line": line}
        read = {
            pool: cells for pool, cells in cells_by_pool.items() if pool != "cell_" or not self.near
        }
        inputs |= {pool.rstrip("_"): cells for pool, cells in read.items()}
        since = [self.all.next(seq) for seq in unique_seqs]
        for pool, cells in cells_by_pool.items():
            self.pools[pool].append(cells, pos, sets)
        self.tokens[cells_by_pool["cell_"]] = tokens
        source = np.empty(0, np.int32)
        if self.states:
            for seq in range(self.sequences):  # a state is kept until the run after it is done
                first = since[unique_seqs.index(seq)] if seq in unique_seqs else self.all.next(seq)
                self.pools[STATE].drop(seq, until=first - 1)
            at = [int(np.flatnonzero(line == i)[-1]) for i in range(len(unique_seqs))]
            owners, last = [sets[i] for i in at], pos[at].tolist()
            source, cells_by_pool[STATE] = self.pools[STATE].advance(
                unique_seqs, since, last, owners
            )
        return Piece(inputs, cells_by_pool, unique_seqs, source)

    def positions(self, sets: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Of the next tokens. Raises ContextError where those of sequences that share a token differ."""
        next = {seq: self.all.next(seq) for token_seqs in sets for seq in token_seqs}
        pos = np.empty(len(sets), np.int32)
        for i, token_seqs in enumerate(sets):
            pos[i] = next[token_seqs[0]]
            for seq in token_seqs:
                if next[seq] != pos[i]:
                    raise ContextError(
                        f"a token is for sequences {token_seqs[0]} and {seq}, whose next positions are {pos[i]} and"
                        f" {next[seq]}; they must be equal"
                    )
                next[seq] += 1
        if self.learned and max(next.values()) > self.learned:
            raise ContextError(f"the model has learned {self.learned} positions; there are no more")
        return pos

    def purged(self, seqs: np.ndarray, idle_seqs: list[int]) -> list[int]:
        """The first of these idle sequences, without which tokens of `seqs` fit. Raises CacheFull."""
        for count in range(len(idle_seqs) + 1):
            try:
                self.all.find(seqs, sum(map(bit, idle_seqs[:count])))
                return idle_seqs[:count]
            except CacheFull as error:
                reason = error
        raise CacheFull(
            f"{plural(len(seqs), 'token')} wanted: {reason}; remove or release a sequence, or give more cells"
        )

    def inputs(self, piece: Piece, size: int, *, flash: bool = True) -> dict[str, np.ndarray]:
        """Of a run of `size` tokens, whose last ones see nothing and write nothing."""
        count = lines(size, self.sequences)
        run_inputs = padded(piece.inputs, size, count)
        for pool, cells in self.pools.items():
            if (pool == "cell_" and not self.near) or (pool == "ring_" and not self.plain):
                run_inputs |= cells.inputs(piece.seqs, count, pool, flash=flash)
        if self.states:
            run_inputs |= ends(piece.source, piece.cells[STATE], count)
        if self.width:  # convolutions read the ring if there is one
            conv_pool = "ring_" if self.ring else "cell_"
            new, line = run_inputs[conv_pool.rstrip("_")], run_inputs["line"]
            run_inputs[f"{conv_pool}before"] = self.pools[conv_pool].before(piece.seqs, new, line)
        return run_inputs

    def undo(self, piece: Piece) -> None:
        """Give back the cells of a piece that did not run."""
        for pool, cells in piece.cells.items():
            self.pools[pool].free_up(cells)

    def begin(self, pool: str, seq: int, num_spare: int = SPARE) -> int:
        """The first position that a sequence needs in a pool."""
        if pool == STATE:
            return max(self.all.next(seq) - 1, 0)
        return max(self.all.next(seq) - self.window + 1 - num_spare, 0) if pool == "ring_" else 0

    def expire(self, count: int, gone: int = 0) -> None:
        """Free cells of the ring that no window has, if fewer than `count` are free without the set `gone`."""
        ring = self.pools["ring_"]
        for num_spare in (SPARE, 0):
            if len(ring.free(0, gone)) >= count:
                return
            for seq in range(self.sequences):
                ring.drop(seq, until=self.begin("ring_", seq, num_spare))

    def whole(self, seq: int) -> bool:
        """Whether the ring has all positions that the next token of a sequence attends to, and there is its state."""
        has_state = self.states and len(self.all.of(seq))
        if has_state and not len(self.pools[STATE].of(seq, self.begin(STATE, seq))):
            return False
        if not self.ring:
            return True
        since = self.begin("ring_", seq, 0)
        return len(self.pools["ring_"].of(seq, since)) >= len(self.all.of(seq, since))

    def kept(self, seq: int) -> int:
        """The position after the last state that a sequence still has."""
        return self.pools[STATE].next(seq) if self.states else 0

    def check_whole(self, seq: int) -> None:
        if not self.whole(seq):
            raise ContextError(
                f"sequence {seq} was taken back further than its window or state is kept: remove it whole, or call"
                " `reuse`"
            )

    # ---- changing sequences

    def copy(self, seq: int, to: int, since: int, until: int | None) -> dict[str, Move]:
        """Give `to` the positions of another sequence, instead of what it has there; what must be copied for that."""
        moves = dict[str, Move]()
        if self.parts:
            num_new_cells = len(self.all.of(seq, since, until)) - len(self.all.of(to, since, until))
            self.all.find(np.full(max(num_new_cells, 0), to))  # before anything changes
        self.drop(to, since, until)
        for pool, cells in self.pools.items():
            if cells.parts == 1:
                cells.share(seq, to, since, until)
                continue
            source = cells.of(seq, since, until)
            new = cells.find(np.full(len(source), to))
            cells.put(new, cells.pos[source], bit(to))
            self.tokens[new] = self.tokens[source]
            moves[pool] = Move(source.astype(np.int32), new, np.zeros(len(new), np.int32))
        return moves

    def drop(self, seq: int, since: int = 0, until: int | None = None) -> None:
        for cells in self.pools.values():
            cells.drop(seq, since, until)

    def forget(self, seq: int, pools: Iterable[str]) -> None:
        for pool in pools:
            self.pools[pool].drop(seq)

    def change(
        self, seq: int, since: int, until: int | None, by: int = 0, divisor: int = 1
    ) -> dict[str, Move]:
        """New positions pos // divisor + by for a sequence; those below 0 are dropped. What must be moved for that.

        Cells that other sequences have, too, are copied first.
        """
        at_least(-MOST, by=by)
        at_least(1, divisor=divisor)
        if max(self.all.next(seq) + by, by, divisor) > MOST:
            raise ContextError(f"positions are at most {MOST}")
        if self.learned:
            raise ContextError("learned positions are in keys and values already: none can change")
        if self.width and divisor > 1:
            raise ContextError("convolutions take tokens in their order: positions must differ")
        plans = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]()
        if self.states:
            self.pools[STATE].drop(seq, until=self.all.next(seq) - 1)
        for pool, cells in self.pools.items():
            source = cells.of(seq, since, until)
            pos = cells.pos[source] // divisor + by
            other_cells = np.setdiff1d(cells.of(seq), source)
            taken_positions = np.intersect1d(cells.pos[other_cells], pos)
            if pool == "cell_" and taken_positions.size:
                raise ContextError(
                    f"sequence {seq} has position {taken_positions[0]} already; positions may"
                    " not meet when they are changed"
                )
            shared = (cells.sets[source] & ~bit(seq) != 0) & (pos >= 0)
            if pool == "ring_":
                self.expire(int(shared.sum()))
            to = source.astype(np.int32)
            to[shared] = cells.find(np.full(shared.sum(), seq))
            plans[pool] = source, to, pos
        return {pool: self._moved(seq, pool, *plan) for pool, plan in plans.items()}

    def _moved(
        self, seq: int, pool: str, source: np.ndarray, to: np.ndarray, pos: np.ndarray
    ) -> Move:
        cells = self.pools[pool]
        by = (pos - cells.pos[source]).astype(np.int32)
        cells.put(source, cells.pos[source], cells.sets[source] & ~bit(seq))
        stay = pos >= 0
        cells.put(to[stay], pos[stay], cells.sets[to[stay]] | bit(seq))
        if pool == "cell_":
            self.tokens[to[stay]] = self.tokens[source[stay]]
        needed = stay & ((by != 0) | (to != source))
        return Move(source[needed].astype(np.int32), to[needed], by[needed])


def move_inputs(
    moves: Mapping[str, Move],
    pools: Sequence[str],
    at: int,
    count: int,
    input_names: Container[str],
) -> dict[str, np.ndarray]:
    """Inputs of a run that moves `count` cells of each pool, from the `at`-th on; those that are `input_names`."""
    inputs = dict[str, np.ndarray]()
    for pool in pools:
        empty = np.empty(0, np.int32)
        move = moves.get(pool, Move(empty, empty, empty))
        for name, value in (("from", move.source), ("to", move.to), ("by", move.by)):
            filled = np.full(count, 0 if name == "by" else -1, np.int32)
            part = value[at : at + count]
            filled[: len(part)] = part
            inputs[pool + name] = filled
    return {name: value for name, value in inputs.items() if name in input_names}
