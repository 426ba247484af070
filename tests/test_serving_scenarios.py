"""What llama.cpp's tests of its server check, asked of ours in our own words, on a small model of random weights."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

starlette = pytest.importorskip("starlette")

from starlette.testclient import TestClient  # noqa: E402

from packtrain.common.events import Events  # noqa: E402
from packtrain.models.model_file import open_model  # noqa: E402
from packtrain.serving.http_app import app  # noqa: E402
from packtrain.serving.server_state import Server  # noqa: E402
from packtrain.workflows.model_server import ServeSettings, load_server, split_names  # noqa: E402
from tests.adapters import random_adapter  # noqa: E402
from tests.architectures import random_model  # noqa: E402

TEXT = {"prompt": [1, *range(40, 60)], "n_predict": 6, "temperature": 0}
USER = {"role": "user", "content": "the a"}
STARTED_MESSAGES = [USER, {"role": "assistant", "content": "It is"}]
CHAT = {"messages": [USER], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CHATS = "/v1/chat/completions"
ORIGIN = "http://a.example"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("scenarios")
    random_model(folder / "m.gguf", "llama")
    adapter = random_adapter(folder / "a.gguf", open_model(folder / "m.gguf"))
    options: dict[str, Any] = {
        "ctx": 512, "parallel": 2, "chat_template": "chatml", "seed": 42, "slot_save_path": folder, "metrics": True,
        "alias": "first, second,first", "lora": (f"{adapter}:0",), "embeddings": True, "kv_unified": False,
    }  # fmt: skip
    instance = load_server(ServeSettings(folder / "m.gguf", **options), Events())
    yield instance
    instance.engine.close(0)


@pytest.fixture(scope="module")
def client(server) -> Iterator[TestClient]:
    with TestClient(app(server), raise_server_exceptions=False) as client:
        yield client


def stream_events(client: TestClient, path: str, body: Any) -> list[Any]:
    """The events of a stream."""
    text = client.post(path, json={**body, "stream": True}).text
    lines = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def post_json(client: TestClient, path: str, body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---- the server itself


def test_what_the_server_says_of_itself(client, server):
    assert client.get("/health").json() == {"status": "ok"}
    props = client.get("/props").json()
    assert props["model_path"].endswith(".gguf") and props["total_slots"] == 2
    defaults = props["default_generation_settings"]
    assert defaults["n_ctx"] == 256 and defaults["params"]["seed"] == 42
    assert "grammar" not in defaults["params"]
    assert props["endpoint_slots"] and props["endpoint_metrics"]
    model_card = client.get("/models").json()["data"][0]
    assert model_card["id"] == "first" and model_card["aliases"] == ["first", "second"]
    assert client.get("/v1/models/second").json()["id"] == "first"
    slots = client.get("/slots").json()
    assert [slot["n_ctx"] for slot in slots] == [256, 256] and "params" not in slots[0]


def test_slots_can_be_hidden(client, server):
    server.has_slots = False
    try:
        refused = client.get("/slots")
        assert refused.status_code == 501
        assert refused.json()["error"]["type"] == "not_supported_error"
    finally:
        server.has_slots = True


def test_browsers_may_ask_from_anywhere(client):
    headers = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "Authorization",
    }
    answer = client.options("/completions", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] in ("*", ORIGIN)
    assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert answer.headers["access-control-allow-headers"].lower() in ("*", "authorization")


def test_counts_of_prometheus_add_up(client):
    def counts() -> dict[str, float]:
        lines = [line.split() for line in client.get("/metrics").text.splitlines()]
        return {name.removeprefix("llamacpp:"): float(x) for name, x in (p for p in lines if len(p) == 2)}  # fmt: skip

    before = counts()
    timings = post_json(client, "/completion", TEXT | {"ignore_eos": True})["timings"]
    after = counts()
    cached = "prompt_tokens_cached_total"
    assert after[cached] - before[cached] == timings["cache_n"]
    assert after["n_tokens_max"] >= 27


# ---- /completion


def test_a_stream_has_what_the_whole_answer_has(client):
    full_answer = post_json(client, "/completion", TEXT | {"return_tokens": True})
    *parts, last = stream_events(client, "/completion", TEXT)
    assert "".join(part["content"] for part in parts) + last["content"] == full_answer["content"]
    assert [id for part in parts for id in part["tokens"]] == full_answer["tokens"]
    assert all(part["stop"] is False for part in parts) and last["stop"] is True
    written = [part["tokens_predicted"] for part in parts]
    assert written == sorted(set(written)) and last["tokens_predicted"] >= written[-1]
    settings = last["generation_settings"]
    assert settings["seed"] == 42 and settings["n_predict"] == 6 and settings["stream"] is True
    assert last["truncated"] is False and isinstance(last["has_new_line"], bool)
    assert post_json(client, "/completion", TEXT)["tokens"] == []


def test_the_same_seed_gives_the_same_text_and_others_others(client):
    warm = TEXT | {"temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "n_predict": 8}
    texts = [post_json(client, "/completion", warm | {"seed": n})["content"] for n in (1, 2, 3, 1)]
    assert texts[0] == texts[3] and len({*texts}) == 3
    cold = warm | {"seed": 1, "cache_prompt": False}
    assert post_json(client, "/completion", cold)["content"] == texts[0]


def test_prompts_are_texts_tokens_and_both(client):
    ids = post_json(client, "/tokenize", {"content": "the a", "add_special": True})["tokens"]
    prompts = [ids, "the a", {"prompt_string": "the a"}, ids]
    completions = post_json(client, "/completion", TEXT | {"prompt": prompts})
    assert [completion["index"] for completion in completions] == [0, 1, 2, 3]
    assert len({completion["content"] for completion in completions}) == 1
    mixed = post_json(client, "/completion", TEXT | {"prompt": [1, 40, "the a", 41, "the"]})
    assert isinstance(mixed["content"], str)
    image = {"prompt_string": "a", "multimodal_data": "AAAA"}
    assert client.post("/completion", json=TEXT | {"prompt": image}).status_code == 400


def test_fields_of_an_answer_can_be_chosen(client):
    fields = ["content", "generation_settings/n_predict", "prompt"]
    completion = post_json(client, "/completion", TEXT | {"response_fields": fields})
    assert set(completion) == {*fields} and completion["generation_settings/n_predict"] == 6
    assert "generation_settings" in post_json(client, "/completion", TEXT | {"response_fields": []})


def test_top_k_below_zero_is_off(client):
    completion = post_json(client, "/completion", TEXT | {"top_k": -1, "n_predict": 1})
    assert completion["generation_settings"]["top_k"] == 0


@pytest.mark.parametrize("samplers", [["top_k", "temperature"], "top_k;temperature"])
def test_samplers_are_a_list_or_a_text(client, samplers):
    completion = post_json(client, "/completion", TEXT | {"samplers": samplers})
    assert completion["generation_settings"]["samplers"] == ["top_k", "temperature"]


def test_probabilities_before_the_samplers(client):
    body = TEXT | {"n_probs": 10, "cache_prompt": False}
    tokens = post_json(client, "/completion", body)["completion_probabilities"]
    *parts, _ = stream_events(client, "/completion", body)
    assert [entry for part in parts for entry in part["completion_probabilities"]] == tokens
    for token in tokens:
        assert token["logprob"] <= 0 and len(token["top_logprobs"]) == 10
        assert {"id", "token", "bytes", "logprob"} <= set(token["top_logprobs"][0])


def test_probabilities_after_the_samplers(client):
    body = TEXT | {"n_probs": 10, "temperature": 1.0, "top_k": 4, "min_p": 0, "top_p": 1}
    body |= {"post_sampling_probs": True, "ignore_eos": True}
    tokens = post_json(client, "/completion", body)["completion_probabilities"]
    assert len(tokens) == 6
    for token in tokens:
        likely = {candidate["id"]: candidate["prob"] for candidate in token["top_probs"]}
        assert len(likely) == 4 and sum(likely.values()) == pytest.approx(1)
        assert token["prob"] == likely[token["id"]] > 0
    greedy = post_json(client, "/completion", body | {"temperature": 0})["completion_probabilities"]
    assert all(token["prob"] == 1 and len(token["top_probs"]) == 1 for token in greedy)


def test_ends_are_forbidden_where_they_are_ignored(client, server):
    settings = post_json(client, "/completion", TEXT | {"ignore_eos": True})["generation_settings"]
    eos_ids = {
        bias_entry["token"] for bias_entry in settings["logit_bias"] if bias_entry["bias"] is None
    }
    assert eos_ids == {*server.tokenizer.eog_ids} and settings["ignore_eos"]
    assert post_json(client, "/completion", TEXT)["generation_settings"]["logit_bias"] == []


@pytest.mark.parametrize("openai", [False, True])
def test_forbidden_tokens_do_not_come(client, openai):
    first = post_json(client, "/completion", TEXT | {"return_tokens": True, "ignore_eos": True})
    banned = {str(id): -100 for id in first["tokens"]}
    logit_bias = banned if openai else [[int(id), False] for id in banned]
    body = TEXT | {"logit_bias": logit_bias, "return_tokens": True}
    assert not {*post_json(client, "/completion", body)["tokens"]} & {*first["tokens"]}


def test_a_long_answer_ends_in_time_and_by_its_lines(client):
    """Neither counts before there is a line."""
    lines = {"grammar": 'root ::= "a\\n" ("  b\\n" | "  c\\n") "d" [a-z]{50}', "n_predict": 100}
    timed = post_json(client, "/completion", TEXT | lines | {"t_max_predict_ms": 0.001})
    assert timed["content"] == "a\n" and timed["stop_type"] == "limit"
    indented = post_json(client, "/completion", TEXT | lines | {"n_indent": 2})
    assert indented["content"][-1] == "d" and indented["content"].count("\n") == 2
    assert len(post_json(client, "/completion", TEXT | lines)["content"]) > 50


def test_timings_come_with_each_token_if_asked_for(client):
    for path, body in (("/completion", TEXT), ("/v1/completions", TEXT), (CHATS, CHAT)):
        body = body | {"ignore_eos": True}
        timed = stream_events(client, path, body | {"timings_per_token": True})
        counts = [event["timings"]["predicted_n"] for event in timed if "timings" in event]
        assert counts == sorted(counts) and len(counts) > 2 and counts[-1] == 6, path
        assert sum("timings" in event for event in stream_events(client, path, body)) == 1


def test_the_reading_of_a_prompt_is_told(client):
    long = [1, *(30 + n % 80 for n in range(150))]
    body = {"prompt": long, "n_predict": 2, "return_progress": True, "id_slot": 0}
    for cached in (False, True):
        events = stream_events(client, "/completion", body | {"cache_prompt": cached})
        progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert progress[0]["processed"] == progress[0]["cache"] == (150 if cached else 0)
        assert [event["processed"] for event in progress] == (
            [150, 151] if cached else [0, 64, 128, 151]
        )
        assert {event["total"] for event in progress} == {151}
    chat = stream_events(client, CHATS, CHAT | {"return_progress": True})
    kinds = ["prompt_progress" in event for event in chat]
    assert kinds[0] and kinds == sorted(kinds, reverse=True)
    assert chat[kinds.index(False)]["choices"][0]["delta"]["role"] == "assistant"


# ---- the cache, the context and slots


def test_only_what_is_new_of_a_prompt_is_read(client):
    body = TEXT | {"id_slot": 1, "ignore_eos": True}
    post_json(client, "/slots/1?action=erase", {})
    first = post_json(client, "/completion", body)
    assert first["timings"]["prompt_n"] == 21 and first["timings"]["cache_n"] == 0
    repeated = post_json(client, "/completion", body)
    assert repeated["timings"]["prompt_n"] == 1 and repeated["content"] == first["content"]
    diverged = post_json(
        client, "/completion", body | {"prompt": [*TEXT["prompt"][:15], 90, 91, 92]}
    )
    assert (diverged["timings"]["cache_n"], diverged["timings"]["prompt_n"]) == (15, 3)
    cold = post_json(client, "/completion", body | {"cache_prompt": False})
    assert cold["timings"]["cache_n"] == 0 and cold["content"] == first["content"]
    assert cold["tokens_cached"] == 21 + 6 - 1


def test_a_saved_slot_goes_on_in_another(client):
    body = TEXT | {"id_slot": 1, "cache_prompt": True, "ignore_eos": True}
    post_json(client, "/slots/1?action=erase", {})
    post_json(client, "/completion", body)
    saved = post_json(client, "/slots/1?action=save", {"filename": "slot1.bin"})
    similar_body = body | {"prompt": [*TEXT["prompt"][:18], 95, 96]}
    expected = post_json(client, "/completion", similar_body)
    restored = post_json(client, "/slots/0?action=restore", {"filename": "slot1.bin"})
    assert restored["n_restored"] == saved["n_saved"] == 26
    continued = post_json(client, "/completion", similar_body | {"id_slot": 0})
    assert continued["timings"]["prompt_n"] == 2 and continued["content"] == expected["content"]
    assert post_json(client, "/completion", similar_body)["timings"]["prompt_n"] == 1


def test_an_answer_ends_where_the_context_does(client):
    """Each of the two slots has 256 tokens."""
    completion = post_json(client, "/completion", TEXT | {"n_predict": -1, "ignore_eos": True})
    assert completion["truncated"] is True and completion["stop_type"] == "limit"
    assert completion["tokens_evaluated"] + completion["tokens_predicted"] in (256, 257)
    short = post_json(client, "/completion", TEXT | {"n_predict": 64, "ignore_eos": True})
    assert short["truncated"] is False and short["timings"]["predicted_n"] == 64
    for stream in (False, True):
        refused = client.post("/completion", json=TEXT | {"prompt": [5] * 300, "stream": stream})
        fault = refused.json()["error"]
        assert refused.status_code == 400 and "exceeds the available context" in fault["message"]
        assert (fault["n_prompt_tokens"], fault["n_ctx"]) == (300, 256)


def test_adapters_of_requests_and_of_the_server(client):
    zero_scales, full_scales = [{"id": 0, "scale": 0.0}], [{"id": 0, "scale": 1.0}]
    body = TEXT | {"ignore_eos": True, "return_tokens": True}
    base = post_json(client, "/completion", body | {"lora": zero_scales})["tokens"]
    adapted_tokens = post_json(client, "/completion", body | {"lora": full_scales})["tokens"]
    assert base != adapted_tokens and post_json(client, "/completion", body)["tokens"] == base
    post_json(client, "/lora-adapters", full_scales)
    assert client.get("/lora-adapters").json()[0]["scale"] == 1
    assert post_json(client, "/completion", body)["tokens"] == adapted_tokens
    post_json(client, "/lora-adapters", zero_scales)


# ---- chats


def test_an_answer_that_has_begun_goes_on(client):
    def prompt(**fields: Any) -> str:
        return post_json(client, "/apply-template", {"messages": STARTED_MESSAGES, **fields})[
            "prompt"
        ]

    text = prompt()
    assert text.endswith("<|im_start|>assistant\nIt is")
    assert prompt(continue_final_message=True, add_generation_prompt=False) == text
    both = {"continue_final_message": True, "add_generation_prompt": True}
    for path in ("/apply-template", CHATS):
        assert (
            client.post(path, json=CHAT | {"messages": STARTED_MESSAGES} | both).status_code == 400
        )
    nothing = {"messages": [USER], "continue_final_message": True, "add_generation_prompt": False}
    assert client.post("/apply-template", json=nothing).status_code == 400
    no_generation = {"messages": [USER], "add_generation_prompt": False}
    rendered = post_json(client, "/apply-template", no_generation)["prompt"]
    assert rendered == "<|im_start|>user\nthe a<|im_end|>\n"
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "a"}]
    assert post_json(client, CHATS, CHAT | {"messages": [{"role": "user", "content": parts}]})[
        "usage"
    ]


def test_verbose_answers_have_the_prompt(client):
    completion = post_json(client, CHATS, CHAT | {"verbose": True})
    assert completion["__verbose"]["prompt"].endswith("<|im_start|>assistant\n")
    assert completion["__verbose"]["content"] == completion["choices"][0]["message"]["content"]
    assert "__verbose" not in post_json(client, CHATS, CHAT | {"verbose": False})
    events = stream_events(client, CHATS, CHAT | {"verbose": True})
    assert events[-1]["__verbose"]["stop_type"] == "limit"


def test_cached_tokens_of_a_chat_are_counted(client):
    post_json(client, "/slots/0?action=erase", {})
    body = CHAT | {"id_slot": 0}
    first, second = (post_json(client, CHATS, body)["usage"] for _ in range(2))
    assert first["prompt_tokens"] == second["prompt_tokens"]
    num_cached = second["prompt_tokens_details"]["cached_tokens"]
    assert num_cached == second["prompt_tokens"] - 1
    assert first["completion_tokens"] == 6
    counted = post_json(client, f"{CHATS}/input_tokens", {"messages": [USER]})
    assert counted["input_tokens"] == first["prompt_tokens"]


def test_answers_to_one_chat_may_be_several(client):
    for _ in range(2):
        choices = post_json(client, CHATS, CHAT | {"n": 2, "id_slot": 0})["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 2


FORMATS: list[tuple[Any, str]] = [
    ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, '"42"'),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "oo"}}}}, '"oo"'),
    ({"json_schema": {"const": "42"}}, '"42"'),
    ({"grammar": 'root ::= "a"{5,5}'}, "aaaaa"),
]  # fmt: skip


@pytest.mark.parametrize("fields, text", FORMATS)
def test_answers_follow_formats(client, fields, text):
    completion = post_json(client, CHATS, CHAT | {"max_tokens": 20, "ignore_eos": False} | fields)
    assert completion["choices"][0]["message"]["content"] == text


WRONG: list[Any] = [
    {"response_format": {"type": "json_object", "schema": 123}},
    {"response_format": {"type": "json_object", "schema": {"type": 123}}},
    {"grammar": "root ::= this is (not valid"},
    {"messages": [123]},
    {"messages": [{}]},
    {"messages": [USER, {}]},
    {"messages": [*STARTED_MESSAGES, STARTED_MESSAGES[-1]]},
]


@pytest.mark.parametrize("fields", WRONG)
def test_what_cannot_be_meant_is_refused(client, fields):
    refused = client.post(CHATS, json=CHAT | fields)
    assert refused.status_code == 400 and refused.json()["error"]["message"]


# ---- tokens and embeddings


def test_special_tokens_are_read_where_they_are_asked_for(client, server):
    ids = post_json(client, "/tokenize", {"content": "the a"})["tokens"]
    ids_with_bos = post_json(client, "/tokenize", {"content": "the a", "add_special": True})[
        "tokens"
    ]
    assert ids_with_bos == [server.tokenizer.bos, *ids]
    mark = server.tokenizer.piece(server.tokenizer.eos).decode()
    special_ids = post_json(client, "/tokenize", {"content": mark, "parse_special": True})["tokens"]
    text_ids = post_json(client, "/tokenize", {"content": mark, "parse_special": False})["tokens"]
    assert server.tokenizer.eos in special_ids and server.tokenizer.eos not in text_ids
    pieces = post_json(client, "/tokenize", {"content": "a é", "with_pieces": True})["tokens"]
    assert all(piece["id"] > 0 and len(piece["piece"]) for piece in pieces)


def test_embeddings_have_length_one_and_count_tokens(client):
    ids = post_json(client, "/tokenize", {"content": "the a", "add_special": True})["tokens"]
    response = post_json(client, "/v1/embeddings", {"input": ["the a", ids, "a"]})
    assert "'input' is required" in client.post("/v1/embeddings", json={}).text
    first, second, third = (entry["embedding"] for entry in response["data"])
    assert first == pytest.approx(second, abs=1e-6) and first != pytest.approx(third, abs=1e-3)
    assert sum(x * x for x in first) == pytest.approx(1, abs=1e-5)
    assert response["usage"]["prompt_tokens"] == response["usage"]["total_tokens"] > 2 * len(ids)
    for wrong in (None, True, 1.5, [], [[]], {}):
        assert client.post("/v1/embeddings", json={"input": wrong}).status_code == 400, wrong


# ---- the command's settings


def test_names_of_the_model_are_split_at_commas():
    assert split_names(" a, b,,a") == ["a", "b"] and split_names(None) == []
