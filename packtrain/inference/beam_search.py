"""Beam search: the likeliest continuations of a prompt, several of which are followed at once.

Beams are sequences of a context that share the cells of what they have in common; a step is one batch.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from packtrain.data.tokenizer import Stream, Tokenizer
from packtrain.inference.generator import Limits, Pieces, Speed, check_prompt
from packtrain.inference.kv_cache import Context


@dataclass(frozen=True, slots=True)
class Search:
    """How many beams are followed, how many of the best are wanted, and the power of a text's length that divides its
    sum of log-probabilities."""

    width: int
    wanted: int = 1
    penalty: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens after the prompt, with the one that ended it; the sum of their log-probabilities; its sequence."""

    ids: tuple[int, ...] = ()
    total: float = 0.0
    seq: int = 0
    ended: str = ""

    def score(self, penalty: float) -> float:
        return scored(self.total, len(self.ids), penalty)


def scored(total: float, length: int, penalty: float) -> float:
    """total / length**penalty, as in transformers."""
    return total / float(max(length, 1) ** penalty)


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Of each token (V,), f64."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    return wide


def likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """Places of the largest values, descending; of equal ones the first come first."""
    if count < len(values):
        threshold = np.partition(values, -count)[-count]
        indices = np.flatnonzero(values >= threshold)
    else:
        indices = np.arange(len(values))
    return indices[np.argsort(-values[indices], kind="stable")][:count]


class Beams:
    """A search in sequences 0 … of a context; `run` gives the best texts, the best first.

    reading, writing  speeds of the prompt, and of all beams together
    """

    def __init__(
        self,
        context: Context,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        search: Search,
        limits: Limits,
    ) -> None:
        check_prompt(prompt, context.cache.cells)
        self._context, self._tokenizer, self._search = context, tokenizer, search
        self._limits, self.prompt = limits, tuple(prompt)
        self.reading, self.writing = Speed(), Speed()
        self._ended = list[Beam]()

    def run(self) -> list[Beam]:
        """The best texts: fewer than wanted only if there are no more."""
        start_time, context = time.perf_counter(), self._context
        num_reused = context.reuse(0, self.prompt)
        logits = context.decode(self.prompt[num_reused:], 0)
        self.reading.add(len(self.prompt) - num_reused, time.perf_counter() - start_time)
        active, self._ended = [Beam()], []
        while not (reason := self._over(active)):
            start_time = time.perf_counter()
            if active[0].ids:
                tokens, seqs = [beam.ids[-1] for beam in active], [beam.seq for beam in active]
                logits = context.decode(tokens, seqs, wanted=range(len(seqs)))
            active = self._placed(self._next(active, logits))
            self.writing.add(len(logits), time.perf_counter() - start_time)
        if reason != "found":
            self._keep([replace(beam, ended=reason) for beam in active])
        return self._ended

    def text(self, beam: Beam) -> str:
        """The text of a beam, without what ended it."""
        return self._read(beam)[0]

    def _read(self, beam: Beam) -> tuple[str, bool]:
        """The text, and whether a stop text ends it."""
        pieces, stream = Pieces(self._limits.stops), Stream(self._tokenizer)
        for id in self.prompt:  # so that the space before the first word is part of the text
            stream.feed(id)
        text = ""
        for id in beam.ids[: -1 if beam.ended == "end" else None]:
            text += pieces.add(stream.feed(id))
            if pieces.stopped:
                return text, True
        return text + pieces.add(stream.flush()) + pieces.rest(), pieces.stopped

    def _next(self, active: list[Beam], logits: np.ndarray) -> list[Beam]:
        """The likeliest texts that are one token longer; those that end are kept apart."""
        width = self._search.width
        following, finished = list[Beam](), list[Beam]()
        for rank, beam in enumerate(self._longer(active, logits)):
            if beam.ids[-1] in self._tokenizer.ends:
                finished += [replace(beam, ended="end")] if rank < width else []
            elif self._limits.stops and self._read(beam)[1]:
                finished += [replace(beam, ended="stop")] if rank < width else []
            elif len(following) < width:
                following.append(beam)
        self._keep(finished)
        return following

    def _longer(self, active: list[Beam], logits: np.ndarray) -> list[Beam]:
        """So many that `width` are left when those that end are taken away, the likeliest first."""
        count, candidates = (1 + len(self._tokenizer.ends)) * self._search.width, list[Beam]()
        for beam, row in zip(active, logits, strict=True):
            biased = row.copy()
            for id, by in self._search.bias.items():
                biased[id] += by
            values = beam.total + log_probabilities(biased)
            candidates += [
                Beam((*beam.ids, int(id)), float(values[id]), beam.seq)
                for id in likeliest(values, count)
                if values[id] > -np.inf
            ]
        return sorted(candidates, key=lambda beam: -beam.total)[:count]

    def _keep(self, finished: list[Beam]) -> None:
        ranked = sorted(
            (*self._ended, *finished), key=lambda beam: -beam.score(self._search.penalty)
        )
        self._ended = ranked[: self._search.wanted]

    def _placed(self, beams: list[Beam]) -> list[Beam]:
        """The beams in sequences of their own: each text's first stays where that text is, the others share it."""
        alive, context, placed = {beam.seq for beam in beams}, self._context, list[Beam]()
        free = [seq for seq in range(self._search.width) if seq not in alive]
        for seq in free:
            context.remove(seq)
        for beam in beams:
            seq = beam.seq
            if seq in alive:
                alive.remove(seq)
            else:
                seq = free.pop(0)
                context.copy(beam.seq, seq)
            placed.append(replace(beam, seq=seq))
        return placed

    def _over(self, active: list[Beam]) -> str:
        """Why the search is over: `found`, or what ends all texts that are left; "" if it goes on."""
        if not active:
            return "found"
        length = len(active[0].ids)
        if self._limits.interrupted():
            return "interrupted"
        if length == self._limits.count:
            return "count"
        if length and np.count_nonzero(self._context.pools.all.sets == 0) < len(active):
            return "context"
        return "found" if self._found(active, length) else ""

    def _found(self, active: list[Beam], length: int) -> bool:
        """Whether no text that goes on can become better than those that are wanted."""
        penalty, num_beams = self._search.penalty, self._search.wanted
        if len(self._ended) < num_beams:
            return False
        if self._search.width == 1:  # greedy: the likeliest token ends the text
            return True
        max_length = self._context.cache.cells - len(self.prompt) + 1
        if self._limits.count >= 0:
            max_length = min(max_length, self._limits.count)
        best = max(beam.total for beam in active)
        bound = scored(best, max_length if penalty > 0 else length + 1, penalty)
        return bound <= self._ended[-1].score(penalty)
