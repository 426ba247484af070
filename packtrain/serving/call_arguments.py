"""Arguments of calls in a text: JSON, Python, or objects with bare keys, and where they end."""

import ast
import json
import re
from typing import Any

DECODER = json.JSONDecoder()
LONGEST, CONSTANTS = 4096, ("True", "False", "None")  # most characters of a value in Python
Read = tuple[str, Any, int]  # of a call: name, arguments, and where it ends


def read_document(text: str, at: int) -> tuple[Any, int]:
    """The JSON document there, and where it ends; None if there is none."""
    try:
        return DECODER.raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip()))
    except (ValueError, RecursionError):
        return None, at


def read_value(text: str) -> Any:
    """An argument that is written alone: JSON or Python where it is that, but no string."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _literal(text) if text[:1] in ("{", "[") or text in CONSTANTS else text
    return text if isinstance(value, str) else value


def read_bare(text: str, at: int, quote: str) -> tuple[Any, int]:
    """The object there, with bare keys and such quotes, and where it ends; None if there is none."""
    mark, depth, parts = re.escape(quote), 0, list[str]()
    part = re.compile(
        rf"\s*(?:{mark}(?P<text>.*?){mark}|(?P<sign>[{{}}\[\],:])|(?P<key>[^:{{}}\[\],]+?)\s*(?=:)|(?P<value>[\w.+-]+))",
        re.S,
    )
    while (match := part.match(text, at)) is not None:
        word, at = match[match.lastgroup or 0], match.end()
        is_words = match.lastgroup in ("text", "key")
        parts.append(json.dumps(word) if is_words else "null" if word == "None" else word)
        depth += (word in "{[") - (word in "}]") if match.lastgroup == "sign" else 0
        if depth <= 0:
            break
    return read_document("".join(parts), 0)[0], at


def read_keywords(text: str, name: str, at: int) -> Read | None:
    """A call in Python, from its first argument on, and where its arguments end; None if it cannot be read.

    Strings end where a comma or the end follows: quotes within them are as they are.
    """
    arguments, key = dict[str, Any](), re.compile(r"\s*(\w+)\s*=\s*")
    while (named := key.match(text, at)) is not None:
        quote, at = text[named.end() : named.end() + 1], named.end()
        if quote in ("'", '"'):
            string_match = re.compile(rf"(.*?){quote}(?=\s*(?:,\s*\w+\s*=|\)))", re.S).match(
                text, at + 1
            )
            if string_match is None:
                return None
            arguments[named[1]], at = string_match[1], string_match.end()
        else:
            arguments[named[1]], at = _plain(text, at)
        at = re.compile(r"\s*,?").match(text, at).end()  # type: ignore[union-attr]
    end = re.compile(r"\s*(?=\))").match(text, at)
    return None if end is None else (name, arguments, end.end())


def _plain(text: str, at: int) -> tuple[Any, int]:
    """The value there, JSON or Python, and where it ends."""
    document, end = read_document(text, at)
    if end > at:
        return document, end
    for match in re.finditer(r"[,)]", text[at : at + LONGEST]):
        words = text[at : at + match.start()].strip()
        if (read := _literal(words)) != words:
            return read, at + match.start()
    return None, at


def _literal(text: str) -> Any:
    """A value of Python, or the text itself where it is none."""
    try:
        return ast.literal_eval(text) if len(text) <= LONGEST else text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
