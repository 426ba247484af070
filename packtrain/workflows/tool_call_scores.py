"""Tool calls in answers, compared with those of the data: functions by name, arguments as values."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from packtrain.data.chat_template import ChatTemplate
from packtrain.data.conversations.conversation_renderer import ConversationRenderer
from packtrain.data.conversations.messages import Conversation, Message
from packtrain.serving.call_arguments import read_value
from packtrain.serving.tool_call_styles import ToolCallStyle, detect_style
from packtrain.serving.tool_calls import with_tools_prompt

ToolCall = tuple[str, Any]  # name and arguments
TRAINED_STYLE = ToolCallStyle("", "", "")  # calls as training writes them for a template without


@dataclass(frozen=True, slots=True)
class ToolCallScore:
    """Comparison of an answer's calls with the data's.

    is_expected     the data calls functions here
    has_functions   the answer calls the functions that the data calls, and no other
    has_arguments   it does so with equal arguments
    """

    is_expected: bool
    has_functions: bool
    has_arguments: bool


def calls_of(message: Message) -> list[ToolCall]:
    """Return the calls (name, arguments) of a message of the data."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], function["arguments"]) for function in functions]


def answer_text(message: Message) -> str:
    """Return a message of the data as text, with its calls as JSON."""
    calls = (json.dumps(c["function"], ensure_ascii=False) for c in message.get("tool_calls", ()))
    return "\n".join(filter(None, (message["content"], *calls)))


def score_calls(calls: Sequence[ToolCall], expected_calls: Sequence[ToolCall]) -> ToolCallScore:
    """Return how calls compare with the expected ones, in any order; `5` equals `5.0`, the order of keys is free."""
    names, expected_names = (sorted(name for name, _ in x) for x in (calls, expected_calls))
    values, expected_values = (sorted(map(_value_text, x)) for x in (calls, expected_calls))
    return ToolCallScore(bool(expected_calls), names == expected_names, values == expected_values)


def _value_text(call: ToolCall) -> str:
    """Return a text of a call's name and arguments that is equal for equal values."""
    name, arguments = call
    arguments = read_value(arguments) if isinstance(arguments, str) else arguments
    values = json.loads(
        json.dumps([name, arguments]), parse_float=lambda x: int(float(x)) if float(x).is_integer() else float(x)
    )  # fmt: skip
    return json.dumps(values, sort_keys=True)


def call_shares(scores: Iterable[ToolCallScore]) -> Iterator[tuple[str, int, int]]:
    """Yield (what is right, in how many answers, out of how many) for the calls of answers."""
    scores = [*scores]
    expected = [score for score in scores if score.is_expected]
    if expected:
        yield "right function", sum(score.has_functions for score in expected), len(expected)
        yield "right arguments", sum(score.has_arguments for score in expected), len(expected)
    if num_without_calls := len(scores) - len(expected):
        num_correct = sum(score.has_functions for score in scores if not score.is_expected)
        yield "no call where none is due", num_correct, num_without_calls


class ToolCallReader:
    """Renders conversations with tools as `serve` does, and reads the calls of answers."""

    def __init__(self, template: ChatTemplate, template_source: str, eog_texts: list[str]) -> None:
        self._renderer = ConversationRenderer(template, eog_texts)
        self._style = detect_style(self._renderer, template_source)

    def prompt(self, conversation: Conversation) -> str:
        if not self._renderer.takes_tools:
            conversation = with_tools_prompt(conversation, self._style)
        return self._renderer.prompt(conversation)

    def calls(self, text: str, conversation: Conversation) -> list[ToolCall]:
        """Return the calls of an answer; [("", text)] if a call begins but none can be read."""
        names = [tool["function"]["name"] for tool in conversation.tools or ()]
        _, calls = self._style.parse(text, names)
        if not calls and not self._renderer.takes_calls:
            _, calls = TRAINED_STYLE.parse(text, names)
        if not calls and any(opening in text for opening in self._style.call_openings(names)):
            return [("", text)]
        return calls
