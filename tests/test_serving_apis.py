"""Anthropic's Messages and OpenAI's Responses with the official clients, over real connections.

An answer is given by a grammar, so that a random model thinks, says or calls what a test needs.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from packtrain.serving.anthropic_messages import chat_body
from packtrain.serving.json_fields import JsonBody
from packtrain.serving.server_state import StoredResponses
from tests.clients import Api, model_api, openai
from tests.test_serving_thoughts import TEMPLATE

pytestmark = pytest.mark.grammar

ASK: Any = [{"role": "user", "content": "the a"}]
ZONE = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"]}
ANTHROPIC_TOOL = {"name": "get_time", "description": "e", "input_schema": ZONE}
FUNCTION_TOOL: Any = {"type": "function", "name": "get_time", "parameters": ZONE}
THOUGHT = "<think>the a\n</think>\n\nthe the"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("apis")
    (folder / "template.jinja").write_text(TEMPLATE)
    with model_api(folder, chat_template=str(folder / "template.jinja"), ctx=4096) as api:
        yield api


@pytest.fixture
def anthropic_client(api: Api) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=api.address, api_key="any", max_retries=0) as client:
        yield client


def answer_of(text: str) -> dict[str, Any]:
    """Fields of a request whose answer is this text."""
    return {"grammar": f"root ::= {json.dumps(text)}", "temperature": 0}


def post(api: Api, path: str, **body: Any) -> Any:
    response = httpx.post(f"{api.address}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def stream(api: Api, path: str, **body: Any) -> list[Any]:
    """The events of a stream, each named by its type."""
    text = httpx.post(f"{api.address}{path}", json=body | {"stream": True}, timeout=60).text
    named = [event.split("\n") for event in text.split("\n\n") if event]
    events = [(name, json.loads(data.removeprefix("data: "))) for name, data in named]
    assert all(name == f"event: {event['type']}" for name, event in events)
    return [event for _, event in events]


def refusal(api: Api, path: str, **body: Any) -> tuple[int, str]:
    response = httpx.post(f"{api.address}{path}", json=body, timeout=60)
    assert response.json()["type"] == "error"
    return response.status_code, response.json()["error"]["message"]


def dense(api: Api) -> dict[str, Any]:
    """Fields of a request whose answer has no white space, which a random model would write without end."""
    tokenizer = api.server.tokenizer
    pieces = ((id, tokenizer.piece(id)) for id in range(tokenizer.vocab_size))
    return {"logit_bias": {str(id): -100 for id, piece in pieces if piece and not piece.strip()}}


# ---- /v1/messages


def message(api: Api, **fields: Any) -> Any:
    return post(api, "/v1/messages", **{"model": "m", "max_tokens": 100, "messages": ASK} | fields)


def message_events(api: Api, **fields: Any) -> list[Any]:
    return stream(api, "/v1/messages", **{"max_tokens": 100, "messages": ASK} | fields)


def test_a_message_has_blocks_of_thoughts_and_text(api):
    answer = message(api, **answer_of(THOUGHT))
    thinking = {"type": "thinking", "thinking": "the a", "signature": ""}
    assert answer["content"] == [thinking, {"type": "text", "text": "the the"}]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == (
        "message",
        "assistant",
        "end_turn",
    )
    chat = api.chat(ASK, extra_body=answer_of(THOUGHT) | {"max_tokens": 100}).usage
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat.prompt_tokens
    assert usage["output_tokens"] == chat.completion_tokens


def test_a_stream_of_messages_has_the_events_of_each_block(api):
    events = message_events(api, **answer_of(THOUGHT))
    delta, block = "content_block_delta", ["content_block_start", "content_block_stop"]
    types = [event["type"] for event in events if event["type"] != delta]
    assert types == ["message_start", *block, *block, "message_delta", "message_stop"]
    deltas = [(e["index"], e["delta"]) for e in events if e["type"] == delta]
    *thoughts, signature = (d for index, d in deltas if index == 0)
    assert "".join(d["thinking"] for d in thoughts) == "the a"
    assert signature == {"type": "signature_delta", "signature": ""}
    assert "".join(d["text"] for index, d in deltas if index == 1) == "the the"
    full_answer = message(api, **answer_of(THOUGHT))
    assert events[-2]["delta"]["stop_reason"] == full_answer["stop_reason"]
    assert events[-2]["usage"]["output_tokens"] == full_answer["usage"]["output_tokens"]


@pytest.mark.parametrize("fields, reason, text", [
    ({"max_tokens": 2}, "max_tokens", None),
    ({"stop_sequences": ["the the"], **answer_of("a the the a")}, "stop_sequence", "the the"),
])  # fmt: skip
def test_a_message_says_why_it_ended(api, fields, reason, text):
    answer = message(api, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, text)
    end = message_events(api, **fields)[-2]["delta"]
    assert end == {"stop_reason": reason, "stop_sequence": text}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_time"}])
def test_a_tool_is_used_and_its_result_read(api, choice):
    options = {"tools": [ANTHROPIC_TOOL], "max_tokens": 200, **dense(api)}
    answer = message(api, tool_choice=choice, **options)
    (use,) = answer["content"]
    assert (
        use["type"] == "tool_use"
        and use["name"] == "get_time"
        and answer["stop_reason"] == "tool_use"
    )
    assert use["input"]["zone"] in ("utc", "cet")
    events = message_events(api, tool_choice=choice, temperature=0, **options)
    start = next(e["content_block"] for e in events if e["type"] == "content_block_start")
    assert start["type"] == "tool_use" and start["input"] == {}
    parts = (e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta")
    assert json.loads("".join(parts))["zone"] in ("utc", "cet")
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "noon"}
    turns = [*ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert message(api, messages=turns, tools=[ANTHROPIC_TOOL])["content"]


def test_messages_are_the_prompt_of_the_same_chat(api):
    blocks = [{"type": "text", "text": "the"}, {"type": "text", "text": "a"}]
    cached = [{"type": "text", "text": "a the", "cache_control": {"type": "ephemeral"}}]
    turns = [{"role": "user", "content": blocks}]
    count = post(api, "/v1/messages/count_tokens", system=cached, messages=turns)
    chat = [{"role": "system", "content": "a the"}, {"role": "user", "content": "the\na"}]
    expected = post(api, "/v1/chat/completions/input_tokens", messages=chat)
    assert count == {"input_tokens": expected["input_tokens"]}


def test_input_tokens_of_responses_are_those_that_an_answer_reads(api):
    client, answer_options = api.client, {"extra_body": {"max_tokens": 2}}
    first = client.responses.create(model="m", input=ASK, **answer_options)
    fields: Any = {
        "model": "m", "input": "a the", "instructions": "the", "tools": [FUNCTION_TOOL],
        "previous_response_id": first.id,
    }  # fmt: skip
    counted = client.responses.input_tokens.count(**fields)
    answer = client.responses.create(**fields, **answer_options)
    assert answer.usage.input_tokens == counted.input_tokens > first.usage.input_tokens
    assert counted.object == "response.input_tokens"
    assert post(api, "/responses/input_tokens", **fields) == counted.model_dump()


@pytest.mark.parametrize("fields, words", [
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].type is 'image'"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role is 'robot'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is 'web_search_20250305'"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
    ({"system": [{"type": "image"}]}, "system.content[0].type is 'image'"),
    ({"messages": []}, "'messages' is required"),
])  # fmt: skip
def test_what_a_message_cannot_have_is_refused_by_name(api, fields, words):
    status, text = refusal(api, "/v1/messages", **{"max_tokens": 4, "messages": ASK} | fields)
    assert status == 400 and words in text


def test_a_budget_of_thoughts_that_is_not_kept_is_said(api):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert "budget_tokens" in message(api, max_tokens=4, thinking=thinking)["warnings"][0]
    assert "warnings" not in message(api, max_tokens=4)


def test_the_anthropic_client_reads_answers_streams_and_counts(api, anthropic_client):
    options = {"model": "m", "max_tokens": 100, "messages": ASK, "extra_body": answer_of(THOUGHT)}
    answer = anthropic_client.messages.create(**options)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    with anthropic_client.messages.stream(**options) as events:
        assert "".join(events.text_stream) == "the the"
        text_block = events.get_final_message().content[1]
    assert text_block.text == "the the"
    counted = anthropic_client.messages.count_tokens(model="m", messages=ASK)
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    forced = {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}, "extra_body": dense(api)}
    with anthropic_client.messages.stream(**options | {"max_tokens": 200} | forced) as events:
        (use,) = events.get_final_message().content
    assert use.type == "tool_use" and use.input["zone"] in ("utc", "cet")


ONE_ANSWER = [
    ("/v1/messages", {"messages": ASK, "max_tokens": 4}),
    ("/v1/responses", {"input": "the a", "max_output_tokens": 4}),
]


@pytest.mark.parametrize("path, fields", ONE_ANSWER)
def test_apis_of_one_answer_refuse_to_write_several_and_to_edit_the_context(api, path, fields):
    clear_tools = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    for name, value in (("n", 3), ("context_management", clear_tools)):
        response = httpx.post(f"{api.address}{path}", json={**fields, name: value}, timeout=60)
        assert response.status_code == 400 and f"{name} is not supported" in response.text


@pytest.mark.parametrize("path, fields", ONE_ANSWER)
def test_apis_of_one_answer_take_what_asks_for_one_and_for_no_edits(api, path, fields):
    keep_all = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert post(api, path, **fields, n=1, context_management=keep_all)["usage"]


@pytest.mark.parametrize("content", ["no such zone", [{"type": "text", "text": "no such zone"}]])
def test_a_model_sees_that_a_tool_failed(api, content):
    use = {"type": "tool_use", "id": "c1", "name": "get_time", "input": {"zone": "moon"}}
    counts, prompts = {}, {}
    for is_error in (False, True):
        result = {
            "type": "tool_result",
            "tool_use_id": "c1",
            "content": content,
            "is_error": is_error,
        }
        turns = [
            *ASK,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        fields = {"messages": turns, "max_tokens": 1, "tools": [ANTHROPIC_TOOL]}
        counts[is_error] = post(api, "/v1/messages/count_tokens", **fields)["input_tokens"]
        prompts[is_error] = chat_body(JsonBody(fields)).get("messages")[-1]["content"]
    assert counts[True] > counts[False]
    assert prompts == {
        False: content,
        True: [{"type": "text", "text": "Error:"}, {"type": "text", "text": "no such zone"}],
    }


# ---- /v1/responses


def response(api: Api, **fields: Any) -> Any:
    options = {"model": "m", "input": "the a", "max_output_tokens": 100} | fields
    extra = {name: options.pop(name) for name in ("grammar", "logit_bias") if name in options}
    return api.client.responses.create(**options, extra_body=extra)


def test_a_response_has_items_of_thoughts_and_text(api):
    answer = response(api, **answer_of(THOUGHT))
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "the a" and answer.output_text == "the the"
    assert answer.status == "completed" and answer.usage.output_tokens_details.reasoning_tokens > 0


def test_a_stream_of_a_response_has_the_events_of_each_item(api):
    events = [*response(api, stream=True, **answer_of(THOUGHT))]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    types = [event.type.removeprefix("response.") for event in events]
    item = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    assert [t for t in types if not t.endswith("delta")] == [
        "created", "in_progress", *item, "reasoning_text.done", *done,
        *item, "output_text.done", *done, "completed",
    ]  # fmt: skip
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == "the the" == events[-1].response.output_text
    with api.client.responses.stream(
        model="m", input="the a", extra_body=answer_of(THOUGHT)
    ) as managed:
        assert managed.get_final_response().output_text == "the the"


def test_a_response_that_is_cut_is_incomplete(api):
    answer = response(api, max_output_tokens=1)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    events = [*response(api, max_output_tokens=1, stream=True)]
    assert events[-1].type == "response.incomplete"
    (done,) = (event.item for event in events if event.type == "response.output_item.done")
    (streamed,), (item,) = events[-1].response.output, answer.output
    assert done.status == streamed.status == item.status == "incomplete"
    full_answer = response(api, **answer_of(THOUGHT))
    assert [item.status for item in full_answer.output] == ["completed"] * 2


def test_a_function_is_called_and_its_output_read(api):
    options = {"tools": [FUNCTION_TOOL], "max_output_tokens": 200}
    answer = response(api, tool_choice="required", **options, **dense(api))
    (call,) = answer.output
    assert call.type == "function_call" and json.loads(call.arguments)["zone"] in ("utc", "cet")
    events = [*response(api, tool_choice="required", stream=True, **options, **dense(api))]
    arguments = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert json.loads(arguments.arguments)["zone"] in ("utc", "cet")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    followed = response(api, input=[output], previous_response_id=answer.id, **options)
    turns = [{"role": "user", "content": "the a"}, call.model_dump(exclude_none=True), output]
    assert followed.usage.input_tokens == response(api, input=turns, **options).usage.input_tokens


def test_a_previous_response_is_continued_without_its_instructions(api):
    first = response(api, instructions="a a a", **answer_of("the the"))
    second = response(api, input="a", previous_response_id=first.id)
    turns = [*ASK, {"role": "assistant", "content": "the the"}, {"role": "user", "content": "a"}]
    assert second.usage.input_tokens == response(api, input=turns).usage.input_tokens
    unstored = response(api, store=False)
    for unknown_id in (unstored.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            response(api, previous_response_id=unknown_id)


def test_a_response_fits_a_schema(api):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    assert json.loads(response(api, text=text, **dense(api)).output_text)["n"] in (1, 2)


@pytest.mark.parametrize("fields, words", [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search'"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type is 'item_reference'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type is 'input_image'"),
    ({"background": True}, "background is not supported"),
    ({"include": ["message.output_text.logprobs"]}, "include: message.output_text.logprobs"),
    ({"input": []}, "'messages' is required"),
])  # fmt: skip
def test_what_a_response_cannot_have_is_refused_by_name(api, fields, words):
    status, text = refusal(api, "/v1/responses", **{"input": "a"} | fields)
    assert status == 400 and words in text


def test_stored_conversations_stay_within_their_bytes():
    stored = StoredResponses(max_nbytes=200)
    for number in range(50):
        stored.store(f"resp_{number}", [{"role": "user", "content": "a" * 20}])
    assert stored.messages("resp_49") == [{"role": "user", "content": "a" * 20}]
    assert sum(map(len, stored._conversations.values())) <= 200
    stored.store("resp_large", [{"role": "user", "content": "a" * 300}])
    assert not stored._conversations
