"""Renders a conversation with a chat template, and finds the assistant's parts of the text.

An assistant's turn begins where the prompt before it, rendered with a generation prompt, ends; it ends with the next
end marker. It knows no token ids; an error in the template is an InputError that names the record.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from packtrain.common.errors import InputError
from packtrain.data.conversations.messages import Conversation, Message

PROBE = "packtrainprobe"
CALL = {"id": "call00001", "type": "function", "function": {"name": PROBE, "arguments": {}}}
NONE = {"type": "object", "properties": {}, "required": []}
TOOL = {"type": "function", "function": {"name": PROBE, "description": "", "parameters": NONE}}
ASK, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SAID = {"role": "user", "content": PROBE}
RESULT = {"role": "tool", "content": PROBE, "tool_call_id": "call00001", "name": "a"}

THOUGHTS = "reasoning_content", "thinking"  # the fields that templates read
THINKING = {"enable_thinking": True}  # what templates ask for before they ask for thoughts
THINK, THOUGHT = "<think>", re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)

# notes with a count
SYSTEM = (
    "system messages put before the user's first words, because the template does not support them"
)
CALLS = "tool calls written as JSON, because the template does not support them"
RESULTS = "tool results written as user messages, because the template does not support them"
TOOLS = "lists of tools left out, because the template does not support them"
THOUGHTLESS = "thoughts left out, because the template does not support them"
UNSTABLE = "conversations rendered once per trained turn, because later turns change earlier ones"
CHANGED = "turns whose content or reasoning the template changes"
WEIGHTLESS = "turns of the assistant that the data keeps from being trained on"
ENDLESS = "turns without an end token, so that the model cannot learn to stop"


class Template(Protocol):
    def render(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text, and the spans (start, end) of it that are trained on."""

    text: str
    spans: list[tuple[int, int]]


class Renderer:
    """Renders conversations with one template.

    ends   the texts of tokens that end a reply
    notes  counts of what may surprise, by message
    """

    def __init__(self, template: Template, ends: list[str], last_only: bool = False) -> None:
        self.template, self.last_only = template, last_only
        self.notes: Counter[str] = Counter()
        self._end = re.compile(
            "|".join(map(re.escape, sorted(ends, key=len, reverse=True))) or "(?!)"
        )
        called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        self._without: list[Any] | None = None  # what the template takes for no tools
        if not self._shows([SAID]) and self._shows([SAID], []):
            self._without = []
        self.takes_system = self._shows([{"role": "system", "content": PROBE}, ASK])
        self.takes_calls = self._shows([ASK, called])
        self._as_text = not self.takes_calls and self._shows([ASK, _with_text(called)])
        if self._as_text:
            self.takes_calls, called = True, _with_text(called)
        self._by_id = not self.takes_calls and self._shows([ASK, _with_names([called])[0]])
        if self._by_id:
            self.takes_calls, called = True, _with_names([called])[0]
        self.takes_results = self._shows([ASK, called if self.takes_calls else REPLY, RESULT])
        self.takes_tools = self._shows([ASK], [TOOL])
        self._thoughts, self.marks = self._place_of_thoughts(called)
        self._own_marks = THINK not in (self.marks[0] or THINK)

    def _place_of_thoughts(self, called: Message) -> tuple[str, tuple[str, str]]:
        """The field that the template reads thoughts from, and what it writes before and behind them; "" if none.

        A template may have them only before calls.
        """
        (call,) = called["tool_calls"]
        named = {**called, "tool_calls": [{**call, "function": {**call["function"], "name": "a"}}]}
        for reply, name in product((REPLY, named), THOUGHTS):
            if not self._shows([ASK, {**reply, name: PROBE}]):
                continue
            prefix, _, suffix = self._text([ASK, {**reply, name: PROBE}], None).partition(PROBE)
            base_text = self._text([ASK, reply], None)
            head = base_text[: len(base_text) - len(common_end(suffix, base_text))]
            opened, close = prefix[len(head) :], suffix.removesuffix(base_text[len(head) :])
            begin = opened.lstrip()
            fits = prefix.startswith(head)
            return name, (begin, close + opened.removesuffix(begin)) if fits and begin else ("", "")
        return "", ("", "")

    def _shows(self, messages: list[Message], tools: list[Any] | None = None) -> bool:
        """Whether the template renders the probe message, without dropping it or raising."""
        try:
            return PROBE in self._text(messages, tools)
        except InputError:
            return False

    def _text(self, messages: list[Message], tools: list[Any] | None, **options: Any) -> str:
        return self.template.render(messages, self._without if tools is None else tools, **options)

    def render(self, conversation: Conversation) -> list[Rendered]:
        """One text with all turns of the assistant, or one text for each if later turns change earlier ones."""
        messages, tools = self._fitted(conversation)
        first = len(messages) - (conversation.answer or len(messages))
        weights = [m.get("weight") != 0 for m in conversation.messages]
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        turns = [i for i in answers if weights[i - len(messages)]]
        if len(turns) < len(answers):
            self.notes[WEIGHTLESS] += len(answers) - len(turns)
        thinks = bool(self._thoughts) and any(m.get(self._thoughts) for m in messages)
        options = {"more": THINKING} if thinks else {}
        per_turn = [
            self._turn(messages, i, tools, options) for i in turns[-1 if self.last_only else 0 :]
        ]
        full_text = per_turn[-1].text
        if all(
            full_text.startswith(rendered.text[: rendered.spans[0][1]]) for rendered in per_turn
        ):
            return [Rendered(full_text, [span for rendered in per_turn for span in rendered.spans])]
        self.notes[UNSTABLE] += 1
        return per_turn

    def without_end(self, reply: str) -> str:
        """A reply without the token that ends it."""
        marks = [*self._end.finditer(reply)]
        return reply[: marks[-1].start()] if marks and marks[-1].end() == len(reply) else reply

    def prompt(
        self,
        conversation: Conversation,
        variables: Mapping[str, Any] | None = None,
        begins: bool = True,
    ) -> str:
        """The text up to the answer that comes next; more: variables of the template, beside its own.

        begins  whether the text has the beginning of this answer
        """
        messages, tools = self._fitted(conversation)
        return self._text(messages, tools, add_generation_prompt=begins, more=variables)

    def _turn(
        self, messages: list[Message], i: int, tools: list[Any] | None, options: dict[str, Any]
    ) -> Rendered:
        """The conversation up to a turn of the assistant, with the span of this turn."""
        prompt = self._text(messages[:i], tools, add_generation_prompt=True, **options)
        text, begin = self._text(messages[: i + 1], tools, **options), len(prompt)
        words = messages[i]["content"].strip()
        if not text.startswith(prompt):
            shown = self._text([*messages[:i], {**REPLY, "content": PROBE}], tools, **options)
            question_text = messages[i - 1]["content"].strip()
            called = bool(messages[i].get("tool_calls"))
            text, begin = _joined(prompt, text, question_text, shown, called)
        text = self._with_thoughts(messages[i], text, begin)
        at = text.find(words, begin)
        if at < 0:
            self.notes[CHANGED] += 1
        search_start = begin if at < 0 else at + len(words)
        mark = self._end.search(text, search_start)
        if mark is None:
            text = self._ended(messages[: i + 1], tools, text, options)
            mark = self._end.search(text, search_start)
        if mark is None:
            self.notes[ENDLESS] += 1
        return Rendered(text, [(begin, mark.end() if mark else max(begin, len(text.rstrip())))])

    def _with_thoughts(self, message: Message, text: str, begin: int) -> str:
        """The text with the thoughts before the reply, where the template leaves them out, as Gemma 4's does."""
        thought, (opened, closed) = (message.get(self._thoughts) or "").strip(), self.marks
        reply = text[begin:]
        if not thought or thought in reply or not opened or opened.strip() in reply:
            return text
        return f"{text[:begin]}{opened}{thought}{closed}{reply}"

    def _ended(
        self, messages: list[Message], tools: list[Any] | None, text: str, options: dict[str, Any]
    ) -> str:
        """The text with what ends its last reply, where the template writes it with the next message, as GLM's does."""
        called = messages[-1].get("tool_calls") and self.takes_results
        try:
            longer = self._text([*messages, RESULT if called else SAID], tools, **options)
        except InputError:
            return text
        *_, last = text.rstrip().rpartition("\n")
        at = longer.rfind(last, 0, max(longer.rfind(PROBE), 0)) + len(last)
        mark = self._end.search(longer, at)
        if at < len(last) or mark is None or longer[at : mark.start()].strip():
            return text
        return text.rstrip() + longer[at : mark.end()]

    # ---- what templates do not support

    def _fitted(self, conversation: Conversation) -> tuple[list[Message], list[Any] | None]:
        """Messages and tools in a form that the template supports."""
        messages, tools = conversation.messages, conversation.tools
        if messages[0]["role"] == "system" and not self.takes_system:
            self.notes[SYSTEM] += 1
            system, first, *rest = messages
            messages = [{**first, "content": f"{system['content']}\n{first['content']}"}, *rest]
        if tools and not self.takes_tools:
            self.notes[TOOLS] += 1
            tools = None
        if self._by_id:
            messages = _with_names(messages)
        return [self._fitting(message) for message in messages], tools

    def _thinking(self, message: Message) -> Message:
        """Thoughts as the template reads them; those before the words, too, if it has marks of its own for them."""
        words, thoughts = message["content"], [message[n] for n in THOUGHTS if message.get(n)]
        thought_match = THOUGHT.match(words) if self._own_marks and not thoughts else None
        if thought_match:
            words, thoughts = words[thought_match.end() :], [thought_match[1].strip()]
        if thoughts and not self._thoughts:
            self.notes[THOUGHTLESS] += 1
        if not thoughts or not self._thoughts:
            return message
        return {**message, "content": words, self._thoughts: thoughts[0]}

    def _fitting(self, message: Message) -> Message:
        if message["role"] == "assistant":
            message = self._thinking(message)
        if message.get("tool_calls") and not self.takes_calls:
            self.notes[CALLS] += 1
            calls = (json.dumps(c["function"], ensure_ascii=False) for c in message["tool_calls"])
            words = "\n".join(filter(None, (message["content"], *calls)))
            return {"role": "assistant", "content": words}
        if message.get("tool_calls") and self._as_text:
            return _with_text(message)
        if message["role"] == "tool" and not self.takes_results:
            self.notes[RESULTS] += 1
            return {"role": "user", "content": message["content"]}
        return message


def common_end(a: str, b: str) -> str:
    """What both texts end with."""
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return a[len(a) - count :]


def _with_text(message: Message) -> Message:
    """The message with the arguments of its calls as JSON, for templates that add them to other text."""
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _with_names(messages: list[Message]) -> list[Message]:
    """Calls with ids that say their functions' names, for templates that write ids only, and results with the same."""
    ids, output, count = dict[str, str](), list[Message](), 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            name, call_id = call["function"]["name"], str(call.get("id", ""))
            names_function = re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", call_id)
            ids[call_id] = call_id if names_function else f"functions.{name}:{count}"
            calls.append({**call, "id": ids[call_id]})
            count += 1
        answers = ids.get(str(message.get("tool_call_id", "")))
        named = {"tool_calls": calls} if calls else {"tool_call_id": answers} if answers else {}
        output.append({**message, **named})
    return output


def _joined(
    prompt: str, text: str, question_text: str, shown: str, called: bool
) -> tuple[str, int]:
    """A prompt with its reply, and where the reply begins, if the template renders an answered prompt differently.

    The trained reply must follow the prompt as the model will see it, for example with the system message in the last
    question. If the prompt opens a reasoning block that is dropped from the answer, the answered text is used, and
    `shown`, the same with the probe as its reply, tells where replies begin. A call of a tool, which may have another
    beginning, begins where the text differs from the prompt.
    """
    at = prompt.rfind(question_text) if question_text else -1
    prompt_end = prompt[at:]
    if at >= 0 and prompt_end in text:
        return prompt + text[text.rindex(prompt_end) + len(prompt_end) :], len(prompt)
    begin = shown.rfind(PROBE)
    if (
        begin < 0 or text[:begin] != shown[:begin]
    ):  # a call, perhaps: it begins where the prompt goes on otherwise
        pairs = enumerate(zip(prompt, text, strict=False))
        begin = next((k for k, (a, b) in pairs if a != b), len(text))
        tag = text.rfind("<", 0, begin)
        if begin < len(text) and tag >= 0 and ">" not in text[tag:begin]:
            begin = tag  # of two tags that begin alike
        if not called or at < 0 or begin < at + len(question_text):
            raise InputError(
                "the chat template gives no text in which the reply can be told from the prompt"
            )
    return text, begin
