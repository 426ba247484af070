"""What a slot is asked to write, and what it tells while it does."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from packtrain.inference.grammar import Grammar
from packtrain.inference.sampling import Sampling

CANCELLED, FAILED = "cancelled", "failed"  # beside the ends of `generation`


class Busy(RuntimeError):
    """No more jobs can wait."""


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to write.

    prompt    token ids, at least one
    count     most tokens to write; -1: until it ends or the context is full
    stops     texts before which it ends
    top       how many of the likeliest tokens are told with each token; 0: none, nor its own probability
    after     these probabilities are those after the samplers, else before them
    slot      which slot to take; -1: the one that knows most of the prompt
    reuse     whether a beginning of the prompt that is in the cache is used
    adapters  scale of each adapter
    endless   end tokens do not end it
    special   control tokens are part of the text
    progress  it is told how much of the prompt has been read
    seconds   of writing after which it ends, once it has a line; 0: no limit
    indent    it ends at a line that begins with fewer spaces
    keep      first tokens of the text that stay where a full context is shifted; -1: the prompt
    discard   tokens after these that are then forgotten; 0: half of them
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    count: int = -1
    stops: tuple[str, ...] = ()
    grammar: Grammar | None = None
    top: int = 0
    after: bool = False
    slot: int = -1
    reuse: bool = True
    adapters: tuple[float, ...] = ()
    endless: bool = False
    special: bool = False
    progress: bool = False
    seconds: float = 0.0
    indent: int = 0
    keep: int = 0
    discard: int = 0


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token that was written, its logarithmic probability and the likeliest tokens."""

    id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one answer: tokens of the prompt, how many of them were in the cache, tokens written, and seconds of both.

    forgotten  tokens that left a full context, so that the answer could go on
    """

    prompt: int
    cached: int = 0
    written: int = 0
    reading: float = 0.0
    writing: float = 0.0
    forgotten: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Text that is complete, the tokens since the last part, and the counts so far."""

    text: str
    tokens: tuple[Chosen, ...]
    counts: Counts


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a prompt has been read: tokens of all, of the cache, of both this and what was read; seconds."""

    total: int
    cached: int
    read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class End:
    """The end of an answer.

    reason  end, stop, count, context, cancelled or failed
    why     a sentence, if it failed
    stop    the stop text
    """

    reason: str
    counts: Counts
    slot: int = -1
    stop: str = ""
    why: str = ""


Told = Part | Progress | End


@dataclass(slots=True)
class Ticket:
    """A job in the queue or in a slot. `tell` is called in the engine's thread, last with an End."""

    job: Job
    tell: Callable[[Told], None]
    arrived: float = 0.0
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Nobody wants the answer any more; from any thread."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()
