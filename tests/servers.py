"""`packtrain serve` as a process of its own."""

import http.client
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.hostile_requests import Ask

START_TIMEOUT_SECONDS = 120.0  # seconds until a server must listen
ANSWER = 30.0  # seconds in which it must answer


class ServerProcess:
    """A server that listens on a port of this machine."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def connection(self) -> "closing[http.client.HTTPConnection]":
        return closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER))

    def ask(
        self, ask: Ask, connection: "http.client.HTTPConnection | None" = None
    ) -> tuple[int, str, bytes]:
        """Status, content type and body of the answer; on a connection that is kept, if one is given."""
        if connection is None:
            with self.connection() as new_connection:
                return self.ask(ask, new_connection)
        connection.putrequest(ask.method, ask.path, skip_accept_encoding=True)
        for name, value in ({"Content-Length": str(len(ask.body))} | ask.headers).items():
            connection.putheader(name, value)
        connection.endheaders(ask.body)
        answer = connection.getresponse()
        body = answer.read()
        return answer.status, answer.headers.get("Content-Type", ""), body


@contextmanager
def serve_process(model: Path, *flags: str) -> Iterator[ServerProcess]:
    """A server, once it listens; it is killed at the end."""
    command = [sys.executable, "-m", "packtrain", "serve", str(model), "--port", "0", *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with open(log, "wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
            try:
                yield ServerProcess(process, _port(process, log), log)
            finally:
                process.kill()


def _port(process: "subprocess.Popen[bytes]", log: Path) -> int:
    """The port that it says it listens on."""
    end = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if match := re.search(r"listening on http://[^ ]*:(\d+)", log.read_text()):
            return int(match[1])
        time.sleep(0.02)
    raise AssertionError(log.read_text())
