"""How a chat template writes calls of tools: found by rendering one, and comparing it with an answer in words.

A call is a document between texts: an object with the function's name and its arguments (Hermes, Mistral, Llama,
Granite …), or the name, a text, and the arguments as an object (functionary, DeepSeek, Kimi, gpt-oss …) or one by one
(Qwen3-Coder, GLM …).
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from packtrain.errors import InputError
from packtrain.samples.messages import Conversation
from packtrain.samples.render import Renderer, common_end

NAME, LAST, WORDS = "probename", "probelast", "probewords"
KEYS, VALUES = ("probekey", "otherkey"), ("probevalue", "othervalue")
IDS = "call00001", "call00002"
ID, COUNT = "\0", "\1"  # in texts: the id of a call, and a number
WILD = {ID: r"[A-Za-z0-9_-]{1,40}", COUNT: r"[0-9]{1,3}"}
DECODER = json.JSONDecoder()
FAR = 100  # most characters between a name and its arguments
Call = dict[str, Any]
Read = tuple[str, Any, int]  # of a call: name, arguments, and where it ends


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
    quote                    stands around strings where the object's keys are bare, as in Gemma 4's calls
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
    quote: str = ""

    def beginnings(self, names: Collection[str]) -> tuple[str, ...]:
        """Texts with which a call begins, if an answer has them."""
        if self.opening.strip():
            return (re.split(f"[{ID}{COUNT}]", self.opening)[0].strip(),)
        if self.middle is None:
            return (f'{{"{self.name}":',)
        brace = "" if self.pair else "{"
        return tuple(f"{name}{self.middle}{brace}" for name in names)

    def parse(self, text: str, names: Collection[str]) -> tuple[str, list[tuple[str, Any]]]:
        """The words before the calls, and the calls (name, arguments), up to one that cannot be read."""
        begun = self._opening(names).search(text)
        found, at = list[tuple[str, Any]](), begun.end() if begun else -1
        between = re.compile(
            f"{_spaced(self.closing)}{_spaced(self.opening)}|{_spaced(self.again)}"
        )
        while at >= 0:
            calls, end = self._calls(text, at, names)
            found += calls if self._ends(text, end) else []
            more = between.match(text, end) if calls and self.again and not self.listed else None
            at = more.end() if more and more.end() > end else -1
        return (text[: begun.start()].rstrip(), found) if begun and found else (text, [])

    def _ends(self, text: str, at: int) -> bool:
        """Whether a call ends there: it may have been cut off."""
        rests = [rest for rest in (self.again, self.closing) if rest.strip()]
        ended = any(re.compile(_spaced(rest)).match(text, at) for rest in rests)
        return ended or not rests or (not text[at:].strip() and self.pair is None)

    def _opening(self, names: Collection[str]) -> re.Pattern[str]:
        if self.opening.strip():
            return re.compile(_spaced(self.opening).removeprefix(r"\s*"))
        if self.middle is None:
            return re.compile(rf'(?=\{{\s*"{re.escape(self.name)}"\s*:)')
        return re.compile(rf"(?m)^(?=(?:{_any(names)}){_spaced(self.middle)})")

    def _calls(
        self, text: str, at: int, names: Collection[str]
    ) -> tuple[list[tuple[str, Any]], int]:
        """The calls of a document, none if it cannot be read; and where it ends."""
        if self.middle is not None:
            read = self._named(text, at, names)
            return ([], at) if read is None else ([read[:2]], read[2])
        document, end = _document(text, at)
        calls = document if isinstance(document, list) else [document]
        if not all(isinstance(one, dict) and one.get(self.name) in names for one in calls):
            return [], at
        return [(one[self.name], one.get(self.arguments, {})) for one in calls], end

    def _named(self, text: str, at: int, names: Collection[str]) -> Read | None:
        """A call whose name stands before its arguments."""
        if self.pair is None:  # what stands between varies
            named = re.compile(rf"\s*({_any(names)})[^{{]{{0,{FAR}}}").match(text, at)
            if named is None:
                return None
            start, quote = named.end(), self.quote
            arguments, end = bare(text, start, quote) if quote else _document(text, start)
            return (named[1], arguments, end) if isinstance(arguments, dict) else None
        named = re.compile(rf"\s*({_any(names)}){_spaced(self.middle or '')}").match(text, at)
        if named is None:
            return None
        before, between, after = map(_spaced, self.pair)
        each, end, found = re.compile(f"{before}(.*?){between}(.*?){after}", re.S), named.end(), {}
        while (one := each.match(text, end)) is not None and one.end() > end:
            found[one[1].strip()], end = _value(one[2]), one.end()
        return named[1], found, end


HERMES = Style("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
MISTRAL = Style("[TOOL_CALLS]", "", "", listed=True)
LLAMA = Style("", "", "", arguments="parameters")  # nothing stands around it


def style_of(renderer: Renderer, template: str) -> Style:
    """The style that a chat template writes, or teaches if it writes none; Hermes's if it has no place for tools."""
    if not renderer.takes_tools:
        return HERMES
    found = _written(renderer) if renderer.takes_calls else None
    if found is not None:
        return found
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    plain = "<tool_call>" not in template and "tools" in template
    return LLAMA if plain and '"parameters"' in template else HERMES


def _written(renderer: Renderer) -> Style | None:
    """From what the template makes of a call, and of two; None if that is no form known here."""
    try:
        said = _reply(renderer, {"content": WORDS}).partition(WORDS)[0]
        one = _reply(renderer, {"content": "", "tool_calls": [_call(NAME, 0)]})
    except InputError:
        return None
    one = one.removeprefix(said)
    try:
        two = _reply(renderer, {"content": "", "tool_calls": [_call(NAME, 0), _call(LAST, 1)]})
    except InputError:
        two = ""
    return _in_object(one, two) or _behind_name(one, two)


def _reply(renderer: Renderer, message: dict[str, Any]) -> str:
    """The text of an answer, without the token that ends it."""
    asked = {"role": "user", "content": "a"}
    about = {"name": NAME, "description": "b", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": about}] if renderer.takes_tools else None
    given = Conversation("", [asked, {"role": "assistant", **message}], tools)
    made = renderer.render(given)[-1]
    text = renderer.without_end(made.text[slice(*made.spans[-1])])
    return re.sub("|".join(IDS), ID, text)


def _call(name: str, number: int) -> Call:
    arguments = dict(zip(KEYS, VALUES, strict=True))
    function = {"name": name, "arguments": arguments}
    return {"id": IDS[number], "type": "function", "function": function}


def _in_object(one: str, two: str) -> Style | None:
    """Name and arguments are in one object, or in one of a list."""
    for start in (found.start() for found in re.finditer(r"[{\[]", one)):
        document, end = _document(one, start)
        inner = document[0] if isinstance(document, list) and document else document
        if not isinstance(inner, dict) or NAME not in inner.values():
            continue
        keys = {_kind(value): key for key, value in inner.items()}
        if "arguments" not in keys:
            continue
        opening, closing, listed = one[:start], one[end:], isinstance(document, list)
        again = "" if listed else _again(two, opening, closing)
        return Style(opening, again, closing, keys["name"], keys["arguments"], listed, (*inner,))
    return None


def _kind(value: Any) -> str:
    if value == NAME:
        return "name"
    same = isinstance(value, dict) and tuple(value.items()) == tuple(zip(KEYS, VALUES, strict=True))
    return "arguments" if same else ""


def _again(two: str, opening: str, closing: str) -> str:
    """What stands between two calls."""
    first = two.find(VALUES[1])
    ends = [
        found.end() for found in re.finditer(r"\}+", two[: two.find(LAST)]) if found.start() > first
    ]
    begin = two.rfind("{", 0, two.find(LAST))
    if first < 0 or not ends or begin < first:
        return ""
    between = two[first + len(VALUES[1]) : begin]
    return between[re.match(r'[\s"}]*', between).end() :] if between.strip('"} \n') else ""  # type: ignore[union-attr]


def _behind_name(one: str, two: str) -> Style | None:
    """The arguments come after the name, as an object or one by one."""
    opening, _, rest = one.partition(NAME)
    if not rest or NAME in rest:
        return None
    for found in re.finditer(r"\{", rest):
        document, end = _document(rest, found.start())
        if _kind(document) == "arguments":
            middle, closing = re.sub(r"\d+", COUNT, rest[: found.start()]), rest[end:]
            return Style(opening, _behind(two, "}"), closing, middle=middle)
    if (own := _own_notation(rest)) is not None:
        again = two.partition(own[0])[2].partition(LAST)[0]
        middle, closing = rest[: own.start()], rest[own.end() :]
        return Style(opening, again, closing, middle=middle, quote=own["quote"])
    places = [rest.find(word) for pair in zip(KEYS, VALUES, strict=True) for word in pair]
    if -1 in places or places != sorted(places):
        return None
    ends = [at + len(w) for at, w in zip(places, _words(), strict=True)]
    head, between, apart, tail = (
        rest[: places[0]],
        rest[ends[0] : places[1]],
        rest[ends[1] : places[2]],
        rest[ends[3] :],
    )
    before = common_end(head, apart)
    after = apart[: len(apart) - len(before)]
    if not after.strip() or not before.strip() or not tail.startswith(after):
        return None
    pair, middle = (before, between, after), head[: len(head) - len(before)]
    return Style(opening, _behind(two, after), tail[len(after) :], middle=middle, pair=pair)


def _own_notation(rest: str) -> re.Match[str] | None:
    """The arguments as an object with bare keys, in either order."""
    pairs = [*zip(KEYS, VALUES, strict=True)]
    for (a, x), (b, y) in (pairs, pairs[::-1]):
        quote = r"(?P<quote>[^\w{}]+?)"
        form = rf"\{{{a}:{quote}{x}(?P=quote),{b}:(?P=quote){y}(?P=quote)\}}"
        if found := re.search(form, rest):
            return found
    return None


def bare(text: str, at: int, quote: str) -> tuple[Any, int]:
    """The object there, with bare keys and such quotes, and where it ends; None if there is none."""
    mark, depth, parts = re.escape(quote), 0, list[str]()
    part = re.compile(
        rf"\s*(?:{mark}(?P<text>.*?){mark}|(?P<sign>[{{}}\[\],:])|(?P<key>[^:{{}}\[\],]+?)\s*(?=:)|(?P<value>[\w.+-]+))",
        re.S,
    )
    while (found := part.match(text, at)) is not None:
        word, at = found[found.lastgroup or 0], found.end()
        is_words = found.lastgroup in ("text", "key")
        parts.append(json.dumps(word) if is_words else "null" if word == "None" else word)
        depth += (word in "{[") - (word in "}]") if found.lastgroup == "sign" else 0
        if depth <= 0:
            break
    return _document("".join(parts), 0)[0], at


def _words() -> Iterator[str]:
    for pair in zip(KEYS, VALUES, strict=True):
        yield from pair


def _behind(two: str, after: str) -> str:
    """What stands between the arguments of a call, which end so, and the name of the next."""
    _, found, rest = two.partition(VALUES[1])
    between, last, _ = rest.partition(LAST)
    at = between.find(after)
    return between[at + len(after) :] if found and last and at >= 0 else ""


def _spaced(text: str) -> str:
    """A pattern of the text with any white space between its words, and around it."""
    words = ("".join(WILD.get(c) or re.escape(c) for c in word) for word in text.split())
    return r"\s*".join(["", *words, ""]) if text.strip() else r"\s*"


def _any(names: Collection[str]) -> str:
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))


def _document(text: str, at: int) -> tuple[Any, int]:
    """The JSON document there, and where it ends; None if there is none."""
    try:
        return DECODER.raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip()))
    except (ValueError, RecursionError):
        return None, at


def _value(text: str) -> Any:
    """An argument that is written alone: JSON where it is that, but no string."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(found, str) else found
