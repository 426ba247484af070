"""The HTTP application: routes, API keys, bodies and limits of requests, errors, and the page at /.

Clients may be slow or send too much: the memory of all bodies is bounded. The page loads nothing, and may run its own
script and use its own style only."""

import asyncio
import json
import math
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import cache, partial
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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from packtrain.common.errors import InputError
from packtrain.common.memory import trim_heap
from packtrain.common.web_page import asset_text, content_hash
from packtrain.serving import routes
from packtrain.serving.generation_jobs import ServerBusy
from packtrain.serving.json_fields import JsonBody
from packtrain.serving.response_shapes import HttpRefusal, error
from packtrain.serving.server_state import PromptTooLong, RequestLimits, Server

NUM_READERS = 1  # requests of a kind of route that are parsed and worked on at once
LARGE = 1 << 16  # bytes of bodies after which memory is released; longer bodies wait for their turn
MAX_LARGE_BODIES = 7  # large bodies that are read or worked on at once
REFUSED, DRAIN_SECONDS = 64 << 20, 30.0  # most bytes and seconds that a refused request is read
MAX_VALUES = 1 << 17  # values in a body: each takes much more memory than its text
STRING_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*+"', re.S)


class BodyReader:
    """Reads bodies. Requests take turns per kind of route, so that quick ones need not wait for the engine's."""

    def __init__(self) -> None:
        self._num_parsed_nbytes, self._semaphores = 0, dict[str, asyncio.Semaphore]()
        self._large_semaphore = asyncio.Semaphore(MAX_LARGE_BODIES)

    @asynccontextmanager
    async def parse_body(
        self, request: Request, limits: RequestLimits, route_kind: str
    ) -> AsyncIterator[Any]:
        """Yield a body's parsed JSON. NUM_READERS bodies of a `route_kind` (a method in ROUTES) have turns at once;
        this one's lasts until the block ends. Raises HTTPException (408, 413, 503), InputError."""
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


INLINE_ELEMENT = re.compile(r"<(script|style)>(.*?)</\1>", re.S)
_read_asset = partial(asset_text, "packtrain.serving")
SCRIPT_NAMES = "servers", "columns", "talks", "ask", "tokens", "turns"


def page_route() -> Route:
    """Create the route of the chat page at /, which may talk to servers at any address that its user names."""
    page_html = page_text()
    headers = {
        "Content-Security-Policy": security_policy(page_html), "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
    }  # fmt: skip

    page = Response(page_html, media_type="text/html", headers=headers)
    return Route("/", page, methods=["GET"])


def worker_route() -> Route:
    """Create the route of the service worker that ends llama-server's, which keeps its page at this address."""
    script, headers = _read_asset("page_sw.js"), {"Cache-Control": "no-cache"}
    worker = Response(script, media_type="text/javascript", headers=headers)
    return Route("/sw.js", worker, methods=["GET"])


@cache
def page_text() -> str:
    """Return the page's HTML: page.html is the frame, page.css the style; of all scripts, page.js is the last."""
    scripts = [*(f"page_{name}.js" for name in SCRIPT_NAMES), "page.js"]
    page_html = _read_asset("page.html").replace("<!--style-->", _read_asset("page.css"))
    return page_html.replace("<!--script-->", "\n".join(map(_read_asset, scripts)))


def security_policy(page_html: str) -> str:
    """Return the page's Content-Security-Policy, which knows its script and style by their hashes."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for element_name, element_text in INLINE_ELEMENT.findall(page_html):
        hashes[element_name].append(f"'{content_hash(element_text)}'")
    return (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])};"
        " connect-src 'self' http: https:; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )


PRIVATE = "access-control-request-private-network"
FAULTS = (
    InputError, RecursionError, ServerBusy, HttpRefusal, HTTPException, ClientDisconnect, Exception,
)  # fmt: skip
HTTP_MESSAGES = {404: "File Not Found", 405: "this path takes another method"}
CORS: dict[str, Any] = {
    "allow_origin_regex": ".*", "allow_credentials": True, "allow_headers": ["*"],
    "allow_methods": ["GET", "POST", "DELETE", "OPTIONS"],
}  # fmt: skip
PUBLIC = {
    "/",
    "/sw.js",
    "/health",
    "/v1/health",
    "/models",
    "/v1/models",
}  # need no key, as in llama-server


def app(server: Server, keys: Sequence[str] = (), ui: bool = True) -> Starlette:
    """Create the HTTP application. With keys, all paths but PUBLIC need one of them; with `ui` there is a page at /."""
    body_reader = BodyReader()
    api_routes = [_make_route(server, body_reader, *route_args) for route_args in routes.ROUTES]
    return Starlette(
        routes=[*api_routes, worker_route(), *([page_route()] if ui else ())],
        exception_handlers=dict.fromkeys(FAULTS, _answer_error),
        middleware=[
            Middleware(DrainRequest),
            Middleware(PrivateNetworkCors, **CORS),
            Middleware(ApiKeyMiddleware, keys=keys),
        ],
    )


class PrivateNetworkCors(CORSMiddleware):
    """CORS of Starlette that ignores questions about private networks instead of refusing: browsers decide that."""

    def preflight_response(self, request_headers: Headers) -> Response:
        headers = {key: value for key, value in request_headers.items() if key != PRIVATE}
        return super().preflight_response(Headers(headers))


class ApiKeyMiddleware:
    """With keys, answers 401 where `Authorization: Bearer KEY` or `X-Api-Key: KEY` is missing, but for PUBLIC paths."""

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
    """Create a route for handler(server[, body of POST], request). `method` "POST list": the body may be a list."""

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
    """Return the JSON error and status for an exception that a handler raised; 500 for those of unknown kind."""
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
