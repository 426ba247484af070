"""Text generation: the prompt is processed in chunks, then tokens come one at a time, and text as it is complete.

The session holds the weights; a trainer passes its own, so that samples need no second copy. Nothing prints."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.text import plural
from packtrain.data.tokenizer import StreamDecoder, Tokenizer
from packtrain.data.tokenizer.token_table import CONTROL, UNKNOWN
from packtrain.dtypes import Dtype, f32
from packtrain.engine.backends import CPU, Target
from packtrain.inference.kv_cache import Context
from packtrain.inference.sampling import Chain, Constraint, SamplerInput, Sampling, find_breakers
from packtrain.inference.sampling.dry import Breakers
from packtrain.models.model_file import ModelFile

NO_TOKENS: Sequence[int] = ()
LOOP_TOKENS, LOOP_REPEATS, LOOP_PERIOD = 160, 5, 256
LOOP_WINDOW, LOOP_NGRAM, MAX_DISTINCT_NGRAMS = 256, 12, 0.15
NO_PROMPT = "the prompt has no tokens; the vocabulary adds none at its beginning, so give some text"


class Drafter(Protocol):
    """Guesses how a text goes on, see speculative."""

    def propose(self, text: Sequence[int], max_tokens: int) -> list[int]:
        """Return at most `max_tokens` tokens that may come next."""


class Generator:
    """One sequence of a context: `feed` reads tokens and returns the logits of the next one."""

    def __init__(self, context: Context, seq: int = 0) -> None:
        self.context, self.seq = context, seq

    @classmethod
    def from_model(
        cls, model: ModelFile, num_cells: int, cache: Dtype = f32, target: Target = CPU, rows: int = 1,
        **options: Any,
    ) -> "Generator":  # fmt: skip
        """Create a generator with a file's mapped weights and a KV cache in its own session. Raises DoesNotFit.

        rows     most tokens whose logits one run gives
        options  further arguments of Context
        """
        return cls(
            Context(model, cells=num_cells, cache=cache.name, target=target, rows=rows, **options)
        )

    @property
    def size(self) -> int:
        """How many tokens fit into the context."""
        return self.context.cache.num_cells

    @property
    def cached_tokens(self) -> list[int]:
        """The tokens in the cache, in order."""
        return self.context.tokens(self.seq)

    def truncate(self, since: int = 0) -> None:
        """Drop the cached tokens from position `since` on; the text continues from there."""
        self.context.remove(self.seq, since)

    def tokens_to_feed(self, text: Sequence[int]) -> Sequence[int]:
        """Return the tokens of `text` to feed next: the last, or more where the cache has lost cells or a state."""
        return text[-1:] if self.context.pools.is_complete(self.seq) else self.reuse_prefix(text)

    def reuse_prefix(self, tokens: Sequence[int]) -> Sequence[int]:
        """Keep the longest cached prefix of a text; returns the tokens still to feed, at least one."""
        return tokens[self.context.reuse(self.seq, tokens) :]

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """Read tokens, at least one, and return the logits (V,) after the last."""
        logits: np.ndarray = self.context.decode(tokens, self.seq)[0]
        return logits

    def step(self, tokens: Sequence[int], chain: Chain) -> tuple[list[SamplerInput], Sequence[int]]:
        """Feed as many tokens as one run takes; return ([what `chain.choose` chooses the next token from], []), or ([],
        the tokens left) if they are more."""
        run_size = self.context.sizes.next_size(len(tokens))
        run_tokens, remaining_tokens = tokens[:run_size], tokens[run_size:]
        output_rows = [] if remaining_tokens else [len(run_tokens) - 1]
        return self.context.choices(
            run_tokens, [chain] * len(output_rows), self.seq, wanted=output_rows
        ), remaining_tokens

    def verify(self, tokens: Sequence[int], num_drafted: int, chain: Chain) -> list[SamplerInput]:
        """Feed tokens that end in `num_drafted` guesses; return num_drafted + 1 inputs of `chain.choose`, from which it
        chooses a token in place of each guess, and the token after the last."""
        output_rows = range(len(tokens) - num_drafted - 1, len(tokens))
        return self.context.choices(
            tokens, [chain] * len(output_rows), self.seq, wanted=output_rows
        )


@dataclass(slots=True)
class Speed:
    """Number of tokens processed, and the seconds for them, including sampling."""

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
class GenerationLimits:
    """Where a reply ends, in addition to the vocabulary's end tokens.

    max_tokens      after this many tokens; -1: no limit
    stops           before the first of these texts
    is_interrupted  called between runs of the model; ends the reply if true
    loop_tokens     after a text that has repeated itself for so many tokens, see `is_loop`; 0: never
    """

    max_tokens: int = -1
    stops: tuple[str, ...] = ()
    is_interrupted: Callable[[], bool] = lambda: False
    loop_tokens: int = 0

    def end_reason(self, ids: Sequence[int], is_chain_over: bool, is_full: bool) -> str:
        """Return why a reply with these tokens ends now: interrupted, end, count, context or loop, or "" if it goes on.
        `is_chain_over`: its grammar allows no more tokens; `is_full`: the context has no room for more."""
        if self.is_interrupted():
            return "interrupted"
        if is_chain_over:
            return "end"
        if len(ids) == self.max_tokens:
            return "count"
        if is_full:
            return "context"
        return "loop" if self.loop_tokens and is_loop(ids, self.loop_tokens) else ""


def is_loop(ids: Sequence[int], min_tokens: int = LOOP_TOKENS) -> bool:
    """Return whether the end of a text repeats itself. A piece of text stands there at least LOOP_REPEATS times in a
    row, over at least `min_tokens` tokens; or nearly all runs of LOOP_NGRAM tokens among the last LOOP_WINDOW have
    stood there before: a loop with a stumble now and then. Short repetitions are no loops, nor are lists and tables of
    which a word in each row differs."""
    for period in range(1, min(len(ids) // LOOP_REPEATS, LOOP_PERIOD) + 1):
        loop_start = len(ids) - max(min_tokens, LOOP_REPEATS * period)
        if (
            ids[-1] == ids[-1 - period]
            and loop_start >= 0
            and ids[loop_start:-period] == ids[loop_start + period :]
        ):
            return True
    if len(ids) < LOOP_WINDOW or len(ids) % LOOP_NGRAM:
        return False
    window_tokens = ids[-LOOP_WINDOW:]
    ngrams = [*zip(*(window_tokens[at:] for at in range(LOOP_NGRAM)), strict=False)]
    return len(set(ngrams)) <= MAX_DISTINCT_NGRAMS * len(ngrams)


def check_prompt(prompt: Sequence[int], size: int) -> None:
    """Raise InputError for an empty prompt, or one of more than `size` tokens, the size of the context."""
    if not prompt:
        raise InputError(NO_PROMPT)
    if len(prompt) > size:
        fact = f"the prompt has {plural(len(prompt), 'token')} and the context {size}"
        raise InputError(f"{fact}; the prompt must fit")


class Reply:
    """The model's reply to a prompt; iterate over the reply for pieces of text as they are complete. Afterwards
    `end_reason` is end, stop, count, context, loop or interrupted; `ids` are its tokens, `reading` and `writing` the
    speeds of prompt and reply; `drafted` and `accepted` count the tokens that a drafter guessed, at most `draft_max` at
    once, and those that were right."""

    def __init__(
        self, generator: Generator, tokenizer: Tokenizer, prompt: Sequence[int], sampling: Sampling, seed: int,
        limits: GenerationLimits = GenerationLimits(), drafter: Drafter | None = None, draft_max: int = 7,
        grammar: Constraint | None = None,
    ) -> None:  # fmt: skip
        check_prompt(prompt, generator.size)
        self.prompt, self.ids, self.end_reason = tuple(prompt), list[int](), ""
        self.reading, self.writing = Speed(), Speed()
        self._generator, self._tokenizer = generator, tokenizer
        self._limits = limits
        self._chain = make_chain(tokenizer, sampling, seed, prompt, grammar)
        # A run of eight rows multiplies packed weights as they are; seventeen rows unpack them and run as 32. On
        # repetitive text Gemma 3 270M wrote 1.7 to 1.9 × as fast with seven guesses, 1.0 to 1.3 × with sixteen.
        self._drafter, self._draft_max = drafter, draft_max
        self.drafted = self.accepted = 0

    def __iter__(self) -> Iterator[str]:
        text, token_stream = StopTextFilter(self._limits.stops), StreamDecoder(self._tokenizer)
        for id in self.prompt:  # so that the space before the first word is part of the text
            token_stream.feed(id)
        for id in self._tokens():
            yield text.add(token_stream.feed(id))
            if text.is_stopped:
                self.end_reason = "stop"
                return
        yield text.add(token_stream.flush()) + text.flush()

    def _tokens(self) -> Iterator[int]:
        """Yield the reply's tokens, guessed ones while the chain chooses the same; does not look for stop texts."""
        pending_tokens = self._generator.reuse_prefix(self.prompt)
        while not self._is_over():
            speed, start_time = self.writing if self.ids else self.reading, time.perf_counter()
            guess, left = self._propose_draft(), NO_TOKENS
            if guess:
                rows = self._generator.verify([*pending_tokens, *guess], len(guess), self._chain)
            else:
                rows, left = self._generator.step(pending_tokens, self._chain)
            num_read = len(pending_tokens) - len(left)
            for row_result, draft_token in zip_longest(rows, guess):
                next_token = self._chain.choose(row_result)
                speed.add(num_read, time.perf_counter() - start_time)
                num_read, start_time = 1, time.perf_counter()
                if next_token in self._tokenizer.eog_ids:
                    self.end_reason = "end"
                    return
                self._chain.accept(next_token)
                self.ids.append(next_token)
                self.accepted += next_token == draft_token
                yield next_token
                if next_token != draft_token or self._is_over():
                    break
            else:
                speed.add(num_read, time.perf_counter() - start_time)
            if guess:
                self._generator.truncate(len(self.prompt) + len(self.ids) - 1)
            pending_tokens = left or self._generator.tokens_to_feed((*self.prompt, *self.ids))

    def _propose_draft(self) -> list[int]:
        """Return tokens that the drafter guesses to come next, counted in `drafted`; [] without a drafter or room."""
        max_draft = min(self._draft_max, self._num_free_tokens - 1)
        if self._limits.max_tokens >= 0:
            max_draft = min(max_draft, self._limits.max_tokens - len(self.ids) - 1)
        if self._drafter is None or not self.ids or max_draft <= 0:
            return []
        draft_tokens = self._drafter.propose((*self.prompt, *self.ids), max_draft)
        self.drafted += len(draft_tokens)
        return draft_tokens

    @property
    def _num_free_tokens(self) -> int:
        """How many more tokens the context can read."""
        return self._generator.size - len(self.prompt) - max(len(self.ids) - 1, 0) + (not self.ids)

    def _is_over(self) -> bool:
        """Return whether the reply is over, and set `end_reason` if so."""
        reason = self._limits.end_reason(self.ids, self._chain.over, not self._num_free_tokens)
        self.end_reason = reason or self.end_reason
        return bool(self.end_reason)


def make_chain(
    tokenizer: Tokenizer, sampling: Sampling, seed: int, prompt: Sequence[int], grammar: Constraint | None = None,
) -> Chain:  # fmt: skip
    """Create the sampler chain of a sequence that begins with `prompt`. Raises InputError."""
    sampling.check_sampling(tokenizer.vocab_size)
    breakers = _breaker_tokens(tokenizer, sampling.breakers) if sampling.dry_multiplier else {}
    eog_ids = sorted(tokenizer.eog_ids, key=lambda id: (id != tokenizer.eot, id != tokenizer.eos))
    infill_tokens = (
        lambda id: b"" if tokenizer.token_types[id] in (CONTROL, UNKNOWN) else tokenizer.piece(id), eog_ids,
    )  # fmt: skip
    return Chain(sampling, seed, prompt, breakers, grammar, infill_tokens)


@lru_cache(maxsize=2)
def _breaker_tokens(tokenizer: Tokenizer, texts: tuple[str, ...]) -> Breakers:
    """Return the texts that end DRY's repetitions as tokens, see `find_breakers`; cached."""
    pieces = [tokenizer.piece(id) for id in range(tokenizer.vocab_size)]
    return find_breakers(texts, pieces, lambda text: tokenizer.encode(text, False, False, False))


class StopTextFilter:
    """Releases text piece by piece up to a stop text, `matched_stop`, and holds back an end that may become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops, self.is_stopped, self.matched_stop, self._pending_text = stops, False, "", ""

    def add(self, piece: str) -> str:
        """Add a piece of the reply; return the text that can be released now, up to the first stop text."""
        text = self._pending_text + piece
        matches = [(at, stop_text) for stop_text in self.stops if (at := text.find(stop_text)) >= 0]
        if matches:
            at, self.matched_stop = min(matches)
            self.is_stopped, self._pending_text = True, ""
            return text[:at]
        prefix_lengths = (
            length
            for stop_text in self.stops
            for length in range(1, min(len(stop_text), len(text) + 1))
            if text.endswith(stop_text[:length])
        )
        num_held = max(prefix_lengths, default=0)
        self._pending_text = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        return self._pending_text
