"""A slot, which is a sequence of the context, and the answer that is being written in it."""

import time
from dataclasses import dataclass

import numpy as np

from packtrain.data.tokenizer import Stream, Tokenizer
from packtrain.inference.generator import Pieces, chain_of
from packtrain.inference.sampling import Given
from packtrain.inference.sampling.candidates import Candidates
from packtrain.serving.generation_jobs import Chosen, Counts, End, Part, Progress, Ticket


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
    text     all tokens that count: the prompt and those written, less what was forgotten
    cached   tokens of the prompt that were in the cache
    waited   runs since it read something
    paused   it waits until there is room in the context
    """

    def __init__(self, ticket: Ticket, tokenizer: Tokenizer, slot: int) -> None:
        """Raises InputError."""
        job = self.job = ticket.job
        self.ticket, self._tokenizer, self._slot = ticket, tokenizer, slot
        self.left, self.text, self.ids = [*job.prompt], [*job.prompt], list[int]()
        self._forgotten = 0
        self.cached, self.waited, self.paused = 0, 0, False
        self.chain = chain_of(tokenizer, job.sampling, job.seed, job.prompt, job.grammar)
        self.chain.whole = job.top > 0
        self._pieces, self._stream = Pieces(job.stops), Stream(tokenizer, job.special)
        for id in job.prompt:  # so that the space before the first word is part of the text
            self._stream.feed(id)
        self._untold, self.ended = list[Chosen](), False
        self._line, self._lines = "", False  # the last line, and whether one has ended
        self._began = self._first = time.perf_counter()

    @property
    def reading(self) -> bool:
        """Whether the last token of `left` is not one that was just written."""
        return not self.ids or len(self.left) > 1

    def forget(self, bos: bool) -> tuple[int, int]:
        """Forget a part of the text in the middle; from which token to which. The last one is not in the cache yet."""
        job, num_cached = self.job, len(self.text) - 1
        keep = len(job.prompt) if job.keep < 0 else job.keep + bos
        keep = min(keep, num_cached - 1)
        count = min(job.discard or (num_cached - keep) // 2, num_cached - keep)
        del self.text[keep : keep + count]
        self._forgotten += count
        return keep, keep + count

    def take(self, candidates: Given) -> None:
        """Choose the next token, and tell what text it completes. Raises InputError."""
        if not self.ids:
            self._first = time.perf_counter()
        if self.job.count == 0:
            self.end("count")
            return
        chosen = self.chain.choose(candidates)
        if chosen in self._tokenizer.ends and not self.job.endless:
            self.end("end")
            return
        left = (
            self.chain.left(candidates)
            if self.job.after and isinstance(candidates, np.ndarray)
            else None
        )
        self.chain.accept(chosen)
        self.ids.append(chosen)
        self.text.append(chosen)
        self.left = [chosen]
        self._untold.append(described(left or candidates, chosen, self.job.top))
        text = self._pieces.add(self._stream.feed(chosen))
        _, end, line = text.rpartition("\n")
        self._line, self._lines = line if end else self._line + line, self._lines or bool(end)
        self._tell(text)
        if self._pieces.stopped:
            self.end("stop")
        elif self.chain.over:
            self.end("end")
        elif len(self.ids) == self.job.count or self._is_over():
            self.end("count")

    def _is_over(self) -> bool:
        """Whether it has written for long enough, or a line begins with too few spaces."""
        job, is_timed_out = self.job, 0 < self.job.seconds < time.perf_counter() - self._first
        words = self._line.lstrip(" \t")
        return self._lines and (
            is_timed_out or (bool(words) and len(self._line) - len(words) < job.indent)
        )

    def end(self, reason: str, message: str = "") -> None:
        """Tell the rest of the text, and why it ended."""
        if self.ended:
            return
        self.ended = True
        if reason != "stop":
            self._tell(self._pieces.add(self._stream.flush()) + self._pieces.rest(), last=True)
        stop = self._pieces.found if reason == "stop" else ""
        self.ticket.tell(End(reason, self._counts(), self._slot, stop, message))

    def _counts(self) -> Counts:
        seconds = self._first - self._began, time.perf_counter() - self._first
        return Counts(len(self.job.prompt), self.cached, len(self.ids), *seconds, self._forgotten)

    def tell_progress(self) -> None:
        """How much of the prompt has been read, if the job asks for that."""
        if self.job.progress and not self.ids:
            total = len(self.job.prompt)
            read, seconds = total - len(self.left), time.perf_counter() - self._began
            self.ticket.tell(Progress(total, self.cached, read, seconds))

    def _tell(self, text: str, last: bool = False) -> None:
        if text or (last and self._untold):
            self.ticket.tell(Part(text, tuple(self._untold), self._counts()))
            self._untold.clear()


def described(candidates: Given, id: int, top: int) -> Chosen:
    """A token; with its probability and the `top` likeliest ones where they are asked for."""
    if not top or isinstance(candidates, int):
        return Chosen(id)
    c = candidates
    if isinstance(c, np.ndarray):
        c = Candidates(np.arange(len(c)), c.astype(np.float64))
    values = c.logits - c.logits.max()
    values -= np.log(np.exp(values).sum())
    top = min(top, len(values))
    likely = np.argpartition(-values, top - 1)[:top]
    likely = likely[np.lexsort((c.ids[likely], -values[likely]))]
    top_tokens = tuple((int(c.ids[at]), float(values[at])) for at in likely if values[at] > -np.inf)
    return Chosen(id, float(values[c.ids == id][0]), top_tokens)
