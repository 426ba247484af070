"""`--context-shift`: an answer that fills the context goes on, and the middle of its text is forgotten."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

starlette = pytest.importorskip("starlette")

from starlette.testclient import TestClient  # noqa: E402

from packtrain.common.events import Events  # noqa: E402
from packtrain.serving.http_app import app  # noqa: E402
from packtrain.workflows.model_server import ServeSettings, load_server  # noqa: E402
from tests.architectures import random_model  # noqa: E402

PROMPT = [1, *range(40, 60)]
ENDLESS = {"prompt": PROMPT, "n_predict": 150, "temperature": 0, "ignore_eos": True}


@contextmanager
def running_server(
    folder: Path, arch: str = "llama", **changes: Any
) -> Iterator[tuple[TestClient, Any]]:
    random_model(folder / "m.gguf", arch)
    options: dict[str, Any] = {"ctx": 64, "parallel": 1, "seed": 1, "context_shift": True} | changes
    server = load_server(ServeSettings(folder / "m.gguf", **options), Events())
    with TestClient(app(server), raise_server_exceptions=False) as client:
        yield client, server.engine
    server.engine.close(0)


def post_completion(client: TestClient, **fields: Any) -> Any:
    answer = client.post("/completion", json=ENDLESS | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


# windows; learned positions; states
@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2", "qwen35"])
def test_an_answer_longer_than_the_context(tmp_path, arch):
    with running_server(tmp_path, arch) as (client, engine):
        answer = post_completion(client)
        assert answer["truncated"] is True and answer["tokens_predicted"] == 150
        assert answer["stop_type"] == "limit"
        assert post_completion(client, cache_prompt=False)["content"] == answer["content"]
        cached_tokens = engine.context.tokens(0)
        assert len(cached_tokens) <= 64 and cached_tokens[0] == 1


def test_what_is_kept_and_forgotten(tmp_path):
    """64 cells: the answer begins to forget after 43 tokens, 10 behind BOS and five that are kept."""
    with running_server(tmp_path) as (client, engine):
        answer = post_completion(client, n_predict=45, n_keep=5, n_discard=10, return_tokens=True)
        text = [*PROMPT, *answer["tokens"]]
        assert engine.context.tokens(0) == text[:6] + text[16:-1]
        full_answer = post_completion(
            client, n_predict=45, n_keep=-1, return_tokens=True, cache_prompt=False
        )
        assert engine.context.tokens(0)[: len(PROMPT)] == PROMPT
        assert full_answer["tokens"][:43] == answer["tokens"][:43]


def test_without_it_the_answer_ends(tmp_path):
    with running_server(tmp_path, context_shift=False) as (client, _):
        answer = post_completion(client)
        assert answer["truncated"] is True and len(PROMPT) + answer["tokens_predicted"] == 64


def test_several_answers_share_a_prompt_and_a_full_pool(tmp_path):
    with running_server(tmp_path, parallel=3) as (client, engine):
        body = {"prompt": PROMPT, "n": 3, "max_tokens": 100, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 300
        end = time.monotonic() + 10
        while any(slot.answer for slot in engine.slots) and time.monotonic() < end:
            time.sleep(0.01)
        assert not any(slot.answer for slot in engine.slots)
