"""Text from a llama in a session: a prompt goes in by chunks, tokens come out one at a time, text as it is complete.

The session holds the weights; a trainer gives its own, so that samples need no second copy of them. Nothing here
reads files or prints.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from packtrain.backends import CPU, Target
from packtrain.dtypes import Dtype, f32
from packtrain.errors import InputError
from packtrain.graph import Graph
from packtrain.models import transformer
from packtrain.models.cache import Cells
from packtrain.models.config import Config
from packtrain.models.file import ModelFile
from packtrain.place import Placed, place
from packtrain.run import Executor, Session
from packtrain.sample import Sampling, choose, draws
from packtrain.tokenizer import Stream, Tokenizer
from packtrain.words import plural

SEQUENCE = 0  # the only one there is
CHUNKS = (512, 128, 32, 8, 1)  # tokens of a prompt that one run takes


def placements(
    config: Config,
    cells: int,
    chunks: tuple[int, ...] = (64, 8, 1),
    types: Mapping[str, Dtype] = transformer.NO_TYPES,
    cache: Dtype = f32,
    target: Target = CPU,
) -> dict[int, Placed]:
    """The graphs of a Generator with a cache of `cells` tokens, for each number of tokens one run can take.

    chunks  those numbers, falling and ending with 1; a prompt is cut into them
    types   of weights that are not f32
    cache   of keys and values, f32 or f16
    """
    placed = {}
    for size in (size for size in chunks if size <= cells):
        leaves = transformer.weights(config, types)
        logits, handles = transformer.generation(config, leaves, size, cells, cache=cache)
        placed[size] = place(Graph({"logits": logits}, handles), target)
    return placed


class Generator:
    """A model with a cache of `cells` tokens: feed it tokens, it gives the logits of the next one.

    runs  executors of its placements, the largest first
    fed   the tokens in the cache, in order
    """

    def __init__(self, cells: int, runs: Mapping[int, Executor]) -> None:
        self.cells, self._runs = Cells(cells), runs
        self.fed: list[int] = []

    @classmethod
    def of(
        cls, model: ModelFile, cells: int, cache: Dtype = f32, target: Target = CPU
    ) -> "Generator":
        """A generator with the weights of a file, mapped, and a cache in a session of its own. Raises DoesNotFit."""
        session = Session(target.limits)
        session.share(model.stored())
        made = placements(model.config, cells, CHUNKS, model.types(), cache, target)
        return cls(cells, {size: session.executor(placed) for size, placed in made.items()})

    @property
    def room(self) -> int:
        """How many more tokens fit."""
        return len(self.cells.pos) - self.cells.length

    def forget(self, since: int = 0) -> None:
        """Drop what was fed from place `since` on; the text goes on from there."""
        self.cells.drop(SEQUENCE, since)
        del self.fed[since:]

    def resume(self, tokens: Sequence[int]) -> Sequence[int]:
        """Keep what the cache has of the beginning of a text; the tokens that are to be fed, one at least."""
        same = (a == b for a, b in zip(self.fed, tokens[:-1], strict=False))
        known = sum(takewhile(bool, same))
        self.forget(known)
        return tokens[known:]

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits (V,) after the last of these tokens, of which there must be one or more."""
        logits, left = self.step(tokens)
        while left:
            logits, left = self.step(left)
        return logits

    def step(self, tokens: Sequence[int]) -> tuple[np.ndarray, Sequence[int]]:
        """Feed as many of the tokens as one run takes: the logits (V,) after them, and the tokens that are left."""
        size = next(size for size in self._runs if size <= len(tokens))
        ids, seqs = np.array(tokens[:size], np.int32), np.full(size, SEQUENCE, np.int32)
        fed = self.cells.feed(ids, seqs, np.array([size - 1], np.int32))
        logits = self._runs[size](fed)["logits"][0]
        self.fed += tokens[:size]
        return logits, tokens[size:]


@dataclass(slots=True)
class Speed:
    """Tokens that went through the model and how long that took, choosing the next one included."""

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
    """Where a reply ends, beside the vocabulary's end tokens.

    count        after so many tokens; -1 sets no limit
    stops        before the first of these texts
    interrupted  is asked between runs of the model, and ends the reply when it says so
    """

    count: int = -1
    stops: tuple[str, ...] = ()
    interrupted: Callable[[], bool] = lambda: False


class Reply:
    """What a model writes after a prompt; iterate over it for pieces of text as they are complete.

    Afterwards `ended` says why: end, stop, count, context or interrupted; `ids` are its tokens, `reading` and
    `writing` say how fast prompt and reply were.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        limits: Limits = Limits(),
    ) -> None:
        if not prompt:
            raise InputError(
                "the prompt has no tokens; the vocabulary adds none at its beginning, so give some text"
            )
        if len(prompt) > len(generator.cells.pos):
            raise InputError(
                f"the prompt has {plural(len(prompt), 'token')} and the context {len(generator.cells.pos)};"
                " the prompt must fit"
            )
        self.prompt, self.ids, self.ended = tuple(prompt), list[int](), ""
        self.reading, self.writing = Speed(), Speed()
        self._generator, self._tokenizer = generator, tokenizer
        self._sampling, self._seed, self._limits = sampling, seed, limits

    def __iter__(self) -> Iterator[str]:
        text, stream = _Text(self._limits.stops), Stream(self._tokenizer)
        for id in self.prompt:  # so that the space before the first word is text
            stream.feed(id)
        for id in self._tokens():
            yield text.add(stream.feed(id))
            if text.stopped:
                self.ended = "stop"
                return
        yield text.add(stream.flush()) + text.rest()

    def _tokens(self) -> Iterator[int]:
        """Tokens until one of the ends but a stop text, which only the text shows."""
        waiting = self._generator.resume(self.prompt)
        while not self._over():
            speed = self.writing if self.ids else self.reading
            began = time.perf_counter()
            logits, left = self._generator.step(waiting)
            chosen = () if left else (self._choose(logits),)
            speed.add(len(waiting) - len(left), time.perf_counter() - began)
            if self._tokenizer.ends.intersection(chosen):
                self.ended = "end"
                return
            self.ids += chosen
            yield from chosen
            waiting = left or chosen

    def _over(self) -> bool:
        """Whether nothing more shall be fed."""
        if self._limits.interrupted():
            self.ended = "interrupted"
        elif len(self.ids) == self._limits.count:
            self.ended = "count"
        elif not self._generator.room:
            self.ended = "context"
        return bool(self.ended)

    def _choose(self, logits: np.ndarray) -> int:
        seen, rng = (*self.prompt, *self.ids), draws(self._seed, len(self.ids))
        return choose(logits, seen, self._sampling, rng)


class _Text:
    """Text that is let out piece by piece, but for an end that could still become one of the stop texts."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops, self.stopped, self._held = stops, False, ""

    def add(self, piece: str) -> str:
        """What can be let out now; up to the first stop text if there is one."""
        text = self._held + piece
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(
            (n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        return self._held
