"""Context: a model with a KV cache for many sequences, whose batches mix tokens of any of them.

All runs are planned at its creation. A call that fails changes nothing; a stopped call keeps the tokens it has read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from packtrain.common.errors import name_keywords
from packtrain.common.files import atomic_file
from packtrain.common.mapped_file import PageBudget, pages_within
from packtrain.dtypes import DTYPES
from packtrain.engine.backends import CPU, Target
from packtrain.engine.executor import Executor, Session
from packtrain.inference.kv_cache import cell_pools, decode_plans, saved_state
from packtrain.inference.kv_cache.adapters import AdapterScales
from packtrain.inference.kv_cache.cell_pools import CellMove, CellPools, ContextError, PlacedTokens
from packtrain.inference.kv_cache.context_size import ContextPlan, check_room
from packtrain.inference.kv_cache.kv_cells import CacheFull
from packtrain.inference.kv_cache.results import SAMPLER_FLOATS, RowResults, result_rows
from packtrain.inference.kv_cache.saved_state import REREAD_MESSAGE, StateCheckpoints
from packtrain.inference.sampling import Chain, SamplerInput
from packtrain.models.attention_choice import AUTO, with_flash
from packtrain.models.cached_transformer import CacheLayout
from packtrain.models.config import Config
from packtrain.models.model_file import ModelFile, open_model

StopCallback = Callable[[], bool]
SequenceIds = int | Sequence[int | Sequence[int]]


@name_keywords
class Context:
    """A model and the cells of its KV cache.

    cells        tokens that fit, of all sequences together
    sequences    number of sequences, at most 63
    cache        type of the cache: f16, f32 or q8_0
    rows         most results of one run; default: one for each sequence, with `hidden` one for each token
    prompts      most tokens of the runs that read prompts; the largest first
    parts        each sequence has its own equal part of the cells, instead of all sharing all
    longest      tokens of one sequence; 0: all cells, or those of its part
    swa_full     blocks with a sliding window keep all cells, not only those of the window
    checkpoints  most saved states of each sequence (window, scans), to which it can go back without being read again
    spacing      tokens between saved states; 0: the window, or with scan states a default if that is larger
    hidden       results are the outputs of the last norm, for embeddings, instead of logits
    has_hidden_states   `choices` can return hidden states of any tokens, and `head_logits` logits from them
    memory       limit of this process, 1 << 30 or "1GiB"; DoesNotFit names what fits
    beside       bytes of `memory` to leave for others, or a function that returns them for a number of cells
    resident     limit of this process and the pages of the model in memory, together, like `memory`; on the CPU
    say          called with messages
    """

    def __init__(
        self, model: ModelFile | str | Path, *, cells: int = 4096, sequences: int = 1, cache: str = "f16",
        rows: int = 0, prompts: Sequence[int] = decode_plans.PROMPT_SIZES, parts: bool = False, longest: int = 0,
        swa_full: bool = False, checkpoints: int = decode_plans.CHECKPOINTS, spacing: int = 0, hidden: bool = False,
        has_hidden_states: bool = False, memory: int | str | None = None, beside: int | Callable[[int], int] = 0,
        resident: int | str | None = None, target: Target = CPU, say: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        cell_pools.at_least(1, cells=cells, sequences=sequences)
        cell_pools.at_least(0, rows=rows, longest=longest, checkpoints=checkpoints, spacing=spacing)
        file = model if isinstance(model, ModelFile) else open_model(model)
        if file.config.flash and cache in decode_plans.CACHE_TYPES:
            file = replace(file, config=with_flash(file.config, AUTO, target, say, DTYPES[cache]))
        run_sizes = decode_plans.RunSizes.of(cells, rows or (0 if hidden else sequences), prompts)
        plan_options = swa_full, parts, longest, checkpoints, hidden, target, has_hidden_states
        plan = ContextPlan(file, run_sizes, sequences, cache, *plan_options)
        layout, graphs = plan.graphs(cells)

        def needed_nbytes(num_cells: int) -> int:
            other_nbytes = beside if isinstance(beside, int) else beside(num_cells)
            return plan.nbytes(num_cells) + other_nbytes

        if resident is not None and target != CPU:
            raise ContextError("resident limits pages of a model on the CPU; leave it out")
        if memory is not None:
            check_room(cells, memory, needed_nbytes)
        with pages_within(resident, lambda: needed_nbytes(cells)):
            session = Session(target.limits)
            session.share(file.stored())
            executors = session.executors(graphs)
        self._set_up(file.config, layout, run_sizes, executors, sequences, parts)
        self._checkpoints = StateCheckpoints(checkpoints, spacing or self.pools.checkpoint_spacing)
        self._origin, self._report = saved_state.state_origin(file, layout), say

    @property
    def pages(self) -> PageBudget | None:
        """The limit on pages of the model in memory, which another context may share; None without `resident`."""
        return self._session.pages

    @classmethod
    def within(
        cls, config: Config, cache: CacheLayout, sizes: decode_plans.RunSizes,
        runs: Mapping[decode_plans.RunKey, Executor], sequences: int = 1, *, parts: bool = False, checkpoints: int = 0,
    ) -> "Context":  # fmt: skip
        """Create a context in a session that others use, too, as a training run's, from executors of `place_runs`.

        parts        each sequence has cells of its own
        checkpoints  most saved states (window, scans) of each sequence
        """
        self = cls.__new__(cls)
        self._set_up(config, cache, sizes, runs, sequences, parts)
        self._checkpoints = StateCheckpoints(checkpoints, self.pools.checkpoint_spacing)
        self._origin, self._report = saved_state.StateOrigin(), lambda line: None
        return self

    def _set_up(
        self, config: Config, cache: CacheLayout, run_sizes: decode_plans.RunSizes,
        executors: Mapping[decode_plans.RunKey, Executor], sequences: int, parts: bool,
    ) -> None:  # fmt: skip
        self.config, self.cache, self.sizes, self.runs = config, cache, run_sizes, executors
        self._session, self._draws = executors[1].session, SAMPLER_FLOATS in executors[1].inputs
        self.pools = CellPools.of(config, cache, sequences, parts)
        self.adapters = AdapterScales(config.lora, sequences)
        self._leaf_names = saved_state.leaf_names(config, cache)
        self._idle_seqs = dict[int, None]()  # idle sequences, the oldest first

    # ---- running

    def decode(
        self, tokens: Sequence[int], seqs: SequenceIds = 0, *, wanted: Sequence[int] | None = None,
        stop: StopCallback | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Read the next tokens of sequences; returns logits (len(wanted), V), or hidden values (len(wanted), C).

        seqs    the sequence of all tokens, or of each: a number, or several that share it
        wanted  indices in `tokens` of tokens with results, ascending; default: the last token of each sequence
        stop    called between ops; if true, Stopped is raised, and tokens of runs before stay

        Raises CacheFull and ContextError; nothing has changed then.
        """
        row_results = self._run_tokens(tokens, seqs, wanted, stop)
        width = self.runs[1].placed.graph.outputs["result"].shape[1]
        return np.array(row_results, np.float32).reshape(len(row_results), width)

    def choices(
        self, tokens: Sequence[int], chains: Sequence[Chain], seqs: SequenceIds = 0, *,
        wanted: Sequence[int] | None = None, stop: StopCallback | None = None,
        hidden_states: dict[int, np.ndarray] | None = None,
    ) -> list[SamplerInput]:  # fmt: skip
        """Read the next tokens; returns for each wanted row what `chain.choose` takes: logits, candidates or a token.

        chains  one for each wanted row; rows of one chain are consecutive tokens of its text
        hidden_states  its keys, indices in `tokens`, get values before the last norm (C,); see `results.head_logits`
        """
        return self._run_tokens(tokens, seqs, wanted, stop, chains, hidden_states)

    def _run_tokens(
        self, tokens: Sequence[int], seqs: SequenceIds, requested_rows: Sequence[int] | None, stop: StopCallback | None,
        chains: Sequence[Chain] | None = None, hidden_states: dict[int, np.ndarray] | None = None,
    ) -> list[SamplerInput]:  # fmt: skip
        """Run tokens, in several runs if need be; returns the result of each requested row."""
        seq_sets = self._seq_sets(tokens, seqs)
        rows = result_rows(seq_sets, requested_rows)
        row_results = RowResults.for_chains(len(rows), chains)
        row_results.hidden_states = hidden_states or {}
        self._make_room(seq_sets)
        placed_pieces = list[PlacedTokens]()
        try:
            for part in self.sizes.parts(tokens, seq_sets, rows, states=self.pools.num_states > 0):
                self._run_once(*part, stop, placed_pieces, row_results)
        except CacheFull:  # of the ring, where several tokens have one position
            for placed_tokens in placed_pieces:
                self.pools.free_tokens(placed_tokens)
            for seq in {token_seqs[0] for token_seqs in seq_sets}:
                self._checkpoints.drop_after(seq, self.next(seq))
            raise
        for seq in {seq for token_seqs in seq_sets for seq in token_seqs}:
            self._idle_seqs.pop(seq, None)
        return row_results.row_results

    def _seq_sets(self, tokens: Sequence[int], seqs: SequenceIds) -> list[tuple[int, ...]]:
        """Check tokens and sequences; returns the sequences of each token. Raises ContextError."""
        seqs_by_token = [seqs] * len(tokens) if isinstance(seqs, int | np.integer) else [*seqs]
        seq_sets = [(x,) if isinstance(x, int | np.integer) else tuple(x) for x in seqs_by_token]
        if not seq_sets or len(seq_sets) != len(tokens) or not all(seq_sets):
            fact = f"there are {len(tokens)} tokens and sequences for {len(seq_sets)}"
            raise ContextError(f"{fact}; each token needs one")
        all_integers = all(isinstance(token, int | np.integer) for token in tokens)
        if not all_integers or not 0 <= min(tokens) <= max(tokens) < self.config.vocab_size:
            raise ContextError(f"tokens are whole numbers from 0 to {self.config.vocab_size - 1}")
        for seq in {seq for token_seqs in seq_sets for seq in token_seqs}:
            self.pools.check_positions(seq)
            self.pools.check_complete(seq)
        self.pools.next_positions(seq_sets)
        return seq_sets

    def _make_room(self, sets: list[tuple[int, ...]]) -> None:
        """Remove released sequences, the oldest first, until all tokens fit. Raises CacheFull, and removes none."""
        seqs = np.array([token_seqs[0] for token_seqs in sets], np.int32)
        used = {seq for token_seqs in sets for seq in token_seqs}
        for seq in self.pools.purged(seqs, [seq for seq in self._idle_seqs if seq not in used]):
            self.remove(seq)

    def _run_once(
        self, ids: np.ndarray, sets: list[tuple[int, ...]], rows: list[int], stop: StopCallback | None,
        done: list[PlacedTokens], row_results: RowResults,
    ) -> None:  # fmt: skip
        """Run some tokens at once, or in halves where the ring lacks room; adds what ran to `done`, and the results of
        `rows`, indices in `ids`, to `row_results`."""
        try:
            placed_tokens = self.pools.place_tokens(ids, sets)
        except CacheFull:
            half_size = len(ids) // 2
            if not half_size:
                raise
            first_rows = [output_row for output_row in rows if output_row < half_size]
            second_rows = [output_row - half_size for output_row in rows if output_row >= half_size]
            self._run_once(ids[:half_size], sets[:half_size], first_rows, stop, done, row_results)
            self._run_once(ids[half_size:], sets[half_size:], second_rows, stop, done, row_results)
            return
        size = min(run_size for run_size in self.sizes.token_counts if run_size >= len(ids))
        try:
            run_inputs = self.pools.inputs(placed_tokens, size, flash=self.config.flash)
            run_inputs |= self.adapters.inputs(sets, size)
            run_inputs |= row_results.inputs(rows, self.sizes.num_rows(size), draws=self._draws)
            names = row_results.output_names(len(rows))
            row_results.add(len(rows), len(ids), self.runs[size](run_inputs, stop=stop, only=names))
        except BaseException:
            self.pools.free_tokens(placed_tokens)
            raise
        done.append(placed_tokens)
        self._save_checkpoint(placed_tokens, rows)

    # ---- sequences

    def next(self, seq: int) -> int:
        """Return the position of a sequence's next token: 0 if the sequence is empty."""
        self.pools.check_positions(seq)
        return self.pools.all.next(seq)

    def tokens(self, seq: int) -> list[int]:
        """Return the tokens of a sequence by position."""
        self.pools.check_positions(seq)
        return [int(t) for t in self.pools.tokens[self.pools.all.of(seq)]]

    def copy(self, seq: int, to: int, since: int = 0, until: int | None = None) -> None:
        """Copy positions of `seq` from `since` on, below `until`, to `to`; they share cells, but not with `parts`."""
        self.pools.check_positions(seq, since, until)
        self.pools.check_positions(to)
        if seq != to:
            moves = self.pools.copy(seq, to, since, until)
            self._checkpoints.drop_after(to, since)
            self._idle_seqs.pop(to, None)
            self._move_cells(moves)

    def remove(self, seq: int, since: int = 0, until: int | None = None) -> None:
        """Remove positions of a sequence from `since` on, below `until`; later positions stay as they are."""
        self.pools.check_positions(seq, since, until)
        self.pools.drop_positions(seq, since, until)
        self._checkpoints.drop_after(seq, since)
        if not len(self.pools.all.of(seq)):
            self._idle_seqs.pop(seq, None)

    def keep(self, seq: int) -> None:
        """Remove all sequences but `seq`."""
        self.pools.check_positions(seq)
        for other_seq in range(self.pools.sequences):
            if other_seq != seq:
                self.remove(other_seq)

    def shift(self, seq: int, by: int, since: int = 0, until: int | None = None) -> None:
        """Add `by` to positions of a sequence from `since` on, below `until`; tokens below 0 are removed."""
        self._change_positions(seq, since, until, by=by)

    def divide(self, seq: int, divisor: int, since: int = 0, until: int | None = None) -> None:
        """Divide positions of a sequence from `since` on, below `until`, rounding down: several tokens may have one."""
        self._change_positions(seq, since, until, divisor=divisor)

    def _change_positions(self, seq: int, since: int, until: int | None, **options: int) -> None:
        """Move or divide positions since … until - 1 of a sequence: in the tables, then the keys in the cache."""
        self.pools.check_positions(seq, since, until)
        moves = self.pools.change_positions(seq, since, until, **options)
        self._checkpoints.drop_after(seq, since)
        self._move_cells(moves)

    def release(self, seq: int) -> None:
        """Mark a sequence as idle: when room is short, idle sequences are removed, the oldest first."""
        self.pools.check_positions(seq)
        self._idle_seqs.pop(seq, None)
        self._idle_seqs[seq] = None

    def reuse(self, seq: int, tokens: Sequence[int]) -> int:
        """Keep of a sequence only the longest prefix of `tokens` that can go on; returns its length, < len(tokens)."""
        self.pools.check_positions(seq)
        num_common, cached_tokens = 0, self.tokens(seq)
        positions = self.pools.all.pos[self.pools.all.of(seq)]
        is_in_order = np.array_equal(positions, np.arange(len(cached_tokens)))
        max_common = min(len(cached_tokens), len(tokens) - 1) if is_in_order else 0
        while num_common < max_common and cached_tokens[num_common] == tokens[num_common]:
            num_common += 1
        self.pools.drop_positions(seq, num_common)
        if not self.pools.is_complete(seq):
            num_common = self._restore_window(seq)
        self._checkpoints.drop_after(seq, num_common)
        return num_common

    def _move_cells(self, moves: dict[str, CellMove]) -> None:
        """Move keys and values, and scan states, in the cache as the moves of each pool say."""
        if cell_pools.STATE in moves:
            saved_state.move_states(
                self._session, self._leaf_names[cell_pools.STATE], moves.pop(cell_pools.STATE)
            )
        num_moves = max((len(move.to) for move in moves.values()), default=0)
        for at in range(0, num_moves, decode_plans.MOVED):
            run, pool_names = self.runs[decode_plans.MOVE_RUN], self.cache.pools(self.config)
            run(cell_pools.move_inputs(moves, pool_names, at, decode_plans.MOVED, run.inputs))

    # ---- states

    def save(self, seqs: Sequence[int] | None = None) -> bytes:
        """Return the state of sequences (None: all), for `restore` in a context of the same model and cache type."""
        saved_seqs = range(self.pools.sequences) if seqs is None else seqs
        for seq in saved_seqs:
            self.pools.check_positions(seq)
        saved_sequences = saved_state.SavedSequences.from_pools(
            self.pools, self._leaf_names, self._session, [*saved_seqs]
        )
        saved_sequences.scales = self.adapters.scales[[*saved_seqs]].tolist()
        return saved_state.pack_state(saved_sequences, self._origin)

    def restore(self, state: bytes, seqs: Sequence[int] | None = None) -> None:
        """Restore sequences that `save` saved, as the sequences `seqs`; None: as those with the saved numbers. Raises
        ContextError for damaged or foreign states, CacheFull if they do not fit; nothing has changed then."""
        saved_sequences = saved_state.unpack_state(
            state, self._origin, saved_state.views(self.pools, self._leaf_names, self._session)
        )
        target_seqs = saved_sequences.target_seqs(seqs)
        for seq in target_seqs:
            self.pools.check_positions(seq)
        self.adapters.set([], saved_sequences.scales)  # raises where they do not fit
        saved_sequences.restore_cells(self.pools, self._session, target_seqs)
        self.adapters.set(target_seqs, saved_sequences.scales)
        for seq in target_seqs:
            self._checkpoints.drop_after(seq, 0)
            self._idle_seqs.pop(seq, None)

    def save_file(self, path: str | Path, seqs: Sequence[int] | None = None) -> None:
        """Save sequences to a file, which is replaced atomically, see `save`."""
        with atomic_file(path) as file:
            file.write(self.save(seqs))

    def restore_file(self, path: str | Path, seqs: Sequence[int] | None = None) -> None:
        """Restore sequences from a file, see `restore`. Raises ContextError, which names the file, and OSError."""
        try:
            self.restore(Path(path).read_bytes(), seqs)
        except ContextError as error:
            raise ContextError(f"{path}: {error}") from None

    def _save_checkpoint(self, piece: PlacedTokens, rows: Sequence[int]) -> None:
        """Save windows and scan states of sequences whose next saved state is due, or whose prompt goes on after this
        run; `rows`: indices of its tokens with results."""
        if (self.pools.ring_cells or self.pools.num_states) and self._checkpoints.max_checkpoints:
            for seq in piece.seqs:
                if piece.goes_on(seq, rows) or self._checkpoints.is_due(seq, self.next(seq)):
                    saved_sequences = saved_state.SavedSequences.from_pools(
                        self.pools, self._leaf_names, self._session, [seq], False
                    )
                    self._checkpoints.add_state(seq, self.next(seq), saved_sequences)

    def _restore_window(self, seq: int) -> int:
        """Take a sequence back to its latest state, in the cache or saved, or empty it; returns the tokens left."""
        checkpoint = self._checkpoints.latest_state(seq, self.next(seq))
        states = self.pools.pools.get(cell_pools.STATE)
        num_retained = states.next(seq) if states else 0
        if num_retained > (checkpoint[0] if checkpoint else 0):  # the last run's first state
            self.pools.drop_positions(seq, num_retained)
            return num_retained
        if checkpoint is None:
            if self._checkpoints.max_checkpoints:
                self._report(REREAD_MESSAGE.format(seq))
            self.pools.drop_positions(seq)
            return 0
        checkpoint_pos, saved_sequences = checkpoint
        self.pools.drop_positions(seq, checkpoint_pos)
        self.pools.drop_positions(seq, pools=saved_sequences.parts)
        saved_sequences.restore_cells(self.pools, self._session, [seq])
        return checkpoint_pos
