"""The HTTP application: routes, API keys, limits of requests, errors."""

import secrets
from collections.abc import Mapping, Sequence
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
from packtrain.serving.generation_jobs import ServerBusy
from packtrain.serving.json_fields import JsonBody
from packtrain.serving.request_bodies import BodyReader, DrainRequest
from packtrain.serving.response_shapes import HttpRefusal, error
from packtrain.serving.server_state import PromptTooLong, Server

PRIVATE = "access-control-request-private-network"
FAULTS = (
    InputError, RecursionError, ServerBusy, HttpRefusal, HTTPException, ClientDisconnect, Exception,
)  # fmt: skip
HTTP_MESSAGES = {404: "File Not Found", 405: "this path takes another method"}
METHODS = ["GET", "POST", "DELETE", "OPTIONS"]
PUBLIC = {"/", "/health", "/v1/health", "/models", "/v1/models"}  # need no key, as in llama-server


def app(server: Server, keys: Sequence[str] = (), ui: bool = True) -> Starlette:
    """Create the application. With keys, requests need one of them; with `ui` there is a page at /."""
    body_reader = BodyReader()
    api_routes = [_make_route(server, body_reader, *route_args) for route_args in routes.ROUTES]
    return Starlette(
        routes=[*api_routes, *([page_route()] if ui else ())],
        exception_handlers=dict.fromkeys(FAULTS, _answer_error),
        middleware=[
            Middleware(DrainRequest),
            Middleware(
                PrivateNetworkCors, allow_origins=["*"], allow_methods=METHODS, allow_headers=["*"]
            ),
            Middleware(ApiKeyMiddleware, keys=keys),
        ],
    )


class PrivateNetworkCors(CORSMiddleware):
    """CORS of Starlette that ignores questions about private networks instead of refusing: browsers decide that."""

    def preflight_response(self, request_headers: Headers) -> Response:
        headers = {key: value for key, value in request_headers.items() if key != PRIVATE}
        return super().preflight_response(Headers(headers))


class ApiKeyMiddleware:
    """Lets requests pass that have a key: `Authorization: Bearer KEY`, or `X-Api-Key: KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._api_keys = [key.encode(errors="surrogateescape") for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._api_keys and scope["path"] not in PUBLIC:
            headers = Headers(scope=scope)
            api_key = headers.get("authorization", "").removeprefix("Bearer ")
            if not self._knows(api_key) and not self._knows(headers.get("x-api-key", "")):
                refusal_response = JSONResponse(error(401, "Invalid API Key"), 401)
                await refusal_response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, api_key: str) -> bool:
        """Return whether a key is valid, in a time that depends only on the key's length."""
        matches = [secrets.compare_digest(api_key.encode("latin-1"), key) for key in self._api_keys]
        return any(matches)


def _make_route(server: Server, bodies: BodyReader, path: str, method: str, handler: Any) -> Route:
    """Create a route whose handler gets the server and, for POST, the body."""

    def call_handler(*args: Any) -> Response:
        result = handler(server, *args)
        return result if isinstance(result, Response) else JSONResponse(result)

    async def endpoint(request: Request) -> Response:
        if method == "GET":
            return call_handler(request)
        async with bodies.parse_body(request, server.limits, method) as payload:
            body = payload if method == "POST list" else JsonBody(payload)
            return await run_in_threadpool(call_handler, body, request)

    return Route(path, endpoint, methods=[method.split()[0]])


async def _answer_error(request: Request, fault: Exception) -> Response:
    """Answer a request that failed by a fault of its own or of the server."""
    code, message, error_type, details = 500, "internal error", "", dict[str, int]()
    headers: Mapping[str, str] | None = None
    match fault:
        case PromptTooLong(tokens=tokens, max_tokens=max_tokens):
            code, message, error_type = 400, str(fault), "exceed_context_size_error"
            details = {"n_prompt_tokens": tokens, "n_ctx": max_tokens}
        case InputError():
            code, message = 400, str(fault)
        case RecursionError():
            code, message = 400, "the body is nested too deep"
        case ServerBusy() | ClientDisconnect():
            code, message = 503, str(fault) or "the client went away before the answer"
            headers = {"Retry-After": "1"}
        case HttpRefusal(code=code):
            message = str(fault)
        case HTTPException(status_code=code, headers=headers):
            message = HTTP_MESSAGES.get(code, fault.detail)
    return JSONResponse(error(code, message, error_type, **details), code, headers)
