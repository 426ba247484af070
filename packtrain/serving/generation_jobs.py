"""Jobs for slots, and the events that report their progress and results."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from packtrain.inference.grammar import Grammar
from packtrain.inference.sampling import Sampling

CANCELLED, FAILED = "cancelled", "failed"  # besides the end reasons of `generator.Reply`


class ServerBusy(RuntimeError):
    """The server cannot take one more request now; clients get status 503."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One answer to write.

    prompt              token ids, at least one
    max_tokens          most tokens to write; -1: until it ends or the context is full
    stops               texts before which it ends
    num_top_logprobs    likeliest tokens returned with each token; 0: none, nor its own probability
    scores_prompt       the prompt's tokens are returned with probabilities, too; needs use_cache=False
    is_post_sampling    return probabilities after the samplers, else before them
    slot                slot to take; -1: any idle one, preferably one whose cells have much of the prompt
    use_cache           whether a beginning of the prompt that is in the cache is used
    adapter_scales      scale of each adapter
    ignore_eos          end tokens do not end the answer
    has_special_tokens  control tokens are part of the text
    report_progress     report how much of the prompt has been read
    max_seconds         seconds of writing after which the answer ends, once its first line is complete; 0: no limit
    min_indent          the answer ends at a line, not its first, that begins with fewer spaces or tabs
    num_keep            first tokens of the text that stay where a full context is shifted; -1: the prompt
    num_discard         tokens after these `num_keep` that are then forgotten; 0: half of all that follow
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    max_tokens: int = -1
    stops: tuple[str, ...] = ()
    grammar: Grammar | None = None
    num_top_logprobs: int = 0
    scores_prompt: bool = False
    is_post_sampling: bool = False
    slot: int = -1
    use_cache: bool = True
    adapter_scales: tuple[float, ...] = ()
    ignore_eos: bool = False
    has_special_tokens: bool = False
    report_progress: bool = False
    max_seconds: float = 0.0
    min_indent: int = 0
    num_keep: int = 0
    num_discard: int = 0


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token; its log-probability: None for a prompt's first token, 0.0 if none is requested; the likeliest tokens."""

    token_id: int
    logprob: float | None = 0.0
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Counts of one answer: tokens of the prompt, of these cached, and written, with seconds to read and write them.

    read              tokens of the prompt that were read so far
    forgotten_tokens  tokens that left a full context, so that the answer could go on
    drafted, accepted  tokens that a drafter guessed, and those of them that the model chose, too
    decode_steps      tokens written after the first, which the prompt's last run gives
    """

    prompt: int
    cached: int = 0
    read: int = 0
    output_tokens: int = 0
    reading: float = 0.0
    output_seconds: float = 0.0
    forgotten_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_steps: int = 0


@dataclass(slots=True)
class EngineTotals:
    """Totals since the start: tokens and seconds of prompts and of answers, runs, and busy slots summed over runs.

    cached           tokens of prompts that were in the cache
    drafted          tokens that were guessed; accepted: those of them that came; drafts: how often any were
    decode_steps     tokens written after the first of each answer
    max_text_tokens  tokens of the longest text
    """

    read: int = 0
    cached: int = 0
    max_text_tokens: int = 0
    reading: float = 0.0
    output_tokens: int = 0
    decode_steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    output_seconds: float = 0.0
    runs: int = 0
    busy: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of complete text, the tokens since the last piece, and the counts so far."""

    text: str
    tokens: tuple[GeneratedToken, ...]
    counts: TokenCounts


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Progress in a prompt: tokens in total, cached tokens, tokens read so far including cached ones, and seconds."""

    total_tokens: int
    cached: int
    read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of an answer.

    reason         end (by an end token or the grammar), stop (a stop text), count (a limit of tokens, seconds or
                   indent), context (full), cancelled, or failed, with error_message
    stop_text      the stop text that ended it
    """

    reason: str
    counts: TokenCounts
    slot_index: int = -1
    stop_text: str = ""
    error_message: str = ""


JobEvent = TextDelta | PromptProgress | AnswerEnd
AnswerResults = Sequence[tuple[str, tuple[GeneratedToken, ...], AnswerEnd]]


@dataclass(slots=True)
class JobTicket:
    """A job in the queue or in a slot. The engine's thread calls tell(event); the last event is an AnswerEnd."""

    job: GenerationJob
    tell: Callable[[JobEvent], None]
    _cancel_event: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Ask the engine to end the job before its next run; any thread may call this."""
        self._cancel_event.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancel_event.is_set()
