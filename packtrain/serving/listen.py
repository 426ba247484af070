"""Listening: the HTTP server around the application, until a signal ends it."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from packtrain.errors import InputError
from packtrain.serving.engine import Engine

HEADERS = 64 << 10  # most bytes of a request's headers
CONNECTIONS = 128  # at once; more are refused
LINGER = 30.0  # seconds that running answers have once a signal came
TELLING = 1.0  # seconds in which clients can take that their answers ended, after a second signal
BACKLOG = 128


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises InputError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = str(error.strerror or error).lower()
        raise InputError(
            f"--host {host} --port {port}: cannot listen there: {why}", "use another port"
        ) from None


class _Listener(uvicorn.Server):
    """Ends running answers before it stops."""

    def __init__(self, config: uvicorn.Config, engine: Engine, say: Callable[[str], None]) -> None:
        super().__init__(config)
        self._engine, self._say, self._hurried = engine, say, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._hurried = True
            self._engine.hurry()
            return
        self._say(f"stopping: running answers have {LINGER:g} s; a second signal ends them at once")
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(asyncio.to_thread(self._engine.close, LINGER))
        ending = asyncio.create_task(super().shutdown(sockets))
        while not (self._hurried or ending.done()):
            await asyncio.sleep(0.05)
        await asyncio.wait((ending,), timeout=TELLING)
        for connection in [*self.server_state.connections]:
            connection.transport.abort()
        await ending
        await closing


def listener(app: Starlette, engine: Engine, say: Callable[[str], None]) -> uvicorn.Server:
    """Serves when it is run, until a signal or `should_exit`; running answers may finish, for a while."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws="none", server_header=False,
        date_header=True, h11_max_incomplete_event_size=HEADERS, limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=int(LINGER) + 5, timeout_keep_alive=30,
    )  # fmt: skip
    return _Listener(config, engine, say)


def listen(app: Starlette, engine: Engine, sock: socket.socket, say: Callable[[str], None]) -> None:
    """Serve until a signal."""
    with suppress(KeyboardInterrupt):  # the signal again, once all has ended
        listener(app, engine, say).run(sockets=[sock])
