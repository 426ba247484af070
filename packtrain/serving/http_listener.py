"""Listening: the HTTP server around the application, until a signal ends it."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from packtrain.serving import listening_socket
from packtrain.serving.engine_thread import ServingEngine

MAX_HEADER_NBYTES = 64 << 10  # most bytes of a request's headers
MAX_CONNECTIONS = 128  # open at once; beyond them, idle connections are closed
LINGER_SECONDS = 30.0  # seconds that running answers have after a signal
TELLING = 1.0  # seconds in which clients can receive the ends of answers
IDLE_SECONDS = 30.0  # seconds that a connection may ask nothing, or take nothing that is sent
# most bytes of answers that clients have not taken; beyond them, the slowest are cut
MAX_UNSENT_NBYTES = 16 << 20
BACKLOG = 128


def bind_sockets(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Open listening sockets at all addresses of --host, at one port (0: a free one). Raises InputError."""
    sockets = list[socket.socket]()
    options: Any = {"backlog": BACKLOG, "idle_seconds": IDLE_SECONDS}
    for host in hosts:
        flags = f"--host {host} --port {port}"
        sockets.append(listening_socket.bind_socket(host, port, flags, **options))
        port = sockets[0].getsockname()[1]
    return sockets


class _Connection(H11Protocol):
    """A connection that is cut if it idles for IDLE_SECONDS, or for too many connections or bytes that wait unsent."""

    since = 0.0  # when the connection was last used
    _idle_timer: asyncio.TimerHandle | None = None

    @property
    def asks(self) -> bool:
        """Whether a request of this connection is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_idle_timer()
        if len(self.connections) > MAX_CONNECTIONS:
            idle_connections = (connection for connection in self._all() if not connection.asks)
            min(idle_connections, key=lambda connection: connection.since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_idle_timer()

    def handle_events(self) -> None:
        super().handle_events()
        if self.asks:
            self._stop_idle_timer()

    def on_response_complete(self) -> None:
        self._start_idle_timer()
        super().on_response_complete()
        # the oldest connections that have not taken their answers are cut, until at most MAX_UNSENT_NBYTES wait
        unsent_nbytes = {
            connection: connection.transport.get_write_buffer_size()
            for connection in sorted(self._all(), key=lambda connection: connection.since)
        }
        excess_nbytes = sum(unsent_nbytes.values()) - MAX_UNSENT_NBYTES
        for connection, connection_nbytes in unsent_nbytes.items():
            if excess_nbytes > 0 and connection_nbytes:
                connection.transport.abort()
                excess_nbytes -= connection_nbytes

    def _all(self) -> "list[_Connection]":
        return [item for item in self.connections if isinstance(item, _Connection)]

    def _start_idle_timer(self) -> None:
        self._stop_idle_timer()
        self.since = self.loop.time()
        self._idle_timer = self.loop.call_later(IDLE_SECONDS, self.transport.abort)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


class _Listener(uvicorn.Server):
    """A uvicorn server that ends running answers before it stops."""

    def __init__(
        self, config: uvicorn.Config, engine: ServingEngine, report: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._engine, self._report, self._cancels_all = engine, report, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._cancels_all = True
            self._engine.cancel_all()
            return
        self._report(
            f"stopping: running answers have {LINGER_SECONDS:g} s; a second signal ends them at once"
        )
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        engine_task = asyncio.create_task(asyncio.to_thread(self._engine.close, LINGER_SECONDS))
        shutdown_task = asyncio.create_task(super().shutdown(sockets))
        while not (self._cancels_all or shutdown_task.done()):
            await asyncio.sleep(0.05)
        await asyncio.wait((shutdown_task,), timeout=TELLING)
        for connection in [*self.server_state.connections]:
            connection.transport.abort()
        await shutdown_task
        await engine_task


def make_listener(
    app: Starlette, engine: ServingEngine, report: Callable[[str], None]
) -> uvicorn.Server:
    """Create a server that runs until a signal, which it reports; running answers then have LINGER_SECONDS."""
    config = uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="off", ws="none", server_header=False, http=_Connection,
        loop="asyncio", date_header=True, h11_max_incomplete_event_size=MAX_HEADER_NBYTES,
        timeout_graceful_shutdown=int(LINGER_SECONDS) + 5, timeout_keep_alive=int(IDLE_SECONDS),
    )  # fmt: skip
    return _Listener(config, engine, report)


def listen(
    app: Starlette, engine: ServingEngine, sockets: list[socket.socket], report: Callable[[str], None]
) -> None:  # fmt: skip
    """Serve an application on sockets until a signal, and close the engine; `report` gets a message at the signal."""
    with suppress(KeyboardInterrupt):  # the signal again, once all has ended
        make_listener(app, engine, report).run(sockets=sockets)
