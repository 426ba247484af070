"""The style in which a chat template writes tool calls: found by rendering a call, and comparing it with plain words.

A call is a document between texts: an object with the function's name and its arguments (Hermes, Mistral, Llama,
Granite …), or the name, a text, and the arguments as an object (functionary, DeepSeek, Kimi, gpt-oss …) or one by one
(Qwen3-Coder, GLM …), or as keywords of Python (LFM2). A list of families would be out of date with the next model.
Among 69 templates of llama.cpp, those that write calls show their style, except LFM 2.5's and four others."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.conversations.conversation_renderer import ConversationRenderer, num_common
from packtrain.data.conversations.messages import Conversation
from packtrain.serving import call_arguments
from packtrain.serving.call_arguments import ParsedCall, read_bare, read_document, read_keywords

NAME, PROBE_LAST, PROBE_WORDS = "probename", "probelast", "probewords"
PROBE_ARGUMENTS = {"probekey": "probevalue", "otherkey": "othervalue"}
PROBE_KEYS, PROBE_VALUES = [*PROBE_ARGUMENTS], [*PROBE_ARGUMENTS.values()]
PROBE_IDS = "call00001", "call00002"
ID_MARK, COUNT = "\0", "\1"  # characters that stand for the id of a call, and for a number
WILD = {ID_MARK: r"[A-Za-z0-9_-]{1,40}", COUNT: r"[0-9]{1,3}"}
FAR = 100  # most characters between a name and its arguments
CallObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCallStyle:
    """A style of tool calls. White space between the parts does not count.

    opening, separator, closing  texts before the first call, between two, and behind the last; without `separator` an
                                 answer has one call; ID_MARK and COUNT in them stand for what differs between calls
    name, arguments              keys of the object
    is_list                      a list of objects is one document
    keys                         all keys of the object, in order; others than these two have texts, and may be missing
    middle                       text between the name and the arguments, where the name is not in an object
    pair                         texts before a key, between key and value, and behind the value, where arguments are
                                 written one by one: strings as they are, others as JSON
    typed_separators             text between key and a value that is no string, by its kind, if it differs
    quote                        text around strings where the object's keys are bare, as in Gemma 4's calls
    python                       text around strings where arguments are keywords, as in LFM2's calls
    words_prefix                 text before words, as functionary's `all` in a line of its own
    """

    opening: str
    separator: str
    closing: str
    name: str = "name"
    arguments: str = "arguments"
    is_list: bool = False
    keys: tuple[str, ...] = ()
    middle: str | None = None
    pair: tuple[str, str, str] | None = None
    typed_separators: tuple[tuple[str, str], ...] = ()
    quote: str = ""
    python: str = ""
    words_prefix: str = ""

    def value_separator(self, kind: str) -> str:
        """Return the text between an argument's key and its value, whose type in JSON Schema is `kind`."""
        assert self.pair is not None
        kind = kind if kind != "number" else "integer"
        return dict(self.typed_separators).get(kind, self.pair[1])

    def example(self) -> str:
        """Return an example of a call, for a model that has to be told the style."""
        if self.middle is None:
            call = f'{{"{self.name}": NAME, "{self.arguments}": {{…}}}}'
            call = f"[{call}]" if self.is_list else call
        else:
            pair_text = "KEY".join((self.pair[0], "VALUE".join(self.pair[1:]))) if self.pair else ""
            call = f"NAME{self.middle}{pair_text or ('KEY=VALUE' if self.python else '{…}')}"
        return re.sub(f"[{ID_MARK}{COUNT}]", "1", f"{self.opening}{call}{self.closing}").strip()

    def call_openings(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the texts with which a call can begin in an answer; names: of the functions."""
        if self.opening.strip():
            return (re.split(f"[{ID_MARK}{COUNT}]", self.opening)[0].strip(),)
        if self.middle is None:
            return (f'{{"{self.name}":',)
        brace = "" if self.pair or self.python else "{"
        return tuple(f"{name}{self.middle}{brace}" for name in names)

    def parse(self, text: str, names: Collection[str]) -> tuple[str, list[tuple[str, Any]]]:
        """Split an answer into words and the calls (name, arguments) behind them, up to the first unreadable one."""
        text = text.removeprefix(self.words_prefix)
        opening_match = self._opening_pattern(names).search(text)
        if opening_match and self.middle is not None and not self.opening.strip():
            opening_match = self._earlier_call(text, opening_match.start(), names) or opening_match
        parsed_calls, pos = list[tuple[str, Any]](), opening_match.end() if opening_match else -1
        call_gap = f"{_spaced(self.closing)}{_spaced(self.opening)}"
        separator = _spaced(self.separator)  # the separator may be a new line
        between = re.compile(
            f"{separator}|{call_gap}" if self.separator.strip() else f"{call_gap}|{separator}"
        )
        while pos >= 0:
            calls, end = self._read_calls(text, pos, names)
            parsed_calls += calls if self._has_ended(text, end) else []
            next_match = (
                between.match(text, end) if calls and self.separator and not self.is_list else None
            )
            pos = next_match.end() if next_match and next_match.end() > end else -1
        return (
            (text[: opening_match.start()].rstrip(), parsed_calls)
            if opening_match and parsed_calls
            else (text, [])
        )

    def _earlier_call(self, text: str, at: int, names: Collection[str]) -> re.Match[str] | None:
        """Find a call without opening text, after words of the answer, that ends at `at`, where another call begins."""
        name_pattern = re.compile(rf"(?=(?:{_any(names)}){_spaced(self.middle or '')})")
        for match in name_pattern.finditer(text, 0, at):
            earlier_calls, end_pos = self._read_calls(text, match.start(), names)
            if earlier_calls and end_pos == at:
                return match
        return None

    def _has_ended(self, text: str, end_pos: int) -> bool:
        """Return whether a call is complete at `end_pos`, and not cut off."""
        closing_texts = [rest for rest in (self.separator, self.closing) if rest.strip()]
        has_ended = any(re.compile(_spaced(rest)).match(text, end_pos) for rest in closing_texts)
        if self.separator.isspace():  # the next call stands on the next line
            has_ended = has_ended or text[end_pos:].lstrip().startswith("{")
        return has_ended or not closing_texts or (not text[end_pos:].strip() and self.pair is None)

    def _opening_pattern(self, names: Collection[str]) -> re.Pattern[str]:
        if self.opening.strip():
            return re.compile(_spaced(self.opening).removeprefix(r"\s*"))
        if self.middle is None:
            return re.compile(rf'(?=\{{\s*"{re.escape(self.name)}"\s*:)')
        line_prefix = f"^|{re.escape(self.separator.strip())}" if self.separator.strip() else "^"
        return re.compile(rf"(?m)(?:{line_prefix})(?=(?:{_any(names)}){_spaced(self.middle)})")

    def _read_calls(
        self, text: str, at: int, names: Collection[str]
    ) -> tuple[list[tuple[str, Any]], int]:
        """Parse the calls at offset `at`, [] if none can be read; returns [(name, arguments)] and where they end."""
        if self.middle is not None:
            named_call = self._read_named_call(text, at, names)
            return ([], at) if named_call is None else ([named_call[:2]], named_call[2])
        document, end_pos = read_document(text, at)
        calls = document if isinstance(document, list) else [document]
        if not all(isinstance(call, dict) and call.get(self.name) in names for call in calls):
            return [], at
        return [(call[self.name], call.get(self.arguments, {})) for call in calls], end_pos

    def _read_named_call(self, text: str, at: int, names: Collection[str]) -> ParsedCall | None:
        """Parse the call at `at` whose name stands before its arguments, with its end; None if there is none."""
        if self.python:
            call_match = re.compile(rf"\s*({_any(names)}){_spaced(self.middle or '')}").match(
                text, at
            )
            return call_match and read_keywords(text, call_match[1], call_match.end())
        if self.pair is None:  # the text between name and arguments varies
            name_match = re.compile(rf"\s*({_any(names)})(?![\w-])[^{{]{{0,{FAR}}}").match(text, at)
            if name_match is None:
                return None
            start, quote = name_match.end(), self.quote
            arguments, end = read_bare(text, start, quote) if quote else read_document(text, start)
            return (name_match[1], arguments, end) if isinstance(arguments, dict) else None
        name_match = re.compile(rf"\s*({_any(names)}){_spaced(self.middle or '')}").match(text, at)
        if name_match is None:
            return None
        before_key, between, after = map(_spaced, self.pair)
        typed_separators = "|".join(_spaced(other) for _, other in self.typed_separators) or "(?!)"
        each = re.compile(f"{before_key}(.*?)(?:({between})|{typed_separators})(.*?){after}", re.S)
        end, keyword_args = name_match.end(), {}
        while (pair_match := each.match(text, end)) is not None and pair_match.end() > end:
            value = (
                pair_match[3]
                if self.typed_separators and pair_match[2] is not None
                else call_arguments.read_value(pair_match[3])
            )
            keyword_args[pair_match[1].strip()], end = value, pair_match.end()
        return name_match[1], keyword_args, end


HERMES = ToolCallStyle("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
MISTRAL = ToolCallStyle("[TOOL_CALLS]", "", "", is_list=True)
LLAMA = ToolCallStyle("", "", "", arguments="parameters")  # no text around the object
GRANITE = ToolCallStyle("<|tool_call|>", "", "", is_list=True)
LFM2 = ToolCallStyle("<|tool_call_start|>[", "), ", ")]<|tool_call_end|>", middle="(", python='"')
KIMI = ToolCallStyle(  # some templates write only ids, which contain names
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.", "<|tool_call_end|><|tool_call_begin|>functions.",
    "<|tool_call_end|><|tool_calls_section_end|>", middle=f":{COUNT}<|tool_call_argument_begin|>",
)  # fmt: skip
TAUGHT_STYLES = {
    "[TOOL_CALLS]": MISTRAL, "<|tool_call|>": GRANITE, "List of tools: ": LFM2, "<|tool_calls_section_begin|>": KIMI,
}  # fmt: skip
EXAMPLE_VALUES = {"integer": 7, "boolean": True, "array": ["a"], "object": {"a": "b"}, "null": None}


def detect_style(renderer: ConversationRenderer, template: str) -> ToolCallStyle:
    """Return the style of tool calls that a chat template writes, or teaches if it writes none; else Hermes's."""
    written_style = _rendered_style(renderer) if renderer.takes_calls else None
    if written_style is not None:
        return written_style
    if not renderer.takes_tools:
        return HERMES
    for style_mark, style in TAUGHT_STYLES.items():
        if style_mark in template:
            return style
    lists_tools = "<tool_call>" not in template and "tools" in template
    return LLAMA if lists_tools and '"parameters"' in template else HERMES


def _rendered_style(renderer: ConversationRenderer) -> ToolCallStyle | None:
    """Derive a template's style of tool calls from replies rendered with one call and with two; None if unknown."""
    try:
        words_prefix = _render_reply(renderer, {"content": PROBE_WORDS}).partition(PROBE_WORDS)[0]
        one_call = _render_reply(renderer, {"content": "", "tool_calls": [_call(NAME, 0)]})
    except InputError:
        return None
    one_call = one_call.removeprefix(words_prefix)
    try:
        two_calls = _render_reply(
            renderer, {"content": "", "tool_calls": [_call(NAME, 0), _call(PROBE_LAST, 1)]}
        )
    except InputError:
        two_calls = ""
    style = _object_style(one_call, two_calls) or _name_first_style(one_call, two_calls)
    if style and re.fullmatch(r"\w+\n", words_prefix):
        style = replace(style, words_prefix=words_prefix)
    if style and style.pair:
        return replace(style, typed_separators=_typed(renderer, style))
    return style


def _typed(renderer: ConversationRenderer, style: ToolCallStyle) -> tuple[tuple[str, str], ...]:
    """Return the text between an argument's key and value for kinds of values where it differs from that of strings."""
    assert style.pair is not None
    separators, (_, default_separator, after_value) = [], style.pair
    for kind, value in EXAMPLE_VALUES.items():
        probe_call = _call(NAME, 0)
        probe_call["function"]["arguments"] = {PROBE_KEYS[0]: value}
        try:
            reply_text = _render_reply(renderer, {"content": "", "tool_calls": [probe_call]})
        except InputError:
            continue
        values = f"{json.dumps(value)}\0{json.dumps(value, separators=(',', ':'))}\0{value}".split(
            "\0"
        )
        pair_pattern = rf"{PROBE_KEYS[0]}(.*?)(?:{_any(values)}){_spaced(after_value)}"
        shown = re.search(pair_pattern, reply_text, re.S)
        separators += (
            [(kind, shown[1])] if shown and shown[1].strip() != default_separator.strip() else []
        )
    return tuple(separators)


def _render_reply(renderer: ConversationRenderer, message: dict[str, Any]) -> str:
    """Render an assistant's message by the template, and return its text without the token that ends it."""
    user_message = {"role": "user", "content": "a"}
    about = {"name": NAME, "description": "b", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": about}] if renderer.takes_tools else None
    conversation = Conversation("", [user_message, {"role": "assistant", **message}], tools)
    sample = renderer.render(conversation)[-1]
    text = renderer.strip_end(sample.text[slice(*sample.spans[-1])])
    return re.sub("|".join(PROBE_IDS), ID_MARK, text)


def _call(name: str, call_index: int) -> CallObject:
    function = {"name": name, "arguments": PROBE_ARGUMENTS}
    return {"id": PROBE_IDS[call_index], "type": "function", "function": function}


def _object_style(one_call: str, two_calls: str) -> ToolCallStyle | None:
    """Derive a style of calls that are objects with name and arguments, or lists of them, from replies; None if not."""
    for start in (match.start() for match in re.finditer(r"[{\[]", one_call)):
        document, end = read_document(one_call, start)
        call_object = document[0] if isinstance(document, list) and document else document
        if not isinstance(call_object, dict) or NAME not in call_object.values():
            continue
        keys = {_value_kind(value): key for key, value in call_object.items()}
        if "arguments" not in keys:
            continue
        opening, closing, is_list = one_call[:start], one_call[end:], isinstance(document, list)
        separator = "" if is_list else _call_separator(two_calls, opening, closing)
        return ToolCallStyle(
            opening, separator, closing, keys["name"], keys["arguments"], is_list, (*call_object,)
        )
    return None


def _value_kind(value: Any) -> str:
    """Return "name" or "arguments" if a value in a parsed call is the probe's name or PROBE_ARGUMENTS, else ""."""
    if value == NAME:
        return "name"
    return "arguments" if value == PROBE_ARGUMENTS and [*value] == PROBE_KEYS else ""


def _call_separator(two_calls: str, opening: str, closing: str) -> str:
    """Return the text between two calls that are objects, in the reply `two_calls`; "" if there is none."""
    value_start = two_calls.find(PROBE_VALUES[1])
    end_offsets = [
        match.end()
        for match in re.finditer(r"\}+", two_calls[: two_calls.find(PROBE_LAST)])
        if match.start() > value_start
    ]
    object_start = two_calls.rfind("{", 0, two_calls.find(PROBE_LAST))
    if value_start < 0 or not end_offsets or object_start < value_start:
        return ""
    separator_text = two_calls[value_start + len(PROBE_VALUES[1]) : object_start]
    if not separator_text.strip('"} \n'):
        return "\n" if "\n" in separator_text else ""
    return separator_text[re.match(r'[\s"}]*', separator_text).end() :]  # type: ignore[union-attr]


def _name_first_style(one_call: str, two_calls: str) -> ToolCallStyle | None:
    """Derive a style of calls with arguments behind the name, as an object or one by one, from replies; None if not."""
    opening, _, rest = one_call.partition(NAME)
    if not rest or NAME in rest:
        return None
    for match in re.finditer(r"\{", rest):
        document, object_end = read_document(rest, match.start())
        if _value_kind(document) == "arguments":
            name_suffix, closing = re.sub(r"\d+", COUNT, rest[: match.start()]), rest[object_end:]
            separator = _text_after_arguments(two_calls, "}")
            return ToolCallStyle(opening, separator, closing, middle=name_suffix)
    if (notation_match := _match_python_call(rest)) is not None:
        separator = two_calls.partition(notation_match[0])[2].partition(PROBE_LAST)[0]
        closing = f"){rest[notation_match.end() :]}"
        separator, quote = f"){separator}", notation_match["quote"]
        return ToolCallStyle(opening, separator, closing, middle="(", python=quote)
    if (notation_match := _find_bare_object(rest)) is not None:
        separator = two_calls.partition(notation_match[0])[2].partition(PROBE_LAST)[0]
        name_suffix, closing = rest[: notation_match.start()], rest[notation_match.end() :]
        quote = notation_match["quote"]
        return ToolCallStyle(opening, separator, closing, middle=name_suffix, quote=quote)
    probe_words = [word for pair in PROBE_ARGUMENTS.items() for word in pair]
    places = [rest.find(word) for word in probe_words]
    if -1 in places or places != sorted(places):
        return None
    end_offsets = [at + len(w) for at, w in zip(places, probe_words, strict=True)]
    head = rest[: places[0]]
    between = rest[end_offsets[0] : places[1]]
    pair_gap = rest[end_offsets[1] : places[2]]
    tail = rest[end_offsets[3] :]
    before_key = head[len(head) - num_common(head[::-1], pair_gap[::-1]) :]
    after_value = pair_gap[: len(pair_gap) - len(before_key)]
    if not after_value.strip() or not before_key.strip() or not tail.startswith(after_value):
        return None
    pair, name_suffix = (before_key, between, after_value), head[: len(head) - len(before_key)]
    separator = _text_after_arguments(two_calls, after_value)
    closing = tail[len(after_value) :]
    return ToolCallStyle(opening, separator, closing, middle=name_suffix, pair=pair)


def _match_python_call(rest: str) -> re.Match[str] | None:
    """Match the probe's arguments (PROBE_ARGUMENTS, which a template rendered) as keywords of Python at the start of
    `rest`, the text behind a call's name; group `quote`: the quotation mark of strings."""
    (first_key, x), (b, y) = PROBE_ARGUMENTS.items()
    quote = r"(?P<quote>['\"])"
    return re.match(rf"\({first_key}={quote}{x}(?P=quote), *{b}=(?P=quote){y}(?P=quote)\)", rest)


def _find_bare_object(rest: str) -> re.Match[str] | None:
    """Find the probe's arguments (PROBE_ARGUMENTS, which a template rendered) as an object with unquoted keys, in any
    order, in `rest`, the text behind a call's name; group `quote`: what stands before and after strings."""
    probe_pairs = [*PROBE_ARGUMENTS.items()]
    for (first_key, x), (b, y) in (probe_pairs, probe_pairs[::-1]):
        quote_pattern = r"(?P<quote>[^\w{}]+?)"
        form = rf"\{{{first_key}:{quote_pattern}{x}(?P=quote),{b}:(?P=quote){y}(?P=quote)\}}"
        if match := re.search(form, rest):
            return match
    return None


def _text_after_arguments(two_calls: str, arguments_end: str) -> str:
    """Return the text, in a reply with two calls, between the first one's arguments, which end with `arguments_end`,
    and the second name; "" if not found."""
    _, last_value, text_after_value = two_calls.partition(PROBE_VALUES[1])
    call_gap, probe_last, _ = text_after_value.partition(PROBE_LAST)
    at = call_gap.find(arguments_end)
    return call_gap[at + len(arguments_end) :] if last_value and probe_last and at >= 0 else ""


def _spaced(text: str) -> str:
    """Return a regular expression of a text with any white space between its words, and around them."""
    word_patterns = ("".join(WILD.get(c) or re.escape(c) for c in word) for word in text.split())
    return r"\s*".join(["", *word_patterns, ""]) if text.strip() else r"\s*"


def _any(names: Collection[str]) -> str:
    """Return a regular expression of any of the names, the longest first."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
