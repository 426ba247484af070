"""The server as programs use it: the official `openai` client, and the calls of Open WebUI, over real connections."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx  # noqa: E402

from packtrain.events import Events  # noqa: E402
from packtrain.serving.app import app  # noqa: E402
from packtrain.serving.listen import bound, listener  # noqa: E402
from packtrain.serving.server import Server  # noqa: E402
from packtrain.tasks.serve import Serve, load  # noqa: E402
from tests.architectures import random_model  # noqa: E402

KEY = "secret-key"
ASK: list[Any] = [{"role": "user", "content": "the a"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("clients") / "m.gguf"
    random_model(path, "llama")
    made = load(Serve(path, ctx=2048, chat_template="chatml", seed=1, embeddings=True), Events())
    yield made
    made.engine.close(0)


@contextmanager
def listening(server: Server, *keys: str) -> Iterator[str]:
    """The address of a listener in a thread of its own."""
    sock = bound("127.0.0.1", 0)
    running = listener(app(server, keys), server.engine, lambda words: None)
    thread = threading.Thread(target=running.run, args=([sock],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address(server) -> Iterator[str]:
    with listening(server) as address:
        yield address


@pytest.fixture(scope="module")
def locked(server) -> Iterator[str]:
    """The same engine behind a key."""
    with listening(server, KEY) as address:
        yield address


def connected(address: str, **how: Any) -> Any:
    given = {"api_key": "any", "max_retries": 0, "timeout": 60} | how
    return openai.OpenAI(base_url=f"{address}/v1", **given)


@pytest.fixture(scope="module")
def client(address) -> Iterator[Any]:
    with connected(address) as client:
        yield client


@pytest.fixture(scope="module")
def chat(client) -> Any:
    """Asks for a chat, by default for eight tokens, the likeliest ones."""

    def ask(messages: Any = ASK, **how: Any) -> Any:
        given = {"model": "m.gguf", "max_tokens": 8, "temperature": 0} | how
        return client.chat.completions.create(messages=messages, **given)

    return ask


def idle(server: Server, seconds: float = 10) -> bool:
    """Whether all slots become free."""
    end = time.monotonic() + seconds
    while any(slot.writing for slot in server.engine.slots) or server.engine.waiting:
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


# ---- models and chats


def test_models_are_listed_and_found_by_name(client):
    (one,) = client.models.list().data
    assert one.id == "m.gguf" and one.object == "model"
    assert client.models.retrieve("m.gguf").id == "m.gguf"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none-such")


def test_a_stream_put_together_is_the_whole_answer(chat):
    whole = chat()
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    *parts, last, counts = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content and text
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert counts.choices == [] and counts.usage.completion_tokens == 8
    assert counts.usage.total_tokens == whole.usage.total_tokens
    assert all(part.usage is None for part in (*parts, last))
    assert all(part.choices for part in chat(stream=True))


def test_streams_at_once_are_each_what_they_are_alone(address, chat):
    words = [[{"role": "user", "content": f"the {letter}"}] for letter in "abcdef"]
    want = [chat(messages).choices[0].message.content for messages in words]

    async def text(client: Any, messages: Any) -> str:
        stream = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=8, temperature=0, stream=True
        )
        return "".join([part.choices[0].delta.content or "" async for part in stream])

    async def every() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any") as client:
            return await asyncio.gather(*(text(client, messages) for messages in words))

    assert asyncio.run(every()) == want


def test_a_stream_that_is_closed_frees_its_slot(server, chat):
    with chat(max_tokens=1500, stream=True) as stream:
        texts = (part.choices[0].delta.content for part in stream)
        assert next(text for text in texts if text)
        assert any(slot.writing for slot in server.engine.slots)
    written = server.engine.totals.written
    assert idle(server)
    assert server.engine.totals.written - written < 100


# ---- errors


def test_keys_are_asked_for(locked):
    with connected(locked, api_key="wrong") as wrong:
        with pytest.raises(openai.AuthenticationError) as refused:
            wrong.chat.completions.create(model="m", messages=ASK)
        assert refused.value.type == "authentication_error"
        assert wrong.models.list().data[0].id == "m.gguf"
    with connected(locked, api_key=KEY) as right:
        answer = right.chat.completions.create(model="m", messages=ASK, max_tokens=1)
        assert answer.usage.completion_tokens == 1
    assert httpx.post(f"{locked}/v1/chat/completions", json={"messages": ASK}).status_code == 401
