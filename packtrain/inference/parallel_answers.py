"""Several answers to one prompt, which is read once: their tokens are computed together."""

import time
from collections.abc import Iterator, Sequence

from packtrain.data.tokenizer import Stream, Tokenizer
from packtrain.inference.generator import Limits, Pieces, Speed, chain_of, check_prompt, is_loop
from packtrain.inference.kv_cache import Context
from packtrain.inference.sampling import Chain, Constraint, Given, Sampling


class Answer:
    """One of them: `ids`, and `ended` by end, stop, count, context, loop or interrupted."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: tuple[str, ...], chain: Chain
    ) -> None:
        self.chain, self.seed, self.ids, self.ended = chain, chain.seed, list[int](), ""
        self.text, self._ends = "", tokenizer.ends
        self._pieces, self._stream = Pieces(stops), Stream(tokenizer)
        for id in prompt:  # so that the space before the first word is part of the text
            self._stream.feed(id)

    def take(self, candidates: Given) -> None:
        """Choose the next token, out of what left the device."""
        chosen = self.chain.choose(candidates)
        if chosen in self._ends:
            self.end("end")
            return
        self.chain.accept(chosen)
        self.ids.append(chosen)
        self.text += self._pieces.add(self._stream.feed(chosen))
        if self._pieces.stopped:
            self.ended = "stop"

    def end(self, reason: str) -> None:
        self.ended = reason
        self.text += self._pieces.add(self._stream.flush()) + self._pieces.rest()


class Answers:
    """Answers of sequences 0 … of a context; iterate over it until all have ended, for what is new in the first that
    has not.

    reading, writing  speeds of the prompt, and of all answers together
    """

    def __init__(
        self,
        context: Context,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Limits,
        grammar: Constraint | None = None,
        size: int = 0,
    ) -> None:
        """size: most tokens of prompt and answer; 0: those of the context."""
        self._context, self._limits, self._size = context, limits, size or context.cache.cells
        check_prompt(prompt, self._size)
        self.prompt, self.reading, self.writing = tuple(prompt), Speed(), Speed()
        chains = [chain_of(tokenizer, sampling, seed, prompt, grammar) for seed in seeds]
        self.every = [Answer(tokenizer, self.prompt, limits.stops, chain) for chain in chains]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Number of an answer, and a piece of its text, all of one before the next."""
        shown = [0] * len(self.every)
        for _ in self._run():
            for number, answer in enumerate(self.every):
                yield number, answer.text[shown[number] :]
                shown[number] = len(answer.text)
                if not answer.ended:
                    break

    def _run(self) -> Iterator[None]:
        start_time, context = time.perf_counter(), self._context
        num_reused = context.reuse(0, self.prompt)
        first = context.decode(self.prompt[num_reused:], 0)[0]  # of which each chain takes its own
        outputs: list[Given] = [first] * len(self.every)
        for seq in range(1, len(self.every)):
            context.remove(seq)
            context.copy(0, seq)
        self.reading.add(len(self.prompt) - num_reused, time.perf_counter() - start_time)
        self._limit(self.every, len(self.every))
        active = [(seq, answer) for seq, answer in enumerate(self.every) if not answer.ended]
        while active:
            start_time = time.perf_counter()
            for (_, answer), row in zip(active, outputs, strict=True):
                answer.take(row)
            room = int((context.pools.all.sets == 0).sum())
            self._limit([answer for _, answer in active if not answer.ended], room)
            active = [(seq, answer) for seq, answer in active if not answer.ended]
            if active:
                tokens = [answer.ids[-1] for _, answer in active]
                seqs = [seq for seq, _ in active]
                chains = [answer.chain for _, answer in active]
                outputs = context.choices(tokens, chains, seqs)
                self.writing.add(len(seqs), time.perf_counter() - start_time)
            yield

    def _limit(self, active: list[Answer], room: int) -> None:
        """End those that may not go on, with so many cells free."""
        for answer in active:
            if self._limits.interrupted():
                answer.end("interrupted")
            elif answer.chain.over:
                answer.end("end")
            elif len(answer.ids) == self._limits.count:
                answer.end("count")
            elif room < len(active) or len(self.prompt) + len(answer.ids) > self._size:
                answer.end("context")
            elif self._limits.loop_tokens and is_loop(answer.ids, self._limits.loop_tokens):
                answer.end("loop")
