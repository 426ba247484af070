"""Context: a model with a KV cache for many sequences, whose batches mix tokens of any of them.

All runs are planned when it is made. A call that fails changes nothing; one that is stopped keeps what it had read.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from packtrain.common.errors import in_keywords
from packtrain.common.files import atomic_file
from packtrain.engine.backends import CPU, Target
from packtrain.engine.executor import Executor, Session
from packtrain.engine.placement import Placed
from packtrain.inference.kv_cache import cell_pools, decode_plans, saved_state
from packtrain.inference.kv_cache.adapters import Adapters
from packtrain.inference.kv_cache.cell_pools import ContextError, Move, Piece, Pools
from packtrain.inference.kv_cache.context_size import check_room
from packtrain.inference.kv_cache.results import NUMBERS, Results, wanted_rows
from packtrain.inference.kv_cache.state_checkpoints import ANEW, Checkpoints
from packtrain.inference.sampling import Chain, Given
from packtrain.models.cached_transformer import Cache
from packtrain.models.config import Config
from packtrain.models.kv_cell_table import CacheFull
from packtrain.models.model_file import ModelFile, open_model

Stop = Callable[[], bool]
Seqs = int | Sequence[int | Sequence[int]]


@in_keywords
class Context:
    """A model and the cells of its KV cache.

    cells        tokens that fit, of all sequences together
    sequences    how many there are, at most 63
    cache        type of the cache: f16, f32 or q8_0
    rows         most results of one run; default: one for each sequence, with `hidden` one for each token
    prompts      most tokens of the runs that read prompts; the largest first
    parts        each sequence has its own equal part of the cells, instead of all sharing all
    longest      tokens of one sequence; 0: all cells, or those of its part
    swa_full     blocks with a sliding window keep all cells, not only those of the window
    checkpoints  how many states of the windows are kept, so that a text can be taken back without reading it anew
    spacing      tokens between them; 0: the window
    hidden       results are the outputs of the last norm, for embeddings, instead of logits
    memory       limit of this process, 1 << 30 or "1GiB", `beside` of which others need; DoesNotFit names what fits
    say          is told what the caller may want to know
    """

    def __init__(
        self,
        model: ModelFile | str | Path,
        *,
        cells: int = 4096,
        sequences: int = 1,
        cache: str = "f16",
        rows: int = 0,
        prompts: Sequence[int] = decode_plans.PROMPTS,
        parts: bool = False,
        longest: int = 0,
        swa_full: bool = False,
        checkpoints: int = 8,
        spacing: int = 0,
        hidden: bool = False,
        memory: int | str | None = None,
        beside: int = 0,
        target: Target = CPU,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        cell_pools.at_least(1, cells=cells, sequences=sequences)
        cell_pools.at_least(0, rows=rows, longest=longest, checkpoints=checkpoints, spacing=spacing)
        file = model if isinstance(model, ModelFile) else open_model(model)
        sizes = decode_plans.Sizes.of(cells, rows or (0 if hidden else sequences), prompts)
        kind = sequences, cache, sizes.tokens[0], swa_full

        def made(cells: int) -> tuple[Cache, dict[decode_plans.Name, Placed]]:
            max_seq_cells = longest or (cells // sequences if parts else cells)
            layout = decode_plans.cache_of(file.config, cells, *kind, longest=max_seq_cells)
            graph_args = file.config, layout, sizes, file.types(), target
            return layout, decode_plans.placements(*graph_args, hidden=hidden, moves=True)

        layout, graphs = made(cells)
        if memory is not None:
            check_room(cells, memory, made, file, checkpoints, beside)
        session = Session(target.limits)
        session.share(file.stored())
        self._begin(file.config, layout, sizes, session.executors(graphs), sequences, parts)
        self._checkpoints = Checkpoints(checkpoints, spacing or self.pools.spacing)
        self._origin, self._say = saved_state.origin_of(file, layout), say

    @classmethod
    def within(
        cls,
        config: Config,
        cache: Cache,
        sizes: decode_plans.Sizes,
        runs: Mapping[decode_plans.Name, Executor],
        sequences: int = 1,
        *,
        parts: bool = False,
        checkpoints: int = 0,
    ) -> "Context":
        """A context with given executors of `decode_plans.placements`, whose session has the weights."""
        self = cls.__new__(cls)
        self._begin(config, cache, sizes, runs, sequences, parts)
        self._checkpoints = Checkpoints(checkpoints, self.pools.spacing)
        self._origin, self._say = saved_state.Origin(), lambda line: None
        return self

    def _begin(
        self,
        config: Config,
        cache: Cache,
        sizes: decode_plans.Sizes,
        runs: Mapping[decode_plans.Name, Executor],
        sequences: int,
        parts: bool,
    ) -> None:
        self.config, self.cache, self.sizes, self.runs = config, cache, sizes, runs
        self._session, self._chooses = runs[1].session, NUMBERS in runs[1].inputs
        self.pools = Pools.of(config, cache, sequences, parts)
        self.adapters = Adapters(config.lora, sequences)
        self._leaves = saved_state.leaves_of(config, cache)
        self._released = dict[int, None]()  # idle sequences, the oldest first

    # ---- running

    def decode(
        self,
        tokens: Sequence[int],
        seqs: Seqs = 0,
        *,
        wanted: Sequence[int] | None = None,
        stop: Stop | None = None,
    ) -> np.ndarray:
        """Read the next tokens of some sequences; logits (len(wanted), V), or hidden values (len(wanted), C).

        seqs    the sequence of all tokens, or of each: a number, or several that share it
        wanted  places in `tokens`, ascending; default: the last token of each sequence
        stop    called between ops; if true, Stopped is raised, and tokens of runs before stay

        Raises CacheFull and ContextError; nothing has changed then.
        """
        row_results = self._read(tokens, seqs, wanted, stop)
        width = self.runs[1].placed.graph.outputs["result"].shape[1]
        return np.array(row_results, np.float32).reshape(len(row_results), width)

    def choices(
        self,
        tokens: Sequence[int],
        chains: Sequence[Chain],
        seqs: Seqs = 0,
        *,
        wanted: Sequence[int] | None = None,
        stop: Stop | None = None,
    ) -> list[Given]:
        """The same, but of each wanted row only what its chain needs: `chain.choose(given)` is the next token.

        chains  one for each wanted row; rows of one chain are consecutive tokens of its text
        """
        return self._read(tokens, seqs, wanted, stop, chains)

    def _read(
        self,
        tokens: Sequence[int],
        seqs: Seqs,
        requested_rows: Sequence[int] | None,
        stop: Stop | None,
        chains: Sequence[Chain] | None = None,
    ) -> list[Given]:
        sets = self._sets(tokens, seqs)
        rows = wanted_rows(sets, requested_rows)
        results = Results.of(len(rows), chains)
        self._make_room(sets)
        done = list[Piece]()
        try:
            for part in self.sizes.parts(tokens, sets, rows, states=self.pools.states > 0):
                self._run(*part, stop, done, results)
        except CacheFull:  # of the ring, where several tokens have one position
            for piece in done:
                self.pools.undo(piece)
            for seq in {token_seqs[0] for token_seqs in sets}:
                self._checkpoints.drop(seq, self.next(seq))
            raise
        for seq in {seq for token_seqs in sets for seq in token_seqs}:
            self._released.pop(seq, None)
        return results.found

    def _sets(self, tokens: Sequence[int], seqs: Seqs) -> list[tuple[int, ...]]:
        seqs_by_token = [seqs] * len(tokens) if isinstance(seqs, int | np.integer) else [*seqs]
        sets = [(x,) if isinstance(x, int | np.integer) else tuple(x) for x in seqs_by_token]
        if not sets or len(sets) != len(tokens) or not all(sets):
            raise ContextError(
                f"there are {len(tokens)} tokens and sequences for {len(sets)}; each token needs one"
            )
        all_integers = all(isinstance(token, int | np.integer) for token in tokens)
        if not all_integers or not 0 <= min(tokens) <= max(tokens) < self.config.vocab_size:
            raise ContextError(f"tokens are whole numbers from 0 to {self.config.vocab_size - 1}")
        for seq in {seq for token_seqs in sets for seq in token_seqs}:
            self.pools.check(seq)
            self.pools.check_whole(seq)
        self.pools.positions(sets)
        return sets

    def _make_room(self, sets: list[tuple[int, ...]]) -> None:
        """Remove released sequences, the oldest first, until all tokens fit. Raises CacheFull, and removes none."""
        seqs = np.array([token_seqs[0] for token_seqs in sets], np.int32)
        used = {seq for token_seqs in sets for seq in token_seqs}
        for seq in self.pools.purged(seqs, [seq for seq in self._released if seq not in used]):
            self.remove(seq)

    def _run(
        self,
        ids: np.ndarray,
        sets: list[tuple[int, ...]],
        rows: list[int],
        stop: Stop | None,
        done: list[Piece],
        results: Results,
    ) -> None:
        """Run some tokens at once, or in halves where the ring has no room for all."""
        try:
            piece = self.pools.place(ids, sets)
        except CacheFull:
            half = len(ids) // 2
            if not half:
                raise
            before = [row for row in rows if row < half]
            after = [row - half for row in rows if row >= half]
            self._run(ids[:half], sets[:half], before, stop, done, results)
            self._run(ids[half:], sets[half:], after, stop, done, results)
            return
        size = min(size for size in self.sizes.tokens if size >= len(ids))
        try:
            run_inputs = self.pools.inputs(piece, size, flash=self.config.flash)
            run_inputs |= self.adapters.inputs(sets, size)
            run_inputs |= results.inputs(rows, self.sizes.wanted(size), chosen=self._chooses)
            names = results.names(len(rows))
            results.add(len(rows), self.runs[size](run_inputs, stop=stop, only=names))
        except BaseException:
            self.pools.undo(piece)
            raise
        done.append(piece)
        self._checkpoint(piece, rows)

    # ---- sequences

    def next(self, seq: int) -> int:
        """The position of its next token: 0 if it is empty."""
        self.pools.check(seq)
        return self.pools.all.next(seq)

    def tokens(self, seq: int) -> list[int]:
        """Those that it has, by position."""
        self.pools.check(seq)
        return [int(t) for t in self.pools.tokens[self.pools.all.of(seq)]]

    def copy(self, seq: int, to: int, since: int = 0, until: int | None = None) -> None:
        """Let `to` have the positions of another sequence from `since` on, below `until`. They share cells."""
        self.pools.check(seq, since, until)
        self.pools.check(to)
        if seq != to:
            moves = self.pools.copy(seq, to, since, until)
            self._checkpoints.drop(to, since)
            self._released.pop(to, None)
            self._move(moves)

    def remove(self, seq: int, since: int = 0, until: int | None = None) -> None:
        """Remove positions of a sequence; those after them stay where they are."""
        self.pools.check(seq, since, until)
        self.pools.drop(seq, since, until)
        self._checkpoints.drop(seq, since)
        if not len(self.pools.all.of(seq)):
            self._released.pop(seq, None)

    def keep(self, seq: int) -> None:
        """Remove all other sequences."""
        self.pools.check(seq)
        for other_seq in range(self.pools.sequences):
            if other_seq != seq:
                self.remove(other_seq)

    def shift(self, seq: int, by: int, since: int = 0, until: int | None = None) -> None:
        """Add `by` to positions of a sequence; those that come below 0 are removed."""
        self._change(seq, since, until, by=by)

    def divide(self, seq: int, divisor: int, since: int = 0, until: int | None = None) -> None:
        """Divide positions of a sequence, rounding down: several tokens may then have one position."""
        self._change(seq, since, until, divisor=divisor)

    def _change(self, seq: int, since: int, until: int | None, **options: int) -> None:
        self.pools.check(seq, since, until)
        moves = self.pools.change(seq, since, until, **options)
        self._checkpoints.drop(seq, since)
        self._move(moves)

    def release(self, seq: int) -> None:
        """Say that a sequence is idle: it is removed when room is short, the oldest such first."""
        self.pools.check(seq)
        self._released.pop(seq, None)
        self._released[seq] = None

    def reuse(self, seq: int, tokens: Sequence[int]) -> int:
        """Keep the longest beginning of this text that the sequence has; how many tokens that is, less than all."""
        self.pools.check(seq)
        num_common, cached_tokens = 0, self.tokens(seq)
        positions = self.pools.all.pos[self.pools.all.of(seq)]
        in_order = np.array_equal(positions, np.arange(len(cached_tokens)))
        end = min(len(cached_tokens), len(tokens) - 1) if in_order else 0
        while num_common < end and cached_tokens[num_common] == tokens[num_common]:
            num_common += 1
        self.pools.drop(seq, num_common)
        if not self.pools.whole(seq):
            num_common = self._restore_window(seq)
        self._checkpoints.drop(seq, num_common)
        return num_common

    def _move(self, moves: dict[str, Move]) -> None:
        if cell_pools.STATE in moves:
            saved_state.move_rows(
                self._session, self._leaves[cell_pools.STATE], moves.pop(cell_pools.STATE)
            )
        count = max((len(move.to) for move in moves.values()), default=0)
        for at in range(0, count, decode_plans.MOVED):
            run, pools = self.runs[decode_plans.MOVE], self.cache.pools(self.config)
            run(cell_pools.move_inputs(moves, pools, at, decode_plans.MOVED, run.inputs))

    # ---- states

    def save(self, seqs: Sequence[int] | None = None) -> bytes:
        """The state of some sequences, or of all: for `restore` in a context of the same model and types."""
        saved_seqs = range(self.pools.sequences) if seqs is None else seqs
        for seq in saved_seqs:
            self.pools.check(seq)
        stored = saved_state.Stored.of(self.pools, self._leaves, self._session, [*saved_seqs])
        stored.scales = self.adapters.scales[[*saved_seqs]].tolist()
        return saved_state.to_bytes(stored, self._origin)

    def restore(self, state: bytes, seqs: Sequence[int] | None = None) -> None:
        """Put sequences back that `save` saved, instead of what is there; as these, or as the numbers they had.

        Raises ContextError for damaged states and those of another model, CacheFull if they do not fit; nothing has
        changed then.
        """
        stored = saved_state.of_bytes(
            state, self._origin, saved_state.views(self.pools, self._leaves, self._session)
        )
        to = stored.homes(seqs)
        for seq in to:
            self.pools.check(seq)
        self.adapters.set([], stored.scales)  # raises where they do not fit
        stored.put(self.pools, self._session, to)
        self.adapters.set(to, stored.scales)
        for seq in to:
            self._checkpoints.drop(seq, 0)
            self._released.pop(seq, None)

    def save_file(self, path: str | Path, seqs: Sequence[int] | None = None) -> None:
        """`save` to a file, which is replaced whole."""
        with atomic_file(path) as file:
            file.write(self.save(seqs))

    def restore_file(self, path: str | Path, seqs: Sequence[int] | None = None) -> None:
        """`restore` from a file. Raises ContextError, which names it, and OSError."""
        try:
            self.restore(Path(path).read_bytes(), seqs)
        except ContextError as error:
            raise ContextError(f"{path}: {error}") from None

    def _checkpoint(self, piece: Piece, rows: Sequence[int]) -> None:
        """Keep windows and states of sequences that a piece took past the next checkpoint, or near a prompt's end."""
        if (self.pools.ring or self.pools.states) and self._checkpoints.most:
            for seq in piece.seqs:
                if piece.goes_on(seq, rows) or self._checkpoints.due(seq, self.next(seq)):
                    stored = saved_state.Stored.of(
                        self.pools, self._leaves, self._session, [seq], False
                    )
                    self._checkpoints.add(seq, self.next(seq), stored)

    def _restore_window(self, seq: int) -> int:
        """Take a sequence back to its last checkpoint, or to nothing; how many tokens it has then."""
        checkpoint, num_retained = self._checkpoints.last(seq, self.next(seq)), self.pools.kept(seq)
        if num_retained > (checkpoint[0] if checkpoint else 0):  # what the last run began with
            self.pools.drop(seq, num_retained)
            return num_retained
        if checkpoint is None:
            if self._checkpoints.most:
                self._say(ANEW.format(seq))
            self.pools.drop(seq)
            return 0
        at, stored = checkpoint
        self.pools.drop(seq, at)
        self.pools.forget(seq, stored.parts)
        stored.put(self.pools, self._session, [seq])
        return at
