"""A real browser, and `packtrain serve` in a process of its own: what tests of the page and its screenshots share."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
BROWSERS_FOLDER = Path(
    os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright"
)


def browser_path() -> str | None:
    """A browser that Playwright can drive; None without it."""
    if find_spec("playwright") is None:
        return None
    installed = [shutil.which(name) for name in NAMES]
    return next(
        filter(
            None, [*installed, *map(str, BROWSERS_FOLDER.glob("chromium-*/chrome-linux*/chrome"))]
        ),
        None,
    )


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


class RestartableServer:
    """`packtrain serve` that can be killed and started again on the same port."""

    def __init__(self, log: Path, *args: str) -> None:
        self._log, self._args = log, args
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "RestartableServer":
        command = [
            sys.executable,
            "-m",
            "packtrain",
            "serve",
            *self._args,
            "--port",
            str(self._port),
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(1200):
            try:
                urlopen(f"{self.address}/health", timeout=5).close()
                return self
            except (URLError, OSError):
                assert self._process.poll() is None, self._log.read_text()
                time.sleep(0.1)
        raise TimeoutError(self._log.read_text())

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
