"""The HTTP application: routes, API keys, limits of requests, errors."""

import asyncio
import json
import secrets
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from packtrain.errors import InputError
from packtrain.serving import routes
from packtrain.serving.asked import Body
from packtrain.serving.jobs import Busy
from packtrain.serving.page import page_route
from packtrain.serving.server import Server, TooLong
from packtrain.serving.shapes import Refused, error

READERS = 2  # requests of a route that are read at once
PUBLIC = {"/", "/health", "/v1/health", "/models", "/v1/models"}  # need no key, as in llama-server


def app(server: Server, keys: Sequence[str] = (), ui: bool = True) -> Starlette:
    """The application. With keys, requests need one of them; with `ui` there is a page at /."""
    return Starlette(
        routes=[*(_route(server, *one) for one in routes.ALL), *([page_route()] if ui else ())],
        exception_handlers={
            InputError: _bad,
            Busy: _busy,
            Refused: _refused,
            HTTPException: _http,
            ClientDisconnect: _busy,
            Exception: _fault,
        },
        middleware=[
            Middleware(
                CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
            ),
            Middleware(Keys, keys=keys),
        ],
    )


class Keys:
    """Lets requests pass that have a key: `Authorization: Bearer KEY`, or `X-Api-Key: KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in PUBLIC:
            headers = Headers(scope=scope)
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not self._knows(given) and not self._knows(headers.get("x-api-key", "")):
                refused = JSONResponse(error(401, "Invalid API Key"), 401)
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, given: str) -> bool:
        """Takes as long for every key of a length."""
        found = [secrets.compare_digest(given.encode(), key) for key in self._keys]
        return any(found)


def _route(server: Server, path: str, method: str, work: Any) -> Route:
    """A route whose function gets the server and, for POST, the body."""
    turns = asyncio.Semaphore(READERS)

    async def endpoint(request: Request) -> Response:
        if method == "GET":
            found = work(server, request)
        else:
            text = await read(request, server.limits.body, server.limits.patience)
            async with turns:  # what requests need while they are read is bounded
                given = await run_in_threadpool(parsed, text)
                body = given if method == "POST list" else Body(given)
                found = await run_in_threadpool(work, server, body, request)
        return found if isinstance(found, Response) else JSONResponse(found)

    return Route(path, endpoint, methods=[method.split()[0]])


async def read(request: Request, most: int, seconds: float) -> bytes:
    """The body of a request. Raises HTTPException."""
    found = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                found += chunk
                if len(found) > most:
                    raise HTTPException(413, f"the request has more than {most:,} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the request did not come within {seconds:g} s") from None
    return bytes(found)


def parsed(text: bytes) -> Any:
    """JSON; nothing is an empty object. Raises InputError."""
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise InputError("the body is not JSON") from None


async def _bad(request: Request, fault: Exception) -> Response:
    if isinstance(fault, TooLong):
        more = {"n_prompt_tokens": fault.tokens, "n_ctx": fault.limit}
        return JSONResponse(error(400, str(fault), "exceed_context_size_error", **more), 400)
    return JSONResponse(error(400, str(fault)), 400)


async def _busy(request: Request, fault: Exception) -> Response:
    return JSONResponse(error(503, str(fault)), 503)


async def _refused(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, Refused)
    return JSONResponse(error(fault.code, str(fault)), fault.code)


async def _http(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, HTTPException)
    words = {404: "File Not Found", 405: "this path takes another method"}.get(
        fault.status_code, fault.detail
    )
    return JSONResponse(error(fault.status_code, words), fault.status_code, headers=fault.headers)


async def _fault(request: Request, fault: Exception) -> Response:
    return JSONResponse(error(500, "internal error"), 500)
