"""The engine: a thread that runs the model for all slots together, one batch after the other."""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import TypeVar

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.generator import Drafter
from packtrain.inference.kv_cache import Context, ContextError
from packtrain.inference.kv_cache.decode_plans import HEAD_RUN
from packtrain.inference.kv_cache.kv_cells import CacheFull
from packtrain.inference.kv_cache.results import head_logits
from packtrain.inference.sampling import Chain, SamplerInput
from packtrain.serving import generation_jobs
from packtrain.serving.generation_jobs import CANCELLED, FAILED, AnswerEnd, JobTicket, TokenCounts
from packtrain.serving.slots import Slot, SlotAnswer

T = TypeVar("T")
# Tokens of one run. While 4,000 tokens are read, a short prompt waits 2.8 to 3.4 times as long for its first token
# with 128, and 1.9 to 2.5 times with 64, as in an idle server.
CHUNK = 64
NO_STATE = np.empty(0, np.float32)
MAX_WAIT_RUNS = 4  # runs after which a prompt is read even if shorter ones wait
SHARED = 16  # tokens that another prompt must have in common with this one to be waited for
SIMILAR = 0.1  # share of a prompt that a slot must know to be preferred, as llama-server's -sps


class ServingEngine:
    """Runs jobs in slots and reports their text. A thread, started at creation, makes all calls of the context.

    max_waiting        most jobs that wait for a slot
    min_similarity     share of a prompt's tokens that must be in a slot's cells for the slot to be preferred
    use_context_shift  an answer that fills the context goes on: tokens in the middle of the text are forgotten
    drafters           one for each slot, which guesses tokens of its answers; (): no tokens are guessed
    draft_max          most tokens of a run that are guessed, for all slots together
    on_run_end         called after each run, once all its results are reported
    """

    def __init__(
        self, context: Context, tokenizer: Tokenizer, *, max_waiting: int = 256, chunk: int = CHUNK,
        min_similarity: float = SIMILAR, use_context_shift: bool = False,
        drafters: Sequence[Drafter] = (), draft_max: int = 0,
    ) -> None:  # fmt: skip
        self.context, self.totals = context, generation_jobs.EngineTotals()
        self.slots = [Slot(slot_index) for slot_index in range(context.pools.sequences)]
        for slot, drafter in zip(self.slots, drafters, strict=False):
            slot.drafter = drafter
        self._draft_max, self._use_context_shift = draft_max, use_context_shift
        self._tokenizer, self._max_waiting, self._similar = tokenizer, max_waiting, min_similarity
        self.on_run_end: Callable[[], None] = lambda: None
        self._chunk_tokens = max(chunk, len(self.slots) + 1)
        self._queue, self._pending_calls = deque[JobTicket](), deque[Callable[[], None]]()
        self._condition, self._is_closing, self._cancels_all = threading.Condition(), False, False
        self._thread = threading.Thread(target=self._run_loop, name="engine", daemon=True)
        self._thread.start()

    @property
    def max_seq_tokens(self) -> int:
        """Most tokens of a sequence: all of the context's cells, or a slot's part where slots have parts."""
        pools = self.context.pools
        return pools.cells // pools.sequences if pools.parts else pools.cells

    # ---- from any thread

    def submit_job(
        self, job: generation_jobs.GenerationJob, tell: Callable[[generation_jobs.JobEvent], None]
    ) -> JobTicket:
        """Queue a job; the engine's thread calls tell(event). Raises ServerBusy if the queue is full or closes."""
        ticket = JobTicket(job, tell)
        with self._condition:
            if self._is_closing:
                raise generation_jobs.ServerBusy("the server is shutting down")
            if len(self._queue) >= self._max_waiting:
                fact = f"{self._max_waiting} requests are waiting already; try again later"
                raise generation_jobs.ServerBusy(fact)
            self._queue.append(ticket)
            self._condition.notify()
        return ticket

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Let the engine's thread call a function between runs; returns a future of its result. Raises ServerBusy."""
        future = Future[T]()

        def run_call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        with self._condition:
            if self._is_closing:
                raise generation_jobs.ServerBusy("the server is shutting down")
            self._pending_calls.append(run_call)
            self._condition.notify()
        return future

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait for a slot."""
        return len(self._queue)

    def close(self, timeout_seconds: float) -> None:
        """Refuse new jobs, wait for the thread's end; after `timeout_seconds`, unfinished jobs end as cancelled."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join(timeout_seconds)
        self._cancels_all = True
        self._thread.join()

    def cancel_all(self) -> None:
        """Let unfinished jobs end as cancelled once the server closes; a signal's handler may call this, too."""
        self._cancels_all = True

    # ---- in its own thread

    def _run_loop(self) -> None:
        while True:
            with self._condition:
                while not (self._queue or self._pending_calls or self._all() or self._is_closing):
                    self._condition.wait()
                if self._is_closing and not (self._queue or self._pending_calls or self._all()):
                    return
                calls = [self._pending_calls.popleft() for _ in range(len(self._pending_calls))]
            for pending_call in calls:
                pending_call()
            try:
                self._end_cancelled()
                self._admit_jobs()
                self._run_step(self._draft_max)
            except Exception as error:  # our own fault: clients are told, and the server goes on
                traceback.print_exc()
                for slot in self.slots:
                    if slot.answer:
                        self._finish_answer(slot, FAILED, f"internal error: {type(error).__name__}")
                        self.context.remove(slot.index)
            self.on_run_end()

    def _all(self) -> list[SlotAnswer]:
        """Return the answers that are being written, of all slots."""
        return [slot.answer for slot in self.slots if slot.answer]

    def _end_cancelled(self) -> None:
        cancels_all = self._is_closing and self._cancels_all
        for slot in self.slots:
            if slot.answer and (cancels_all or slot.answer.ticket.is_cancelled):
                self._finish_answer(slot, CANCELLED)
        with self._condition:
            cancelled = [ticket for ticket in self._queue if cancels_all or ticket.is_cancelled]
            for ticket in cancelled:
                self._queue.remove(ticket)
        for ticket in cancelled:
            ticket.tell(AnswerEnd(CANCELLED, TokenCounts(len(ticket.job.prompt))))

    def _finish_answer(self, slot: Slot, reason: str, message: str = "") -> None:
        """End a slot's answer (`reason` as in AnswerEnd); cells stay until room is short; paused answers go on."""
        assert slot.answer
        slot.answer.finish(reason, message)
        slot.answer = None
        self.context.release(slot.index)
        for answer in self._all():
            answer.is_paused = False

    # ---- which slot

    def _admit_jobs(self) -> None:
        """Give jobs to idle slots in order; a job whose prefix a slot is just reading waits for that slot."""
        for ticket in [*self._queue]:
            if len(self._all()) == len(self.slots):
                return
            slot = self._slot_for(ticket.job)
            if slot is not None:
                with self._condition:
                    self._queue.remove(ticket)
                try:
                    self._start_answer(slot, ticket)
                except Exception as error:
                    if slot.answer is None:
                        error_message = f"internal error: {type(error).__name__}"
                        counts = TokenCounts(len(ticket.job.prompt))
                        ticket.tell(AnswerEnd(FAILED, counts, error_message=error_message))
                    raise

    def _slot_for(self, job: generation_jobs.GenerationJob) -> Slot | None:
        """Choose an idle slot for a job, preferably one that knows its prompt; None: the job waits."""
        free_slots = [slot for slot in self.slots if not slot.answer]
        if job.slot >= 0:
            free_slots = [slot for slot in free_slots if slot.index == job.slot]
        if not free_slots or self._is_being_read(job):
            return None
        best_slot = max(free_slots, key=lambda slot: (self._num_cached(slot, job), -slot.used))
        num_cached = self._num_cached(best_slot, job)
        if num_cached > self._similar * len(job.prompt) and not self._wastes(best_slot, num_cached):
            return best_slot
        return min(free_slots, key=lambda slot: slot.used)

    def _wastes(self, slot: Slot, num_cached: int) -> bool:
        """Return whether a job that reuses `num_cached` cells would drop most of a slot's, which others could share."""
        pools = self.context.pools
        can_share = not pools.parts and not pools.ring_cells
        return can_share and len(pools.all.of(slot.index)) > 2 * num_cached

    def _num_cached(self, slot: Slot, job: generation_jobs.GenerationJob) -> int:
        """Return how many tokens of a job's prompt are in the cells of a slot."""
        if slot.scales != job.adapter_scales:
            return 0
        pools = self.context.pools
        return common_prefix_length(pools.tokens[pools.all.of(slot.index)], job.prompt)

    def _is_being_read(self, job: generation_jobs.GenerationJob) -> bool:
        """Return whether a slot is reading a prompt that shares SHARED more tokens with this one than any cells do."""
        num_cached = max(self._num_cached(slot, job) for slot in self.slots)
        jobs = (w.job for w in self._all() if w.reading and not w.is_paused)
        prompts = (j.prompt for j in jobs if j.adapter_scales == job.adapter_scales)
        shared_lengths = (common_prefix_length(prompt, job.prompt) for prompt in prompts)
        return job.use_cache and max(shared_lengths, default=0) >= num_cached + SHARED

    def _start_answer(self, slot: Slot, ticket: JobTicket) -> None:
        """Begin the answer to a ticket in a slot, and reuse cells that have its prompt."""
        job, context = ticket.job, self.context
        try:
            answer = SlotAnswer(ticket, self._tokenizer, slot.index)
        except InputError as error:
            ticket.tell(AnswerEnd(FAILED, TokenCounts(len(job.prompt)), error_message=str(error)))
            return
        if not job.use_cache:
            context.remove(slot.index)
        else:
            self._share_cells(slot, job)
        if slot.scales != job.adapter_scales:
            context.remove(slot.index)
        slot.scales, slot.used, slot.answer = job.adapter_scales, time.monotonic(), answer
        context.adapters.set([slot.index], [job.adapter_scales])
        answer.num_cached = context.reuse(slot.index, job.prompt)
        answer.left = [*job.prompt[answer.num_cached :]]
        self.totals.cached += answer.num_cached
        answer.tell_progress()

    def _share_cells(self, slot: Slot, job: generation_jobs.GenerationJob) -> None:
        """Let `slot` share the cells of a slot that knows SHARED more tokens of the prompt, if there is one."""
        if self.context.pools.parts:
            return
        best_slot = max(self.slots, key=lambda other_slot: self._num_cached(other_slot, job))
        num_cached = self._num_cached(best_slot, job)
        if num_cached >= self._num_cached(slot, job) + SHARED:
            self.context.remove(slot.index)
            self.context.copy(best_slot.index, slot.index, 0, num_cached)
            slot.scales = job.adapter_scales

    # ---- one run

    def _run_step(self, draft_max: int) -> None:
        """Run the model once for the tokens that come next, up to `draft_max` of them guessed, and choose tokens."""
        tokens, seqs, output_rows, chains = list[int](), list[int](), list[int](), list[Chain]()
        start_time, batch = time.perf_counter(), self._next_batch(draft_max)
        hidden_states = dict[int, np.ndarray]()
        for slot, num_tokens in batch:
            assert slot.answer
            tokens += [*slot.answer.left, *slot.answer.guess][:num_tokens]
            seqs += [slot.index] * num_tokens
            if slot.answer.is_scoring:
                places = range(len(tokens) - num_tokens, len(tokens))
                hidden_states |= dict.fromkeys(places, NO_STATE)
            rows = slot.answer.wanted_rows(num_tokens)
            output_rows += [len(tokens) - num_tokens + row for row in rows]
            chains += [slot.answer.chain] * len(rows)
        if not tokens:
            return
        num_written = sum(n for slot, n in batch if slot.answer and not slot.answer.reading)
        try:
            row_results = self.context.choices(
                tokens, chains, seqs, wanted=output_rows, hidden_states=hidden_states
            )
        except CacheFull:
            if any(answer.guess for answer in self._all()):
                self._run_step(0)
            else:
                self._make_room()
            return
        self._read(batch, row_results, iter(hidden_states.values()))
        seconds = (time.perf_counter() - start_time) / len(tokens)
        self.totals.runs += 1
        self.totals.busy += len(batch)
        self.totals.reading += seconds * (len(tokens) - num_written)
        self.totals.output_seconds += seconds * num_written

    def _next_batch(self, draft_max: int) -> list[tuple[Slot, int]]:
        """Set answers' guesses, at most `draft_max` in all; return the next run's (slot, number of tokens): the last
        token of an answer with its guesses, or a part of a prompt."""
        active_slots = [s for s in self.slots if s.answer and not s.answer.is_paused]
        writing = [(s, s.answer) for s in active_slots if s.answer and not s.answer.reading]
        num_guessed = (draft_max + 1 - len(active_slots)) // max(len(writing), 1)
        for slot, answer in writing:
            slot.propose_guess(min(num_guessed, self.max_seq_tokens - len(answer.text_ids) - 1))
        batch = [(slot, 1 + len(answer.guess)) for slot, answer in writing]
        prompt_answers = [(s, s.answer) for s in active_slots if s.answer and s.answer.reading]
        prompt_answers.sort(key=lambda p: (p[1].num_waited_runs < MAX_WAIT_RUNS, len(p[1].left)))
        num_free_tokens = self._chunk_tokens - sum(num_tokens for _, num_tokens in batch)
        for i, (slot, answer) in enumerate(prompt_answers):
            count = min(len(answer.left), num_free_tokens)
            answer.num_waited_runs += 1
            if i == 0 or count == len(answer.left):  # short ones do not wait for parts of others
                batch.append((slot, count))
                answer.num_waited_runs, num_free_tokens = 0, num_free_tokens - count
        return batch

    def _read(
        self, batch: Sequence[tuple[Slot, int]], row_results: Sequence[SamplerInput],
        hidden_states: Iterator[np.ndarray],
    ) -> None:  # fmt: skip
        """Give a run's results, in the batch's order, to its answers: score prompts, choose tokens, end answers."""
        result_iterator = iter(row_results)
        for slot, num_tokens in batch:
            answer = slot.answer
            assert answer
            results = [next(result_iterator) for _ in answer.wanted_rows(num_tokens)]
            counts = len(answer.output_ids), answer.num_drafted, answer.num_accepted
            try:
                if answer.is_scoring:
                    prompt_states = [*islice(hidden_states, num_tokens)]
                    answer.score_prompt(head_logits(self.context.runs[HEAD_RUN], prompt_states))
                self.totals.read += answer.take(num_tokens)
                answer.tell_progress()
                if answer.left:
                    continue
                length = len(answer.job.prompt) + len(answer.output_ids) + 1
                self.totals.max_text_tokens = max(self.totals.max_text_tokens, length)
                answer.choose_tokens(results)
            except InputError as error:
                self._finish_answer(slot, FAILED, str(error))
                continue
            finally:
                self.totals.output_tokens += len(answer.output_ids) - counts[0]
                self.totals.decode_steps += max(len(answer.output_ids) - max(counts[0], 1), 0)
                self.totals.drafts += answer.num_drafted > counts[1]
                self.totals.drafted += answer.num_drafted - counts[1]
                self.totals.accepted += answer.num_accepted - counts[2]
            if answer.num_drafted > counts[1]:
                self._remove_guesses(slot)
            if answer.is_ended:
                self._finish_answer(slot, "")
            elif len(answer.text_ids) >= self.max_seq_tokens and not self._shift_context(slot):
                self._finish_answer(slot, "context")

    def _remove_guesses(self, slot: Slot) -> None:
        """Remove wrong guesses from the KV cache; a window or a state that they overwrote is read again."""
        if (answer := slot.answer) is not None:
            self.context.remove(slot.index, len(answer.text_ids) - 1)
            if not answer.is_ended and not self.context.pools.is_complete(slot.index):
                answer.left = answer.text_ids[self.context.reuse(slot.index, answer.text_ids) :]

    def _shift_context(self, slot: Slot) -> bool:
        """Forget the middle of a slot's text, so that its answer can go on; returns whether that was possible."""
        answer, context = slot.answer, self.context
        if answer is None or answer.reading or not self._use_context_shift:
            return False
        start_pos, end_pos = answer.forget_middle(self._tokenizer.add_bos)
        try:
            context.remove(slot.index, start_pos, end_pos)
            context.shift(slot.index, start_pos - end_pos, start_pos)
        except (CacheFull, ContextError):
            # cells of other answers, too, have no room to be copied, or positions are learned: read the rest again
            context.remove(slot.index)
            answer.left = [*answer.text_ids]
        return start_pos < end_pos

    def _make_room(self) -> None:
        """Pause the answer that began last, whose text is read again later; if it is the only one, shift or end it."""
        active_slots = [slot for slot in self.slots if slot.answer and not slot.answer.is_paused]
        last_slot = max(active_slots, key=lambda slot: slot.used)
        assert last_slot.answer
        if len(active_slots) == 1:
            if not self._shift_context(last_slot):
                self._finish_answer(last_slot, "context")
            return
        last_slot.answer.is_paused, last_slot.answer.left = True, [*last_slot.answer.text_ids]
        self.context.remove(last_slot.index)


def common_prefix_length(cached_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return how many tokens two texts share at their beginning."""
    size = min(len(cached_ids), len(token_ids))
    differ = np.flatnonzero(np.asarray(cached_ids[:size]) != np.asarray(token_ids[:size]))
    return int(differ[0]) if len(differ) else size
