"""The server as programs use it: chats and errors with the official `openai` client, over real connections."""

import asyncio
import math
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from packtrain.common.errors import InputError
from packtrain.data.chat_template import ChatTemplate
from packtrain.data.conversations.conversation_renderer import ConversationRenderer
from packtrain.serving import slots
from packtrain.serving.http_app import parse_json
from packtrain.serving.server_state import RequestLimits
from tests.clients import ASK, Api, model_api, openai, openai_client


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with model_api(tmp_path_factory.mktemp("clients")) as api:
        yield api


# ---- models and chats


def test_models_are_listed_and_found_by_name(api):
    (model,) = api.client.models.list().data
    assert model.id == "m.gguf" and model.object == "model"
    assert api.client.models.retrieve("m.gguf").id == "m.gguf"
    with pytest.raises(openai.NotFoundError):
        api.client.models.retrieve("none-such")


def test_a_stream_put_together_is_the_whole_answer(api):
    completion = api.chat()
    chunks = list(api.chat(stream=True, stream_options={"include_usage": True}))
    *parts, last, counts = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == completion.choices[0].message.content and text
    assert last.choices[0].finish_reason == completion.choices[0].finish_reason == "length"
    assert counts.choices == [] and counts.usage.completion_tokens == 8
    assert counts.usage.total_tokens == completion.usage.total_tokens
    assert all(part.usage is None for part in (*parts, last))
    assert all(part.choices for part in api.chat(stream=True))


def test_streams_at_once_are_each_what_they_are_alone(api):
    words = [[{"role": "user", "content": f"the {letter}"}] for letter in "abcdef"]
    expected = [api.chat(messages).choices[0].message.content for messages in words]

    async def text(client: Any, messages: Any) -> str:
        stream = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=8, temperature=0, stream=True
        )
        return "".join([part.choices[0].delta.content or "" async for part in stream])

    async def every() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{api.address}/v1", api_key="any") as client:
            return await asyncio.gather(*(text(client, messages) for messages in words))

    assert asyncio.run(every()) == expected


def test_a_stream_that_is_closed_frees_its_slot(api):
    with api.chat(max_tokens=1500, stream=True) as stream:
        texts = (part.choices[0].delta.content for part in stream)
        assert next(text for text in texts if text)
        assert any(slot.answer for slot in api.server.engine.slots)
    written_before = api.server.engine.totals.output_tokens
    assert api.becomes_idle()
    assert api.server.engine.totals.output_tokens - written_before < 30


def test_what_a_chat_may_say(api):
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": " a"}]
    lines = api.chat([{"role": "user", "content": "the\n a"}]).choices[0].message.content
    assert api.chat([{"role": "user", "content": parts}]).choices[0].message.content == lines
    text = api.chat().choices[0].message.content
    partial_answer = {
        "role": "assistant",
        "content": None,
        "refusal": "no",
    }  # as the client repeats one
    api.chat([*ASK, partial_answer, *ASK], max_tokens=1)
    developer_answer = api.chat([{"role": "developer", "content": "e"}, *ASK], max_tokens=1)
    assert developer_answer.usage.prompt_tokens > api.chat(max_tokens=1).usage.prompt_tokens
    extra_fields = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me"}
    answer = api.chat(
        **extra_fields, reasoning_effort="low", extra_body={"no_such_field": {"x": [1]}}
    )
    assert answer.choices[0].message.content == text


def test_variables_of_the_chat_template(api, monkeypatch):
    """Whether a model thinks is one of them, as Qwen's have it; its own variables stay."""
    source = "{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }}"
    monkeypatch.setattr(
        api.server, "renderer", ConversationRenderer(ChatTemplate(source, "", ""), [])
    )

    def prompt(**fields: Any) -> str:
        body = {"messages": ASK} | fields
        answer = httpx.post(f"{api.address}/apply-template", json=body, timeout=60).json()
        return answer["prompt"].removeprefix("the a").strip()

    assert prompt() == "True"
    assert prompt(chat_template_kwargs={"enable_thinking": False, "messages": []}) == "False"
    assert prompt(reasoning_effort="low") == "True low"
    assert prompt(reasoning_effort="none") == "False"
    counts = [
        api.chat(
            max_tokens=1, extra_body={"chat_template_kwargs": template_kwargs}
        ).usage.prompt_tokens
        for template_kwargs in ({}, {"reasoning_effort": "e" * 20})
    ]
    assert counts[1] == counts[0] + 20
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs must be a JSON object"):
        api.chat(extra_body={"chat_template_kwargs": "think"})


def test_lengths(api):
    assert api.chat(max_tokens=3).usage.completion_tokens == 3
    assert api.chat(max_tokens=None, max_completion_tokens=2).usage.completion_tokens == 2
    assert api.chat(max_tokens=9, max_completion_tokens=2).usage.completion_tokens == 2


def test_stop_texts_end_an_answer_before_them(api):
    text = api.chat(max_tokens=30).choices[0].message.content
    stop = text[5:7]
    for stop_option in (stop, ["no such text", stop]):
        (choice,) = api.chat(max_tokens=30, stop=stop_option).choices
        assert choice.finish_reason == "stop"
        assert choice.message.content == text[: text.index(stop)]
        parts = [part.choices[0] for part in api.chat(max_tokens=30, stop=stop_option, stream=True)]
        assert "".join(p.delta.content or "" for p in parts) == text[: text.index(stop)]
        assert parts[-1].finish_reason == "stop"


def test_probabilities_of_chosen_and_likely_tokens(api):
    """Greedy: the chosen token is the likeliest one."""
    (choice,) = api.chat(logprobs=True, top_logprobs=5).choices
    assert len(choice.logprobs.content) == 8
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 5 and token.top_logprobs[0].bytes == token.bytes
        likely = [top.logprob for top in token.top_logprobs]
        assert likely == sorted(likely, reverse=True) and likely[0] == token.logprob
        assert 0 < sum(math.exp(logprob) for logprob in likely) <= 1
    text = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert text.decode(errors="replace") == choice.message.content
    parts = list(api.chat(logprobs=True, top_logprobs=5, stream=True))
    streamed = [
        entry
        for part in parts
        if (logprobs := part.choices[0].logprobs)
        for entry in logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]
    chosen_only = api.chat(logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in chosen_only] == [[]] * 8
    assert chosen_only[0].logprob == pytest.approx(choice.logprobs.content[0].logprob, abs=1e-4)
    assert api.chat().choices[0].logprobs is None


def test_several_answers_and_seeds(api):
    answer = api.chat(n=3, temperature=1.5, seed=7)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({*texts}) == 3 and answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == api.chat().usage.prompt_tokens
    repeated = api.chat(n=3, temperature=1.5, seed=7)
    assert [choice.message.content for choice in repeated.choices] == texts
    assert api.chat(temperature=1.5, seed=7).choices[0].message.content == texts[0]
    streamed = ["", "", ""]
    for part in api.chat(n=3, temperature=1.5, seed=7, stream=True):
        streamed[part.choices[0].index] += part.choices[0].delta.content or ""
    assert streamed == texts


def test_settings_change_what_comes(api):
    def ids(**options: Any) -> list[int]:
        content = api.chat(max_tokens=40, logprobs=True, **options).choices[0].logprobs.content
        return [entry.id for entry in content]

    baseline = ids()
    assert len({*baseline}) < 40 == len({*ids(presence_penalty=2.0, frequency_penalty=2.0)})
    assert baseline[0] not in ids(logit_bias={baseline[0]: -100})
    e = api.server.tokenizer.tokens.index(b"e")
    assert ids(logit_bias={str(e): 100}) == [e] * 40
    assert (
        ids(temperature=1.0, top_p=1e-6)
        == ids(temperature=1.0, extra_body={"top_k": 1})
        == baseline
    )


# ---- errors


BAD: list[tuple[Any, str]] = [
    ({"messages": None}, "'messages' is required"),
    ({"messages": "the"}, "'messages' is required"),
    ({"messages": []}, "it must be a list of at least one message"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
    ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\]: content"),
    ({"messages": [{"content": "a"}]}, "role"),
    ({"temperature": "hot"}, "temperature must be a number"),
    ({"max_tokens": "many"}, "max_tokens must be a whole number"),
    ({"n": 0}, "n is 0"),
    ({"stop": {"a": 1}}, "stop must be"),
    ({"stream": "yes"}, "stream must be true or false"),
    ({"stream": True, "stream_options": "all"}, "stream_options must be a JSON object"),
    ({"top_logprobs": 2}, "top_logprobs requires logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; it must be at least 0 and at most 20"),
    ({"response_format": {"type": "sound"}}, "response_format.type is 'sound'"),
]  # fmt: skip


@pytest.mark.parametrize("body, words", BAD)
def test_bad_requests_are_told_in_a_sentence(api, body, words):
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        api.chat(extra_body=body)
    fault = refused.value
    assert fault.status_code == 400 and fault.type == "invalid_request_error"
    assert "JSONL" not in fault.message and "a record" not in fault.message


def test_images_are_refused(api):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="'image_url'; only text is supported"):
        api.chat([{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}])


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(api, stream):
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat([{"role": "user", "content": "e a " * 2000}], stream=stream)
    fault, max_tokens = refused.value.body, api.server.engine.max_seq_tokens
    assert fault["type"] == "exceed_context_size_error" and fault["code"] == 400
    assert fault["n_ctx"] == max_tokens < fault["n_prompt_tokens"]


def test_what_there_is_not(api):
    requests = [
        lambda: api.client.moderations.create(input="a"),
        lambda: api.client.images.generate(prompt="a"),
        lambda: api.client.get("/nothing", cast_to=object),
    ]
    for ask in requests:
        with pytest.raises(openai.NotFoundError) as refused:
            ask()
        assert refused.value.type == "not_found_error"


def test_a_full_queue_is_told_and_asked_again(api, monkeypatch):
    """Before a stream begins, so that clients can try again, as this one does by itself."""
    monkeypatch.setattr(api.server.engine, "_max_waiting", 0)
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="try again later") as refused:
            api.chat(stream=stream)
        assert refused.value.status_code == 503 and refused.value.type == "unavailable_error"
    timer = threading.Timer(0.2, monkeypatch.undo)
    timer.start()
    with openai_client(api.address, max_retries=3) as patient:
        answer = patient.chat.completions.create(model="m", messages=ASK, max_tokens=1)
    assert answer.usage.completion_tokens == 1
    timer.join()


def test_a_fault_in_the_middle_of_an_answer(api, monkeypatch):
    """A sentence, and the slot is free; in a stream what came before it comes."""
    real = slots.make_chain

    def chain_of(*args: Any) -> Any:
        chain, remaining = real(*args), [None] * 3
        choose = chain.choose

        def fails(row: Any) -> int:
            if not remaining:
                raise InputError("grammar: nothing can come")
            remaining.pop()
            return choose(row)

        monkeypatch.setattr(chain, "choose", fails)
        return chain

    monkeypatch.setattr(slots, "make_chain", chain_of)
    with pytest.raises(openai.BadRequestError, match="nothing can come"):
        api.chat()
    received = []
    with pytest.raises(openai.APIError, match="nothing can come"):
        received += api.chat(stream=True)
    with pytest.raises(openai.APIError, match="nothing can come"):
        for part in api.chat(stream=True):
            received.append(part.choices[0].delta.content)
    assert any(received) and api.becomes_idle()


def test_an_answer_that_takes_too_long_is_ended(api, monkeypatch):
    monkeypatch.setattr(api.server, "limits", RequestLimits(max_seconds=0.3))
    options = {"max_tokens": None, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.InternalServerError, match=r"more than 0\.3 s"):
        api.chat(**options)
    received = []
    with pytest.raises(openai.APIError, match=r"more than 0\.3 s"):
        for part in api.chat(**options, stream=True):
            received.append(part.choices[0].delta.content)
    assert any(received) and api.becomes_idle()


def test_a_task_that_is_cancelled_frees_the_slot(api):
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{api.address}/v1", api_key="any") as client:
            options = {"model": "m", "messages": ASK, "extra_body": {"ignore_eos": True}}
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.chat.completions.create(**options), 0.3)
            async with await client.chat.completions.create(**options, stream=True) as stream:
                async for part in stream:
                    if part.choices[0].delta.content:
                        break

    asyncio.run(ask())
    assert api.becomes_idle()


def test_who_waits_no_longer_frees_the_slot(api):
    expected = api.chat().choices[0].message.content
    with openai_client(api.address, timeout=0.3) as hasty, pytest.raises(openai.APITimeoutError):
        hasty.chat.completions.create(model="m", messages=ASK, extra_body={"ignore_eos": True})
    assert api.becomes_idle()
    assert api.chat().choices[0].message.content == expected


def test_half_a_surrogate_pair_is_named() -> None:
    with pytest.raises(InputError, match=r"half a surrogate pair, \\udc00; it needs both"):
        parse_json(rb'{"prompt": "a\udc00"}')
    assert parse_json(rb'{"prompt": "\ud83d\ude00"}') == {"prompt": "\U0001f600"}
