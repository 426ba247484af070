"""Bodies of requests, from clients that may be slow or send too much. What all need together is bounded."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from packtrain.errors import InputError
from packtrain.memory import give_back
from packtrain.serving.server import Limits

READERS = 1  # requests of a kind that are parsed and worked on at once
LARGE = 1 << 16  # bytes of a body after which memory is given back
ALL = 8 << 20  # most bytes of bodies that are there at once
MOST_VALUES = 1 << 17  # in a body: each takes much more memory than its text
TEXTS = re.compile(r'"(?:[^"\\]|\\.)*+"', re.S)


class Bodies:
    """Reads bodies. Those of a kind of routes take turns: some wait for the engine, others must not wait for them."""

    def __init__(self) -> None:
        self._held, self._turns = 0, dict[str, asyncio.Semaphore]()

    @asynccontextmanager
    async def parsed(self, request: Request, limits: Limits, kind: str) -> AsyncIterator[Any]:
        """The JSON of a body, while it is worked on. Raises HTTPException, InputError."""
        text = bytearray()
        try:
            await self._read(request, limits, text)
            async with self._turns.setdefault(kind, asyncio.Semaphore(READERS)):
                if await request.is_disconnected():
                    raise ClientDisconnect
                yield await run_in_threadpool(parsed, bytes(text))
        finally:
            self._held -= len(text)
            if len(text) > LARGE:
                await run_in_threadpool(give_back)

    async def _read(self, request: Request, limits: Limits, text: bytearray) -> None:
        too_large = HTTPException(413, f"the request has more than {limits.body:,} bytes")
        if int(request.headers.get("content-length", "0")) > limits.body:
            raise too_large
        try:
            async with asyncio.timeout(limits.patience):
                async for chunk in request.stream():
                    if self._held + len(chunk) > ALL:
                        raise HTTPException(503, "too many large requests at once; try again later")
                    self._held += len(chunk)
                    text += chunk
                    if len(text) > limits.body:
                        raise too_large
        except TimeoutError:
            words = f"the request did not come within {limits.patience:g} s"
            raise HTTPException(408, words) from None


def parsed(text: bytes) -> Any:
    """JSON in UTF-8; nothing is an empty object. Raises InputError."""
    try:
        words = text.decode("utf-8-sig")
        if len(words) > MOST_VALUES:
            check_count(words)
        found = (
            json.loads(words, parse_float=_finite, parse_constant=_finite) if words.strip() else {}
        )
        if "\\u" in words:
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise InputError("the body is nested too deeply") from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise InputError(f"the body has half a surrogate pair, {half}", "it needs both") from None
    except ValueError:
        raise InputError("the body is not JSON") from None
    return found


def check_count(words: str) -> None:
    """Raises InputError if there are too many values."""
    bare = TEXTS.sub("", words)
    if sum(map(bare.count, ",[{:")) > MOST_VALUES:
        raise InputError(f"the body has more than {MOST_VALUES:,} values")


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(word)
    return value
