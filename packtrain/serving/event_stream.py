"""Answers over HTTP: as they are written (server-sent events), or whole. Who goes away stops them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from packtrain.serving.generation_jobs import (
    CANCELLED,
    FAILED,
    Chosen,
    Counts,
    End,
    Job,
    Part,
    Progress,
    Told,
)
from packtrain.serving.response_shapes import error
from packtrain.serving.server_state import Server

as_json = json.JSONEncoder(ensure_ascii=False).encode
QUIET = 15.0  # seconds without an event after which a comment keeps the connection open


class Shape(Protocol):
    """How a kind of answers looks; see native and completions."""

    ends_with_done: bool

    def begin(self) -> list[dict[str, Any]]: ...
    def part(self, number: int, part: Part) -> list[dict[str, Any]]: ...
    def progress(self, number: int, update: Progress) -> list[dict[str, Any]]: ...
    def end(self, number: int, end: End) -> list[dict[str, Any]]: ...
    def close(self, counts: Sequence[Counts]) -> list[dict[str, Any]]: ...
    def whole(self, answers: Sequence[tuple[str, tuple[Chosen, ...], End]]) -> Any: ...


class Failure(RuntimeError):
    """An answer that could not be written, by a fault of the request or of ours."""


def answer(server: Server, jobs: Sequence[Job], shape: Shape, streams: bool) -> Response:
    """The response to a request. Raises InputError."""
    for job in jobs:
        server.check(job)
    return Events(server, jobs, shape) if streams else Whole(server, jobs, shape)


class _Answer(Response):
    """A response that ends when the client goes away."""

    def __init__(self, server: Server, jobs: Sequence[Job], shape: Shape) -> None:
        super().__init__()
        self._server, self._jobs, self._shape = server, jobs, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self.run(scope, receive, send))
        gone = asyncio.create_task(_gone(receive))
        limit, done = self._server.limits.seconds, set[asyncio.Task[None]]()
        try:
            done, _ = await asyncio.wait(
                (work, gone), timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            with suppress(asyncio.CancelledError):
                await work
        if not done:
            words = f"the answer took more than {limit:g} s, the server's --timeout"
            await self.late(error(504, words), scope, receive, send)

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def late(self, fault: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Say that time is over."""
        raise NotImplementedError


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Whole(_Answer):
    """All answers as one JSON document."""

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts, tokens = [""] * len(self._jobs), [list[Chosen]() for _ in self._jobs]
        end_events = dict[int, End]()
        async for batch in self._server.told(self._jobs):
            for number, event in batch:
                if isinstance(event, Part):
                    texts[number] += event.text
                    tokens[number] += event.tokens
                elif isinstance(event, End):
                    end_events[number] = event
        failed = next(
            (end for end in end_events.values() if end.reason in (FAILED, CANCELLED)), None
        )
        if failed is not None:
            response = JSONResponse(*failure(failed))
        else:
            answers = [(texts[n], tuple(tokens[n]), end_events[n]) for n in range(len(self._jobs))]
            response = JSONResponse(self._shape.whole(answers))
        await response(scope, receive, send)

    async def late(self, fault: Any, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(fault, 504)(scope, receive, send)


def failure(end: End) -> tuple[dict[str, Any], int]:
    """Body and status of an answer that failed."""
    if end.reason == CANCELLED:
        return error(503, "the server is shutting down"), 503
    code = 500 if end.why.startswith("internal") else 400
    return error(code, end.why), code


class Events(_Answer):
    """A stream of events. One that cannot be sent in time ends it."""

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        patience = self._server.limits.patience
        loop, tick = asyncio.get_running_loop(), min(QUIET, patience) / 3
        async with (
            aclosing(self._server.told(self._jobs, tick)) as event_stream,
            asyncio.timeout(2 * patience) as deadline,
        ):
            await anext(event_stream)  # who is refused has a status for it
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for event in self._events(event_stream):
                if (deadline.when() or 0.0) < loop.time() + patience:
                    deadline.reschedule(loop.time() + 2 * patience)
                if event:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def late(self, fault: Any, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(self._server.limits.patience):
            await send({"type": "http.response.body", "body": _data(fault), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, batches: AsyncIterator[list[tuple[int, Told]]]) -> AsyncIterator[bytes]:
        yield b"".join(map(_data, self._shape.begin()))
        counts, heard = dict[int, Counts](), time.monotonic()
        async for batch in batches:
            event = b"".join(self._told(batch, counts))
            if not event and time.monotonic() - heard >= QUIET:  # also while a call is written
                event = b": still working\n\n"
            heard = time.monotonic() if event else heard
            yield event
        last = b"".join(
            map(_data, self._shape.close([counts[number] for number in sorted(counts)]))
        )
        if self._shape.ends_with_done:
            last += b"data: [DONE]\n\n"
        yield last

    def _told(
        self, batch: Sequence[tuple[int, Told]], counts: dict[int, Counts]
    ) -> Iterator[bytes]:
        """The events of what was told. Counts of answers that end are added."""
        for number, event in batch:
            if isinstance(event, Part):
                yield from map(_data, self._shape.part(number, event))
            elif isinstance(event, Progress):
                yield from map(_data, self._shape.progress(number, event))
            elif event.reason in (FAILED, CANCELLED):
                yield _data(failure(event)[0])
            else:
                counts[number] = event.counts
                yield from map(_data, self._shape.end(number, event))


def _data(event: Any) -> bytes:
    return f"data: {as_json(event)}\n\n".encode()
