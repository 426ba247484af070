"""The server on a small model: answers of each shape, neighbours, cancelling, slots as files, keys, bad requests."""

import asyncio
import base64
import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

starlette = pytest.importorskip("starlette")

from starlette.testclient import TestClient  # noqa: E402

from packtrain.common.errors import DoesNotFit  # noqa: E402
from packtrain.common.events import Events  # noqa: E402
from packtrain.common.memory import private_nbytes  # noqa: E402
from packtrain.dtypes import f16  # noqa: E402
from packtrain.inference.generator import GenerationLimits, Generator, Reply  # noqa: E402
from packtrain.inference.sampling import Sampling  # noqa: E402
from packtrain.models.model_file import ModelFile, fingerprint, open_model  # noqa: E402
from packtrain.models.model_with_adapters import adapted, read_scaled  # noqa: E402
from packtrain.serving.generation_jobs import (  # noqa: E402
    CANCELLED,
    AnswerEnd,
    GenerationJob,
    JobEvent,
    TextDelta,
)
from packtrain.serving.http_app import app  # noqa: E402
from packtrain.serving.server_state import Server  # noqa: E402
from packtrain.workflows.model_server import ServeSettings, load_server  # noqa: E402
from packtrain.workflows.text_embeddings import EmbedSettings, embed  # noqa: E402
from tests.adapters import random_adapter  # noqa: E402
from tests.architectures import random_model  # noqa: E402

KEY = "secret-key"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "m.gguf"
    random_model(path, "llama")
    return path


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("slots")
    options = {
        "ctx": 512,
        "chat_template": "chatml",
        "seed": 1,
        "slot_save_path": folder,
        "metrics": True,
    }
    loaded = load_server(ServeSettings(model, **options), Events())
    yield loaded
    loaded.engine.close(0)


@pytest.fixture(scope="module")
def client(server) -> Iterator[TestClient]:
    with TestClient(app(server), raise_server_exceptions=False) as client:
        yield client


def generate_ids(
    model: Path | ModelFile, prompt: list[int], count: int, **settings: Any
) -> list[int]:
    """The tokens that generate writes."""
    file = model if isinstance(model, ModelFile) else open_model(model)
    reply = Reply(
        Generator.from_model(file, 512, f16),
        file.tokenizer(),
        prompt,
        Sampling(**settings),
        5,
        GenerationLimits(count),
    )
    "".join(reply)
    return reply.ids


def run_jobs(server: Server, jobs: list[GenerationJob]) -> list[tuple[list[int], AnswerEnd]]:
    """The tokens and the end of each job, all written together."""

    async def run() -> list[tuple[list[int], AnswerEnd]]:
        ids, job_ends = [list[int]() for _ in jobs], dict[int, AnswerEnd]()
        async for updates in server.job_events(jobs):
            for number, update in updates:
                if isinstance(update, TextDelta):
                    ids[number] += [token.token_id for token in update.tokens]
                else:
                    job_ends[number] = update
        return [(ids[n], job_ends[n]) for n in range(len(jobs))]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "settings", [{"temp": 0.0}, {"temp": 1.5}, {"temp": 1.0, "repeat_penalty": 1.3}]
)
def test_answers_are_those_of_generate_alone_and_with_neighbours(server, model, settings):
    """Nine at once: more than there are slots."""
    prompts = [[1, *range(40 + n, 40 + 3 * n + 5)] for n in range(9)]
    expected = [generate_ids(model, prompt, 12, **settings) for prompt in prompts]
    jobs = [GenerationJob(tuple(prompt), Sampling(**settings), 5, 12) for prompt in prompts]
    for job, ids in zip(jobs, expected, strict=True):
        (got, end) = run_jobs(server, [job])[0]
        assert got == ids or end.reason == "end"
        assert [*got] == ids[: len(got)]
    for (got, end), ids in zip(run_jobs(server, jobs), expected, strict=True):
        assert [*got] == ids[: len(got)] and (end.reason == "end" or len(got) == 12)


def test_a_full_context_pauses_the_last_and_loses_no_token(server, model):
    """Four answers of 200 tokens do not fit 512 cells together."""
    prompts = [[1, 50 + n, 60, 70] for n in range(4)]
    jobs = [GenerationJob(tuple(p), Sampling(temp=0), 5, 200, ignore_eos=True) for p in prompts]
    for (got, end), prompt in zip(run_jobs(server, jobs), prompts, strict=True):
        assert end.reason == "count" and len(got) == 200
        assert (
            generate_ids(model, prompt, 40, temp=0)[:40]
            == got[: len(generate_ids(model, prompt, 40, temp=0))]
        )


def test_a_prompt_that_is_being_read_is_read_once(server):
    prompt = (1, *(30 + n % 90 for n in range(150)))
    results = run_jobs(server, [GenerationJob(prompt, Sampling(temp=1), n, 4) for n in range(4)])
    cached = sorted(end.counts.cached for _, end in results)
    assert cached == [0, 150, 150, 150]


def test_who_goes_away_frees_the_slot(server):
    seen, finished = threading.Event(), threading.Event()
    updates = list[JobEvent]()

    def tell(one: JobEvent) -> None:
        (seen if isinstance(one, TextDelta) else finished).set()
        updates.append(one)

    ticket = server.engine.submit_job(
        GenerationJob((1, 40, 41), Sampling(temp=1), 3, 400, ignore_eos=True), tell
    )
    assert seen.wait(30)
    ticket.cancel()
    assert finished.wait(30)
    assert isinstance(updates[-1], AnswerEnd) and updates[-1].reason == CANCELLED
    assert not any(slot.answer for slot in server.engine.slots)


# ---- over HTTP


def events(text: str) -> list[Any]:
    """The events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


CHAT = {"messages": [{"role": "user", "content": "the a"}], "max_tokens": 8, "temperature": 0}


def test_a_chat_whole_and_streamed_is_the_same(client):
    full_reply = client.post("/v1/chat/completions", json=CHAT).json()
    assert (
        full_reply["object"] == "chat.completion" and full_reply["usage"]["completion_tokens"] <= 8
    )
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    first, *parts, last, counts, done = events(client.post("/v1/chat/completions", json=body).text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    text = "".join(part["choices"][0]["delta"]["content"] for part in parts)
    assert text == full_reply["choices"][0]["message"]["content"]
    assert last["choices"][0]["delta"] == {} and done == "[DONE]"
    assert last["choices"][0]["finish_reason"] == full_reply["choices"][0]["finish_reason"]
    assert (
        counts["choices"] == []
        and counts["usage"]["completion_tokens"] == full_reply["usage"]["completion_tokens"]
    )
    assert {part["id"] for part in (first, *parts, last, counts)} == {first["id"]}


def test_completions_have_probabilities_that_add_up(client, server):
    size = server.tokenizer.vocab_size
    body = {"prompt": "the", "n_predict": 3, "n_probs": size, "temperature": 0}
    reply = client.post("/completion", json=body).json()
    assert reply["stop"] is True and reply["stop_type"] in ("limit", "eos")
    for token in reply["completion_probabilities"]:
        total = sum(
            2.718281828459045 ** candidate["logprob"] for candidate in token["top_logprobs"]
        )
        assert total == pytest.approx(1, abs=1e-6)
        assert token["logprob"] == token["top_logprobs"][0]["logprob"]


def test_sequence_breakers_are_texts(client):
    breakers = {"dry_multiplier": 1.0, "dry_sequence_breakers": ["a", ";"]}
    reply = client.post("/completion", json={"prompt": "the", "n_predict": 1, **breakers}).json()
    assert reply["generation_settings"]["dry_sequence_breakers"] == ["a", ";"]


def test_several_prompts_and_answers_come_in_order(client):
    body = {"prompt": ["the", "a"], "max_tokens": 4, "n": 2, "temperature": 0}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["text"] == choices[1]["text"] and choices[2]["text"] == choices[3]["text"]
    pair = client.post("/completion", json={"prompt": [[1, 40], "a"], "n_predict": 2}).json()
    assert len(pair) == 2 and [reply["index"] for reply in pair] == [0, 1]


def test_tokens_and_templates(client):
    ids = client.post("/tokenize", json={"content": "the a", "add_special": True}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["content"] == "the a"
    pieces = client.post("/tokenize", json={"content": "é", "with_pieces": True}).json()["tokens"]
    assert any(isinstance(piece["piece"], list) for piece in pieces)
    prompt = client.post("/apply-template", json=CHAT).json()["prompt"]
    assert prompt == "<|im_start|>user\nthe a<|im_end|>\n<|im_start|>assistant\n"
    partial_chat = CHAT | {
        "messages": [*CHAT["messages"], {"role": "assistant", "content": "I am"}]
    }
    assert client.post("/apply-template", json=partial_chat).json()["prompt"] == f"{prompt}I am"
    parts = [{"type": "text", "text": text} for text in ("I", "am")]
    partial_chat["messages"][-1]["content"] = parts  # joined as llama-server joins them
    assert client.post("/apply-template", json=partial_chat).json()["prompt"] == f"{prompt}I\n\nam"


def test_a_slot_is_saved_restored_and_erased(client, server):
    body = {"prompt": [1, *range(40, 60)], "n_predict": 4, "id_slot": 1, "temperature": 0}
    first = client.post("/completion", json=body).json()
    assert first["id_slot"] == 1
    saved = client.post("/slots/1?action=save", json={"filename": "one.bin"}).json()
    assert (
        saved["n_saved"] == 24
        and saved["n_written"] == (server.slots_folder / "one.bin").stat().st_size
    )
    assert (
        client.post("/slots/2?action=restore", json={"filename": "one.bin"}).json()["n_restored"]
        == 24
    )
    second = client.post("/completion", json=body | {"id_slot": 2}).json()
    assert second["content"] == first["content"] and second["timings"]["cache_n"] == 20
    assert client.post("/slots/2?action=erase", json={}).json()["n_erased"] > 20
    assert (
        client.post("/completion", json=body | {"id_slot": 2, "cache_prompt": False}).json()[
            "timings"
        ]["cache_n"]
        == 0
    )
    for name in ("../one.bin", "", ".", "..", "a/b", "none.bin"):
        refused = client.post("/slots/1?action=restore", json={"filename": name})
        assert refused.status_code == 400, name


def test_the_server_describes_itself(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/v1/models").json()["data"][0]["id"] == "m.gguf"
    props = client.get("/props").json()
    assert props["total_slots"] == 4 and props["default_generation_settings"]["n_ctx"] == 512
    assert props["model_path"] == "m.gguf"
    assert [slot["is_processing"] for slot in client.get("/slots").json()] == [False] * 4
    lines = client.get("/metrics").text.splitlines()
    assert any(line.startswith("llamacpp:tokens_predicted_total ") for line in lines)


BAD: list[tuple[str, Any, str]] = [
    ("/completion", {}, "'prompt' is required"),
    ("/completion", {"prompt": 5}, "prompt must be"),
    ("/completion", {"prompt": [1, 100000]}, "prompt[1]"),
    ("/completion", {"prompt": "a", "temperature": "hot"}, "temperature must be a number"),
    ("/completion", {"prompt": "a", "temperature": -1}, "temperature is -1"),
    ("/completion", {"prompt": "a", "seed": 10**400}, "seed is too large"),
    ("/completion", {"prompt": "a", "temperature": 10**400}, "temperature is too large"),
    ("/completion", {"prompt": "a", "temperature": True}, "temperature must be a number"),
    ("/completion", {"prompt": "a", "top_k": 1.5}, "top_k must be a whole number"),
    ("/tokenize", {"content": 5}, "content must be a text"),
    ("/completion", {"prompt": "a", "samplers": ["none such"]}, "none such"),
    ("/completion", {"prompt": "a", "logit_bias": [[100000, 1]]}, "there is no token 100000"),
    ("/completion", {"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias"),
    ("/completion", {"prompt": "a", "id_slot": 9}, "id_slot is 9"),
    ("/completion", {"prompt": "a", "lora": [{"id": 3, "scale": 1}]}, "there is no adapter 3"),
    ("/completion", {"prompt": "a", "stop": [1]}, "stop must be"),
    ("/completion", {"prompt": "a", "grammar": "root ::= ("}, "line 1"),
    ("/completion", {"prompt": "a", "json_schema": {"type": "hiccup"}}, "hiccup"),
    ("/v1/completions", {"prompt": "a", "n": 1000}, "n is 1000"),
    ("/v1/chat/completions", {}, "'messages' is required"),
    ("/v1/chat/completions", {"messages": "text"}, "'messages' is required"),
    ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "role is 'king'"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 123}]}, "content"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "sound"}}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools[0]"),
    ("/v1/chat/completions", {**CHAT, "tool_choice": "some"}, "there is no such tool"),
    ("/detokenize", {"tokens": [-1]}, "tokens must be ids"),
    ("/slots/9?action=save", {"filename": "x"}, "no such slot"),
    ("/slots/0?action=burn", {}, "action must be"),
]


@pytest.mark.parametrize("path, body, words", BAD)
def test_bad_requests_say_what_is_wrong(client, path, body, words):
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    fault = answer.json()["error"]
    assert fault["type"] == "invalid_request_error" and words in fault["message"]


def test_other_refusals(client):
    assert client.post("/completion", content=b"{").status_code == 400
    assert client.post("/completion", content=b"[" * 100_000).status_code == 400
    deep = client.post("/completion", content=b"[" * 100_000 + b"]" * 100_000)
    assert deep.status_code == 400 and "nested too deeply" in deep.json()["error"]["message"]
    assert client.post("/completion", content=b" " * (2 << 20)).status_code == 413
    assert client.get("/nothing").json()["error"]["type"] == "not_found_error"
    assert client.get("/completion").status_code == 405
    assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 501
    long = client.post("/completion", json={"prompt": [5] * 600})
    fault = long.json()["error"]
    assert long.status_code == 400 and fault["type"] == "exceed_context_size_error"
    assert (fault["n_prompt_tokens"], fault["n_ctx"]) == (600, 512)


def test_keys(server):
    with TestClient(app(server, [KEY, "other"])) as client:
        assert client.get("/health").status_code == client.get("/v1/models").status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer no"},
            {"Authorization": KEY[:-1]},
            {"X-Api-Key": ""},
        ):
            refused = client.post("/completion", json={"prompt": "a"}, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "authentication_error"
        for headers in ({"Authorization": f"Bearer {KEY}"}, {"X-Api-Key": "other"}):
            assert (
                client.post("/tokenize", json={"content": "a"}, headers=headers).status_code == 200
            )


def test_requests_choose_the_scales_of_adapters(model, tmp_path):
    """Base and tuned in one batch answer as each does alone; the default is that of the command line."""
    file = open_model(model)
    (tmp_path / "tuned.run").mkdir()
    adapter = random_adapter(tmp_path / "tuned.run/adapter.gguf", file)
    tuned = adapted(file, read_scaled([f"{adapter}:0.5"], file.gguf))
    expected = {
        0.0: generate_ids(file, [1, 40, 41], 10, temp=0),
        0.5: generate_ids(tuned, [1, 40, 41], 10, temp=0),
    }
    assert expected[0.0] != expected[0.5]
    server = load_server(
        ServeSettings(model, ctx=256, lora=(f"{adapter}:0.5",), chat_template="chatml"), Events()
    )
    try:
        jobs = [
            GenerationJob((1, 40, 41), Sampling(temp=0), 1, 10, adapter_scales=(scale,))
            for scale in (0.0, 0.5, 0.0)
        ]
        for (got, _), job in zip(run_jobs(server, jobs), jobs, strict=True):
            assert got == expected[job.adapter_scales[0]][: len(got)] and got
        with TestClient(app(server)) as client:
            listed = client.get("/lora-adapters").json()
            sha256 = hashlib.sha256(Path(adapter).read_bytes()).hexdigest()[:16]
            identity = {"run": "tuned", "sha256": sha256}
            assert listed == [{"id": 0, "path": "adapter.gguf", "scale": 0.5} | identity]
            assert client.get("/props").json()["model_hash"] == fingerprint(file)
            body = {
                "prompt": [1, 40, 41],
                "n_predict": 10,
                "temperature": 0,
                "return_tokens": True,
            }
            assert client.post("/completion", json=body).json()["tokens"] == expected[0.5]
            unscaled_body = body | {"lora": [{"id": 0, "scale": 0.0}]}
            assert client.post("/completion", json=unscaled_body).json()["tokens"] == expected[0.0]
            assert client.post("/lora-adapters", json=[{"id": 0, "scale": 0}]).json() == {
                "success": True
            }
            assert client.post("/completion", json=body).json()["tokens"] == expected[0.0]
    finally:
        server.engine.close(0)


def test_embeddings_are_those_of_embed(model):
    server = load_server(
        ServeSettings(model, ctx=256, embeddings=True, chat_template="chatml"), Events()
    )
    try:
        with TestClient(app(server)) as client:
            body = {"input": ["the a", "a"]}
            reply = client.post("/v1/embeddings", json=body).json()
            expected = embed(EmbedSettings(model, prompt=("the a", "a")), Events()).vectors
            got = [item["embedding"] for item in reply["data"]]
            np.testing.assert_allclose(got, expected, atol=1e-6)
            packed = client.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()
            raw = base64.b64decode(packed["data"][1]["embedding"])
            np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), np.float32(got[1]))
            native = client.post("/embedding", json={"content": "a"}).json()
            np.testing.assert_allclose(native[0]["embedding"][0], expected[1], atol=1e-6)
    finally:
        server.engine.close(0)


SERVED = """import sys
from pathlib import Path
from packtrain.common.errors import DoesNotFit
from packtrain.common.events import Events
from packtrain.workflows.model_server import ServeSettings, load_server
model, ctx, memory = sys.argv[1:4]
settings = ServeSettings(
    model=Path(model), ctx=int(ctx), memory=memory, embeddings=True, parallel=8,
    lora=tuple(sys.argv[4:]), chat_template="chatml",
)
try:
    load_server(settings, Events()).engine.close(0)
    print("started")
except DoesNotFit as error:
    print(error)
"""


def test_every_limit_that_a_refusal_names_is_enough_for_answers_and_embeddings(model, tmp_path):
    """Both contexts count, not the first alone; the limits are given as they are printed."""
    adapter = tmp_path / "a.gguf"
    random_adapter(adapter, open_model(model))

    def served(ctx: int, memory: str) -> str:
        command = (sys.executable, "-c", SERVED, str(model), str(ctx), memory, str(adapter))
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    refusal = re.fullmatch(
        r"a context of 8,192 tokens needs (.*), and 1.0 MiB are allowed;"
        r" (.*) is the least, for a context of 32",
        served(8192, "1MiB"),
    )
    assert refusal
    assert served(8192, refusal[1]) == "started"
    assert served(32, refusal[2]) == "started"


def test_memory_is_planned_before_it_listens(model):
    """The largest context that fits is named, and fits."""
    memory = f"{(private_nbytes() >> 20) + 300}MiB"
    with pytest.raises(DoesNotFit, match="the largest that fits is") as error:
        load_server(
            ServeSettings(model, ctx=1 << 20, memory=memory, chat_template="chatml"), Events()
        )
    max_ctx = int(str(error.value).split(" is ")[1].replace(",", ""))
    server = load_server(
        ServeSettings(model, ctx=max_ctx, memory=memory, chat_template="chatml"), Events()
    )
    server.engine.close(0)
