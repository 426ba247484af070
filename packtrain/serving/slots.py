"""Slots, which are sequences of the context, and the answers that are written in them."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from packtrain.data.tokenizer import StreamDecoder, Tokenizer
from packtrain.inference.generator import Drafter, StopTextFilter, make_chain
from packtrain.inference.sampling import SamplerInput
from packtrain.inference.sampling.sampler_chain import check_finite_logits
from packtrain.inference.sampling.samplers import log_sum_exp
from packtrain.serving import generation_jobs
from packtrain.serving.generation_jobs import AnswerEnd, GeneratedToken, JobTicket, PromptProgress


@dataclass(slots=True)
class Slot:
    """A sequence of the context.

    answer  the answer being written; None: the slot is idle
    scales  adapter scales with which its cells were computed
    used    when the slot was last taken, in seconds of time.monotonic()
    drafter  guesses tokens of its answers; None: none are guessed
    """

    index: int
    answer: "SlotAnswer | None" = None
    scales: tuple[float, ...] = ()
    used: float = 0.0
    drafter: Drafter | None = None

    def propose_guess(self, max_tokens: int) -> None:
        """Set the answer's `guess`, which the next run checks, to at most `max_tokens` tokens from the drafter."""
        if self.answer is not None and self.drafter is not None:
            job, num_outputs = self.answer.job, len(self.answer.output_ids)
            max_left = max_tokens if job.max_tokens < 0 else job.max_tokens - num_outputs - 1
            max_tokens = min(max_tokens, max_left)
            text_ids = self.answer.text_ids
            self.answer.guess = self.drafter.propose(text_ids, max_tokens) if max_tokens > 0 else []


class SlotAnswer:
    """The answer to a ticket, token by token.

    left             tokens that the model has still to read: of the prompt, or the last token written
    output_ids       tokens written
    text_ids         all tokens that count: the prompt and those written, less what was forgotten
    guess            tokens that may follow, which the next run checks
    num_cached       tokens of the prompt that were in the cache
    num_read         tokens of the prompt that were read so far, each counted once
    num_waited_runs  runs since the answer last read tokens
    is_paused        whether the answer waits until there is room in the context
    """

    def __init__(self, ticket: JobTicket, tokenizer: Tokenizer, slot_index: int) -> None:
        """Prepare an answer to the ticket's job. Raises InputError."""
        job = self.job = ticket.job
        self.ticket, self._tokenizer, self._slot = ticket, tokenizer, slot_index
        self.left, self.text_ids, self.output_ids = [*job.prompt], [*job.prompt], list[int]()
        self.guess, self._num_forgotten = list[int](), 0
        self.num_drafted = self.num_accepted = 0
        self.num_cached = self.num_read = self.num_waited_runs = 0
        self.is_paused = False
        self.chain = make_chain(tokenizer, job.sampling, job.seed, job.prompt, job.grammar)
        self.chain.whole = job.num_top_logprobs > 0
        self._pieces = StopTextFilter(job.stops)
        self._stream = StreamDecoder(tokenizer, job.has_special_tokens)
        for id in job.prompt:  # so that the space before the first word is part of the text
            self._stream.feed(id)
        self._unsent_tokens, self.is_ended = list[GeneratedToken](), False
        self._prompt_tokens = [GeneratedToken(job.prompt[0], None)]  # those with a score so far
        self._line, self._has_line = "", False  # the last line, and whether one has ended
        self._start_time = self._first = time.perf_counter()

    @property
    def reading(self) -> bool:
        """Whether the answer reads its prompt, or reads a text again, instead of writing."""
        return not self.output_ids or len(self.left) > 1

    @property
    def is_scoring(self) -> bool:
        """Whether the next tokens are of a prompt that is scored."""
        return self.job.scores_prompt and not self.output_ids

    def wanted_rows(self, num_tokens: int) -> range:
        """Return which of the next `num_tokens` tokens, by index, need results: all if there are guesses, else the last
        of `left` (the tokens still to read) if it is among them."""
        if self.guess:
            return range(num_tokens)
        return range(num_tokens - (num_tokens == len(self.left)), num_tokens)

    def take(self, num_tokens: int) -> int:
        """Drop from `left` the tokens that a run read; returns how many the prompt had that were not read before."""
        num_read = self.num_read
        self.left = self.left[num_tokens:]
        if not self.output_ids:
            self.num_read = max(num_read, len(self.job.prompt) - self.num_cached - len(self.left))
        return self.num_read - num_read

    def score_prompt(self, logit_rows: Iterable[np.ndarray]) -> None:
        """Record log-probabilities of prompt tokens, from the logits (V,) after each token read. Raises InputError."""
        start, prompt = len(self.text_ids) - len(self.left), self.job.prompt
        for position, logits in enumerate(logit_rows, start + 1):
            if position == len(self._prompt_tokens) < len(prompt):
                check_finite_logits(np.arange(len(logits)), logits)
                scored_token = describe_token(logits, prompt[position], self.job.num_top_logprobs)
                self._prompt_tokens.append(scored_token)

    def forget_middle(self, has_bos: bool) -> tuple[int, int]:
        """Cut tokens after num_keep (and BOS if `has_bos`) out of `text_ids`; returns their (start, stop) positions."""
        job, num_cached = self.job, len(self.text_ids) - 1
        num_keep = len(job.prompt) if job.num_keep < 0 else job.num_keep + has_bos
        num_keep = min(num_keep, num_cached - 1)
        num_forgotten = min(job.num_discard or (num_cached - num_keep) // 2, num_cached - num_keep)
        del self.text_ids[num_keep : num_keep + num_forgotten]
        self._num_forgotten += num_forgotten
        return num_keep, num_keep + num_forgotten

    def choose_tokens(self, row_results: Sequence[SamplerInput]) -> None:
        """Choose the next token by the first result, and more while tokens equal the guesses. Raises InputError."""
        guess, self.guess = self.guess, []
        self.num_drafted += len(guess)
        for row_result, guessed_token in zip_longest(row_results[-1 - len(guess) :], guess):
            self.choose_token(row_result)
            if self.is_ended or self.output_ids[-1] != guessed_token:
                return
            self.num_accepted += 1

    def choose_token(self, candidates: SamplerInput) -> None:
        """Choose the next token, and report the text that it completes. Raises InputError."""
        if not self.output_ids:
            self._first = time.perf_counter()
            self._unsent_tokens += self._prompt_tokens if self.job.scores_prompt else ()
        if self.job.max_tokens == 0:
            self.finish("count")
            return
        next_token = self.chain.choose(candidates)
        if next_token in self._tokenizer.eog_ids and not self.job.ignore_eos:
            self.finish("end")
            return
        remaining_candidates = (
            self.chain.remaining_candidates(candidates)
            if self.job.is_post_sampling and isinstance(candidates, np.ndarray)
            else None
        )
        self.chain.accept(next_token)
        self.output_ids.append(next_token)
        self.text_ids.append(next_token)
        self.left = [next_token]
        candidates, top = remaining_candidates or candidates, self.job.num_top_logprobs
        self._unsent_tokens.append(describe_token(candidates, next_token, top))
        text = self._pieces.add(self._stream.feed(next_token))
        _, end, line = text.rpartition("\n")
        self._line, self._has_line = line if end else self._line + line, self._has_line or bool(end)
        self._tell(text)
        if self._pieces.is_stopped:
            self.finish("stop")
        elif self.chain.over:
            self.finish("end")
        elif len(self.output_ids) == self.job.max_tokens or self._is_cut_off():
            self.finish("count")

    def _is_cut_off(self) -> bool:
        """Return whether the answer ends here: its time is up, or a line is indented less than `min_indent`."""
        job, is_timed_out = self.job, 0 < self.job.max_seconds < time.perf_counter() - self._first
        words = self._line.lstrip(" \t")
        return self._has_line and (
            is_timed_out or (bool(words) and len(self._line) - len(words) < job.min_indent)
        )

    def finish(self, reason: str, message: str = "") -> None:
        """End the answer if it has not ended: report the rest of its text, then AnswerEnd with `reason`, `message`."""
        if self.is_ended:
            return
        self.is_ended = True
        if reason != "stop":
            self._tell(self._pieces.add(self._stream.flush()) + self._pieces.flush(), is_last=True)
        stop_text = self._pieces.matched_stop if reason == "stop" else ""
        self.ticket.tell(AnswerEnd(reason, self._token_counts(), self._slot, stop_text, message))

    def _token_counts(self) -> generation_jobs.TokenCounts:
        seconds = self._first - self._start_time, time.perf_counter() - self._first
        counts = len(self.job.prompt), self.num_cached, self.num_read, len(self.output_ids)
        step_counts = self.num_drafted, self.num_accepted, max(len(self.output_ids) - 1, 0)
        return generation_jobs.TokenCounts(*counts, *seconds, self._num_forgotten, *step_counts)

    def tell_progress(self) -> None:
        """Report how much of the prompt has been read, if the job asks for that."""
        if self.job.report_progress and not self.output_ids:
            total_tokens = len(self.job.prompt)
            read, seconds = total_tokens - len(self.left), time.perf_counter() - self._start_time
            self.ticket.tell(PromptProgress(total_tokens, self.num_cached, read, seconds))

    def _tell(self, text: str, is_last: bool = False) -> None:
        if text or (is_last and self._unsent_tokens):
            tokens = tuple(self._unsent_tokens)
            self.ticket.tell(generation_jobs.TextDelta(text, tokens, self._token_counts()))
            self._unsent_tokens.clear()


def describe_token(candidates: SamplerInput, token_id: int, num_top: int) -> GeneratedToken:
    """Return a token with its log-probability and the `num_top` likeliest of `candidates`; num_top 0: its id only."""
    if not num_top or isinstance(candidates, int):
        return GeneratedToken(token_id)
    if isinstance(candidates, np.ndarray):
        logits, ids, token_at = candidates, None, token_id
    else:
        logits, ids = candidates.logits, candidates.ids
        token_at = int(np.flatnonzero(ids == token_id)[0])
    log_sum, num_top = log_sum_exp(logits), min(num_top, len(logits))
    likely = np.array([logits.argmax()])
    if num_top > 1:
        likely = np.argpartition(logits, len(logits) - num_top)[len(logits) - num_top :]
        likely = likely[np.lexsort((likely if ids is None else ids[likely], -logits[likely]))]
    scores = [(int(at if ids is None else ids[at]), float(logits[at]) - log_sum) for at in likely]
    top_tokens = tuple((id, score) for id, score in scores if score > -np.inf)
    return GeneratedToken(token_id, float(logits[token_at]) - log_sum, top_tokens)
