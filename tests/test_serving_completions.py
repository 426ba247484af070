"""Completions and embeddings with the official `openai` client, over real connections."""

import math
import re
from collections.abc import Iterator

import pytest

from tests.clients import Api, openai, opened


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with opened(tmp_path_factory.mktemp("clients")) as api:
        yield api


def test_completions_of_each_kind_of_prompt(api):
    the, a = (api.write(prompt=text).choices[0].text for text in ("the", "a"))
    assert the and a and the != a
    both = api.write(prompt=["the", "a"], n=2)
    assert [choice.text for choice in both.choices] == [the, the, a, a]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = [api.write(prompt=text).usage.prompt_tokens for text in ("the", "a")]
    assert both.usage.prompt_tokens == sum(alone) and both.usage.completion_tokens == 32
    ids = api.server.tokenizer.encode("the", eos=False)
    assert api.write(prompt=ids).choices[0].text == the
    pair = api.write(prompt=[ids, api.server.tokenizer.encode("a", eos=False)])
    assert [choice.text for choice in pair.choices] == [the, a]
    assert api.write(prompt="the", max_tokens=1).choices[0].finish_reason == "length"


def test_completions_streamed(api):
    whole = api.write(prompt=["the", "a"])
    texts, reasons = ["", ""], ["", ""]
    *parts, counts = api.write(
        prompt=["the", "a"], stream=True, stream_options={"include_usage": True}
    )
    for part in parts:
        choice = part.choices[0]
        texts[choice.index] += choice.text
        reasons[choice.index] += choice.finish_reason or ""
    assert texts == [choice.text for choice in whole.choices] and reasons == ["length"] * 2
    assert counts.choices == [] and counts.usage.prompt_tokens == whole.usage.prompt_tokens
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
    told = choice.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == 8
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert len(top) == 4 and top[token] == logprob == max(top.values())
        assert sum(map(math.exp, top.values())) <= 1
    assert any(re.fullmatch(r"(bytes:)(\\x[0-9a-f]{2})+", token) for token in told.tokens)
    pairs = [*zip(told.tokens, told.text_offset, strict=True)]
    plain = [(token, at) for token, at in pairs if not token.startswith("bytes:")]
    assert plain and all(choice.text[at:].startswith(token) for token, at in plain)
    streamed = [part.choices[0].logprobs for part in api.write(logprobs=4, stream=True)]
    assert [at for one in streamed if one for at in one.text_offset] == told.text_offset
    none = api.write(logprobs=0).choices[0].logprobs
    assert none.token_logprobs == pytest.approx(told.token_logprobs, abs=1e-4)
    assert none.top_logprobs == [{}] * 8
    assert api.write().choices[0].logprobs is None


def test_what_completions_do_not_do_is_refused(api):
    api.write(suffix="", best_of=1, max_tokens=1)
    for more in ({"suffix": "end"}, {"best_of": 2}, {"echo": True, "logprobs": 1}):
        with pytest.raises(openai.BadRequestError, match="is not supported"):
            api.write(**more)


def test_embeddings_as_numbers_and_packed(api):
    """The client asks for base64 by default."""
    packed = api.client.embeddings.create(model="m", input=["the a", "e"])
    plain = api.client.embeddings.create(model="m", input=["the a", "e"], encoding_format="float")
    assert [one.index for one in packed.data] == [0, 1]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
        assert sum(x * x for x in one.embedding) == pytest.approx(1, abs=1e-5)
    assert packed.data[0].embedding != packed.data[1].embedding
    alone = api.client.embeddings.create(model="m", input="the a")
    assert alone.data[0].embedding == pytest.approx(packed.data[0].embedding, abs=1e-6)
    ids = api.server.tokenizer.encode("the a", eos=False)
    counted = api.client.embeddings.create(model="m", input=[ids, ids])
    assert counted.data[1].embedding == pytest.approx(alone.data[0].embedding, abs=1e-6)
    assert 0 < alone.usage.prompt_tokens == alone.usage.total_tokens < packed.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        api.client.embeddings.create(model="m", input="the", dimensions=16)
    with pytest.raises(openai.BadRequestError) as refused:
        api.client.embeddings.create(model="m", input="the a " * 2000)
    assert refused.value.body["type"] == "exceed_context_size_error"
