"""The HTTP application: routes, API keys, limits of requests, errors."""

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

from packtrain.common.errors import InputError
from packtrain.serving import routes
from packtrain.serving.chat_page import page_route
from packtrain.serving.generation_jobs import Busy
from packtrain.serving.json_fields import Body
from packtrain.serving.request_bodies import Bodies, Heard
from packtrain.serving.response_shapes import Refused, error
from packtrain.serving.server_state import Server, TooLong

PRIVATE = "access-control-request-private-network"
METHODS = ["GET", "POST", "DELETE", "OPTIONS"]
PUBLIC = {"/", "/health", "/v1/health", "/models", "/v1/models"}  # need no key, as in llama-server


def app(server: Server, keys: Sequence[str] = (), ui: bool = True) -> Starlette:
    """The application. With keys, requests need one of them; with `ui` there is a page at /."""
    bodies = Bodies()
    api_routes = [_route(server, bodies, *entry) for entry in routes.ALL]
    return Starlette(
        routes=[*api_routes, *([page_route()] if ui else ())],
        exception_handlers={
            InputError: _bad,
            RecursionError: _deep,
            Busy: _busy,
            Refused: _refused,
            HTTPException: _http,
            ClientDisconnect: _busy,
            Exception: _fault,
        },
        middleware=[
            Middleware(Heard),
            Middleware(Cors, allow_origins=["*"], allow_methods=METHODS, allow_headers=["*"]),
            Middleware(Keys, keys=keys),
        ],
    )


class Cors(CORSMiddleware):
    """Starlette's, but a browser that also asks about private networks is not refused: that is for it to decide."""

    def preflight_response(self, request_headers: Headers) -> Response:
        headers = {key: value for key, value in request_headers.items() if key != PRIVATE}
        return super().preflight_response(Headers(headers))


class Keys:
    """Lets requests pass that have a key: `Authorization: Bearer KEY`, or `X-Api-Key: KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode(errors="surrogateescape") for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in PUBLIC:
            headers = Headers(scope=scope)
            api_key = headers.get("authorization", "").removeprefix("Bearer ")
            if not self._knows(api_key) and not self._knows(headers.get("x-api-key", "")):
                refused = JSONResponse(error(401, "Invalid API Key"), 401)
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, candidate: str) -> bool:
        """Takes as long for every key of a length."""
        matches = [secrets.compare_digest(candidate.encode("latin-1"), key) for key in self._keys]
        return any(matches)


def _route(server: Server, bodies: Bodies, path: str, method: str, work: Any) -> Route:
    """A route whose function gets the server and, for POST, the body."""

    def answer(*args: Any) -> Response:
        result = work(server, *args)
        return result if isinstance(result, Response) else JSONResponse(result)

    async def endpoint(request: Request) -> Response:
        if method == "GET":
            return answer(request)
        async with bodies.parsed(request, server.limits, method) as payload:
            body = payload if method == "POST list" else Body(payload)
            return await run_in_threadpool(answer, body, request)

    return Route(path, endpoint, methods=[method.split()[0]])


async def _bad(request: Request, fault: Exception) -> Response:
    if isinstance(fault, TooLong):
        details = {"n_prompt_tokens": fault.tokens, "n_ctx": fault.limit}
        return JSONResponse(error(400, str(fault), "exceed_context_size_error", **details), 400)
    return JSONResponse(error(400, str(fault)), 400)


async def _deep(request: Request, fault: Exception) -> Response:
    return JSONResponse(error(400, "the body is nested too deep"), 400)


async def _busy(request: Request, fault: Exception) -> Response:
    words = str(fault) or "the client went away before the answer"
    return JSONResponse(error(503, words), 503, {"Retry-After": "1"})


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
