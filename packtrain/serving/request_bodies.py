"""Bodies of requests, from clients that may be slow or send too much. The memory of all bodies is bounded."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from packtrain.common.errors import InputError
from packtrain.common.memory import trim_heap
from packtrain.serving.server_state import RequestLimits

NUM_READERS = 1  # requests of a kind of route that are parsed and worked on at once
LARGE = 1 << 16  # bytes of bodies after which memory is released; longer bodies wait for their turn
MAX_LARGE_BODIES = 7  # large bodies that are read or worked on at once
REFUSED, DRAIN_SECONDS = 64 << 20, 30.0  # most bytes and seconds that a refused request is read
MAX_VALUES = 1 << 17  # values in a body: each takes much more memory than its text
STRING_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*+"', re.S)


class BodyReader:
    """Reads bodies. Requests take turns per kind of route, so that quick ones need not wait for those on the engine."""

    def __init__(self) -> None:
        self._num_parsed_nbytes, self._semaphores = 0, dict[str, asyncio.Semaphore]()
        self._large_semaphore = asyncio.Semaphore(MAX_LARGE_BODIES)

    @asynccontextmanager
    async def parse_body(
        self, request: Request, limits: RequestLimits, route_kind: str
    ) -> AsyncIterator[Any]:
        """Yield a body's parsed JSON, and take a turn until the block ends. Raises HTTPException, InputError."""
        body_bytes = bytearray()
        async with AsyncExitStack() as turn_stack:
            try:
                await self._read_stream(request, limits, body_bytes, turn_stack)
                semaphore = self._semaphores.setdefault(route_kind, asyncio.Semaphore(NUM_READERS))
                await turn_stack.enter_async_context(semaphore)
                if await request.is_disconnected():
                    raise ClientDisconnect
                yield await run_in_threadpool(parse_json, bytes(body_bytes))
            finally:
                self._num_parsed_nbytes += len(body_bytes)
                if self._num_parsed_nbytes > LARGE:
                    self._num_parsed_nbytes = 0
                    re.purge()  # drop patterns with the names of clients' tools
                    await run_in_threadpool(trim_heap)

    async def _read_stream(
        self, request: Request, limits: RequestLimits, text: bytearray, turn_stack: AsyncExitStack
    ) -> None:
        too_large_error = HTTPException(413, f"the request has more than {limits.body:,} bytes")
        if int(request.headers.get("content-length", "0")) > limits.body:
            raise too_large_error
        timeout_error = HTTPException(408, f"the request did not come within {limits.patience:g} s")
        busy_error = HTTPException(503, "too many large requests at once; try again later")
        timeout_fault, is_large = timeout_error, False
        try:
            async with asyncio.timeout(limits.patience):
                async for chunk in request.stream():
                    if len(text) + len(chunk) > LARGE and not is_large:
                        timeout_fault, is_large = busy_error, True
                        await turn_stack.enter_async_context(self._large_semaphore)
                        timeout_fault = timeout_error
                    text += chunk
                    if len(text) > limits.body:
                        raise too_large_error
        except TimeoutError:
            raise timeout_fault from None


def parse_json(json_bytes: bytes) -> Any:
    """Parse JSON in UTF-8; an empty body is an empty object. Raises InputError."""
    try:
        words = json_bytes.decode("utf-8-sig")
        if len(words) > MAX_VALUES:
            json_structure = STRING_PATTERN.sub("", words)
            if sum(map(json_structure.count, ",[{:")) > MAX_VALUES:
                raise InputError(f"the body has more than {MAX_VALUES:,} values")
        document = (
            json.loads(words, parse_float=_finite, parse_constant=_finite) if words.strip() else {}
        )
        if "\\u" in words:
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError:
        raise InputError("the body is nested too deeply") from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise InputError(f"the body has half a surrogate pair, {half}", "it needs both") from None
    except ValueError:
        raise InputError("the body is not JSON") from None
    return document


def _finite(number_text: str) -> float:
    if not math.isfinite(number := float(number_text)):
        raise ValueError(number_text)
    return number


class DrainRequest:
    """Reads the rest of a request before answering: a client that is cut while it sends may not read the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # a client that asks before it sends does not send on
        is_complete = any(name == b"expect" for name, _ in scope.get("headers", ()))

        async def receive_message() -> Message:
            nonlocal is_complete
            message = await receive()
            is_complete = not message.get("more_body")
            return message

        async def send_message(message: Message) -> None:
            nonlocal is_complete
            # a client that sends too slowly is not waited for
            is_complete = is_complete or message.get("status") == 408
            num_drained_nbytes = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    while not is_complete and num_drained_nbytes < REFUSED:
                        num_drained_nbytes += len((await receive_message()).get("body", b""))
            if "headers" in message:  # in the case of HTTP/1.1, which some clients compare
                message["headers"] = [(name.title(), value) for name, value in message["headers"]]
            await send(message)

        await self._app(scope, receive_message, send_message)
