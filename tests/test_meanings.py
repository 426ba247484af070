"""What other tools read from a row is honoured, or the row is refused with the column's name; none is passed over."""

from pathlib import Path
from typing import Any

import pytest

from packtrain.common.errors import InputError
from packtrain.data.conversations import samples_cache
from packtrain.data.conversations.field_meanings import (
    FALSE,
    LABEL,
    LOSS,
    OTHER_FIELDS_TABLE,
    ROW_TABLE,
    TURN,
)
from packtrain.data.conversations.messages import (
    AnswerPair,
    Conversation,
    make_conversation,
    read_messages,
)
from packtrain.data.conversations.record_formats import RecordReader
from packtrain.data.text.documents import SourceFile
from tests.test_samples import PAIR, build_dataset, learned_texts, model, write_data
from tests.test_samples import TURN as ASKS

__all__ = ["model"]  # a fixture
ASK = {"question": "why", "answer": "so"}
CALL_TEXT = '{"name": "f", "arguments": {"a": 1}}'
CALL = {"name": "f", "arguments": '{"a": 1}'}


def read_conversation(tmp_path: Path, row: dict[str, Any]) -> Conversation:
    (conversation,) = RecordReader(SourceFile(write_data(tmp_path, [row])))
    assert isinstance(conversation, Conversation)
    return conversation


@pytest.mark.parametrize("name", sorted(ROW_TABLE | LABEL))
def test_a_column_with_a_meaning_is_refused_and_an_empty_one_is_not(tmp_path: Path, name: str):
    harmful = (ROW_TABLE | LABEL)[name][2]
    row = {"text": "why"} if name in ("system", "tools", "history", "chosen", "rejected") else ASK
    empty = row | {name: "" if harmful or name not in ROW_TABLE else []}
    assert len([*RecordReader(SourceFile(write_data(tmp_path, [empty])))]) == 1
    with pytest.raises(InputError, match=rf"line 1: {name} is .*; in data of .* it "):
        read_conversation(tmp_path, row | {name: harmful[0] if harmful else "some"})


def test_a_context_beside_messages_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"line 1: context is some; .* part of the prompt"):
        read_conversation(tmp_path, {"messages": PAIR, "context": "some"})
    assert read_conversation(tmp_path, {**ASK, "context": "some"}).messages[0]["content"] != "why"
    assert (
        len(
            [
                *RecordReader(
                    SourceFile(write_data(tmp_path, [{"text": "a film", "context": "some"}]))
                )
            ]
        )
        == 1
    )


@pytest.mark.parametrize("name", sorted(OTHER_FIELDS_TABLE))
def test_another_question_or_answer_is_refused_where_names_are_guessed(tmp_path: Path, name: str):
    row = {"query": "why", "input": "a", "response": "so"} | {name: "some"}
    columns = {"query", "response", *OTHER_FIELDS_TABLE} & row.keys()
    if len(columns) > 2:
        with pytest.raises(InputError, match=rf"line 1: ({'|'.join(columns)}) is .* is another"):
            read_conversation(tmp_path, row)
    assert read_conversation(tmp_path, {"prompt": "why", "completion": "so", name: "some"})


@pytest.mark.parametrize("name", sorted(TURN))
def test_a_key_of_a_message_with_a_meaning_is_refused(tmp_path: Path, name: str):
    for form in (
        {"messages": [ASKS, {**PAIR[1], name: "some"}]},
        {"prompt": "why", "completion": [{**PAIR[1], name: 5}]},
    ):
        with pytest.raises(InputError, match=rf"\[\d\]: {name} is .*; in data of .* it "):
            read_conversation(tmp_path, form)


@pytest.mark.parametrize("value", [False, "False", 0, "0"])
def test_an_answer_that_is_not_wanted_is_refused_whatever_writes_the_label(
    tmp_path: Path, value: Any
):
    for row in ({"prompt": "why", "completion": "so"}, {"messages": PAIR}, ASK):
        with pytest.raises(
            InputError, match=r"line 1: label is .*marks answers that are not wanted"
        ):
            read_conversation(tmp_path, {**row, "Label": value})
    for accepted_label in (True, 1, "1", "spam", None, 3):
        assert (
            read_conversation(tmp_path, {**ASK, "label": accepted_label}).messages[0]["content"]
            == "why"
        )
    assert [*RecordReader(SourceFile(write_data(tmp_path, [{"text": "a film", "label": value}])))]


def test_columns_that_other_tools_call_otherwise_are_read(tmp_path: Path):
    tools = [{"name": "f", "parameters": {}}]
    conversation = read_conversation(tmp_path, {**ASK, "system_prompt": "be", "functions": tools})
    assert [m["content"] for m in conversation.messages] == [
        "be",
        "why",
        "so",
    ] and conversation.tools is not None
    row = {"query": "why", "response": "so", "rejected_response": "no"}
    (pair,) = RecordReader(SourceFile(write_data(tmp_path, [row])))
    assert isinstance(pair, AnswerPair) and pair.rejected.messages[-1]["content"] == "no"


@pytest.mark.parametrize("key", LOSS)
def test_what_says_whether_a_turn_is_trained_on_is_understood_or_refused(tmp_path: Path, key: str):
    for value in ("0", 0.5, [0, 1], "no", -1):
        with pytest.raises(InputError, match=rf"messages\[1\]: {key} is .*; it must be 0 or 1"):
            read_conversation(tmp_path, {"messages": [PAIR[0], {**PAIR[1], key: value}]})
    with pytest.raises(
        InputError, match=rf"{key} is True for the user; only the assistant's turns"
    ):
        read_conversation(tmp_path, {"messages": [{**PAIR[0], key: True}, PAIR[1]]})
    other_key = "loss" if key == "weight" else "weight"
    with pytest.raises(InputError, match="contradict each other"):
        read_conversation(tmp_path, {"messages": [PAIR[0], {**PAIR[1], key: 1, other_key: False}]})
    part = {"type": "text", "text": "so", key: False}
    with pytest.raises(InputError, match=rf"messages\[1\]: {key} is False; .* which parts"):
        read_conversation(
            tmp_path, {"messages": [PAIR[0], {"role": "assistant", "content": [part]}]}
        )
    for value in FALSE:
        with pytest.raises(InputError, match=rf"line 1: {key} is {value}"):
            read_conversation(tmp_path, {**ASK, key: value})


def test_no_turn_of_weight_0_is_trained_on_in_pairs_or_beside_the_prompt(
    tmp_path: Path, model: Path
):
    context, trained_turn = {**PAIR[1], "weight": 0}, {"role": "assistant", "content": "two"}
    data = write_data(
        tmp_path, [{"prompt": "why", "chosen": [context, ASKS, trained_turn], "rejected": "one"}]
    )
    dataset = build_dataset(data, model, tmp_path, pairs=True)
    assert learned_texts(dataset.train, model)[0].count("[[") == 1
    (folder := tmp_path / "more").mkdir()
    bad = write_data(folder, [{"prompt": "why", "chosen": [context], "rejected": "one"}])
    with pytest.raises(InputError, match="chosen has no answer with a weight of 1"):
        build_dataset(bad, model, folder, pairs=True)
    (folder := folder / "more").mkdir()
    turns = write_data(folder, [{"messages": [PAIR[0], context, ASKS, trained_turn]}])
    with pytest.raises(InputError, match="must not be trained on; --no-mask-prompt would"):
        build_dataset(turns, model, folder, everything=True)


def test_an_older_run_does_not_resume_on_data_that_gives_other_samples(tmp_path: Path, model: Path):
    context = {"messages": [PAIR[0], {**PAIR[1], "train": False}, *PAIR]}
    for name, row in (("a", ASK), ("b", context), ("c", {**ASK, "system_prompt": "be"})):
        (folder := tmp_path / name).mkdir()
        notes = build_dataset(write_data(folder, [row]), model, folder).notes
        assert any(map(samples_cache.SINCE.search, notes)) == (name != "a")


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_legacy_call_of_a_function_is_a_call_of_a_tool(tmp_path: Path, content: dict[str, Any]):
    result = {"role": "function", "name": "f", "content": "2"}
    turns = [PAIR[0], {"role": "assistant", **content, "function_call": CALL}, result, PAIR[1]]
    called, answered = read_conversation(tmp_path, {"messages": turns}).messages[1:3]
    (call,) = called["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"a": 1}} and called["content"] == ""
    assert answered["role"] == "tool" and answered["tool_call_id"] == call["id"]
    both = {"role": "assistant", "function_call": CALL, "tool_calls": [CALL]}
    with pytest.raises(InputError, match="has tool_calls and function_call"):
        read_conversation(tmp_path, {"messages": [PAIR[0], both]})
    with pytest.raises(InputError, match="the user calls a tool; only the assistant can"):
        read_conversation(tmp_path, {"messages": [{**PAIR[0], "tool_calls": [CALL]}, PAIR[1]]})


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    "name", ["parameters", "input_schema", "inputSchema", "parametersJsonSchema"]
)
def test_the_schema_of_a_tool_is_read_whatever_its_name(tmp_path: Path, name: str):
    row = {"messages": PAIR, "tools": [{"name": "f", name: SCHEMA}]}
    (tool,) = read_conversation(tmp_path, row).tools or []
    assert tool["function"]["parameters"] == SCHEMA


@pytest.mark.parametrize("name", ["arguments", "parameters", "input", "args", "kwargs"])
def test_the_arguments_of_a_call_are_read_whatever_their_name(tmp_path: Path, name: str):
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", name: {"a": 1}}]}
    (call,) = read_conversation(tmp_path, {"messages": [PAIR[0], called]}).messages[1]["tool_calls"]
    assert call["function"]["arguments"] == {"a": 1}


THINKS = {**PAIR[1], "reasoning_content": "first"}
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{**PAIR[0], "value": "other"}, PAIR[1]]}, "content and value differ"),
    ({"messages": [PAIR[0], {**THINKS, "thinking": "second"}]}, "reasoning_content and thinking differ"),
    ({"messages": [PAIR[0], {**THINKS, "reasoning": "second"}]}, "reasoning_content and reasoning differ"),
    ({"messages": [PAIR[0], {**PAIR[1], "tool_calls": [{"name": "f", "args": {"a": 1}, "input": {"a": 2}}]}]},
     "input and args differ"),
    ({"messages": PAIR, "tools": [{"name": "f", "parameters": SCHEMA, "input_schema": {}}]}, "input_schema differ"),
    ({"messages": [PAIR[0], {**PAIR[1], "tool_calls": [{"name": "f", "arguments": "[1]"}]}]}, "not an object"),
    ({"messages": PAIR, "tools": [{"type": "web_search_20250305", "name": "f"}]}, "type is 'web_search_20250305'"),
    ({"prompt": "why", "completion": "so", "history": {"a": "b"}}, "history must be a list of pairs"),
    ({"prompt": "why", "completion": "so", "loss_mask": [0, 1]}, "loss_mask is .*what is not trained on"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "words"), CONTRADICTIONS)
def test_no_value_of_a_row_is_dropped_beside_another(
    tmp_path: Path, row: dict[str, Any], words: str
):
    with pytest.raises(InputError, match=words):
        read_conversation(tmp_path, row)


def test_a_call_is_a_call_however_its_role_is_written(tmp_path: Path):
    turns = [{"from": "human", "value": "why"}, {"from": "Function_Call", "value": CALL_TEXT}]
    message = read_conversation(tmp_path, {"conversations": turns}).messages[1]
    assert message["tool_calls"][0]["function"]["name"] == "f" and not message["content"]


def test_answers_in_a_prompt_of_messages_are_context(tmp_path: Path, model: Path):
    rows = [{"prompt": [*PAIR, ASKS], "completion": [{"role": "assistant", "content": "two"}]}]
    dataset = build_dataset(write_data(tmp_path, rows), model, tmp_path)
    (text,) = learned_texts(dataset.train, model)
    assert text.count("[[") == 1 and "two" in text.partition("[[")[2]


def test_a_role_that_stands_twice_stands_for_one(tmp_path: Path):
    turns = [
        {"role": "user", "from": "gpt", "content": "Hi."},
        {"role": "assistant", "content": "Ho."},
    ]
    with pytest.raises(InputError, match=r"messages\[0\]: role and from differ"):
        read_messages(turns, "row 1", "messages")
    turns[0]["from"] = "human"
    assert [m["role"] for m in read_messages(turns, "row 1", "messages")] == ["user", "assistant"]


def test_values_beside_the_function_of_a_call_or_tool_are_read(tmp_path: Path):
    """And ToolACE's name of a tool's schema."""
    calls = [{"id": "a", "function": {"name": "up"}, "arguments": '{"by": 2}'}]
    turns = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    schema = {"type": "object", "properties": {"by": {"type": "integer"}}}
    tools = [
        {
            "type": "function",
            "description": "Goes up.",
            "function": {"name": "up", "parameters": schema},
        },
        {"name": "down", "arguments": schema},
    ]
    parsed = make_conversation("row 1", read_messages(turns, "row 1", "messages"), tools)
    assert parsed.messages[1]["tool_calls"][0]["function"]["arguments"] == {"by": 2}
    functions = [tool["function"] for tool in parsed.tools or ()]
    assert [f["parameters"] for f in functions] == [schema, schema]
    assert functions[0]["description"] == "Goes up."
