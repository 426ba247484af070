"""The page of runs over HTTP, read-only: in a thread beside training, or as a command of its own.

A client that reads slowly or goes away costs the process one connection for STALLED seconds, and nothing else."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from packtrain.common.errors import InputError
from packtrain.serving.listening_socket import bind_socket, url_of
from packtrain.training.monitoring.page_data import RunsPageData
from packtrain.training.monitoring.runs_page import live_page

LOOPBACK_HOST = "127.0.0.1"
LOCAL = ["127.0.0.1", "localhost", "[::1]", "::1"]  # host names that a browser on this machine uses
CONNECTIONS = 16  # open at once; more are refused
STALLED = 20  # seconds for which a client may take nothing
CLOSE_SECONDS = 3.0  # seconds that closing may take
MAX_WAIT_SECONDS = 20.0  # seconds for which an answer may wait for the end of the run
LOOK = 0.05  # seconds between two looks whether the run has ended
REPEAT_SECONDS = 2.0  # seconds in which a waiting page asks again after an answer
PIECE_NBYTES = 1 << 16
PLAN_FILE = "plan.html"
RESPONSE_HEADERS = {
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
}  # fmt: skip


def parse_address(text: str) -> tuple[str, int]:
    """Parse PORT or HOST:PORT into host and port. Raises InputError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if ":" in text else LOOPBACK_HOST
    if not (port.isascii() and port.isdecimal()) or int(port) > 65535 or not host:
        fact = f"--watch {text}: it must be a port from 0 to 65535, or HOST:PORT"
        raise InputError(f"{fact}; 0 takes a free one")
    return host, int(port)


class RunsPageServer:
    """Serves the runs page at the address `watch`, bound at creation; `url` is the page's. Raises InputError.

    board  the data that the page shows
    A page asks for /data?wait=SECONDS; the answer comes after these, or at once when the run has ended. So every page
    gets the end, also hidden pages, whose timers a browser slows down.
    """

    def __init__(self, watch: str, board: RunsPageData) -> None:
        host, port = parse_address(watch)
        self.board = board
        flags = f"--watch {watch}"
        self._socket = bind_socket(host, port, flags, backlog=CONNECTIONS, idle_seconds=STALLED)
        self.url = f"{url_of(self._socket)}/"
        is_local = self._socket.getsockname()[0] in LOCAL
        config = uvicorn.Config(
            self._make_app(is_local), log_config=None, access_log=False, lifespan="off", ws="none", http="h11",
            loop="asyncio", server_header=False, h11_max_incomplete_event_size=1 << 14,
            limit_concurrency=CONNECTIONS, timeout_keep_alive=STALLED, timeout_graceful_shutdown=1,
        )  # fmt: skip
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL + 1)
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None
        # waiting pages, and when one last heard that the run goes on
        self._num_waiting, self._last_answer_time = 0, -REPEAT_SECONDS

    def _make_app(self, is_local: bool) -> Starlette:
        routes = [Route("/", self._page), Route("/data", self._data), Route("/plan", self._plan)]
        host_guard = Middleware(TrustedHostMiddleware, allowed_hosts=LOCAL, www_redirect=False)
        # refuses pages of other hosts whose names were made to point here
        return Starlette(routes=routes, middleware=[host_guard] if is_local else [])

    # ---- answers

    async def _page(self, request: Request) -> Response:
        text, policy = live_page()
        headers = RESPONSE_HEADERS | {"Content-Security-Policy": policy}
        return Response(text, media_type="text/html", headers=headers)

    async def _data(self, request: Request) -> Response:
        params = request.query_params
        since = params.get("since", "0")
        seen_version = int(since) if since.isdecimal() and len(since) < 18 else 0
        wait_text = params.get("wait", "0")
        if wait_text.isdecimal() and wait_text != "0":
            await self._wait_for_end(request, min(float(wait_text), MAX_WAIT_SECONDS))
        data_json = self.board.json_bytes(seen_version, params.get("session", ""))
        return Response(data_json, media_type="application/json", headers=RESPONSE_HEADERS)

    async def _wait_for_end(self, request: Request, seconds: float) -> None:
        """Return after `seconds`, or when the run has ended, or when the client or the server goes away."""
        deadline = time.monotonic() + seconds
        self._num_waiting += 1
        try:
            while not (self.board.end or self._server.should_exit or time.monotonic() > deadline):
                if await request.is_disconnected():
                    return
                await asyncio.sleep(LOOK)
            if self.board.end is None:
                self._last_answer_time = time.monotonic()
        finally:
            self._num_waiting -= 1

    async def _plan(self, request: Request) -> Response:
        """Answer with the page of a run's plan, whose Content-Security-Policy allows only its own script."""
        run = self.board.runs.get(request.query_params.get("run", ""))
        plan_path = run and run.folder / PLAN_FILE
        if not plan_path or not plan_path.is_file():
            return JSONResponse({"error": "there is no such plan"}, 404)
        headers = RESPONSE_HEADERS | {
            "Content-Security-Policy": "frame-ancestors 'self'; sandbox allow-scripts"
        }
        return StreamingResponse(_file_pieces(plan_path), media_type="text/html", headers=headers)

    # ---- running

    def start(self) -> None:
        """Serve in a thread; returns once each kind of request was answered, and so has its memory."""
        args = ([self._socket],)
        self._thread = threading.Thread(target=self._server.run, args=args, daemon=True)
        self._thread.start()
        for path in ("/", "/data", "/plan"):
            self._request_page(path)

    def _request_page(self, path: str) -> None:
        """Request a path of the page, so that the memory of its answer is allocated before training plans its own."""
        host, port = self._socket.getsockname()[:2]
        host = {"0.0.0.0": LOOPBACK_HOST, "::": "::1"}.get(host, host)
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, port), CLOSE_SECONDS) as asking,
        ):
            asking.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())  # fmt: skip
            while asking.recv(PIECE_NBYTES):
                pass

    def close(self) -> None:
        """End the thread once all pages know the end of the run; connections that do not end in time are cut."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while (self.board.end and time.monotonic() < deadline) and (
            self._num_waiting or time.monotonic() < self._last_answer_time + REPEAT_SECONDS
        ):
            time.sleep(LOOK)
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def run(self) -> None:
        """Serve in this thread until a signal."""
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run([self._socket])


async def _file_pieces(path: Path) -> AsyncIterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(PIECE_NBYTES):
            yield piece
            await asyncio.sleep(0)
