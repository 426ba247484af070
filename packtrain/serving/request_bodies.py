"""Bodies of requests, from clients that may be slow or send too much. What all need together is bounded."""

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
from packtrain.common.memory import give_back
from packtrain.serving.server_state import Limits

READERS = 1  # requests of a kind that are parsed and worked on at once
LARGE = 1 << 16  # bytes of bodies after which memory is given back; longer ones wait for their turn
TURNS = 7  # large bodies that are read or worked on at once
REFUSED, PATIENCE = 64 << 20, 30.0  # most bytes and seconds that a refused request is read
MOST_VALUES = 1 << 17  # in a body: each takes much more memory than its text
TEXTS = re.compile(r'"(?:[^"\\]|\\.)*+"', re.S)


class Bodies:
    """Reads bodies. Those of a kind of routes take turns: some wait for the engine, others must not wait for them."""

    def __init__(self) -> None:
        self._since, self._turns = 0, dict[str, asyncio.Semaphore]()
        self._large = asyncio.Semaphore(TURNS)

    @asynccontextmanager
    async def parsed(self, request: Request, limits: Limits, kind: str) -> AsyncIterator[Any]:
        """The JSON of a body, while it is worked on. Raises HTTPException, InputError."""
        text = bytearray()
        async with AsyncExitStack() as turns:
            try:
                await self._read(request, limits, text, turns)
                semaphore = self._turns.setdefault(kind, asyncio.Semaphore(READERS))
                await turns.enter_async_context(semaphore)
                if await request.is_disconnected():
                    raise ClientDisconnect
                yield await run_in_threadpool(parsed, bytes(text))
            finally:
                self._since += len(text)
                if self._since > LARGE:
                    self._since = 0
                    re.purge()  # of patterns with the names of clients' tools
                    await run_in_threadpool(give_back)

    async def _read(
        self, request: Request, limits: Limits, text: bytearray, turns: AsyncExitStack
    ) -> None:
        too_large = HTTPException(413, f"the request has more than {limits.body:,} bytes")
        if int(request.headers.get("content-length", "0")) > limits.body:
            raise too_large
        timeout_error = HTTPException(408, f"the request did not come within {limits.patience:g} s")
        busy = HTTPException(503, "too many large requests at once; try again later")
        fault, is_large = timeout_error, False
        try:
            async with asyncio.timeout(limits.patience):
                async for chunk in request.stream():
                    if len(text) + len(chunk) > LARGE and not is_large:
                        fault, is_large = busy, True
                        await turns.enter_async_context(self._large)
                        fault = timeout_error
                    text += chunk
                    if len(text) > limits.body:
                        raise too_large
        except TimeoutError:
            raise fault from None


def parsed(text: bytes) -> Any:
    """JSON in UTF-8; nothing is an empty object. Raises InputError."""
    try:
        words = text.decode("utf-8-sig")
        if len(words) > MOST_VALUES:
            check_count(words)
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


def check_count(words: str) -> None:
    """Raises InputError if there are too many values."""
    structure = TEXTS.sub("", words)
    if sum(map(structure.count, ",[{:")) > MOST_VALUES:
        raise InputError(f"the body has more than {MOST_VALUES:,} values")


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(word)
    return value


class Heard:
    """Reads what a request still sends before it is answered: a client that is cut while it sends may not read why."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # a client that asks before it sends is told not to
        is_complete = any(name == b"expect" for name, _ in scope.get("headers", ()))

        async def reading() -> Message:
            nonlocal is_complete
            message = await receive()
            is_complete = not message.get("more_body")
            return message

        async def sending(message: Message) -> None:
            nonlocal is_complete
            is_complete = (
                is_complete or message.get("status") == 408
            )  # who sends too slowly is not waited for
            nbytes = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    while not is_complete and nbytes < REFUSED:
                        nbytes += len((await reading()).get("body", b""))
            await send(message)

        await self._app(scope, reading, sending)
