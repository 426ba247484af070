"""What all routes share: the model, its engine, and how answers travel from the engine's thread to a request."""

import asyncio
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from threading import Lock, RLock
from typing import Any, TypeVar

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.conversations.conversation_renderer import Renderer
from packtrain.data.conversations.messages import Conversation
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.embeddings import batches, check_texts, embeddings, normalized
from packtrain.inference.kv_cache import Context, ContextError
from packtrain.inference.sampling import Sampling
from packtrain.models.kv_cell_table import CacheFull
from packtrain.models.model_file import ModelFile
from packtrain.serving.engine_thread import Engine
from packtrain.serving.generation_jobs import Busy, End, Job, Told
from packtrain.serving.reasoning_text import AUTO, marks_of
from packtrain.serving.response_shapes import Refused
from packtrain.serving.tool_call_styles import Style, style_of

T = TypeVar("T")
News = tuple[int, Told] | None
Queue = asyncio.Queue[News]
Loop = asyncio.AbstractEventLoop
# of all requests together: characters of their grammars, and bytes of their prompts and settings
ROOM = {"grammars": 1 << 17, "settings": 40 << 20}


class TooLong(InputError):
    """A prompt that does not fit into the context."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"the request ({tokens:,} tokens) exceeds the available context size ({limit:,} tokens);"
            " shorten it, or start the server with a larger --ctx-size"
        )
        self.tokens, self.limit = tokens, limit


@dataclass(frozen=True)
class Limits:
    """What requests may ask for.

    body      most bytes of a request
    answer    most tokens of an answer; -1: as many as fit
    seconds   for an answer
    patience  seconds in which a client must send a request, and take each piece of an answer
    """

    body: int = 1 << 20
    answer: int = -1
    seconds: float = 3600.0
    patience: float = 30.0


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A LoRA adapter as clients are told of it.

    run_name  NAME of NAME.run/adapter.gguf, where `finetune` writes it; else the stem of the file
    sha256    the first 16 digits of the file's SHA-256
    """

    name: str
    run_name: str
    sha256: str


@dataclass
class Server:
    """A model being served.

    model_hash  the fingerprint of the base's tensors
    source    the chat template
    bos       text of the BOS token, with which a template may begin
    name      of the model, as clients see it
    aliases   its other names
    reasoning how thoughts are told, where a request does not say
    scales    of the adapters, where a request does not say
    embedder  a context for embeddings, and how they are pooled; None: they are off
    slots     where slots are saved; None: nowhere
    measured  whether /metrics answers
    watched   whether /slots answers
    page      whether there is a page at /
    """

    model: ModelFile
    tokenizer: Tokenizer
    renderer: Renderer
    source: str
    bos: str
    engine: Engine
    name: str
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = -1
    limits: Limits = Limits()
    model_hash: str = ""
    adapters: tuple[AdapterFile, ...] = ()
    scales: tuple[float, ...] = ()
    embedder: Context | None = None
    pooling: str = "mean"
    slots: Path | None = None
    measured: bool = False
    watched: bool = True
    page: bool = True
    aliases: tuple[str, ...] = ()
    reasoning: str = AUTO
    began: float = field(default_factory=time.time)
    _lock: Lock = field(default_factory=Lock)
    _counting: Any = field(
        default_factory=RLock
    )  # again within itself: what is collected is forgotten
    _sizes: Counter[str] = field(default_factory=Counter)
    _told: dict[Loop, list[tuple[Queue, News]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine.pause = self._deliver

    # ---- texts

    @cached_property
    def style(self) -> Style:
        """How the chat template writes calls of tools."""
        with self._lock:
            return style_of(self.renderer, self.source)

    @cached_property
    def marks(self) -> tuple[str, str] | None:
        """What stands before and behind thoughts; None if the template has none."""
        return marks_of(self.source, self.renderer.marks)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return self.renderer.takes_tools

    def prompt(
        self, conversation: Conversation, variables: Mapping[str, Any], begins: bool = True
    ) -> str:
        """The text of a conversation; more: variables of its template; begins: with that of an answer.

        Raises InputError.
        """
        with self._lock:  # one child renders
            return self.renderer.prompt(conversation, variables, begins)

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendered conversation, with at most one BOS."""
        has_bos = bool(self.bos) and text.startswith(self.bos)
        return self.tokenizer.encode(text, bos=False if has_bos else None, eos=False)

    # ---- jobs

    def keep(self, resource: T, size: int, kind: str = "grammars") -> T:
        """Count what a request has, of such a size, as long as it is in use. Raises Busy if all are too large."""
        with self._counting:
            if self._sizes[kind] + size > ROOM[kind]:
                raise Busy(f"too many large {kind} are in use; try again later")
            self._sizes[kind] += size
        weakref.finalize(resource, self._forget, kind, size)
        return resource

    def _forget(self, kind: str, size: int) -> None:
        with self._counting:
            self._sizes[kind] -= size

    def check(self, job: Job) -> None:
        """Raises InputError unless the prompt has tokens, and room for one more."""
        if not job.prompt:
            raise InputError(
                "the prompt has no tokens; the vocabulary adds none at its beginning, so give some text"
            )
        if len(job.prompt) >= self.engine.limit:
            raise TooLong(len(job.prompt), self.engine.limit)
        if job.slot >= len(self.engine.slots):
            raise InputError(
                f"id_slot is {job.slot}; there are {len(self.engine.slots)} slots, from 0 on"
            )

    def embed(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The vector of each text. Raises Refused, InputError."""
        embedder = self.embedder
        if embedder is None:
            raise Refused(
                501, "This server does not support embeddings. Start it with `--embeddings`"
            )
        max_tokens = embedder.cache.cells
        for ids in texts:
            if len(ids) > max_tokens:
                raise TooLong(len(ids), max_tokens)
        check_texts(texts, max_tokens)
        embedder.adapters.set(
            range(embedder.pools.sequences), [self.scales] * embedder.pools.sequences
        )
        vectors = list[np.ndarray]()
        for batch in batches([len(ids) for ids in texts], max_tokens, embedder.pools.sequences):
            batch_ids = [texts[i] for i in batch]
            work = partial(embeddings, embedder, batch_ids, self.pooling)
            vectors += self.engine.call(lambda work=work: [*work()]).result()  # type: ignore[misc]
        return [normalized(vector, 2) for vector in vectors]

    # ---- slots as files

    def save(self, number: int, path: Path) -> int:
        """Save a slot's state to a file; how many tokens it has. Raises Refused, InputError."""
        context = self.engine.context

        def work() -> int:
            self._idle(number)
            try:
                context.save_file(path, [number])
            except OSError as error:
                reason = str(error.strerror or error).lower()
                raise InputError(f"{path.name} cannot be saved: {reason}") from None
            return context.next(number)

        return self.engine.call(work).result()

    def restore(self, number: int, path: Path) -> int:
        """Restore a slot's state from a file; how many tokens it has. Raises Refused, InputError."""
        context = self.engine.context

        def work() -> int:
            self._idle(number)
            try:
                context.restore_file(path, [number])
            except FileNotFoundError:
                raise InputError(f"there is no saved slot {path.name}") from None
            except OSError as error:
                reason = str(error.strerror or error).lower()
                raise InputError(f"{path.name} cannot be restored: {reason}") from None
            except (ContextError, CacheFull) as error:
                raise InputError(str(error).replace(str(path), path.name)) from None
            self.engine.slots[number].scales = tuple(context.adapters.scales[number].tolist())
            context.release(number)
            return context.next(number)

        return self.engine.call(work).result()

    def erase(self, number: int) -> int:
        """Forget a slot's tokens; how many it had. Raises Refused."""
        context = self.engine.context

        def work() -> int:
            self._idle(number)
            count = context.next(number)
            context.remove(number)
            return count

        return self.engine.call(work).result()

    def _idle(self, number: int) -> None:
        if self.engine.slots[number].writing:
            raise Refused(503, f"slot {number} is busy; try again later")

    # ---- answers

    async def told(
        self, jobs: Sequence[Job], quiet: float | None = None
    ) -> AsyncGenerator[list[tuple[int, Told]]]:
        """What the engine tells of jobs, as much as there is: numbers of jobs, each with a Part or its End.

        quiet  seconds after which an empty list comes, whether or not there was something

        The first list is empty and says that all jobs were taken; Busy is raised before it.

        Who stops listening cancels them. Raises Busy, InputError.
        """
        for job in jobs:
            self.check(job)
        loop, queue = asyncio.get_running_loop(), Queue()
        tickets, ticking = [], asyncio.create_task(_tick(queue, quiet))
        try:
            for number, job in enumerate(jobs):
                tell = partial(self._tell, loop, queue, number)
                tickets.append(self.engine.submit(job, tell))
            yield []
            left = len(jobs)
            while left:
                events = [await queue.get()]
                while not queue.empty():
                    events.append(queue.get_nowait())
                news = [item for item in events if item is not None]
                left -= sum(isinstance(event, End) for _, event in news)
                yield news
        finally:
            ticking.cancel()
            for ticket in tickets:
                ticket.cancel()

    def _tell(self, loop: Loop, queue: Queue, number: int, event: Told) -> None:
        """In the engine's thread, which wakes a loop only once a run."""
        self._told.setdefault(loop, []).append((queue, (number, event)))

    def _deliver(self) -> None:
        pending, self._told = self._told, {}
        for loop, items in pending.items():
            with suppress(RuntimeError):  # its loop is closed: nobody listens
                loop.call_soon_threadsafe(_put, items)


def _put(items: Sequence[tuple[Queue, News]]) -> None:
    for queue, news in items:
        queue.put_nowait(news)


async def _tick(queue: Queue, seconds: float | None) -> None:
    """Nothing, now and then."""
    while seconds is not None:
        await asyncio.sleep(seconds)
        queue.put_nowait(None)
