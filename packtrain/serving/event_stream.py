"""Answers over HTTP, as they are written (server-sent events) or whole. A client that goes away stops them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from packtrain.serving import generation_jobs
from packtrain.serving.generation_jobs import AnswerEnd, GeneratedToken, GenerationJob, TextDelta
from packtrain.serving.response_shapes import error
from packtrain.serving.server_state import Server

encode_json = json.JSONEncoder(ensure_ascii=False).encode
AnswerCounts = dict[int, generation_jobs.TokenCounts]
JobBatch = Sequence[tuple[int, generation_jobs.JobEvent]]
UNFINISHED = generation_jobs.FAILED, generation_jobs.CANCELLED
KEEPALIVE_SECONDS = 15.0  # seconds without an event after which a comment keeps the connection open


class ResponseFormat(Protocol):
    """How answers of a route become JSON, streamed or whole, see llama_completion and openai_completions."""

    ends_with_done: bool
    has_named_events: bool  # whether the type of each event is its name, too

    def start_events(self) -> list[dict[str, Any]]: ...
    def delta_events(self, number: int, delta: TextDelta) -> list[dict[str, Any]]: ...
    def progress_events(
        self, number: int, update: generation_jobs.PromptProgress
    ) -> list[dict[str, Any]]: ...
    def end_events(self, number: int, end: AnswerEnd) -> list[dict[str, Any]]: ...
    def close_events(
        self, counts: Sequence[generation_jobs.TokenCounts]
    ) -> list[dict[str, Any]]: ...
    def full_response(self, answers: generation_jobs.AnswerResults) -> Any: ...


def make_response(
    server: Server, jobs: Sequence[GenerationJob], response_format: ResponseFormat, is_stream: bool
) -> Response:
    """Create the response that runs jobs and sends their answers, as events if `is_stream`, else as one document.
    Raises InputError for a job that the server cannot take, see Server.check_job."""
    for job in jobs:
        server.check_job(job)
    response_class = EventStreamResponse if is_stream else FullResponse
    return response_class(server, jobs, response_format)


class _JobResponse(Response):
    """A response that runs jobs, and cancels them when the client goes away or --timeout is over."""

    def __init__(
        self, server: Server, jobs: Sequence[GenerationJob], response_format: ResponseFormat
    ) -> None:
        super().__init__()
        self._server, self._jobs, self._shape = server, jobs, response_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer_task = asyncio.create_task(self.send_answer(scope, receive, send))
        gone = asyncio.create_task(_wait_disconnect(receive))
        max_seconds, finished_tasks = self._server.limits.max_seconds, set[asyncio.Task[None]]()
        try:
            finished_tasks, _ = await asyncio.wait(
                (answer_task, gone), timeout=max_seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            gone.cancel()
            if not answer_task.done():
                answer_task.cancel()
            with suppress(asyncio.CancelledError):
                await answer_task
        if not finished_tasks:
            timeout_message = f"the answer took more than {max_seconds:g} s, the server's --timeout"
            await self.send_timeout(error(504, timeout_message), scope, receive, send)

    async def send_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def send_timeout(self, fault: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the error of an answer that took too long."""
        raise NotImplementedError


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class FullResponse(_JobResponse):
    """All answers as one JSON document."""

    async def send_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts, tokens = [""] * len(self._jobs), [list[GeneratedToken]() for _ in self._jobs]
        end_events = dict[int, AnswerEnd]()
        async for batch in self._server.job_events(self._jobs):
            for answer_index, event in batch:
                if isinstance(event, TextDelta):
                    texts[answer_index] += event.text
                    tokens[answer_index] += event.tokens
                elif isinstance(event, AnswerEnd):
                    end_events[answer_index] = event
        failed_end = next((end for end in end_events.values() if end.reason in UNFINISHED), None)
        if failed_end is not None:
            response = JSONResponse(*failure_body(failed_end))
        else:
            answers = [(texts[n], tuple(tokens[n]), end_events[n]) for n in range(len(self._jobs))]
            response = JSONResponse(self._shape.full_response(answers))
        await response(scope, receive, send)

    async def send_timeout(self, fault: Any, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(fault, 504)(scope, receive, send)


def failure_body(end: AnswerEnd) -> tuple[dict[str, Any], int]:
    """Return the HTTP body and status of a failed answer: cancelled 503, an internal error 500, bad input 400."""
    if end.reason == generation_jobs.CANCELLED:
        return error(503, "the server is shutting down"), 503
    status_code = 500 if end.error_message.startswith("internal") else 400
    return error(status_code, end.error_message), status_code


class EventStreamResponse(_JobResponse):
    """A stream of server-sent events, which ends if an event cannot be sent in time."""

    async def send_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"),
        ]  # fmt: skip
        timeout_seconds = self._server.limits.patience
        loop, tick_seconds = asyncio.get_running_loop(), min(KEEPALIVE_SECONDS, timeout_seconds) / 3
        async with (
            aclosing(self._server.job_events(self._jobs, tick_seconds)) as event_stream,
            asyncio.timeout(2 * timeout_seconds) as deadline,
        ):
            await anext(event_stream)  # before this event, a refusal still has its own status
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for event in self._encoded_events(event_stream):
                if (deadline.when() or 0.0) < loop.time() + timeout_seconds:
                    deadline.reschedule(loop.time() + 2 * timeout_seconds)
                if event:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_timeout(self, fault: Any, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(self._server.limits.patience):
            await send(
                {"type": "http.response.body", "body": self._sse_data(fault), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _encoded_events(self, batches: AsyncIterator[JobBatch]) -> AsyncIterator[bytes]:
        yield b"".join(map(self._sse_data, self._shape.start_events()))
        counts, heard = AnswerCounts(), time.monotonic()
        async for batch in batches:
            event = b"".join(self._encode_batch(batch, counts))
            # also while a tool call is written
            if not event and time.monotonic() - heard >= KEEPALIVE_SECONDS:
                event = b": still working\n\n"
            heard = time.monotonic() if event else heard
            yield event
        close_events = self._shape.close_events([counts[number] for number in sorted(counts)])
        last_event = b"".join(map(self._sse_data, close_events))
        if self._shape.ends_with_done:
            last_event += b"data: [DONE]\n\n"
        yield last_event

    def _encode_batch(self, batch: JobBatch, counts_by_answer: AnswerCounts) -> Iterator[bytes]:
        """Yield a batch, (answer's number, event) each, as bytes; store counts of ended answers in counts_by_answer."""
        for answer_index, event in batch:
            if isinstance(event, TextDelta):
                yield from map(self._sse_data, self._shape.delta_events(answer_index, event))
            elif isinstance(event, generation_jobs.PromptProgress):
                yield from map(self._sse_data, self._shape.progress_events(answer_index, event))
            elif event.reason in UNFINISHED:
                yield self._sse_data(failure_body(event)[0])
            else:
                counts_by_answer[answer_index] = event.counts
                yield from map(self._sse_data, self._shape.end_events(answer_index, event))

    def _sse_data(self, event: Any) -> bytes:
        name_line = f"event: {event['type']}\n" if self._shape.has_named_events else ""
        return f"{name_line}data: {encode_json(event)}\n\n".encode()
