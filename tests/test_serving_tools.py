"""Tools, documents of a schema and grammars with the official `openai` client, over real connections."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest

from packtrain.serving import event_stream, slots
from packtrain.serving.tool_call_styles import HERMES, LLAMA, MISTRAL, ToolCallStyle
from tests.clients import ASK, Api, model_api, openai

pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.grammar

ZONE = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"]}
DAYS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_time", "parameters": ZONE}},
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "e", "parameters": DAYS},
    },
]


def tool(name: str, properties: dict[str, Any]) -> Any:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


HARD = tool(
    "hard",
    {
        "tags": {"type": "array", "uniqueItems": True},
        "n": {"not": {"const": 1}},
        "s": {"pattern": "(?=a)a"},
    },
)
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = '<tool_call>{"name": "get_time", "arguments": {"zone": "utc"}}</tool_call>'
STYLES = {  # as chat templates write calls
    "hermes": HERMES,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "functionary": ToolCallStyle("<function=", "</function><function=", "</function>", middle=">"),
    "kimi": ToolCallStyle("<|calls|>functions.", "<|next|>functions.", "<|end|>", middle=":\1<|arguments|>"),
    "coder": ToolCallStyle(
        "<tool_call><function=", "></function></tool_call><tool_call><function=", "></function></tool_call>",
        middle="", pair=("><parameter=", ">", "</parameter"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with model_api(tmp_path_factory.mktemp("tools"), ctx=4096) as api:
        yield api


@pytest.fixture(scope="module")
def dense(api) -> dict[str, Any]:
    """A request whose answer has no white space, which is all that a random model would write in a document."""
    tokenizer = api.server.tokenizer
    white = [id for id in range(tokenizer.vocab_size) if not tokenizer.piece(id).strip()]
    spaces = [id for id in white if tokenizer.piece(id)]
    return {"logit_bias": {str(id): -100 for id in spaces}, "max_tokens": 200}


@pytest.fixture
def saying(api, monkeypatch) -> Any:
    """Has answers begin with a text, as a trained model might."""

    def begin_with(text: str) -> None:
        ids, real = api.server.tokenizer.encode(text, bos=False, eos=False), slots.make_chain

        def chain_of(*args: Any) -> Any:
            chain, remaining_ids = real(*args), [*ids]
            choose = chain.choose
            monkeypatch.setattr(
                chain, "choose", lambda row: remaining_ids.pop(0) if remaining_ids else choose(row)
            )
            return chain

        monkeypatch.setattr(slots, "make_chain", chain_of)

    return begin_with


def put_together(chunks: Any) -> tuple[str, list[Any], str]:
    """The text, the calls and the reason of a stream."""
    text, calls, reason = "", dict[int, Any](), ""
    for choice in (chunk.choices[0] for chunk in chunks if chunk.choices):
        text += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
            call["id"] += part.id or ""
            call["name"] += part.function.name or ""
            call["arguments"] += part.function.arguments or ""
        reason = choice.finish_reason or reason
    return text, [calls[index] for index in sorted(calls)], reason


def check_arguments(name: str, arguments: str) -> None:
    parsed = json.loads(arguments)
    if name == "get_time":
        assert parsed.keys() == {"zone"} and parsed["zone"] in ("utc", "cet")
    else:
        assert name == "get_weather" and parsed.keys() == {"city", "days"}
        assert parsed["city"] in ("Oslo", "Rome") and 1 <= parsed["days"] <= 9


# ---- tools


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("style", STYLES)
def test_calls_fit_their_parameters(api, dense, monkeypatch, style, choice):
    monkeypatch.setattr(api.server, "style", STYLES[style])
    (completion,) = api.chat(tools=TOOLS, tool_choice=choice, **dense).choices
    assert completion.finish_reason == "tool_calls" and completion.message.content is None
    (call,) = completion.message.tool_calls
    assert call.type == "function" and call.id
    assert call.function.name == "get_weather" or choice == "required"
    check_arguments(call.function.name, call.function.arguments)
    text, (streamed,), reason = put_together(
        api.chat(tools=TOOLS, tool_choice=choice, stream=True, **dense)
    )
    assert text == "" and reason == "tool_calls" and streamed["id"].startswith("call_")
    streamed_call = streamed["name"], streamed["arguments"]
    assert streamed_call == (call.function.name, call.function.arguments)


def test_a_number_of_a_forced_call_ends(api):
    tokenizer = api.server.tokenizer
    digits = [id for id in range(tokenizer.vocab_size) if tokenizer.piece(id).isdigit()]
    counting = tool("f", {"n": {"type": "integer"}, "x": {"type": "number"}})
    counting["function"]["parameters"]["required"] = ["n", "x"]
    (completion,) = api.chat(
        tools=[counting], tool_choice="required",
        temperature=0, max_tokens=400, logit_bias={str(id): 100 for id in digits},
    ).choices  # fmt: skip
    assert completion.finish_reason == "tool_calls"
    arguments = completion.message.tool_calls[0].function.arguments
    assert all(len(run) <= 16 for run in re.findall("[0-9]+", arguments))


def test_an_answer_calls_if_it_wants_to(api, saying):
    """With `auto` there may be words before a call, or none; its beginning is never shown."""
    free = api.chat(tools=TOOLS, tool_choice="auto").choices[0]
    assert free.message.tool_calls is None and free.finish_reason == "length"
    saying(f"e {CALL}")
    (completion,) = api.chat(tools=TOOLS, max_tokens=200).choices
    (call,) = completion.message.tool_calls
    assert completion.message.content.strip() == "e" and completion.finish_reason == "tool_calls"
    assert call.function.name == "get_time" and json.loads(call.function.arguments) == {
        "zone": "utc"
    }
    text, (streamed,), reason = put_together(api.chat(tools=TOOLS, max_tokens=200, stream=True))
    assert text.strip() == "e" and reason == "tool_calls"
    assert streamed["arguments"] == call.function.arguments
    text_answer = api.chat(tools=TOOLS, tool_choice="none", max_tokens=80).choices[0].message
    assert text_answer.tool_calls is None and "<tool_call>" in text_answer.content


def test_a_line_before_words_is_in_no_answer(api, saying, monkeypatch):
    """As functionary's `all`, which it also writes where no tools are given."""
    head = " all\n"  # this tokenizer puts a space before texts
    monkeypatch.setattr(
        api.server, "style", ToolCallStyle("", ">>>", "", middle="\n", words_prefix=head)
    )
    saying("all\nthe")
    for options in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        content = api.chat(max_tokens=12, **options).choices[0].message.content
        text, calls, _ = put_together(api.chat(max_tokens=12, stream=True, **options))
        assert content.startswith("the") and text.rstrip() == content.rstrip() and not calls


def test_a_connection_is_not_silent_while_a_call_is_written(api, dense, monkeypatch):
    """Proxies cut those; clients skip the comments."""
    monkeypatch.setattr(event_stream, "KEEPALIVE_SECONDS", 0.01)
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "stream": True} | dense
    text = httpx.post(f"{api.address}/v1/chat/completions", json=body, timeout=60).text
    first_event, *_, call, _, _ = text.removesuffix("\n\n").split("\n\n")
    assert '"role"' in first_event and '"tool_calls"' in call and ": still working" in text
    _, calls, _ = put_together(api.chat(tools=TOOLS, tool_choice="required", stream=True, **dense))
    assert len(calls) == 1


def test_several_calls_of_an_answer(api, saying):
    saying(f"{CALL}\n{CALL}")
    options = {"tools": TOOLS, "parallel_tool_calls": True}
    count = len(api.server.tokenizer.encode(f"{CALL}\n{CALL}", bos=False, eos=False))
    (completion,) = api.chat(**options, max_tokens=count).choices
    assert [call.function.name for call in completion.message.tool_calls] == ["get_time"] * 2
    assert len({call.id for call in completion.message.tool_calls}) == 2
    calls = put_together(api.chat(**options, max_tokens=count, stream=True))[1]
    assert [call["name"] for call in calls] == ["get_time"] * 2
    (cut,) = api.chat(**options, max_tokens=count - 5).choices
    assert len(cut.message.tool_calls) == 1 and cut.finish_reason == "length"


def test_results_of_calls_come_back(api, dense):
    """The client's own answer object is taken as a message, then the result."""
    answer = api.chat(tools=TOOLS, tool_choice="required", **dense).choices[0].message
    (call,) = answer.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "3421"}]
    messages = [*ASK, answer, *results]
    final = api.chat(messages, tools=TOOLS).choices[0]
    assert final.message.content and final.message.tool_calls is None
    conversation = [*ASK, answer.model_dump(exclude_none=True), *results]
    body = {"messages": conversation, "tools": TOOLS}
    prompt = httpx.post(f"{api.address}/apply-template", json=body).json()["prompt"]
    assert call.function.name in prompt and prompt.index("3421") > prompt.index("the a")
    with pytest.raises(openai.BadRequestError, match="results must follow"):
        api.chat(messages[:2], tools=TOOLS)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": {"type": "function", "function": {"name": "none_such"}}}, "there is no such tool"),
    ({"tool_choice": "some"}, "there is no such tool"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": "get_time"}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]}, "schema"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "hiccup"}}}]}, "schema"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#/b"}}}]}, "schema"),
    ({"extra_body": {"grammar": 'root ::= "a"'}}, "exclude each other"),
    ({"tools": [HARD], "tool_choice": "required"}, "tools: hard: tags: uniqueItems is not supported"),
    ({"tools": [*TOOLS, HARD], "tool_choice": {"type": "function", "name": "hard"}}, "tools: hard: tags: unique"),
    ({"tools": [{"type": "function", "function": HARD["function"] | {"strict": True}}]}, "hard: tags: uniqueItems"),
    ({"tools": [*TOOLS, tool("b", {"x": {}, "y": {"properties": {"z": {"type": "hiccup"}}}})]}, "b: .*: y.z: type: .*"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "no"}]}}, "'no'; there is no such"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": [{"name": "get_time"}]}}, "must be auto or req"),
    ({"tool_choice": {"type": "allowed_tools"}}, "must list at least one tool"),
    ({"tool_choice": {"type": "allowed_tools", "tools": "x"}}, "tool_choice.allowed_tools.tools must be a list"),
    ({"tools": openai.NOT_GIVEN, "tool_choice": "required"}, "there is no such tool"),
    ({"extra_body": {"functions": [TOOLS[0]["function"]]}}, "send tools and tool_choice"),
    ({"tools": openai.NOT_GIVEN, "extra_body": {"function_call": "auto"}}, "send tools and"),
]  # fmt: skip


@pytest.mark.parametrize("fields, words", BAD)
def test_bad_tools_are_refused(api, fields, words):
    with pytest.raises(openai.BadRequestError, match=words):
        api.chat(**({"tools": TOOLS} | fields))


def test_a_tool_that_is_not_called_refuses_nothing(api, dense, saying):
    odd = tool(
        "odd", {x: {"type": "string", "format": x} for x in ("password", "binary", "uri-reference")}
    )
    saying(CALL)
    answer = api.chat(tools=[*TOOLS, HARD, odd], **dense)
    assert answer.choices[0].message.tool_calls[0].function.name == "get_time"
    expected_warnings = [
        f"tools: hard: {place} is not supported: answers may not keep to it"
        for place in ("tags: uniqueItems", "n: not", "s: pattern")
    ]
    assert answer.model_extra["warnings"] == expected_warnings
    assert (
        next(iter(api.chat(tools=[HARD], stream=True))).model_extra["warnings"] == expected_warnings
    )


def test_only_allowed_tools_are_called(api, dense):
    for name in ("get_time", "get_weather"):
        listed = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
        for choice in ({"allowed_tools": listed}, {"mode": "required", "tools": [{"name": name}]}):
            options = {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"} | choice} | dense
            (call,) = api.chat(**options).choices[0].message.tool_calls
            assert call.function.name == name


@pytest.mark.parametrize("kind", ["auto", "none", "required"])
def test_a_choice_in_an_object_is_that_choice(api, dense, kind):
    answers = [
        api.chat(tools=TOOLS[:1], tool_choice=choice, **dense).choices[0].message
        for choice in (kind, {"type": kind})
    ]
    assert answers[0].content == answers[1].content
    assert [bool(answer.tool_calls) for answer in answers] == [kind == "required"] * 2


def test_a_legacy_call_in_a_request_is_a_call_of_a_tool(api):
    call = {"name": "get_time", "arguments": '{"zone": "utc"}'}
    result = {"role": "function", "name": "get_time", "content": "12"}
    turns = [*ASK, {"role": "assistant", "content": None, "function_call": call}, result]
    modern = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": call}],
    }
    prompts = [
        httpx.post(f"{api.address}/apply-template", json={"messages": x}, timeout=60).json()[
            "prompt"
        ]
        for x in (turns, [*ASK, modern, {"role": "tool", "content": "12"}])
    ]
    assert prompts[0] == prompts[1] and "get_time" in prompts[0]
    assert api.chat(messages=turns).choices[0].message.content


@pytest.mark.parametrize("style", STYLES)
def test_parameters_of_any_shape_are_read_or_refused_with_the_tools_name(
    api, dense, monkeypatch, style
):
    monkeypatch.setattr(api.server, "style", STYLES[style])
    for wrong in (
        "x",
        5,
        {"properties": 5},
        {"properties": {"a": 5}},
        {"properties": {"a": {"enum": 5}}},
        {"required": 5, "properties": {"a": {}}},
    ):
        function = {"name": "b", "parameters": wrong}
        with pytest.raises(openai.BadRequestError, match="tools: b"):
            api.chat(tools=[{"type": "function", "function": function}], tool_choice="required")
    assert api.chat(tools=[tool("b", {"a": True})], tool_choice="required", **dense)


# ---- documents


class Step(pydantic.BaseModel):
    kind: Literal["up", "down"]
    count: int = pydantic.Field(ge=1, le=99)


class Plan(pydantic.BaseModel):
    steps: list[Step] = pydantic.Field(max_length=2)
    done: bool


def test_a_document_of_a_schema(api, dense):
    json_schema = {"name": "n", "strict": True, "schema": DAYS | {"additionalProperties": False}}
    response_format = {"type": "json_schema", "json_schema": json_schema}
    (choice,) = api.chat(response_format=response_format, **dense).choices
    assert choice.finish_reason == "stop"
    check_arguments("get_weather", choice.message.content)
    text, _, reason = put_together(api.chat(response_format=response_format, stream=True, **dense))
    assert (text, reason) == (choice.message.content, "stop")
    readme = api.chat(response_format={"type": "json_schema", "schema": DAYS}, **dense).choices[0]
    check_arguments("get_weather", readme.message.content)
    schema_answer = api.chat(extra_body={"json_schema": DAYS}, **dense).choices[0].message.content
    check_arguments("get_weather", schema_answer)


@pytest.mark.parametrize(
    "response_format",
    [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}],
)
def test_any_object(api, dense, response_format):
    """The answer ends with the object, or is cut within one."""
    (choice,) = api.chat(response_format=response_format, **dense).choices
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    text_answer = api.chat(response_format={"type": "text"}).choices[0].message.content
    assert text_answer == api.chat().choices[0].message.content


def test_parsed_answers_of_the_client(api, dense):
    """Its `parse` and `stream` send a pydantic model's schema, and check what comes."""
    options = {"model": "m", "messages": ASK, "temperature": 0, "response_format": Plan} | dense
    plan = api.client.chat.completions.parse(**options).choices[0].message.parsed
    assert isinstance(plan, Plan) and len(plan.steps) <= 2
    with api.client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == plan
    assert {"chunk", "content.delta", "content.done"} <= kinds
    with pytest.raises(openai.LengthFinishReasonError):
        api.client.chat.completions.parse(**options | {"max_tokens": 3})


def test_parsed_calls_of_the_client(api, dense):
    """Models with parts, which schemas refer to; two tools have parts of the same name."""
    part = pydantic.create_model("Step", zone=(Literal["utc", "cet"], ...))
    trip = pydantic.create_model("Trip", step=(part, ...))
    tools = [openai.pydantic_function_tool(model_class) for model_class in (trip, Plan)]
    options = {"model": "m", "messages": ASK, "temperature": 0, "tools": tools} | dense
    for name, kind in (("Trip", trip), ("Plan", Plan)):
        options["tool_choice"] = {"type": "function", "function": {"name": name}}
        (call,) = api.client.chat.completions.parse(**options).choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, kind)
    options["tool_choice"] = "required"
    (call,) = api.client.chat.completions.parse(**options).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, trip | Plan)
    with api.client.chat.completions.stream(**options) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert done[0].parsed_arguments == final.function.parsed_arguments
    assert final.function.parsed_arguments == call.function.parsed_arguments


@pytest.mark.parametrize("style", STYLES)
def test_a_call_or_a_document(api, dense, monkeypatch, style):
    """Tools with a response_format: `auto` lets either come, `required` calls only."""
    monkeypatch.setattr(api.server, "style", STYLES[style])
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": DAYS}}
    options = {"tools": TOOLS[:1], "response_format": response_format} | dense
    call_opening = {"mistral": "[", "llama": '"'}.get(style, "<")
    tokens = api.server.tokenizer.tokens
    for opening in ("{", call_opening):
        bias = options["logit_bias"] | {str(tokens.index(b"<0x%02X>" % ord(opening))): 50}
        (choice,) = api.chat(**options | {"logit_bias": bias}).choices
        if choice.message.tool_calls:
            check_arguments("get_time", choice.message.tool_calls[0].function.arguments)
        else:
            check_arguments("get_weather", choice.message.content)
        if style != "llama":  # whose calls begin like documents
            assert bool(choice.message.tool_calls) == (opening == call_opening)
    (choice,) = api.chat(**options, tool_choice="required").choices
    check_arguments("get_time", choice.message.tool_calls[0].function.arguments)


# ---- grammars


def test_a_grammar(api):
    for streams in (False, True):
        options = {"extra_body": {"grammar": 'root ::= "yes" | "no"'}, "stream": streams}
        if streams:
            text, _, reason = put_together(api.chat(**options))
        else:
            (choice,) = api.chat(**options).choices
            text, reason = choice.message.content, choice.finish_reason
        assert text in ("yes", "no") and reason == "stop"
    completion = api.write(extra_body={"grammar": 'root ::= "the"'}).choices[0]
    assert (completion.text, completion.finish_reason) == ("the", "stop")


def test_what_is_no_grammar_or_schema(api):
    with pytest.raises(openai.BadRequestError, match="line 1, column"):
        api.chat(extra_body={"grammar": "root ::= ("})
    for schema in ({"type": "hiccup"}, ["a"]):
        response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=r"(?i)schema"):
            api.chat(response_format=response_format)
    for response_format, words in (
        ({}, "json_schema must be a JSON object"),
        ({"json_schema": {"name": "x"}}, "json_schema has no schema"),
        ({"json_schema": {"schema": DAYS}, "schema": ZONE}, "exclude each other"),
        ({"schema": {"properties": {"a": {"not": {}}}}}, "a: not is not supported"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            api.chat(response_format={"type": "json_schema"} | response_format)
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        api.chat(response_format={"type": "json_object"}, extra_body={"json_schema": DAYS})
