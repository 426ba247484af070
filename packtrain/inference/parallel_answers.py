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

    def take(self, given: Given) -> None:
        """Choose the next token, out of what left the device."""
        chosen = self.chain.choose(given)
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
        began, context = time.perf_counter(), self._context
        known = context.reuse(0, self.prompt)
        first = context.decode(self.prompt[known:], 0)[0]  # of which each chain takes its own
        found: list[Given] = [first] * len(self.every)
        for seq in range(1, len(self.every)):
            context.remove(seq)
            context.copy(0, seq)
        self.reading.add(len(self.prompt) - known, time.perf_counter() - began)
        self._limit(self.every, len(self.every))
        going = [(seq, answer) for seq, answer in enumerate(self.every) if not answer.ended]
        while going:
            began = time.perf_counter()
            for (_, answer), given in zip(going, found, strict=True):
                answer.take(given)
            room = int((context.pools.all.sets == 0).sum())
            self._limit([answer for _, answer in going if not answer.ended], room)
            going = [(seq, answer) for seq, answer in going if not answer.ended]
            if going:
                tokens = [answer.ids[-1] for _, answer in going]
                seqs = [seq for seq, _ in going]
                chains = [answer.chain for _, answer in going]
                found = context.choices(tokens, chains, seqs)
                self.writing.add(len(seqs), time.perf_counter() - began)
            yield

    def _limit(self, going: list[Answer], room: int) -> None:
        """End those that may not go on, with so many cells free."""
        for answer in going:
            if self._limits.interrupted():
                answer.end("interrupted")
            elif answer.chain.over:
                answer.end("end")
            elif len(answer.ids) == self._limits.count:
                answer.end("count")
            elif room < len(going) or len(self.prompt) + len(answer.ids) > self._size:
                answer.end("context")
            elif self._limits.loop_tokens and is_loop(answer.ids, self._limits.loop_tokens):
                answer.end("loop")
