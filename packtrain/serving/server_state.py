"""State that all routes share: the model, its engine, and how events travel from the engine's thread to a request."""

import asyncio
import json
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from threading import Lock, RLock
from typing import Any, TypeVar

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.chat_template import answer_variables
from packtrain.data.conversations.conversation_renderer import ConversationRenderer
from packtrain.data.conversations.messages import Conversation
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.embeddings import batches, check_texts, embed_texts, normalize_vector
from packtrain.inference.generator import NO_PROMPT
from packtrain.inference.kv_cache import Context, ContextError
from packtrain.inference.kv_cache.kv_cells import CacheFull
from packtrain.inference.sampling import Sampling
from packtrain.models.model_file import ModelFile
from packtrain.serving.engine_thread import ServingEngine
from packtrain.serving.generation_jobs import AnswerEnd, GenerationJob, JobEvent, ServerBusy
from packtrain.serving.reasoning_text import AUTO, thinking_marks
from packtrain.serving.response_shapes import HttpRefusal, missing_flag
from packtrain.serving.tool_call_styles import ToolCallStyle, detect_style

JsonObject = dict[str, Any]
MAX_STORED_NBYTES = 4 << 20  # of all conversations together


class StoredResponses:
    """Conversations as JSON, by the id of their last response; beyond `max_nbytes` in all, the oldest are dropped."""

    def __init__(self, max_nbytes: int = MAX_STORED_NBYTES) -> None:
        self._max_nbytes, self._nbytes, self._lock = max_nbytes, 0, Lock()
        self._conversations = OrderedDict[str, bytes]()

    def store(self, response_id: str, messages: Sequence[JsonObject]) -> None:
        encoded = json.dumps(messages).encode()
        with self._lock:
            self._conversations[response_id] = encoded
            self._nbytes += len(encoded)
            while self._nbytes > self._max_nbytes:
                self._nbytes -= len(self._conversations.popitem(last=False)[1])

    def messages(self, response_id: str) -> list[JsonObject]:
        """Return the messages of a conversation. Raises HttpRefusal if it is not stored, or no longer."""
        with self._lock:
            encoded = self._conversations.get(response_id)
        if encoded is None:
            raise HttpRefusal(404, f"previous_response_id: there is no response {response_id!r}")
        stored_messages: list[JsonObject] = json.loads(encoded)
        return stored_messages


T = TypeVar("T")
QueueItem = tuple[int, JobEvent] | None
EventQueue = asyncio.Queue[QueueItem]
Loop = asyncio.AbstractEventLoop
# for all requests together: characters of grammars, and bytes of prompts and settings
RESOURCE_LIMITS = {"grammars": 1 << 17, "settings": 40 << 20}


class PromptTooLong(InputError):
    """A prompt that does not fit into the context."""

    def __init__(self, tokens: int, max_tokens: int) -> None:
        super().__init__(
            f"the request ({tokens:,} tokens) is too large: it exceeds the available context size"
            f" ({max_tokens:,} tokens); shorten it, or start the server with a larger --ctx-size"
        )
        self.tokens, self.max_tokens = tokens, max_tokens


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests.

    body               most bytes of a request
    max_answer_tokens  most tokens of an answer whose request says none; -1: as many as fit
    max_seconds        most seconds of an answer
    patience           seconds in which a client must send a request, and take each piece of an answer
    """

    body: int = 1 << 20
    max_answer_tokens: int = -1
    max_seconds: float = 3600.0
    patience: float = 30.0


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A LoRA adapter's names and hash, as clients see them.

    run_name  NAME of NAME.run/adapter.gguf, where `finetune` writes it; else the stem of the file
    sha256    the first 16 digits of the file's SHA-256
    """

    name: str
    run_name: str
    sha256: str


@dataclass
class Server:
    """A model being served.

    model_hash        fingerprint of the base's tensors
    template_source   source of the chat template
    bos_text          text of the BOS token, with which a template may begin
    name, aliases     the model's names for clients
    tags              the model's tags for clients
    reasoning_format  how answers return thoughts, where a request does not say
    thinks            whether the chat template lets the model think, where a request does not say
    is_verbose        whether answers of OpenAI's API have /completion's fields, too
    scales            scales of the adapters, where a request does not say
    embedder          a context for embeddings; None: /v1/embeddings is off
    rerank_head       classifier (N, C) of a reranker; None: /rerank is off
    slots_folder      folder of saved slots; None: slots cannot be saved
    has_metrics       whether /metrics answers
    has_slots         whether /slots answers
    has_page          whether there is a page at /
    """

    model: ModelFile
    tokenizer: Tokenizer
    renderer: ConversationRenderer
    template_source: str
    bos_text: str
    engine: ServingEngine
    name: str
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = -1
    limits: RequestLimits = RequestLimits()
    model_hash: str = ""
    adapters: tuple[AdapterFile, ...] = ()
    scales: tuple[float, ...] = ()
    embedder: Context | None = None
    pooling: str = "mean"
    rerank_head: np.ndarray | None = None
    slots_folder: Path | None = None
    has_metrics: bool = False
    has_slots: bool = True
    has_page: bool = True
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    reasoning_format: str = AUTO
    thinks: bool = True
    is_verbose: bool = False
    stored_responses: StoredResponses = field(default_factory=StoredResponses)
    start_time: float = field(default_factory=time.time)
    _render_lock: Lock = field(default_factory=Lock)
    # reentrant: garbage collection inside `keep` may release another resource
    _resource_lock: Any = field(default_factory=RLock)
    _resource_sizes: Counter[str] = field(default_factory=Counter)
    _pending_events: dict[Loop, list[tuple[EventQueue, QueueItem]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine.on_run_end = self._deliver_events

    # ---- texts

    @cached_property
    def style(self) -> ToolCallStyle:
        """The style in which the chat template writes tool calls."""
        with self._render_lock:
            return detect_style(self.renderer, self.template_source)

    @cached_property
    def think_marks(self) -> tuple[str, str] | None:
        """Texts before and behind thoughts; None if the template has no thoughts."""
        return thinking_marks(self.template_source, self.renderer.marks)

    def render_prompt(
        self, conversation: Conversation, variables: dict[str, Any], has_start: bool = True
    ) -> str:
        """Render a conversation, `variables` for its template, an answer's start if `has_start`. Raises InputError."""
        variables = answer_variables(self.thinks) | variables
        with self._render_lock:  # one child renders
            return self.renderer.prompt(conversation, variables, has_start)

    def encode_prompt(self, text: str) -> list[int]:
        """Tokenize a rendered conversation, with at most one BOS."""
        has_bos = bool(self.bos_text) and text.startswith(self.bos_text)
        return self.tokenizer.encode(text, bos=False if has_bos else None, eos=False)

    # ---- jobs

    def keep(self, resource: T, resource_size: int, resource_kind: str = "grammars") -> T:
        """Return `resource`, such as a grammar, and count its size (in RESOURCE_LIMITS's unit) until Python frees it.
        Raises ServerBusy if all resources of its kind would be larger than their limit."""
        with self._resource_lock:
            if self._resource_sizes[resource_kind] + resource_size > RESOURCE_LIMITS[resource_kind]:
                raise ServerBusy(f"too many large {resource_kind} are in use; try again later")
            self._resource_sizes[resource_kind] += resource_size
        weakref.finalize(resource, self._release_resource, resource_kind, resource_size)
        return resource

    def _release_resource(self, resource_kind: str, resource_size: int) -> None:
        with self._resource_lock:
            self._resource_sizes[resource_kind] -= resource_size

    def check_job(self, job: GenerationJob) -> None:
        """Raise InputError unless the prompt has tokens and, in a sequence, room for one more, and the slot exists."""
        if not job.prompt:
            raise InputError(NO_PROMPT)
        if len(job.prompt) >= self.engine.max_seq_tokens:
            raise PromptTooLong(len(job.prompt), self.engine.max_seq_tokens)
        if job.slot >= len(self.engine.slots):
            fact = f"id_slot is {job.slot}; there are {len(self.engine.slots)} slots, from 0 on"
            raise InputError(fact)

    def embed(self, texts: Sequence[Sequence[int]], norm: int = 2) -> list[np.ndarray]:
        """Return the vector (C,) of each text (token ids), divided by its p-norm `norm` (see normalize_vector); with
        pooling none, the vectors (T, C) of its tokens, not divided. Raises HttpRefusal, InputError, ServerBusy."""
        embedder = self.embedder
        if embedder is None:
            raise missing_flag("embeddings", "--embeddings")
        max_tokens = embedder.cache.num_cells
        for ids in texts:
            if len(ids) > max_tokens:
                raise PromptTooLong(len(ids), max_tokens)
        check_texts(texts, max_tokens)
        embedder.adapters.set(
            range(embedder.pools.sequences), [self.scales] * embedder.pools.sequences
        )
        vectors = list[np.ndarray]()
        for batch in batches([len(ids) for ids in texts], max_tokens, embedder.pools.sequences):
            batch_ids = [texts[i] for i in batch]
            vectors += self.engine.call(partial(self._embed_batch, embedder, batch_ids)).result()
        return [vector if vector.ndim > 1 else normalize_vector(vector, norm) for vector in vectors]

    def _embed_batch(self, embedder: Context, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the vectors of texts that one batch reads, in the engine's thread, and count their tokens."""
        start_time = time.perf_counter()
        vectors = [*embed_texts(embedder, texts, self.pooling)]
        self.engine.totals.read += sum(map(len, texts))
        self.engine.totals.reading += time.perf_counter() - start_time
        self.engine.totals.runs += 1
        return vectors

    # ---- slots as files

    def save_slot(self, number: int, path: Path) -> int:
        """Save a slot's state to a file; returns its number of tokens. Raises HttpRefusal, InputError."""

        def save(context: Context) -> int:
            with _file_errors(path, "saved"):
                context.save_file(path, [number])
            return context.next(number)

        return self._call_idle(number, save)

    def restore(self, number: int, path: Path) -> int:
        """Restore a slot's state from a file; returns its number of tokens. Raises HttpRefusal, InputError."""

        def restore(context: Context) -> int:
            with _file_errors(path, "restored"):
                context.restore_file(path, [number])
            self.engine.slots[number].scales = tuple(context.adapters.scales[number].tolist())
            context.release(number)
            return context.next(number)

        return self._call_idle(number, restore)

    def erase_slot(self, number: int) -> int:
        """Remove a slot's tokens; returns how many there were. Raises HttpRefusal."""

        def erase(context: Context) -> int:
            num_tokens = context.next(number)
            context.remove(number)
            return num_tokens

        return self._call_idle(number, erase)

    def _call_idle(self, number: int, function: Callable[[Context], int]) -> int:
        """Call a function in the engine's thread, return its result. Raises HttpRefusal if slot `number` is busy."""

        def call() -> int:
            if self.engine.slots[number].answer:
                raise HttpRefusal(503, f"slot {number} is busy; try again later")
            return function(self.engine.context)

        return self.engine.call(call).result()

    # ---- answers

    async def job_events(
        self, jobs: Sequence[GenerationJob], quiet_seconds: float | None = None
    ) -> AsyncGenerator[list[tuple[int, JobEvent]]]:
        """Yield lists of pairs (index of a job, event) as the engine reports them; a job's last event is an AnswerEnd.

        quiet_seconds  interval of additional empty lists; None: none come
        The first list is empty and says that all jobs were taken; ServerBusy is raised before it. Closing the generator
        cancels the jobs. Raises ServerBusy, InputError.
        """
        for job in jobs:
            self.check_job(job)
        loop, queue = asyncio.get_running_loop(), EventQueue()
        tickets, tick_task = [], asyncio.create_task(_send_ticks(queue, quiet_seconds))
        try:
            for job_index, job in enumerate(jobs):
                on_event = partial(self._add_event, loop, queue, job_index)
                tickets.append(self.engine.submit_job(job, on_event))
            yield []
            num_running = len(jobs)
            while num_running:
                events = [await queue.get()]
                while not queue.empty():
                    events.append(queue.get_nowait())
                job_items = [queue_item for queue_item in events if queue_item is not None]
                num_running -= sum(isinstance(event, AnswerEnd) for _, event in job_items)
                yield job_items
        finally:
            tick_task.cancel()
            for ticket in tickets:
                ticket.cancel()

    def _add_event(self, loop: Loop, queue: EventQueue, job_index: int, event: JobEvent) -> None:
        """Collect an event, in the engine's thread; `_deliver_events` wakes the requests' loops once a run."""
        self._pending_events.setdefault(loop, []).append((queue, (job_index, event)))

    def _deliver_events(self) -> None:
        """Hand the events that a run collected to the event loops of their requests."""
        pending_events, self._pending_events = self._pending_events, {}
        for loop, loop_events in pending_events.items():
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(_put_events, loop_events)


@contextmanager
def _file_errors(path: Path, verb: str) -> Iterator[None]:
    """Turn errors of the block, in which a slot's file was to be `verb` ("saved", "restored"), into InputErrors that do
    not tell clients its folder."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"there is no saved slot {path.name}") from None
    except OSError as error:
        reason = str(error.strerror or error).lower()
        raise InputError(f"{path.name} cannot be {verb}: {reason}") from None
    except (ContextError, CacheFull) as error:
        raise InputError(str(error).replace(str(path), path.name)) from None


def _put_events(loop_events: Sequence[tuple[EventQueue, QueueItem]]) -> None:
    for queue, queue_item in loop_events:
        queue.put_nowait(queue_item)


async def _send_ticks(queue: EventQueue, seconds: float | None) -> None:
    """Put None into the queue every `seconds` (None: never), so that a quiet stream can be kept open."""
    while seconds is not None:
        await asyncio.sleep(seconds)
        queue.put_nowait(None)
