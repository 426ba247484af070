"""Counts of /metrics: they are the sums of what the answers say, whatever is asked together."""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from packtrain.common.events import Events
from packtrain.serving.generation_jobs import AnswerEnd, GenerationJob, JobEvent
from packtrain.serving.http_app import app
from packtrain.serving.server_state import Server
from packtrain.workflows.model_server import ServeSettings, load_server
from tests.architectures import random_model

TEXTS = ["the a", "the a b c " * 12, "the a b c " * 12 + "d", "one of these", "x"]
COUNTERS = {
    "prompt_n": "prompt_tokens_total",
    "cache_n": "prompt_tokens_cached_total",
    "predicted_n": "tokens_predicted_total",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """A context so small that answers wait for room and read their texts again."""
    path = tmp_path_factory.mktemp("counts") / "m.gguf"
    random_model(path, "llama")
    options: Any = {"ctx": 224, "parallel": 3, "chat_template": "chatml", "seed": 1}
    loaded = load_server(ServeSettings(path, metrics=True, embeddings=True, **options), Events())
    yield loaded
    loaded.engine.close(0)


@pytest.fixture(scope="module")
def client(server) -> Iterator[TestClient]:
    with TestClient(app(server)) as client:
        yield client


def metrics(client: TestClient) -> Counter[str]:
    lines = [line.split() for line in client.get("/metrics").text.splitlines()]
    values = {name.removeprefix("llamacpp:"): value for name, value in (x for x in lines if len(x) == 2)}  # fmt: skip
    return Counter({short: int(values[name]) for short, name in COUNTERS.items()})


def timings_of(answer: Any) -> list[Any]:
    """Timings of an answer: of each of several documents, and of a stream its last ones."""
    if isinstance(answer, list):
        return [timing for part in answer for timing in timings_of(part)]
    if "timings" in answer:
        return [answer["timings"]]
    usage = answer["usage"]
    if "output_tokens" not in usage:  # of embeddings
        return [{"prompt_n": usage["prompt_tokens"], "cache_n": 0, "predicted_n": 0}]
    details = usage.get("input_tokens_details")
    num_cached = details["cached_tokens"] if details else usage["cache_read_input_tokens"]
    num_read = usage["input_tokens"] - (num_cached if details else 0)
    return [{"prompt_n": num_read, "cache_n": num_cached, "predicted_n": usage["output_tokens"]}]


def ask_anything(client: TestClient, rng: random.Random) -> list[Any]:
    """Timings of a random request."""
    text, max_tokens = rng.choice(TEXTS), rng.choice((0, 1, 2, 30))
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": max(max_tokens, 1)}
    stream, num_choices = rng.random() < 0.4, rng.choice((1, 1, 3))
    path, body = rng.choice((
        ("/completion", {"prompt": rng.choice((text, [text, "the"])), "n_predict": max_tokens}),
        ("/completion", {"prompt": text, "n_predict": 30, "stop": ["a", "e"], "cache_prompt": rng.random() < 0.5}),
        ("/v1/completions", {"prompt": text, "max_tokens": max_tokens, "n": num_choices}),
        ("/v1/chat/completions", {**chat, "n": num_choices}),
        ("/v1/responses", {"input": text, "max_output_tokens": 16}),
        ("/v1/messages", chat),
        ("/v1/embeddings", {"input": [text, "the"]}),
    ))  # fmt: skip
    stream &= path in ("/completion", "/v1/completions", "/v1/chat/completions")
    body |= {"stream": stream, "temperature": rng.choice((0, 1)), "model": "m"}
    if path.startswith("/v1/c"):
        body["stream_options"] = {"include_usage": True}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not stream:
        return timings_of(response.json())
    lines = [x.removeprefix("data: ") for x in response.text.splitlines() if x.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    end_events = [e for e in events if e.get("stop")] if path == "/completion" else events[-1:]
    return timings_of(end_events)


def test_counts_of_one_prompt_asked_three_times(client):
    first_counts = metrics(client)
    body = {"prompt": [5, 6, 7, 8, 9, 10, 11], "n_predict": 7, "ignore_eos": True}
    for _ in range(3):
        client.post("/completion", json=body)
    assert metrics(client) - first_counts == {"prompt_n": 9, "cache_n": 12, "predicted_n": 21}


def test_rates_leave_out_the_first_token_that_the_prompt_gives(client):
    def timings(count: int) -> Any:
        body = {"prompt": [5, 6, 7], "n_predict": count, "ignore_eos": True}
        return client.post("/completion", json=body).json()["timings"]

    short_timings = timings(1)
    assert short_timings["predicted_n"] == 1 and short_timings["predicted_ms"] > 0
    assert short_timings["predicted_per_second"] == short_timings["predicted_per_token_ms"] == 0
    long_timings = timings(9)
    num_steps = long_timings["predicted_ms"] * long_timings["predicted_per_second"] / 1e3
    assert long_timings["predicted_n"] == 9 and num_steps == pytest.approx(8)
    assert long_timings["predicted_per_token_ms"] == pytest.approx(long_timings["predicted_ms"] / 8)
    body = {"prompt": "the", "n": 2, "max_tokens": 5, "ignore_eos": True}
    both = client.post("/v1/completions", json=body).json()["timings"]
    assert both["predicted_n"] == 10
    assert both["predicted_ms"] * both["predicted_per_second"] / 1e3 == pytest.approx(8)


def test_the_mean_speed_is_of_steps(client, server):
    def rate_steps() -> float:
        lines = (line.split() for line in client.get("/metrics").text.splitlines())
        values = {x[0].removeprefix("llamacpp:"): x[1] for x in lines if len(x) == 2}
        seconds = float(values["tokens_predicted_seconds_total"])
        return float(values["predicted_tokens_seconds"]) * seconds

    steps = rate_steps()
    client.post("/completion", json={"prompt": [5, 6], "n_predict": 7, "ignore_eos": True})
    assert rate_steps() - steps == pytest.approx(6, abs=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_counts_are_the_sums_of_random_requests(client, server, seed: int):
    rng, cancelled, first_counts = random.Random(seed), list[AnswerEnd](), metrics(client)

    def on_event(event: JobEvent) -> None:
        if isinstance(event, AnswerEnd):
            cancelled.append(event)

    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(ask_anything, client, random.Random(rng.random())) for _ in range(24)
        ]
        for _ in range(8):
            prompt = server.tokenizer.encode(rng.choice(TEXTS))
            ticket = server.engine.submit_job(GenerationJob((*prompt,), max_tokens=60), on_event)
            time.sleep(rng.random() * 0.05)
            ticket.cancel()
        timings = [timing for answer in answers for timing in answer.result(60)]
    for _ in range(2000):
        if len(cancelled) == 8:
            break
        time.sleep(0.005)
    expected = Counter[str]()
    for timing in timings:
        expected.update({name: timing[name] for name in COUNTERS})
    for end in cancelled:
        counts = end.counts
        expected.update(
            prompt_n=counts.read, cache_n=counts.cached, predicted_n=counts.output_tokens
        )
        assert counts.read + counts.cached <= counts.prompt
    assert metrics(client) - first_counts == +expected
