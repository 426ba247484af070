"""How a chat template writes calls of tools: found by rendering one, and comparing it with an answer in words.

A call is a document between texts: an object with the function's name and its arguments (Hermes, Mistral, Llama,
Granite …), or the name, a text, and the arguments as an object (functionary, DeepSeek, Kimi, gpt-oss …) or one by one
(Qwen3-Coder, GLM …), or as keywords of Python (LFM2).
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.conversations.conversation_renderer import Renderer, common_end
from packtrain.data.conversations.messages import Conversation
from packtrain.serving.call_arguments import (
    Read,
    read_bare,
    read_document,
    read_keywords,
    read_value,
)

NAME, LAST, WORDS = "probename", "probelast", "probewords"
KEYS, VALUES = ("probekey", "otherkey"), ("probevalue", "othervalue")
IDS = "call00001", "call00002"
ID, COUNT = "\0", "\1"  # in texts: the id of a call, and a number
WILD = {ID: r"[A-Za-z0-9_-]{1,40}", COUNT: r"[0-9]{1,3}"}
FAR = 100  # most characters between a name and its arguments
Call = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Style:
    """How calls are written. White space between the parts does not count.

    opening, again, closing  texts before the first call, between two, and behind the last; without `again` an answer
                             has one call; ID and COUNT in them stand for what differs from call to call
    name, arguments          keys of the object
    listed                   a list of objects is one document
    keys                     all keys of the object, as they stand in it; others than these two have texts, and may be
                             missing
    middle                   stands between the name and the arguments, where the name is not in an object
    pair                     what stands before a key, between key and value, and behind the value, where arguments are
                             written one by one: strings as they are, others as JSON
    typed                    what stands between key and value where the value is no string, by its kind, if it differs
    quote                    stands around strings where the object's keys are bare, as in Gemma 4's calls
    python                   stands around strings where arguments are keywords, as in LFM2's calls
    head                     stands before words, as functionary's `all` in a line of its own
    """

    opening: str
    again: str
    closing: str
    name: str = "name"
    arguments: str = "arguments"
    listed: bool = False
    keys: tuple[str, ...] = ()
    middle: str | None = None
    pair: tuple[str, str, str] | None = None
    typed: tuple[tuple[str, str], ...] = ()
    quote: str = ""
    python: str = ""
    head: str = ""

    def between(self, kind: str) -> str:
        """What stands between key and value, for a value of this kind of JSON Schema."""
        assert self.pair is not None
        return dict(self.typed).get(kind if kind != "number" else "integer", self.pair[1])

    def example(self) -> str:
        """A call as it is written, for a model that has to be told."""
        if self.middle is None:
            call = f'{{"{self.name}": NAME, "{self.arguments}": {{…}}}}'
            call = f"[{call}]" if self.listed else call
        else:
            each = "KEY".join((self.pair[0], "VALUE".join(self.pair[1:]))) if self.pair else ""
            call = f"NAME{self.middle}{each or ('KEY=VALUE' if self.python else '{…}')}"
        return re.sub(f"[{ID}{COUNT}]", "1", f"{self.opening}{call}{self.closing}").strip()

    def beginnings(self, names: Collection[str]) -> tuple[str, ...]:
        """Texts with which a call begins, if an answer has them."""
        if self.opening.strip():
            return (re.split(f"[{ID}{COUNT}]", self.opening)[0].strip(),)
        if self.middle is None:
            return (f'{{"{self.name}":',)
        brace = "" if self.pair or self.python else "{"
        return tuple(f"{name}{self.middle}{brace}" for name in names)

    def parse(self, text: str, names: Collection[str]) -> tuple[str, list[tuple[str, Any]]]:
        """The words before the calls, and the calls (name, arguments), up to one that cannot be read."""
        text = text.removeprefix(self.head)
        opening_match = self._opening(names).search(text)
        if opening_match and self.middle is not None and not self.opening.strip():
            opening_match = self._earlier(text, opening_match.start(), names) or opening_match
        parsed_calls, at = list[tuple[str, Any]](), opening_match.end() if opening_match else -1
        gap = f"{_spaced(self.closing)}{_spaced(self.opening)}"
        separator = _spaced(self.again)  # which may be a new line
        between = re.compile(f"{separator}|{gap}" if self.again.strip() else f"{gap}|{separator}")
        while at >= 0:
            calls, end = self._calls(text, at, names)
            parsed_calls += calls if self._ends(text, end) else []
            next_match = (
                between.match(text, end) if calls and self.again and not self.listed else None
            )
            at = next_match.end() if next_match and next_match.end() > end else -1
        return (
            (text[: opening_match.start()].rstrip(), parsed_calls)
            if opening_match and parsed_calls
            else (text, [])
        )

    def _earlier(self, text: str, at: int, names: Collection[str]) -> re.Match[str] | None:
        """A call right behind words, which only the next one, there, tells from them."""
        named = re.compile(rf"(?=(?:{_any(names)}){_spaced(self.middle or '')})")
        for match in named.finditer(text, 0, at):
            calls, end = self._calls(text, match.start(), names)
            if calls and end == at:
                return match
        return None

    def _ends(self, text: str, at: int) -> bool:
        """Whether a call ends there: it may have been cut off."""
        rests = [rest for rest in (self.again, self.closing) if rest.strip()]
        has_ended = any(re.compile(_spaced(rest)).match(text, at) for rest in rests)
        if self.again.isspace():  # the next call stands on the next line
            has_ended = has_ended or text[at:].lstrip().startswith("{")
        return has_ended or not rests or (not text[at:].strip() and self.pair is None)

    def _opening(self, names: Collection[str]) -> re.Pattern[str]:
        if self.opening.strip():
            return re.compile(_spaced(self.opening).removeprefix(r"\s*"))
        if self.middle is None:
            return re.compile(rf'(?=\{{\s*"{re.escape(self.name)}"\s*:)')
        prefix = f"^|{re.escape(self.again.strip())}" if self.again.strip() else "^"  # of words
        return re.compile(rf"(?m)(?:{prefix})(?=(?:{_any(names)}){_spaced(self.middle)})")

    def _calls(
        self, text: str, at: int, names: Collection[str]
    ) -> tuple[list[tuple[str, Any]], int]:
        """The calls of a document, none if it cannot be read; and where it ends."""
        if self.middle is not None:
            read = self._named(text, at, names)
            return ([], at) if read is None else ([read[:2]], read[2])
        document, end = read_document(text, at)
        calls = document if isinstance(document, list) else [document]
        if not all(isinstance(call, dict) and call.get(self.name) in names for call in calls):
            return [], at
        return [(call[self.name], call.get(self.arguments, {})) for call in calls], end

    def _named(self, text: str, at: int, names: Collection[str]) -> Read | None:
        """A call whose name stands before its arguments."""
        if self.python:
            call_match = re.compile(rf"\s*({_any(names)}){_spaced(self.middle or '')}").match(
                text, at
            )
            return call_match and read_keywords(text, call_match[1], call_match.end())
        if self.pair is None:  # what stands between varies
            named = re.compile(rf"\s*({_any(names)})(?![\w-])[^{{]{{0,{FAR}}}").match(text, at)
            if named is None:
                return None
            start, quote = named.end(), self.quote
            arguments, end = read_bare(text, start, quote) if quote else read_document(text, start)
            return (named[1], arguments, end) if isinstance(arguments, dict) else None
        named = re.compile(rf"\s*({_any(names)}){_spaced(self.middle or '')}").match(text, at)
        if named is None:
            return None
        before, between, after = map(_spaced, self.pair)
        typed_separators = "|".join(_spaced(other) for _, other in self.typed) or "(?!)"
        each = re.compile(f"{before}(.*?)(?:({between})|{typed_separators})(.*?){after}", re.S)
        end, keyword_args = named.end(), {}
        while (pair_match := each.match(text, end)) is not None and pair_match.end() > end:
            value = (
                pair_match[3]
                if self.typed and pair_match[2] is not None
                else read_value(pair_match[3])
            )
            keyword_args[pair_match[1].strip()], end = value, pair_match.end()
        return named[1], keyword_args, end


HERMES = Style("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
MISTRAL = Style("[TOOL_CALLS]", "", "", listed=True)
LLAMA = Style("", "", "", arguments="parameters")  # nothing stands around it
GRANITE = Style("<|tool_call|>", "", "", listed=True)
LFM2 = Style("<|tool_call_start|>[", "), ", ")]<|tool_call_end|>", middle="(", python='"')
KIMI = Style(
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
    "<|tool_call_end|><|tool_call_begin|>functions.",
    "<|tool_call_end|><|tool_calls_section_end|>",
    middle=f":{COUNT}<|tool_call_argument_begin|>",
)  # some of whose templates write ids only, which have the names in them
TAUGHT = {
    "[TOOL_CALLS]": MISTRAL,
    "<|tool_call|>": GRANITE,
    "List of tools: ": LFM2,
    "<|tool_calls_section_begin|>": KIMI,
}
KINDS = {"integer": 7, "boolean": True, "array": ["a"], "object": {"a": "b"}, "null": None}


def style_of(renderer: Renderer, template: str) -> Style:
    """The style that a chat template writes, or teaches if it writes none; Hermes's if it does neither."""
    written_style = _written(renderer) if renderer.takes_calls else None
    if written_style is not None:
        return written_style
    if not renderer.takes_tools:
        return HERMES
    for mark, style in TAUGHT.items():
        if mark in template:
            return style
    lists_tools = "<tool_call>" not in template and "tools" in template
    return LLAMA if lists_tools and '"parameters"' in template else HERMES


def _written(renderer: Renderer) -> Style | None:
    """From what the template makes of a call, and of two; None if that is no form known here."""
    try:
        preamble = _reply(renderer, {"content": WORDS}).partition(WORDS)[0]
        one_call = _reply(renderer, {"content": "", "tool_calls": [_call(NAME, 0)]})
    except InputError:
        return None
    one_call = one_call.removeprefix(preamble)
    try:
        two_calls = _reply(
            renderer, {"content": "", "tool_calls": [_call(NAME, 0), _call(LAST, 1)]}
        )
    except InputError:
        two_calls = ""
    style = _in_object(one_call, two_calls) or _behind_name(one_call, two_calls)
    if style and re.fullmatch(r"\w+\n", preamble):
        style = replace(style, head=preamble)
    return replace(style, typed=_typed(renderer, style)) if style and style.pair else style


def _typed(renderer: Renderer, style: Style) -> tuple[tuple[str, str], ...]:
    """What stands between a key and values of other kinds than texts, where that differs."""
    assert style.pair is not None
    separators, (_, default_separator, after) = [], style.pair
    for kind, value in KINDS.items():
        call = _call(NAME, 0)
        call["function"]["arguments"] = {KEYS[0]: value}
        try:
            text = _reply(renderer, {"content": "", "tool_calls": [call]})
        except InputError:
            continue
        values = f"{json.dumps(value)}\0{json.dumps(value, separators=(',', ':'))}\0{value}".split(
            "\0"
        )
        form = rf"{KEYS[0]}(.*?)(?:{_any(values)}){_spaced(after)}"
        shown = re.search(form, text, re.S)
        separators += (
            [(kind, shown[1])] if shown and shown[1].strip() != default_separator.strip() else []
        )
    return tuple(separators)


def _reply(renderer: Renderer, message: dict[str, Any]) -> str:
    """The text of an answer, without the token that ends it."""
    user_message = {"role": "user", "content": "a"}
    about = {"name": NAME, "description": "b", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": about}] if renderer.takes_tools else None
    conversation = Conversation("", [user_message, {"role": "assistant", **message}], tools)
    sample = renderer.render(conversation)[-1]
    text = renderer.without_end(sample.text[slice(*sample.spans[-1])])
    return re.sub("|".join(IDS), ID, text)


def _call(name: str, number: int) -> Call:
    arguments = dict(zip(KEYS, VALUES, strict=True))
    function = {"name": name, "arguments": arguments}
    return {"id": IDS[number], "type": "function", "function": function}


def _in_object(one_call: str, two_calls: str) -> Style | None:
    """Name and arguments are in one object, or in one of a list."""
    for start in (match.start() for match in re.finditer(r"[{\[]", one_call)):
        document, end = read_document(one_call, start)
        inner = document[0] if isinstance(document, list) and document else document
        if not isinstance(inner, dict) or NAME not in inner.values():
            continue
        keys = {_kind(value): key for key, value in inner.items()}
        if "arguments" not in keys:
            continue
        opening, closing, listed = one_call[:start], one_call[end:], isinstance(document, list)
        separator = "" if listed else _again(two_calls, opening, closing)
        return Style(
            opening, separator, closing, keys["name"], keys["arguments"], listed, (*inner,)
        )
    return None


def _kind(value: Any) -> str:
    if value == NAME:
        return "name"
    is_arguments = isinstance(value, dict) and tuple(value.items()) == tuple(
        zip(KEYS, VALUES, strict=True)
    )
    return "arguments" if is_arguments else ""


def _again(two_calls: str, opening: str, closing: str) -> str:
    """What stands between two calls."""
    first = two_calls.find(VALUES[1])
    end_offsets = [
        match.end()
        for match in re.finditer(r"\}+", two_calls[: two_calls.find(LAST)])
        if match.start() > first
    ]
    begin = two_calls.rfind("{", 0, two_calls.find(LAST))
    if first < 0 or not end_offsets or begin < first:
        return ""
    between = two_calls[first + len(VALUES[1]) : begin]
    if not between.strip('"} \n'):
        return "\n" if "\n" in between else ""
    return between[re.match(r'[\s"}]*', between).end() :]  # type: ignore[union-attr]


def _behind_name(one_call: str, two_calls: str) -> Style | None:
    """The arguments come after the name, as an object or one by one."""
    opening, _, rest = one_call.partition(NAME)
    if not rest or NAME in rest:
        return None
    for match in re.finditer(r"\{", rest):
        document, end = read_document(rest, match.start())
        if _kind(document) == "arguments":
            middle, closing = re.sub(r"\d+", COUNT, rest[: match.start()]), rest[end:]
            return Style(opening, _behind(two_calls, "}"), closing, middle=middle)
    if (notation_match := _in_python(rest)) is not None:
        separator = two_calls.partition(notation_match[0])[2].partition(LAST)[0]
        closing = f"){rest[notation_match.end() :]}"
        return Style(opening, f"){separator}", closing, middle="(", python=notation_match["quote"])
    if (notation_match := _own_notation(rest)) is not None:
        separator = two_calls.partition(notation_match[0])[2].partition(LAST)[0]
        middle, closing = rest[: notation_match.start()], rest[notation_match.end() :]
        return Style(opening, separator, closing, middle=middle, quote=notation_match["quote"])
    places = [rest.find(word) for pair in zip(KEYS, VALUES, strict=True) for word in pair]
    if -1 in places or places != sorted(places):
        return None
    end_offsets = [at + len(w) for at, w in zip(places, _words(), strict=True)]
    head = rest[: places[0]]
    between = rest[end_offsets[0] : places[1]]
    gap = rest[end_offsets[1] : places[2]]
    tail = rest[end_offsets[3] :]
    before = common_end(head, gap)
    after = gap[: len(gap) - len(before)]
    if not after.strip() or not before.strip() or not tail.startswith(after):
        return None
    pair, middle = (before, between, after), head[: len(head) - len(before)]
    return Style(opening, _behind(two_calls, after), tail[len(after) :], middle=middle, pair=pair)


def _in_python(rest: str) -> re.Match[str] | None:
    """The arguments as keywords of a call in Python."""
    (a, x), (b, y) = zip(KEYS, VALUES, strict=True)
    quote = r"(?P<quote>['\"])"
    return re.match(rf"\({a}={quote}{x}(?P=quote), *{b}=(?P=quote){y}(?P=quote)\)", rest)


def _own_notation(rest: str) -> re.Match[str] | None:
    """The arguments as an object with bare keys, in either order."""
    pairs = [*zip(KEYS, VALUES, strict=True)]
    for (a, x), (b, y) in (pairs, pairs[::-1]):
        quote = r"(?P<quote>[^\w{}]+?)"
        form = rf"\{{{a}:{quote}{x}(?P=quote),{b}:(?P=quote){y}(?P=quote)\}}"
        if match := re.search(form, rest):
            return match
    return None


def _words() -> Iterator[str]:
    for pair in zip(KEYS, VALUES, strict=True):
        yield from pair


def _behind(two_calls: str, after: str) -> str:
    """What stands between the arguments of a call, which end so, and the name of the next."""
    _, value, rest = two_calls.partition(VALUES[1])
    between, last, _ = rest.partition(LAST)
    at = between.find(after)
    return between[at + len(after) :] if value and last and at >= 0 else ""


def _spaced(text: str) -> str:
    """A pattern of the text with any white space between its words, and around it."""
    words = ("".join(WILD.get(c) or re.escape(c) for c in word) for word in text.split())
    return r"\s*".join(["", *words, ""]) if text.strip() else r"\s*"


def _any(names: Collection[str]) -> str:
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
