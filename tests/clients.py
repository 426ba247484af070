"""A small model behind a real connection, and the official `openai` client of it: what tests of clients share.

A module that imports this is skipped where `openai` or the extra `server` is not installed.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from packtrain.common.events import Events  # noqa: E402
from packtrain.serving.http_app import app  # noqa: E402
from packtrain.serving.http_listener import bind_sockets, make_listener  # noqa: E402
from packtrain.serving.server_state import Server  # noqa: E402
from packtrain.workflows.model_server import ServeSettings, load_server  # noqa: E402
from tests.architectures import random_model  # noqa: E402

ASK: list[Any] = [{"role": "user", "content": "the a"}]


@dataclass
class Api:
    """The server, where it listens, and a client."""

    server: Server
    address: str
    client: Any

    def chat(self, messages: Any = ASK, **extra_options: Any) -> Any:
        """By default the eight likeliest tokens."""
        options = {"model": "m.gguf", "max_tokens": 8, "temperature": 0} | extra_options
        return self.client.chat.completions.create(messages=messages, **options)

    def write(self, **extra_options: Any) -> Any:
        """A completion, by default the eight likeliest tokens."""
        options = {
            "model": "m.gguf",
            "prompt": "the",
            "max_tokens": 8,
            "temperature": 0,
        } | extra_options
        return self.client.completions.create(**options)

    def becomes_idle(self, seconds: float = 20) -> bool:
        """Whether all slots become free."""
        end = time.monotonic() + seconds
        while (
            any(slot.answer for slot in self.server.engine.slots) or self.server.engine.num_waiting
        ):
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True


@contextmanager
def model_api(folder: Path, path: Path | None = None, **extra_options: Any) -> Iterator[Api]:
    """The model at `path`, or a random one, behind a listener without keys."""
    if path is None:
        path = folder / "m.gguf"
        random_model(path, "llama")
    options: Any = {
        "ctx": 2048,
        "chat_template": "chatml",
        "seed": 1,
        "embeddings": True,
    } | extra_options
    server = load_server(ServeSettings(path, **options), Events())
    with listening_server(server) as address, openai_client(address) as client:
        yield Api(server, address, client)


@contextmanager
def listening_server(server: Server, *keys: str) -> Iterator[str]:
    """The address of a listener in a thread of its own; at the end the engine ends, too."""
    sock = bind_sockets(["127.0.0.1"], 0)[0]
    running = make_listener(app(server, keys), server.engine, lambda words: None)
    thread = threading.Thread(target=running.run, args=([sock],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()


def openai_client(address: str, **extra_options: Any) -> Any:
    options = {"api_key": "any", "max_retries": 0, "timeout": 60} | extra_options
    return openai.OpenAI(base_url=f"{address}/v1", **options)
