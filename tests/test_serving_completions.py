"""Completions and embeddings with the official `openai` client, over real connections."""

import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

import packtrain as pt
from tests.clients import ASK, Api, model_api, openai


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with model_api(tmp_path_factory.mktemp("clients")) as api:
        yield api


def test_completions_of_each_kind_of_prompt(api):
    the, a = (api.write(prompt=text).choices[0].text for text in ("the", "a"))
    assert the and a and the != a
    both = api.write(prompt=["the", "a"], n=2)
    assert [choice.text for choice in both.choices] == [the, the, a, a]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    prompt_counts = [api.write(prompt=text).usage.prompt_tokens for text in ("the", "a")]
    assert both.usage.prompt_tokens == sum(prompt_counts) and both.usage.completion_tokens == 32
    ids = api.server.tokenizer.encode("the", eos=False)
    assert api.write(prompt=ids).choices[0].text == the
    pair = api.write(prompt=[ids, api.server.tokenizer.encode("a", eos=False)])
    assert [choice.text for choice in pair.choices] == [the, a]
    assert api.write(prompt="the", max_tokens=1).choices[0].finish_reason == "length"


def test_completions_streamed(api):
    full_completion = api.write(prompt=["the", "a"])
    texts, reasons = ["", ""], ["", ""]
    *parts, counts = api.write(
        prompt=["the", "a"], stream=True, stream_options={"include_usage": True}
    )
    for part in parts:
        choice = part.choices[0]
        texts[choice.index] += choice.text
        reasons[choice.index] += choice.finish_reason or ""
    assert (
        texts == [choice.text for choice in full_completion.choices] and reasons == ["length"] * 2
    )
    assert (
        counts.choices == [] and counts.usage.prompt_tokens == full_completion.usage.prompt_tokens
    )
    assert counts.usage.completion_tokens == 16


def test_completions_repeat_the_prompt_if_they_are_asked(api):
    text = api.write(prompt="the a").choices[0].text
    assert api.write(prompt="the a", echo=True).choices[0].text == f"the a{text}"
    first, *parts = api.write(prompt="the a", echo=True, stream=True)
    assert first.choices[0].text == "the a"
    assert "".join(part.choices[0].text for part in parts) == text


def test_completions_with_probabilities(api):
    """Tokens that are no text have names as in OpenAI's API, so that none is lost; offsets go on in a stream."""
    choice = api.write(logprobs=4).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 8
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 4 and top[token] == logprob == max(top.values())
        assert sum(map(math.exp, top.values())) <= 1
    assert any(re.fullmatch(r"(bytes:)(\\x[0-9a-f]{2})+", token) for token in logprobs.tokens)
    pairs = [*zip(logprobs.tokens, logprobs.text_offset, strict=True)]
    text_tokens = [(token, offset) for token, offset in pairs if not token.startswith("bytes:")]
    assert text_tokens and all(
        choice.text[offset:].startswith(token) for token, offset in text_tokens
    )
    streamed = [part.choices[0].logprobs for part in api.write(logprobs=4, stream=True)]
    assert [
        offset
        for chunk_logprobs in streamed
        if chunk_logprobs
        for offset in chunk_logprobs.text_offset
    ] == logprobs.text_offset
    none = api.write(logprobs=0).choices[0].logprobs
    assert none.token_logprobs == pytest.approx(logprobs.token_logprobs, abs=1e-4)
    assert none.top_logprobs == [{}] * 8
    assert api.write().choices[0].logprobs is None


LONG_PROMPT = "the a e the " * 12  # is read in several runs


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("has_bos", [True, False])
def test_tokens_of_a_prompt_have_their_probabilities(api, max_tokens, has_bos):
    """They are those of all logits of the model, though the prompt is in the cache already."""
    ids = api.server.tokenizer.encode(LONG_PROMPT, bos=has_bos, eos=False)
    api.write(prompt=ids)
    options = {"prompt": ids, "echo": True, "max_tokens": max_tokens, "logprobs": 3}
    choice = api.write(**options).choices[0]
    context = pt.Context(api.server.model, cells=256)
    logits = context.decode(ids, wanted=range(len(ids))).astype(float)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = [logprobs[i, id] for i, id in enumerate(ids[1:])]
    first, *scores = choice.logprobs.token_logprobs
    assert first is None and choice.logprobs.top_logprobs[0] is None
    assert scores[: len(expected)] == pytest.approx(expected, abs=2e-4)
    assert len(scores) == len(expected) + max_tokens
    for row, top in zip(logprobs, choice.logprobs.top_logprobs[1:], strict=False):
        assert max(top.values()) == pytest.approx(row.max(), abs=2e-4) and len(top) <= 3
    streamed = [part.choices[0].logprobs for part in api.write(**options, stream=True)]
    tokens = [token for part in streamed if part for token in part.tokens]
    assert tokens == choice.logprobs.tokens


def test_offsets_of_a_prompts_tokens_are_those_of_its_text(api):
    """lm-eval's `gguf` model finds a continuation by them; its `local-completions` counts tokens."""
    context_text, continuation = "the a e", " the a"
    choice = api.write(prompt=context_text + continuation, echo=True, max_tokens=1, logprobs=1)
    logprobs = choice.choices[0].logprobs
    pairs = zip(logprobs.text_offset, logprobs.tokens, strict=True)
    text = choice.choices[0].text
    assert all(text[max(at, 0) :].startswith(name) for at, name in [*pairs][2:] if ":" not in name)
    by_offset = next(i for i, at in enumerate(logprobs.text_offset) if at >= len(context_text))
    num_context = len(api.server.tokenizer.encode(context_text, eos=False))
    assert by_offset == num_context


def test_scores_of_a_prompt_are_those_beside_another_one(tmp_path):
    """In f32: which values of a KV cache in f16 round up can depend on the texts of a run."""
    options = {"echo": True, "max_tokens": 1, "logprobs": 1}
    with model_api(tmp_path, cache_type="f32") as api:
        single_prompt = api.write(prompt="the a e the a", **options).choices[0].logprobs
        both = api.write(prompt=["the a e the a", "the a"], **options)
    assert both.choices[0].logprobs.token_logprobs == pytest.approx(single_prompt.token_logprobs)


def test_a_long_prompt_has_no_more_probabilities_than_a_request_may(api):
    with pytest.raises(openai.BadRequestError, match="probabilities of each token are more than"):
        api.write(prompt="the a " * 800, echo=True, max_tokens=1, logprobs=20, n=2)


def test_what_completions_do_not_do_is_refused(api):
    api.write(suffix="", best_of=1, max_tokens=1)
    for unsupported_options in ({"suffix": "end"}, {"best_of": 2}):
        with pytest.raises(openai.BadRequestError, match="is not supported"):
            api.write(**unsupported_options)


UNMET: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"modalities": ["text", "audio"]}, "text only"),
    ("chat/completions", {"web_search_options": {}}, "web_search_options is not supported"),
    ("chat/completions", {"guided_choice": ["a", "b"]}, "send response_format or grammar"),
    ("chat/completions", {"structured_outputs": {"choice": ["a"]}}, "send response_format or grammar"),
    ("chat/completions", {"repetition_penalty": 1.5}, "send repeat_penalty"),
    ("chat/completions", {"enable_thinking": False}, "send chat_template_kwargs"),
    ("chat/completions", {"verbosity": "low"}, "verbosity is not supported"),
    ("chat/completions", {"best_of": 2}, "best_of is not supported"),
    ("chat/completions", {"echo": True}, "echo is not supported"),
    ("completions", {"tools": [{"name": "f"}]}, "tools is not supported"),
    ("completions", {"top_logprobs": 3}, "top_logprobs is not supported"),
    ("completions", {"stop_token_ids": [5]}, "send stop"),
    ("completions", {"min_keep": 3}, "min_keep is not supported"),
    ("responses", {"text": {"verbosity": "low"}}, "text.verbosity is not supported"),
    ("responses", {"logprobs": True}, "logprobs is not supported"),
    ("responses", {"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ("responses", {"reasoning_effort": "high"}, "send reasoning"),
    ("messages", {"response_format": {"type": "json_object"}}, "send output_config"),
    ("messages", {"stop": ["e"]}, "send stop_sequences"),
    ("messages", {"thinking": {"type": "on"}}, "thinking.type is 'on'; it must be enabled, adaptive"),
    ("messages", {"tools": [{"name": "f", "parameters": {"type": "object"}}]}, "tools[0].input_schema is required"),
    ("messages", {"mcp_servers": [{"type": "url", "url": "x"}]}, "mcp_servers is not supported"),
    ("chat/completions", {"system": "be brief"}, "send a message of the system"),
    ("chat/completions", {"instructions": "be brief"}, "send a message of the system"),
    ("chat/completions", {"reasoning": {"effort": "none"}}, "send reasoning_effort"),
    ("chat/completions", {"text": {"format": {"type": "json_object"}}}, "send response_format"),
    ("chat/completions", {"format": "json"}, "send response_format"),
    ("chat/completions", {"max_output_tokens": 1}, "send max_tokens"),
    ("chat/completions", {"thinking_budget_tokens": 5}, "thinking_budget_tokens is not supported"),
    ("chat/completions", {"extra_body": {"top_k": 1}}, "send each option as a field"),
    ("completions", {"parameters": {"max_new_tokens": 1}}, "send each option as a field"),
    ("completions", {"num_beams": 4}, "num_beams is not supported"),
    ("completions", {"do_sample": False}, "do_sample is not supported"),
    ("../completion", {"logprobs": 3}, "send n_probs"),
    ("../completion", {"suffix": "x"}, "suffix is not supported"),
    ("../completion", {"format": "json"}, "send response_format"),
    ("../completion", {"n": 2}, "n is not supported"),
    ("../completion", {"n_cmpl": 2}, "n_cmpl is not supported"),
    ("../completion", {"grammar_lazy": True}, "grammar_lazy is not supported"),
    ("../completion", {"image_data": [{"id": 1, "data": "x"}]}, "text only"),
    ("../completion", {"adaptive_target": 0.5}, "adaptive_target is not supported"),
]  # fmt: skip
IDLE = {
    "modalities": ["text"], "repetition_penalty": 1.0, "verbosity": "medium", "best_of": 1, "echo": False,
    "min_keep": 0, "grammar_lazy": False, "adaptive_target": -1.0, "image_data": [], "n": 1, "documents": None,
    "num_beams": 1, "do_sample": True, "guidance_scale": 1.0, "thinking_budget_tokens": -1, "options": {},
}  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "words"), UNMET)
def test_fields_that_change_answers_of_other_servers_are_refused_by_name(api, path, fields, words):
    body = {"messages": ASK, "prompt": "the", "input": "the", "max_tokens": 1}
    body = {k: v for k, v in body.items() if k != "prompt" or path != "responses"}
    response = httpx.post(f"{api.address}/v1/{path}", json=body | fields, timeout=60)
    assert response.status_code == 400 and words in response.json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_taken(api):
    assert api.chat(max_tokens=1, extra_body=IDLE).choices


@pytest.mark.parametrize(
    "extra_body",
    [
        {"json_schema": {"name": "x", "schema": {"const": 1}}},
        {"json_schema": {"name": "x", "strict": True}},
        {"response_format": {"type": "json_object", "json_schema": {"schema": {"const": 1}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        {"response_format": {"type": "json_schema", "schema": {"name": "x", "schema": {}}}},
    ],
)
def test_a_schema_in_a_wrapper_is_not_any_document(api, extra_body):
    with pytest.raises(openai.BadRequestError, match="schema"):
        api.write(extra_body=extra_body)


def test_embeddings_as_numbers_and_packed(api):
    """The client asks for base64 by default."""
    packed = api.client.embeddings.create(model="m", input=["the a", "e"])
    float_response = api.client.embeddings.create(
        model="m", input=["the a", "e"], encoding_format="float"
    )
    assert [decoded.index for decoded in packed.data] == [0, 1]
    for decoded, expected in zip(packed.data, float_response.data, strict=True):
        assert decoded.embedding == pytest.approx(expected.embedding, abs=1e-7)
        assert sum(x * x for x in decoded.embedding) == pytest.approx(1, abs=1e-5)
    assert packed.data[0].embedding != packed.data[1].embedding
    single_response = api.client.embeddings.create(model="m", input="the a")
    assert single_response.data[0].embedding == pytest.approx(packed.data[0].embedding, abs=1e-6)
    ids = api.server.tokenizer.encode("the a", eos=False)
    counted = api.client.embeddings.create(model="m", input=[ids, ids])
    assert counted.data[1].embedding == pytest.approx(single_response.data[0].embedding, abs=1e-6)
    assert (
        0
        < single_response.usage.prompt_tokens
        == single_response.usage.total_tokens
        < packed.usage.prompt_tokens
    )
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        api.client.embeddings.create(model="m", input="the", dimensions=16)
    with pytest.raises(openai.BadRequestError) as refused:
        api.client.embeddings.create(model="m", input="the a " * 2000)
    assert refused.value.body["type"] == "exceed_context_size_error"


def test_a_prompt_is_scored_in_as_many_runs_as_it_is_read(api):
    ids = api.server.tokenizer.encode(LONG_PROMPT, eos=False)
    engine = api.server.engine
    runs = list[int]()
    for options in ({"echo": True, "logprobs": 1}, {"extra_body": {"cache_prompt": False}}):
        before = engine.totals.runs
        api.write(prompt=ids, max_tokens=1, **options)
        runs.append(engine.totals.runs - before)
    assert runs[0] == runs[1] < len(ids) / 16


def test_a_prompt_that_spells_bos_has_one(api):
    """transformers and llama.cpp decode BOS and text with a space between them, which the tokenizer adds by itself."""
    tokenizer = api.server.tokenizer
    bos = tokenizer.piece(tokenizer.bos).decode()
    assert tokenizer.add_space_prefix
    options = {"echo": True, "logprobs": 1, "max_tokens": 1}

    def tokens(text: str) -> list[str]:
        return api.write(prompt=text, **options).choices[0].logprobs.tokens[:-1]

    assert tokens("the") == tokens(f"{bos}the") == tokens(f"{bos} the")
    assert tokens(" the") == tokens(f"{bos}  the") != tokens("the")
