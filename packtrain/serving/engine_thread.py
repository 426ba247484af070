"""The engine: a thread that runs the model for all slots together, one batch after the other."""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.kv_cache import Context, ContextError
from packtrain.inference.sampling import Chain, Given
from packtrain.models.kv_cell_table import CacheFull
from packtrain.serving.generation_jobs import (
    CANCELLED,
    FAILED,
    Busy,
    Counts,
    End,
    Job,
    Ticket,
    Told,
)
from packtrain.serving.slots import Slot, Writing

T = TypeVar("T")
CHUNK = 64  # tokens of one run: what a short prompt waits for while a long one is read
PATIENCE = 4  # runs after which a prompt is read even if shorter ones wait
SHARED = 16  # tokens that another prompt must have in common with this one to be waited for
SIMILAR = (
    0.1  # share of a prompt that a slot must know to be taken for that, as llama-server's -sps
)


@dataclass(slots=True)
class Totals:
    """Since the start: tokens and seconds of prompts and of answers, runs, and slots that were busy in them.

    cached   tokens of prompts that were in the cache
    longest  tokens of the longest text
    """

    read: int = 0
    cached: int = 0
    longest: int = 0
    reading: float = 0.0
    written: int = 0
    writing: float = 0.0
    runs: int = 0
    busy: int = 0


class Engine:
    """Jobs in, text out. All calls of the context are made by its own thread.

    waiting  most jobs that wait for a slot
    similar  share of a prompt that a slot must know to be preferred for it
    shifts   an answer that fills the context goes on: tokens in the middle of the text are forgotten
    pause    called after each run, once all that it gave has been told
    """

    def __init__(
        self, context: Context, tokenizer: Tokenizer, *, waiting: int = 256, chunk: int = CHUNK,
        similar: float = SIMILAR, shifts: bool = False,
    ) -> None:  # fmt: skip
        self.context, self.totals = context, Totals()
        self.slots = [Slot(number) for number in range(context.pools.sequences)]
        self._tokenizer, self._waiting, self._similar = tokenizer, waiting, similar
        self._shifts, self.pause = shifts, _nothing
        self._chunk = max(chunk, len(self.slots) + 1)
        self._queue, self._calls = deque[Ticket](), deque[Callable[[], None]]()
        self._change, self._closing, self._hurried = threading.Condition(), False, False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def limit(self) -> int:
        """How many tokens a sequence can have."""
        pools = self.context.pools
        return pools.cells // pools.sequences if pools.parts else pools.cells

    # ---- from any thread

    def submit(self, job: Job, tell: Callable[[Told], None]) -> Ticket:
        """Queue a job. Raises Busy."""
        ticket = Ticket(job, tell)
        with self._change:
            if self._closing:
                raise Busy("the server is shutting down")
            if len(self._queue) >= self._waiting:
                raise Busy(f"{self._waiting} requests are waiting already; try again later")
            self._queue.append(ticket)
            self._change.notify()
        return ticket

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the engine's thread, between two runs. Raises Busy."""
        future = Future[T]()

        def work() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        with self._change:
            if self._closing:
                raise Busy("the server is shutting down")
            self._calls.append(work)
            self._change.notify()
        return future

    @property
    def waiting(self) -> int:
        """Jobs that wait for a slot."""
        return len(self._queue)

    def close(self, patience: float) -> None:
        """Take no more jobs; after `patience` seconds, those that are not done end as cancelled."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join(patience)
        self._hurried = True
        self._thread.join()

    def hurry(self) -> None:
        """All that is not done ends as cancelled, once the server closes; from a signal's handler, too."""
        self._hurried = True

    # ---- in its own thread

    def _run(self) -> None:
        while True:
            with self._change:
                while not (self._queue or self._calls or self._all() or self._closing):
                    self._change.wait()
                if self._closing and not (self._queue or self._calls or self._all()):
                    return
                calls = [self._calls.popleft() for _ in range(len(self._calls))]
            for work in calls:
                work()
            try:
                self._end_cancelled()
                self._admit()
                self._step()
            except Exception as error:  # a fault of ours: who waits is told, and the server goes on
                traceback.print_exc()
                for slot in self.slots:
                    if slot.writing:
                        self._finish(slot, FAILED, f"internal error: {type(error).__name__}")
                        self.context.remove(slot.number)
            self.pause()

    def _all(self) -> list[Writing]:
        return [slot.writing for slot in self.slots if slot.writing]

    def _end_cancelled(self) -> None:
        is_closing = self._closing and self._hurried
        for slot in self.slots:
            if slot.writing and (is_closing or slot.writing.ticket.cancelled):
                self._finish(slot, CANCELLED)
        with self._change:
            cancelled = [ticket for ticket in self._queue if is_closing or ticket.cancelled]
            for ticket in cancelled:
                self._queue.remove(ticket)
        for ticket in cancelled:
            ticket.tell(End(CANCELLED, Counts(len(ticket.job.prompt))))

    def _finish(self, slot: Slot, reason: str, message: str = "") -> None:
        """End the answer of a slot, whose cells stay until room is short; those that pause may go on."""
        assert slot.writing
        slot.writing.end(reason, message)
        slot.writing = None
        self.context.release(slot.number)
        for writing in self._all():
            writing.paused = False

    # ---- which slot

    def _admit(self) -> None:
        """Give jobs to idle slots, the first come first; one whose beginning is just being read waits for that."""
        for ticket in [*self._queue]:
            if len(self._all()) == len(self.slots):
                return
            slot = self._slot_for(ticket.job)
            if slot is not None:
                with self._change:
                    self._queue.remove(ticket)
                try:
                    self._begin(slot, ticket)
                except Exception as error:
                    if slot.writing is None:
                        message = f"internal error: {type(error).__name__}"
                        ticket.tell(End(FAILED, Counts(len(ticket.job.prompt)), why=message))
                    raise

    def _slot_for(self, job: Job) -> Slot | None:
        free_slots = [slot for slot in self.slots if not slot.writing]
        if job.slot >= 0:
            free_slots = [slot for slot in free_slots if slot.number == job.slot]
        if not free_slots or self._is_being_read(job):
            return None
        best = max(free_slots, key=lambda slot: (self._known(slot, job), -slot.used))
        num_cached = self._known(best, job)
        if num_cached > self._similar * len(job.prompt) and not self._loses(best, num_cached):
            return best
        return min(free_slots, key=lambda slot: slot.used)

    def _loses(self, slot: Slot, num_cached: int) -> bool:
        """Whether a slot would lose more than is used of it, though another slot can share that part."""
        pools = self.context.pools
        shares = not pools.parts and not pools.ring
        return shares and len(pools.all.of(slot.number)) > 2 * num_cached

    def _known(self, slot: Slot, job: Job) -> int:
        """How much of a prompt is in the cells of a slot."""
        if slot.scales != job.adapters:
            return 0
        pools = self.context.pools
        return common(pools.tokens[pools.all.of(slot.number)], job.prompt)

    def _is_being_read(self, job: Job) -> bool:
        """Whether a slot reads a prompt that begins like this one, further than any slot has got."""
        num_cached = max(self._known(slot, job) for slot in self.slots)
        coming = (
            common(w.job.prompt, job.prompt)
            for w in self._all()
            if w.reading and not w.paused and w.job.adapters == job.adapters
        )
        return job.reuse and max(coming, default=0) >= num_cached + SHARED

    def _begin(self, slot: Slot, ticket: Ticket) -> None:
        job, context = ticket.job, self.context
        try:
            writing = Writing(ticket, self._tokenizer, slot.number)
        except InputError as error:
            ticket.tell(End(FAILED, Counts(len(job.prompt)), why=str(error)))
            return
        if not job.reuse:
            context.remove(slot.number)
        else:
            self._share(slot, job)
        if slot.scales != job.adapters:
            context.remove(slot.number)
        slot.scales, slot.used, slot.writing = job.adapters, time.monotonic(), writing
        context.adapters.set([slot.number], [job.adapters])
        writing.cached = context.reuse(slot.number, job.prompt)
        writing.left = [*job.prompt[writing.cached :]]
        self.totals.cached += writing.cached
        writing.tell_progress()

    def _share(self, slot: Slot, job: Job) -> None:
        """If another slot knows more of the prompt, have the same cells."""
        if self.context.pools.parts:
            return
        best = max(self.slots, key=lambda other: self._known(other, job))
        num_cached = self._known(best, job)
        if num_cached >= self._known(slot, job) + SHARED:
            self.context.remove(slot.number)
            self.context.copy(best.number, slot.number, 0, num_cached)
            slot.scales = job.adapters

    # ---- one run

    def _step(self) -> None:
        """Run the model once for the tokens that come next, and choose tokens from the results."""
        tokens, seqs, rows, chains = list[int](), list[int](), list[int](), list[Chain]()
        parts = self._batch()
        for slot, count in parts:
            assert slot.writing
            tokens += slot.writing.left[:count]
            seqs += [slot.number] * count
            if count == len(slot.writing.left):
                rows.append(len(tokens) - 1)
                chains.append(slot.writing.chain)
        if not tokens:
            return
        start_time = time.perf_counter()
        try:
            results = self.context.choices(tokens, chains, seqs, wanted=rows)
        except CacheFull:
            self._make_room()
            return
        self._read(parts, results)
        self._count(parts, time.perf_counter() - start_time)

    def _batch(self) -> list[tuple[Slot, int]]:
        """Slots, and how many of their tokens are read: one of each that writes, and prompts or a part of one."""
        active_slots = [s for s in self.slots if s.writing and not s.writing.paused]
        batch = [(s, 1) for s in active_slots if s.writing and not s.writing.reading]
        prompts = [(s, s.writing) for s in active_slots if s.writing and s.writing.reading]
        prompts.sort(key=lambda p: (p[1].waited < PATIENCE, len(p[1].left)))
        room = self._chunk - len(batch)
        for i, (slot, writing) in enumerate(prompts):
            count = min(len(writing.left), room)
            writing.waited += 1
            if i == 0 or count == len(writing.left):  # short ones do not wait for parts of others
                batch.append((slot, count))
                writing.waited, room = 0, room - count
        return batch

    def _read(self, parts: Sequence[tuple[Slot, int]], results: Sequence[Given]) -> None:
        """Give the results of a run to the slots that have read all they had."""
        rows = iter(results)
        for slot, count in parts:
            writing = slot.writing
            assert writing
            writing.left = writing.left[count:]
            writing.tell_progress()
            if writing.left:
                continue
            length = len(writing.job.prompt) + len(writing.ids) + 1
            self.totals.longest = max(self.totals.longest, length)
            try:
                writing.take(next(rows))
            except InputError as error:
                self._finish(slot, FAILED, str(error))
                continue
            if writing.ended:
                self._finish(slot, "")
            elif len(writing.text) > self.limit and not self._shift(slot):
                self._finish(slot, "context")

    def _shift(self, slot: Slot) -> bool:
        """Forget a part of a text, so that its answer can go on; whether that was possible."""
        writing, context = slot.writing, self.context
        if writing is None or writing.reading or not self._shifts:
            return False
        since, until = writing.forget(self._tokenizer.add_bos)
        try:
            context.remove(slot.number, since, until)
            context.shift(slot.number, since - until, since)
        except (CacheFull, ContextError):
            # cells of other answers, too, have no room to be copied, or positions are learned: read the rest again
            context.remove(slot.number)
            writing.left = [*writing.text]
        return since < until

    def _make_room(self) -> None:
        """Let the answer that began last pause; its text is read again later. One alone is over."""
        active_slots = [slot for slot in self.slots if slot.writing and not slot.writing.paused]
        last = max(active_slots, key=lambda slot: slot.used)
        assert last.writing
        if len(active_slots) == 1:
            if not self._shift(last):
                self._finish(last, "context")
            return
        last.writing.paused, last.writing.left = True, [*last.writing.text]
        self.context.remove(last.number)

    def _count(self, parts: Sequence[tuple[Slot, int]], seconds: float) -> None:
        totals, num_tokens = self.totals, sum(count for _, count in parts)
        num_written = sum(1 for _, count in parts if count == 1)
        totals.runs += 1
        totals.busy += len(parts)
        totals.read += num_tokens - num_written
        totals.written += num_written
        totals.reading += seconds * (num_tokens - num_written) / num_tokens
        totals.writing += seconds * num_written / num_tokens


def _nothing() -> None:
    """Nobody listens."""


def common(cached_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many tokens two texts have in common at the beginning."""
    size = min(len(cached_ids), len(token_ids))
    differ = np.flatnonzero(np.asarray(cached_ids[:size]) != np.asarray(token_ids[:size]))
    return int(differ[0]) if len(differ) else size
