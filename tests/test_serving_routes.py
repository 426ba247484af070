"""/infill, /rerank, the inputs of /embeddings and what chat templates read, on small models behind real connections."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.models.model_file import RERANK_HEAD, open_model
from packtrain.workflows.model_server import ServeSettings, load_server
from tests.architectures import random_model
from tests.clients import ASK, Api, model_api, openai
from tests.numpy_models import Model

FILL_KEYS = ("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep")
RERANK_TEMPLATE = "query: {query} document: {document}"
TEMPLATE = "{{ date_string }}|{{ enable_thinking }}|{{ datetime + functions }}"


def random_reranker(path: Path) -> Path:
    """Write a qwen3 with a classifier of two labels and a template of its prompts."""
    width = random_model(path.with_suffix(".base"), "qwen3").embedding_length
    gguf = GGUF(path.with_suffix(".base"))
    head = np.random.default_rng(0).standard_normal((2, width)).astype(np.float32)
    template = {"tokenizer.chat_template.rerank": MetadataValue("string", RERANK_TEMPLATE)}
    arrays = {name: gguf.array(name) for name in gguf.entries}
    write_gguf(path, gguf.values | template, arrays | {RERANK_HEAD: head})
    return path


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A llama whose first letters are the tokens of fill-in-the-middle."""
    folder, options = tmp_path_factory.mktemp("routes"), {"tags": "small, chat", "verbose": True}
    with model_api(folder, chat_template=TEMPLATE, **options) as api:
        ids = [api.server.tokenizer.encode(letter, bos=False)[-1] for letter in "bcdfg"]
        api.server.tokenizer.fill_ids.update(zip(FILL_KEYS, ids, strict=True))
        yield api


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("reranker")
    path = random_reranker(folder / "r.gguf")
    with model_api(folder, path=path, embeddings=False, reranking=True) as api:
        yield api


def post(api: Api, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{api.address}{path}", json=body, timeout=60)


# ---- /infill

CODE = {"input_prefix": "the a", "input_suffix": "a the", "prompt": "e"}


def test_text_is_filled_in_by_the_order_of_tokens_that_llama_server_has(api):
    def encode(text: str) -> list[int]:
        return api.server.tokenizer.encode(text, bos=False, eos=False)

    pre, suf, mid, rep, sep = (api.server.tokenizer.fill_ids[key] for key in FILL_KEYS)
    bos = [api.server.tokenizer.bos] if api.server.tokenizer.add_bos else []
    repository = [rep, *encode("myproject\n"), sep, *encode("x.py\n"), *encode("the")]
    fill = [*bos, pre, *encode("the a"), *encode("e"), suf, *encode("a the"), mid]
    prompt = [*repository, sep, *encode("filename\n"), *fill]
    settings = {"n_predict": 6, "temperature": 0}
    extra = [{"filename": "x.py", "text": "the"}]
    answer = post(api, "/infill", input_extra=extra, **CODE, **settings).json()
    expected = post(api, "/completion", prompt=prompt, **settings).json()
    assert answer["prompt"] == expected["prompt"] and answer["content"] == expected["content"]
    parts = {key: [text[:2], text[2:]] for key, text in CODE.items() if key != "prompt"}
    split = post(api, "/infill", input_extra=extra, **CODE | parts, **settings).json()
    assert api.server.tokenizer.add_bos and split["prompt"].count("<s>") == 1
    streamed = post(api, "/infill", input_extra=extra, stream=True, **CODE, **settings).text
    assert streamed.startswith("data: ") and '"stop": true' in streamed


def test_the_request_of_editors_is_answered(api):
    """llama.vim and llama.vscode name a sampler that stands in no default; their first request only reads."""
    names = "content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached"
    editor = {
        "input_extra": [], "top_k": 40, "top_p": 0.99, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True,
        "n_indent": 0, "t_max_prompt_ms": 500, "t_max_predict_ms": 3000, "response_fields": names,
    }  # fmt: skip
    answer = post(api, "/infill", **CODE | editor | {"n_predict": 8})
    assert answer.status_code == 200 and {*answer.json()} == {*names}
    warm_up = post(api, "/infill", **CODE | editor | {"n_predict": 0, "samplers": []})
    assert warm_up.status_code == 200 and warm_up.json()["content"] == ""


def test_long_texts_are_cut_where_they_are_far_from_the_cursor(api):
    long_prefix, long_suffix = "the a e " * 900 + "g", "c" + " the a e" * 900
    body = {"input_prefix": long_prefix, "input_suffix": long_suffix, "n_predict": 1}
    answer = post(api, "/infill", **body)
    assert answer.status_code == 200, answer.text
    prompt = answer.json()["prompt"]
    assert "gc c the" in prompt and len(prompt) < len(long_prefix)


@pytest.mark.parametrize("fields, words", [
    ({"input_prefix": None}, "'input_prefix' is required"),
    ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text is required"),
    ({"input_extra": [{"filename": 1, "text": "a"}]}, "input_extra[0].filename must be text"),
])  # fmt: skip
def test_what_cannot_be_filled_in_is_refused_by_name(api, fields, words):
    answer = post(api, "/infill", **CODE | fields)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_a_vocabulary_without_the_tokens_is_refused_by_their_names(reranker):
    answer = post(reranker, "/infill", **CODE)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 501 and "prefix (fim_pre), suffix (fim_suf), middle" in message


def test_completions_with_a_suffix_fill_in_the_middle(api):
    tokenizer = api.server.tokenizer
    pre, suf, mid = (tokenizer.fill_ids[key] for key in FILL_KEYS[:3])
    ids = [tokenizer.encode(text, bos=False, eos=False) for text in ("the a", "e", "a the")]
    bos = [tokenizer.bos] if tokenizer.add_bos else []
    prompts = [[*bos, pre, *prefix, suf, *ids[2], mid] for prefix in ids[:2]]
    options = {"max_tokens": 6, "temperature": 0}
    expected = post(api, "/v1/completions", prompt=prompts, **options).json()
    for prefixes in (["the a", "e"], [[*bos, *ids[0]], [*bos, *ids[1]]]):
        answer = post(api, "/v1/completions", prompt=prefixes, suffix="a the", **options).json()
        assert (
            answer["choices"] == expected["choices"]
            and answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        )
    unfilled = post(api, "/v1/completions", prompt="the a", **options).json()
    assert unfilled["choices"][0] != expected["choices"][0]
    echo = post(api, "/v1/completions", prompt="the a", suffix="a", echo=True)
    message = echo.json()["error"]["message"]
    assert echo.status_code == 400 and "suffix and echo exclude each other" in message


def test_a_suffix_without_the_tokens_is_refused_by_their_names(reranker):
    answer = post(reranker, "/v1/completions", prompt="the a", suffix="a")
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith("suffix is not supported by this model")
    assert "prefix (fim_pre), suffix (fim_suf), middle (fim_mid)" in message


# ---- /rerank

DOCUMENTS = ["a", "the cat", "dogs the a", "e"]


def expected_scores(api: Api) -> list[float]:
    """By the forward pass of the tests, in float64."""
    model = api.server.model
    tensors = {name: model.weight(name) for name in model.weight_names}
    scores = []
    for document in DOCUMENTS:
        text = RERANK_TEMPLATE.format(query="the", document=document)
        ids = np.array(model.tokenizer().encode(text, bos=False, eos=False))
        hidden = Model(model.gguf.metadata, tensors, len(ids)).hidden(ids)[-1]
        logits = model.weight(RERANK_HEAD).astype(np.float64) @ hidden
        scores.append(1 / (1 + np.exp(logits[1] - logits[0])))
    return scores


def test_documents_are_ranked_by_the_models_classifier(reranker):
    scores = expected_scores(reranker)
    best = [*np.argsort([-score for score in scores])]
    answer = post(reranker, "/v1/rerank", query="the", documents=DOCUMENTS).json()
    assert [result["index"] for result in answer["results"]] == best
    got = [result["relevance_score"] for result in answer["results"]]
    assert got == pytest.approx([scores[i] for i in best], rel=0.02)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > len(DOCUMENTS)
    tei = post(reranker, "/rerank", query="the", texts=DOCUMENTS, return_text=True, top_n=2).json()
    assert [result["text"] for result in tei] == [DOCUMENTS[i] for i in best[:2]]
    assert tei[0]["score"] == got[0]
    named = post(reranker, "/reranking", query="the", documents=["a"], return_documents=True).json()
    assert named["results"][0]["document"] == {"text": "a"}


@pytest.mark.parametrize("fields, words", [
    ({"documents": ["a"]}, "'query' is required"),
    ({"query": "a", "documents": []}, "'documents' must be a list"),
    ({"query": "a", "documents": [5]}, "'documents' must be a list"),
    ({"query": 5, "documents": ["a"]}, "query must be text"),
    ({"query": "a", "documents": ["a"], "top_k": 1}, "top_k is not supported; send top_n"),
    ({"query": "a", "documents": ["a"], "instruction": "x"}, "instruction is not supported"),
    ({"query": "a", "texts": ["a"], "raw_scores": True}, "raw_scores is not supported"),
])  # fmt: skip
def test_requests_that_cannot_be_ranked_are_refused_by_name(reranker, fields, words):
    answer = post(reranker, "/rerank", **fields)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_ranking_needs_a_reranker(api, tmp_path):
    answer = post(api, "/rerank", query="a", documents=["a"])
    assert answer.status_code == 501 and "--reranking" in answer.json()["error"]["message"]
    random_model(tmp_path / "m.gguf", "llama")
    with pytest.raises(InputError, match=r"is a llama without cls\.output\.weight.*Qwen3"):
        load_server(ServeSettings(tmp_path / "m.gguf", ctx=64, reranking=True), Events())
    with pytest.raises(InputError, match="reranker has its own pooling"):
        load_server(ServeSettings(tmp_path / "m.gguf", reranking=True, pooling="mean"), Events())
    with pytest.raises(InputError, match="--pooling has no effect without --embeddings"):
        load_server(ServeSettings(tmp_path / "m.gguf", pooling="mean"), Events())
    with pytest.raises(InputError, match=r"cls\.output\.weight is not part of a qwen3"):
        open_model(random_reranker(tmp_path / "r.gguf"))


# ---- embeddings


def test_parts_of_content_are_the_text_that_they_make(api):
    parts = {"content": [{"type": "text", "text": "the "}, {"type": "text", "text": "a"}]}
    answer = post(api, "/v1/embeddings", input=["the a", parts]).json()
    assert answer["data"][0]["embedding"] == answer["data"][1]["embedding"]
    image = {"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    refused = post(api, "/v1/embeddings", input=image)
    assert refused.status_code == 400 and "'image_url'" in refused.json()["error"]["message"]
    assert post(api, "/v1/embeddings", input={"content": "the"}).status_code == 400


def test_dimensions_are_the_models_own(api):
    width = api.server.model.config.embedding_length
    answer = api.client.embeddings.create(model="m", input="the", dimensions=width)
    assert len(answer.data[0].embedding) == width
    with pytest.raises(openai.BadRequestError, match=f"embeddings have {width}"):
        api.client.embeddings.create(model="m", input="the", dimensions=16)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embedding"])
@pytest.mark.parametrize("fields, words", [
    ({"normalize": False}, "send embd_normalize"), ({"prompt_name": "query"}, "put it into the text"),
    ({"input_type": "query"}, "put it into the text"), ({"truncate_prompt_tokens": 3}, "leave it out"),
    ({"output_dtype": "int8"}, "send encoding_format"),
])  # fmt: skip
def test_fields_that_change_embeddings_of_other_servers_are_refused(api, path, fields, words):
    answer = post(api, path, input="the", **fields)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert post(api, path, input="the", **dict.fromkeys(fields)).status_code == 200


def test_parts_of_a_text_are_tokenized_as_the_text(api):
    for fields in ({}, {"add_special": True}, {"parse_special": False}):
        text_ids, list_ids = (
            post(api, "/tokenize", content=content, **fields).json()["tokens"]
            for content in ("the<s>", ["the<s>"])
        )
        assert text_ids == list_ids, fields


def test_without_pooling_each_token_has_a_vector(api, monkeypatch):
    ids = api.server.tokenizer.encode("the a", eos=None)
    monkeypatch.setattr(api.server, "pooling", "none")
    (text,) = post(api, "/embeddings", input="the a").json()
    rows = np.array(text["embedding"])
    assert rows.shape == (len(ids), api.server.model.config.embedding_length)
    monkeypatch.setattr(api.server, "pooling", "last")
    (pooled,) = post(api, "/embeddings", input="the a", embd_normalize=-1).json()
    assert pooled["embedding"][0] == pytest.approx(rows[-1], rel=1e-3, abs=1e-4)
    monkeypatch.setattr(api.server, "pooling", "none")
    refused = post(api, "/v1/embeddings", input="the a")
    assert refused.status_code == 400 and "/embeddings" in refused.json()["error"]["message"]


# ---- what clients notice


def test_templates_get_the_date_and_think_unless_told_otherwise(api, monkeypatch):
    def prompt(**fields: Any) -> list[str]:
        answer = post(api, "/apply-template", messages=ASK, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["prompt"].split("|")

    date, thinks, datetime_and_functions = prompt()
    assert date == f"{datetime.now():%d %b %Y}" and thinks == "True"
    assert datetime_and_functions == f"{datetime.now():%b %d %Y}[]"
    assert prompt(reasoning_effort="none")[1] == "False"
    monkeypatch.setattr(api.server, "thinks", False)  # --reasoning off
    assert prompt()[1] == "False"
    assert prompt(chat_template_kwargs={"enable_thinking": True})[1] == "True"
    text = {"enable_thinking": "true"}
    refused = post(api, "/apply-template", messages=ASK, chat_template_kwargs=text)
    assert "chat_template_kwargs.enable_thinking must be true" in refused.json()["error"]["message"]


def test_tags_and_verbose_answers_are_those_of_the_flags(api):
    assert httpx.get(f"{api.address}/v1/models").json()["data"][0]["tags"] == ["small", "chat"]
    body = {"messages": ASK, "max_tokens": 1}
    assert "prompt" in post(api, "/v1/chat/completions", **body).json()["__verbose"]


@pytest.mark.parametrize(("number", "name"), [(15, "Q4_K_M"), (0, "F32"), (9999, "F32")])
def test_the_type_is_the_one_that_the_file_names(api, monkeypatch, number: int, name: str):
    """A small model of Q4_K_M has most of its weights in an embedding of another type."""
    file_type = MetadataValue("u32", number)
    monkeypatch.setitem(api.server.model.gguf.values, "general.file_type", file_type)
    assert httpx.get(f"{api.address}/props").json()["model_ftype"] == name
    assert httpx.get(f"{api.address}/v1/models").json()["data"][0]["meta"]["ftype"] == name


def test_metrics_say_when_the_server_started(api, monkeypatch):
    monkeypatch.setattr(api.server, "has_metrics", True)
    metrics_headers = httpx.get(f"{api.address}/metrics").headers
    started = metrics_headers["Process-Start-Time-Unix"]
    names = {name for name, _ in metrics_headers.raw}  # some clients compare names by case
    assert {b"Process-Start-Time-Unix", b"Content-Type", b"Content-Length"} <= names
    assert int(started) == int(api.server.start_time)


def test_progress_in_a_prompt_has_its_times_if_they_are_asked_for(api):
    body = {"prompt": "the a e " * 200, "n_predict": 1, "stream": True, "return_progress": True}
    timed = post(api, "/completion", **body, timings_per_token=True).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in timed if line]
    progress = [event for event in events if "prompt_progress" in event]
    times = [event["timings"]["prompt_ms"] for event in progress]
    assert len(times) > 1 and times[0] == 0 < times[-1] and times == sorted(times)
    for event in progress:
        counts, timings = event["prompt_progress"], event["timings"]
        assert timings["prompt_n"] == counts["processed"] - counts["cache"]
    response_fields = {"input": body["prompt"], "max_output_tokens": 1, "return_progress": True}
    text = post(api, "/responses", **response_fields, stream=True, timings_per_token=True).text
    assert '"prompt_progress"' in text and '"timings"' in text.split("\n\n")[-2]
    untimed = post(api, "/completion", **body).text
    assert '"prompt_progress"' in untimed and untimed.count('"timings"') == 1
