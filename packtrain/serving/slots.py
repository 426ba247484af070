"""A slot, which is a sequence of the context, and the answer that is being written in it."""

import time
from dataclasses import dataclass

import numpy as np

from packtrain.generation import Pieces, chain_of
from packtrain.sampling import Given
from packtrain.serving.jobs import Chosen, Counts, End, Part, Ticket
from packtrain.tokenizer import Stream, Tokenizer


@dataclass(slots=True)
class Slot:
    """A sequence of the context.

    writing  the answer; None: it is idle
    scales   of the adapters with which its cells were computed
    used     when it was last taken
    """

    number: int
    writing: "Writing | None" = None
    scales: tuple[float, ...] = ()
    used: float = 0.0


class Writing:
    """The answer to a ticket, as its tokens come.

    left     tokens still to read: of the prompt, then the last one written
    ids      tokens written
    cached   tokens of the prompt that were in the cache
    waited   runs since it read something
    paused   it waits until there is room in the context
    """

    def __init__(self, ticket: Ticket, tokenizer: Tokenizer, slot: int) -> None:
        """Raises InputError."""
        job = self.job = ticket.job
        self.ticket, self._tokenizer, self._slot = ticket, tokenizer, slot
        self.left, self.ids = [*job.prompt], list[int]()
        self.cached, self.waited, self.paused = 0, 0, False
        self.chain = chain_of(tokenizer, job.sampling, job.seed, job.prompt, job.grammar)
        self.chain.whole = job.top > 0
        self._pieces, self._stream = Pieces(job.stops), Stream(tokenizer, job.special)
        for id in job.prompt:  # so that the space before the first word is part of the text
            self._stream.feed(id)
        self._untold, self.ended = list[Chosen](), False
        self._began = self._first = time.perf_counter()

    @property
    def reading(self) -> bool:
        """Whether the last token of `left` is not one that was just written."""
        return not self.ids or len(self.left) > 1

    def resume(self) -> list[int]:
        """The whole text: what is to be read where nothing of it is in the cache."""
        return [*self.job.prompt, *self.ids]

    def take(self, given: Given) -> None:
        """Choose the next token, and tell what text it completes. Raises InputError."""
        if not self.ids:
            self._first = time.perf_counter()
        if self.job.count == 0:
            self.end("count")
            return
        chosen = self.chain.choose(given)
        if chosen in self._tokenizer.ends and not self.job.endless:
            self.end("end")
            return
        self.chain.accept(chosen)
        self.ids.append(chosen)
        self.left = [chosen]
        self._untold.append(described(given, chosen, self.job.top))
        self._tell(self._pieces.add(self._stream.feed(chosen)))
        if self._pieces.stopped:
            self.end("stop")
        elif self.chain.over:
            self.end("end")
        elif len(self.ids) == self.job.count:
            self.end("count")

    def end(self, reason: str, why: str = "") -> None:
        """Tell the rest of the text, and why it ended."""
        if self.ended:
            return
        self.ended = True
        if reason != "stop":
            self._tell(self._pieces.add(self._stream.flush()) + self._pieces.rest(), last=True)
        now = time.perf_counter()
        seconds = self._first - self._began, now - self._first
        counts = Counts(len(self.job.prompt), self.cached, len(self.ids), *seconds)
        stop = self._pieces.found if reason == "stop" else ""
        self.ticket.tell(End(reason, counts, self._slot, stop, why))

    def _tell(self, text: str, last: bool = False) -> None:
        if text or (last and self._untold):
            self.ticket.tell(Part(text, tuple(self._untold)))
            self._untold.clear()


def described(given: Given, id: int, top: int) -> Chosen:
    """A token; of all logits, with its probability and the `top` likeliest ones."""
    if not isinstance(given, np.ndarray):
        return Chosen(id)
    values = given.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    top = min(top, len(values))
    likely = np.argpartition(-values, top - 1)[:top]
    likely = likely[np.lexsort((likely, -values[likely]))]
    return Chosen(id, float(values[id]), tuple((int(one), float(values[one])) for one in likely))
