"""Text generation: the prompt is processed in chunks, then tokens come one at a time, and text as it is complete.

The session holds the weights; a trainer passes its own, so that samples need no second copy of them. Nothing here
prints.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.text import plural
from packtrain.data.tokenizer import Stream, Tokenizer
from packtrain.dtypes import Dtype, f32
from packtrain.engine.backends import CPU, Target
from packtrain.inference.kv_cache import Context
from packtrain.inference.sampling import Chain, Constraint, Given, Sampling, find_breakers
from packtrain.inference.sampling.dry import Breakers
from packtrain.models.model_file import ModelFile

NONE: Sequence[int] = ()
LOOP_TOKENS, LOOP_REPEATS, LOOP_PERIOD = 160, 5, 256
LOOP_WINDOW, LOOP_RUN, LOOP_DISTINCT = 256, 12, 0.15


class Drafter(Protocol):
    """Guesses how a text goes on, see speculative."""

    def propose(self, text: Sequence[int], count: int) -> list[int]:
        """At most `count` next tokens."""


class Generator:
    """One sequence of a context: feed it tokens, it returns the logits of the next one."""

    def __init__(self, context: Context, seq: int = 0) -> None:
        self.context, self.seq = context, seq

    @classmethod
    def of(
        cls,
        model: ModelFile,
        cells: int,
        cache: Dtype = f32,
        target: Target = CPU,
        rows: int = 1,
        **options: Any,
    ) -> "Generator":
        """A generator with the mapped weights of a file, and a cache in its own session. Raises DoesNotFit.

        rows  most tokens whose logits one run gives
        options   more for Context
        """
        return cls(
            Context(model, cells=cells, cache=cache.name, target=target, rows=rows, **options)
        )

    @property
    def size(self) -> int:
        """How many tokens fit."""
        return self.context.cache.cells

    @property
    def fed(self) -> list[int]:
        """The tokens in the cache, in order."""
        return self.context.tokens(self.seq)

    @property
    def cells_left(self) -> int:
        """How many more tokens fit."""
        return self.size - self.context.next(self.seq)

    def forget(self, since: int = 0) -> None:
        """Drop the tokens from place `since` on; the text continues from there."""
        self.context.remove(self.seq, since)

    def missing(self, text: Sequence[int]) -> Sequence[int]:
        """What must be fed to go on with a text whose other tokens are there: its last token, or more for a state."""
        return text[-1:] if self.context.pools.whole(self.seq) else self.resume(text)

    def resume(self, tokens: Sequence[int]) -> Sequence[int]:
        """Keep the longest prefix of a text that is cached; returns the tokens still to feed, at least one."""
        return tokens[self.context.reuse(self.seq, tokens) :]

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits (V,) after the last of these tokens, at least one."""
        logits: np.ndarray = self.context.decode(tokens, self.seq)[0]
        return logits

    def step(self, tokens: Sequence[int], chain: Chain) -> tuple[list[Given], Sequence[int]]:
        """Feed as many tokens as one run takes; returns what the chain needs after the last, and those that remain."""
        size = self.context.sizes.next(len(tokens))
        current, left = tokens[:size], tokens[size:]
        output_rows = [] if left else [len(current) - 1]
        return self.context.choices(
            current, [chain] * len(output_rows), self.seq, wanted=output_rows
        ), left

    def checked(self, tokens: Sequence[int], guessed: int, chain: Chain) -> list[Given]:
        """Feed tokens of which the last are guesses; what the chain needs after each, and after the one before."""
        output_rows = range(len(tokens) - guessed - 1, len(tokens))
        return self.context.choices(
            tokens, [chain] * len(output_rows), self.seq, wanted=output_rows
        )


@dataclass(slots=True)
class Speed:
    """Number of tokens processed, and the time for it, including sampling."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    def __str__(self) -> str:
        return plural(self.tokens, "token") + (
            f", {self.tokens / self.seconds:,.0f} tokens/s" if self.tokens else ""
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a reply ends, in addition to the vocabulary's end tokens.

    count        after this many tokens; -1: no limit
    stops        before the first of these texts
    interrupted  called between runs of the model; ends the reply if true
    loop_tokens  after a text that has repeated itself for so many tokens, see `is_loop`; 0: never
    """

    count: int = -1
    stops: tuple[str, ...] = ()
    interrupted: Callable[[], bool] = lambda: False
    loop_tokens: int = 0


def is_loop(ids: Sequence[int], min_tokens: int = LOOP_TOKENS) -> bool:
    """Whether the end of a text repeats itself.

    A piece of text stands there at least LOOP_REPEATS times in a row, over at least `min_tokens` tokens; or nearly all
    runs of LOOP_RUN tokens among the last LOOP_WINDOW have stood there before: a loop with a stumble now and then.
    Short repetitions are no loops, nor are lists and tables of which a word in each row differs.
    """
    for period in range(1, min(len(ids) // LOOP_REPEATS, LOOP_PERIOD) + 1):
        start = len(ids) - max(min_tokens, LOOP_REPEATS * period)
        if (
            ids[-1] == ids[-1 - period]
            and start >= 0
            and ids[start:-period] == ids[start + period :]
        ):
            return True
    if len(ids) < LOOP_WINDOW or len(ids) % LOOP_RUN:
        return False
    last = ids[-LOOP_WINDOW:]
    runs = [*zip(*(last[at:] for at in range(LOOP_RUN)), strict=False)]
    return len(set(runs)) <= LOOP_DISTINCT * len(runs)


def check_prompt(prompt: Sequence[int], size: int) -> None:
    """Raise InputError unless a context of `size` tokens has room for the prompt."""
    if not prompt:
        raise InputError(
            "the prompt has no tokens; the vocabulary adds none at its beginning, so give some text"
        )
    if len(prompt) > size:
        raise InputError(
            f"the prompt has {plural(len(prompt), 'token')} and the context {size}; the prompt must fit"
        )


class Reply:
    """The model's reply to a prompt; iterate over it for pieces of text as they are complete.

    Afterwards `ended` is the reason: end, stop, count, context, loop or interrupted; `ids` are its tokens, `reading`
    and `writing` the speeds of prompt and reply; `drafted` and `accepted` count the tokens that a drafter guessed, at
    most `draft_max` at once, and those that were right.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        limits: Limits = Limits(),
        drafter: Drafter | None = None,
        draft_max: int = 7,
        grammar: Constraint | None = None,
    ) -> None:
        check_prompt(prompt, generator.size)
        self.prompt, self.ids, self.ended = tuple(prompt), list[int](), ""
        self.reading, self.writing = Speed(), Speed()
        self._generator, self._tokenizer = generator, tokenizer
        self._limits = limits
        self._chain = chain_of(tokenizer, sampling, seed, prompt, grammar)
        self._drafter, self._draft_max = drafter, draft_max
        self.drafted = self.accepted = 0

    def __iter__(self) -> Iterator[str]:
        text, stream = Pieces(self._limits.stops), Stream(self._tokenizer)
        for id in self.prompt:  # so that the space before the first word is part of the text
            stream.feed(id)
        for id in self._tokens():
            yield text.add(stream.feed(id))
            if text.stopped:
                self.ended = "stop"
                return
        yield text.add(stream.flush()) + text.rest()

    def _tokens(self) -> Iterator[int]:
        """Tokens until the reply ends for any reason but a stop text, which is found in the text."""
        waiting = self._generator.resume(self.prompt)
        while not self._over():
            speed, start_time = self.writing if self.ids else self.reading, time.perf_counter()
            guess, left = self._guess(), NONE
            if guess:
                rows = self._generator.checked([*waiting, *guess], len(guess), self._chain)
            else:
                rows, left = self._generator.step(waiting, self._chain)
            read = len(waiting) - len(left)
            for row, guessed in zip_longest(rows, guess):
                chosen = self._chain.choose(row)
                speed.add(read, time.perf_counter() - start_time)
                read, start_time = 1, time.perf_counter()
                if chosen in self._tokenizer.ends:
                    self.ended = "end"
                    return
                self._chain.accept(chosen)
                self.ids.append(chosen)
                self.accepted += chosen == guessed
                yield chosen
                if chosen != guessed or self._over():
                    break
            else:
                speed.add(read, time.perf_counter() - start_time)
            if guess:
                self._generator.forget(len(self.prompt) + len(self.ids) - 1)
            waiting = left or self._generator.missing((*self.prompt, *self.ids))

    def _guess(self) -> list[int]:
        """Tokens that may come next: they are checked in one run."""
        room = min(self._draft_max, self._room - 1)
        if self._limits.count >= 0:
            room = min(room, self._limits.count - len(self.ids) - 1)
        if self._drafter is None or not self.ids or room <= 0:
            return []
        guess = self._drafter.propose((*self.prompt, *self.ids), room)
        self.drafted += len(guess)
        return guess

    @property
    def _room(self) -> int:
        """How many more tokens the context can read."""
        return self._generator.size - len(self.prompt) - max(len(self.ids) - 1, 0) + (not self.ids)

    def _over(self) -> bool:
        """Whether the reply is over."""
        if self._limits.interrupted():
            self.ended = "interrupted"
        elif self._chain.over:
            self.ended = "end"
        elif len(self.ids) == self._limits.count:
            self.ended = "count"
        elif not self._room:
            self.ended = "context"
        elif self._limits.loop_tokens and is_loop(self.ids, self._limits.loop_tokens):
            self.ended = "loop"
        return bool(self.ended)


def chain_of(
    tokenizer: Tokenizer,
    sampling: Sampling,
    seed: int,
    prompt: Sequence[int],
    grammar: Constraint | None = None,
) -> Chain:
    """The samplers of a sequence that begins with this prompt. Raises InputError."""
    sampling.check_sampling(tokenizer.vocab_size)
    breakers = _breakers(tokenizer, sampling.breakers) if sampling.dry_multiplier else {}
    return Chain(sampling, seed, prompt, breakers, grammar)


@lru_cache(maxsize=2)
def _breakers(tokenizer: Tokenizer, texts: tuple[str, ...]) -> Breakers:
    """Where DRY ends repetitions, in tokens."""
    pieces = [tokenizer.piece(id) for id in range(tokenizer.vocab_size)]
    return find_breakers(texts, pieces, lambda text: tokenizer.encode(text, False, False, False))


class Pieces:
    """Releases text piece by piece, holding back an end that could become a stop text; `found` is the one that came."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops, self.stopped, self.found, self._held = stops, False, "", ""

    def add(self, piece: str) -> str:
        """The text that can be released now, up to the first stop text."""
        text = self._held + piece
        matches = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if matches:
            at, self.found = min(matches)
            self.stopped, self._held = True, ""
            return text[:at]
        keep = max(
            (
                n
                for stop in self.stops
                for n in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:n])
            ),
            default=0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        return self._held
