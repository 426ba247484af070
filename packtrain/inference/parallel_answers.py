"""Several answers to one prompt, which is read once: their tokens are computed together."""

import time
from collections.abc import Iterator, Sequence
from functools import partial

from packtrain.data.tokenizer import StreamDecoder, Tokenizer
from packtrain.inference import generator
from packtrain.inference.generator import GenerationLimits, Speed, check_prompt, make_chain
from packtrain.inference.kv_cache import Context
from packtrain.inference.sampling import Chain, Constraint, SamplerInput, Sampling


class ParallelAnswer:
    """One of several answers: its `ids`, and as `end_reason` end, stop, count, context, loop or interrupted."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: tuple[str, ...], chain: Chain
    ) -> None:
        self.chain, self.seed, self.ids, self.end_reason = chain, chain.seed, list[int](), ""
        self.text, self._eos_ids = "", tokenizer.eog_ids
        self._pieces, self._stream = generator.StopTextFilter(stops), StreamDecoder(tokenizer)
        for id in prompt:  # so that the space before the first word is part of the text
            self._stream.feed(id)

    def choose_token(self, candidates: SamplerInput) -> None:
        """Choose the next token from what left the device (logits, candidates or a token), and add its text."""
        next_token = self.chain.choose(candidates)
        if next_token in self._eos_ids:
            self.finish_answer("end")
            return
        self.chain.accept(next_token)
        self.ids.append(next_token)
        self.text += self._pieces.add(self._stream.feed(next_token))
        if self._pieces.is_stopped:
            self.end_reason = "stop"

    def finish_answer(self, reason: str) -> None:
        self.end_reason = reason
        self.text += self._pieces.add(self._stream.flush()) + self._pieces.flush()


class ParallelAnswers:
    """Answers in sequences 0 … of a context, written together; iterating yields their texts, one answer after another.

    reading, writing  speeds of the prompt, and of all answers together
    """

    def __init__(
        self, context: Context, tokenizer: Tokenizer, prompt: Sequence[int], sampling: Sampling, seeds: Sequence[int],
        limits: GenerationLimits, grammar: Constraint | None = None, size: int = 0,
    ) -> None:  # fmt: skip
        """size: most tokens of prompt and answer; 0: those of the context."""
        self._context, self._limits, self._size = context, limits, size or context.cache.num_cells
        check_prompt(prompt, self._size)
        self.prompt, self.reading, self.writing = tuple(prompt), Speed(), Speed()
        answer = partial(ParallelAnswer, tokenizer, self.prompt, limits.stops)
        chains = [make_chain(tokenizer, sampling, seed, prompt, grammar) for seed in seeds]
        self.answers = [*map(answer, chains)]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield the number of an answer and a piece of its text, all of one answer before the next."""
        shown_lengths = [0] * len(self.answers)
        for _ in self._write_answers():
            for answer_index, answer in enumerate(self.answers):
                yield answer_index, answer.text[shown_lengths[answer_index] :]
                shown_lengths[answer_index] = len(answer.text)
                if not answer.end_reason:
                    break

    def _write_answers(self) -> Iterator[None]:
        start_time, context = time.perf_counter(), self._context
        num_reused = context.reuse(0, self.prompt)
        first = context.decode(self.prompt[num_reused:], 0)[0]  # one row of logits for all chains
        outputs: list[SamplerInput] = [first] * len(self.answers)
        for seq in range(1, len(self.answers)):
            context.remove(seq)
            context.copy(0, seq)
        self.reading.add(len(self.prompt) - num_reused, time.perf_counter() - start_time)
        self._end_finished(self.answers, len(self.answers))
        active = [(seq, answer) for seq, answer in enumerate(self.answers) if not answer.end_reason]
        while active:
            start_time = time.perf_counter()
            for (_, answer), row_result in zip(active, outputs, strict=True):
                answer.choose_token(row_result)
            room = int((context.pools.all.sets == 0).sum())
            self._end_finished([answer for _, answer in active if not answer.end_reason], room)
            active = [(seq, answer) for seq, answer in active if not answer.end_reason]
            if active:
                tokens = [answer.ids[-1] for _, answer in active]
                seqs = [seq for seq, _ in active]
                outputs = context.choices(tokens, [answer.chain for _, answer in active], seqs)
                self.writing.add(len(seqs), time.perf_counter() - start_time)
            yield

    def _end_finished(self, active_answers: list[ParallelAnswer], room: int) -> None:
        """End the answers that may not go on, by their limits or as there are only `room` free cells."""
        for answer in active_answers:
            is_full = room < len(active_answers) or len(self.prompt) + len(answer.ids) > self._size
            reason = self._limits.end_reason(answer.ids, answer.chain.over, is_full)
            if reason:
                answer.finish_answer(reason)
