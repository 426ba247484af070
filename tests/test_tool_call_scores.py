"""Tool calls of answers beside those of the data: which functions, which arguments, and no call where none is due."""

import json
import re
from types import SimpleNamespace

import pytest

import packtrain as pt
from packtrain.cli.main import main
from packtrain.workflows.chat_session import ChatSession
from packtrain.workflows.tool_call_scores import ToolCallScore, score_calls
from tests.architectures import random_model

WEATHER = {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "weather", "arguments": {"city": "Oslo", "days": 5}}
RECORD = {
    "tools": [WEATHER],
    "messages": [
        {"role": "user", "content": "rain in Oslo"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]},
        {"role": "tool", "content": "no"},
        {"role": "assistant", "content": "it is dry"},
    ],
}


@pytest.mark.parametrize(
    "calls, is_equal",
    [
        ([("f", {"a": 5, "b": ["x"]})], (True, True)),
        ([("f", {"b": ["x"], "a": 5.0})], (True, True)),
        ([("f", '{"a": 5, "b": ["x"]}')], (True, True)),
        ([("f", {"a": "5", "b": ["x"]})], (True, False)),
        ([("f", {"a": True, "b": ["x"]})], (True, False)),
        ([("f", {"a": 5, "b": ["x"]}), ("f", {})], (False, False)),
        ([("g", {"a": 5, "b": ["x"]})], (False, False)),
        ([], (False, False)),
    ],
)
def test_arguments_are_compared_as_values(calls, is_equal) -> None:
    assert score_calls(calls, [("f", {"a": 5, "b": ["x"]})]) == ToolCallScore(True, *is_equal)


def test_no_call_is_right_where_the_data_has_none() -> None:
    assert score_calls([], []) == ToolCallScore(False, True, True)
    assert score_calls([("f", {})], []) == ToolCallScore(False, False, False)


def test_several_calls_are_compared_in_any_order() -> None:
    calls = [("f", {"a": 1}), ("g", {})]
    assert score_calls(calls[::-1], calls) == ToolCallScore(True, True, True)


def test_compare_scores_the_calls_of_each_model(tmp_path, monkeypatch, capsys) -> None:
    for name in ("base", "tuned"):
        random_model(tmp_path / f"{name}.gguf", "llama tied")
    (tmp_path / "test.jsonl").write_text(json.dumps(RECORD))
    answers = {
        "base.gguf": ["it is dry", "<tool_call>\nit is"],
        "tuned.gguf": ['<tool_call>\n{"name": "weather", "arguments": {"days": 5.0, "city": "Oslo"}}\n</tool_call>',
                       "it is dry"],
    }  # fmt: skip
    prompts = []

    def reply(session, prompt_text):
        prompts.append(prompt_text)
        text = answers[session._settings.model.name][prompt_text.count("Oslo") - 1]
        ids = session.tokenizer.encode(text, bos=False, eos=False)
        return SimpleNamespace(ids=ids, text=text)

    monkeypatch.setattr(ChatSession, "reply", reply)
    models = [str(tmp_path / "base.gguf"), str(tmp_path / "tuned.gguf")]
    flags = ["--data", str(tmp_path / "test.jsonl"), "-c", "512", "--chat-template", "chatml"]
    assert main(["compare", *models, *flags, "--json", str(tmp_path / "o.json")]) == 0
    head, base, tuned, *_ = capsys.readouterr().out.splitlines()
    columns = [re.split(r"  +", line)[2:6] for line in (head, base, tuned)]
    assert columns == [
        ["right", "right function", "right arguments", "no call where none is due"],
        ["0 of 2 (0%)", "0 of 1 (0%)", "0 of 1 (0%)", "0 of 1 (0%)"],
        ["2 of 2 (100%)", "1 of 1 (100%)", "1 of 1 (100%)", "1 of 1 (100%)"],
    ]
    assert '"weather"' in prompts[0] and "rain in Oslo" in prompts[0] and "dry" not in prompts[0]
    assert "no" in prompts[1].split("Oslo")[-1]
    _, of_tuned = json.loads((tmp_path / "o.json").read_text())["models"]
    assert of_tuned["share_right_arguments"] == 1 and of_tuned["calls"][0]["is_expected"]
    comparison = pt.compare(models, tmp_path / "test.jsonl", count=1, ctx=512)
    assert [subject.right for subject in comparison.subjects] == [[False], [True]]
