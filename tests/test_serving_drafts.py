"""The server guesses tokens: texts are those without guesses, in whatever company, and the guesses are counted."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.events import Events
from packtrain.inference.kv_cache.saved_state import StateCheckpoints
from packtrain.serving.http_app import app
from packtrain.workflows.model_server import ServeSettings, load_server
from tests.architectures import random_model

PROMPTS = [[1, *range(40, 60)], [1, 5, 6, 7, 5, 6, 7, 5, 6], [1, 9], [1, *([30, 31] * 12)]]
BODY = {"n_predict": 40, "temperature": 0, "ignore_eos": True, "return_tokens": True}


@contextmanager
def served(model: Path, **options: Any) -> Iterator[TestClient]:
    options = {"ctx": 512, "parallel": 3, "seed": 1, "metrics": True} | options
    server = load_server(ServeSettings(model, **options), Events())
    with TestClient(app(server)) as client:
        yield client
    server.engine.close(0)


def answers(client: TestClient, **fields: Any) -> list[Any]:
    """Answers to all prompts, written together, then to the first once more."""

    def post(prompt: list[int]) -> Any:
        return client.post("/completion", json={"prompt": prompt} | BODY | fields).json()

    with ThreadPoolExecutor(4) as pool:
        return [*pool.map(post, PROMPTS), post(PROMPTS[0])]


def tokens_of(client: TestClient, **fields: Any) -> list[Any]:
    return [(a["tokens"], a["stop_type"]) for a in answers(client, **fields)]


def counter(client: TestClient, name: str) -> int:
    lines = client.get("/metrics").text.splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(f"llamacpp:{name} "))


# all tokens in the cache; a window of nine; states
@pytest.mark.parametrize("arch", ["llama", "gemma2", "qwen35"])
def test_guesses_change_no_text(tmp_path, arch):
    model, other = tmp_path / "m.gguf", tmp_path / "d.gguf"
    random_model(model, arch)
    random_model(other, "llama", seed=1)
    bodies: list[Any] = [{}, {"n_probs": 2, "n_predict": 12}]
    with served(model) as client:
        expected = [tokens_of(client, **body) for body in bodies]
        assert all("draft_n" not in a["timings"] for a in answers(client))
        assert not any(slot["speculative"] for slot in client.get("/slots").json())
    foreign: Any = {"model_draft": other, "draft_p_min": 0.0}
    for drafting in (foreign, {"draft_lookup": True}) if arch == "llama" else (foreign,):
        with served(model, **drafting) as client:
            assert [tokens_of(client, **body) for body in bodies] == expected
            assert all(slot["speculative"] for slot in client.get("/slots").json())
            drafted = counter(client, "spec_decode_num_draft_tokens_total")
            accepted = counter(client, "spec_decode_num_accepted_tokens_total")
            timings = [answer["timings"] for answer in answers(client)]
            num_drafted = sum(timing.get("draft_n", 0) for timing in timings)
            num_accepted = sum(timing.get("draft_n_accepted", 0) for timing in timings)
            assert 0 <= num_accepted <= num_drafted
            assert num_drafted or "draft_lookup" in drafting
            drafted += num_drafted
            assert counter(client, "spec_decode_num_draft_tokens_total") == drafted
            accepted += num_accepted
            assert counter(client, "spec_decode_num_accepted_tokens_total") == accepted
            assert counter(client, "tokens_predicted_total") >= sum(
                t["predicted_n"] for t in timings
            )


def test_a_model_that_guesses_itself_is_right(tmp_path):
    random_model(tmp_path / "m.gguf", "llama")
    with served(tmp_path / "m.gguf", model_draft=tmp_path / "m.gguf", draft_p_min=0.0) as client:
        answer = client.post("/completion", json={"prompt": PROMPTS[0]} | BODY).json()
        timings = answer["timings"]
        assert (
            timings["draft_n_accepted"] == timings["draft_n"] > 25 and timings["predicted_n"] == 40
        )
        runs = counter(client, "n_decode_total")
        assert runs < 20
        drafts = counter(client, "spec_decode_num_drafts_total")
        # a run with guesses gives those that come and one more token
        assert 0 < drafts <= 39 - timings["draft_n_accepted"]


def test_guesses_in_a_context_that_is_full(tmp_path):
    """Answers that wait for room, and one that fills the context or forgets its middle."""
    random_model(tmp_path / "m.gguf", "llama")
    for options in (
        {"ctx": 128},
        {"ctx": 64, "parallel": 1, "context_shift": True},
        {"ctx": 64, "parallel": 1},
    ):
        with served(tmp_path / "m.gguf", **options) as client:
            expected = tokens_of(client)
        drafting = {"model_draft": tmp_path / "m.gguf", "draft_p_min": 0.0}
        with served(tmp_path / "m.gguf", **options, **drafting) as client:
            assert tokens_of(client) == expected


def test_a_draft_model_counts_in_the_memory_and_must_have_the_vocabulary(tmp_path):
    random_model(tmp_path / "m.gguf", "llama")
    random_model(tmp_path / "other.gguf", "gpt2")
    settings: Any = {"ctx": 4096, "memory": "10MiB"}

    def needed(**drafting: Any) -> str:
        with pytest.raises(DoesNotFit) as refusal:
            load_server(ServeSettings(tmp_path / "m.gguf", **settings, **drafting), Events())
        return str(refusal.value)

    assert needed() != needed(model_draft=tmp_path / "m.gguf")
    with pytest.raises(InputError, match="--draft-lookup and --model-draft both guess tokens"):
        both: Any = {"draft_lookup": True, "model_draft": tmp_path / "m.gguf"}
        load_server(ServeSettings(tmp_path / "m.gguf", **both), Events())


def test_a_long_text_leaves_the_checkpoints_of_others():
    checkpoints = StateCheckpoints(3, 10)
    states: Any = [object() for _ in range(12)]
    checkpoints.add_state(1, 5, states[0])
    for position in range(10, 110, 10):
        checkpoints.add_state(0, position, states[position // 10])
    assert checkpoints.latest_state(1, 5) == (5, states[0])
    assert [at for seq, at, _ in checkpoints.saved_states if seq == 0] == [80, 90, 100]
