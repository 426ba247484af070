"""Parsing arguments of tool calls in a text: JSON, Python, or objects with bare keys, and where they end."""

import ast
import json
import re
from typing import Any

JSON_DECODER = json.JSONDecoder()
LONGEST, PYTHON_CONSTANTS = 4096, ("True", "False", "None")  # most characters of a value in Python
ParsedCall = tuple[str, Any, int]  # name, arguments, and where the call ends


def read_document(text: str, at: int) -> tuple[Any, int]:
    """Parse the JSON document at offset `at`; returns the document and the offset behind it, or None and `at`."""
    try:
        return JSON_DECODER.raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip()))
    except (ValueError, RecursionError):
        return None, at


def read_value(text: str) -> Any:
    """Parse the text of one argument as JSON or a Python literal; a string stays as it is written, with its quotes."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _parse_literal(text) if text[:1] in ("{", "[") or text in PYTHON_CONSTANTS else text
    return text if isinstance(value, str) else value


def read_bare(text: str, pos: int, quote: str) -> tuple[Any, int]:
    """Parse the object with bare keys at offset `pos`; `quote` surrounds strings. Returns (object or None, its end)."""
    quote_pattern, depth, json_parts = re.escape(quote), 0, list[str]()
    token_pattern = re.compile(
        rf"\s*(?:{quote_pattern}(?P<text>.*?){quote_pattern}|(?P<sign>[{{}}\[\],:])|(?P<key>[^:{{}}\[\],]+?)\s*(?=:)|(?P<value>[\w.+-]+))",
        re.S,
    )
    while (match := token_pattern.match(text, pos)) is not None:
        word, pos = match[match.lastgroup or 0], match.end()
        is_string = match.lastgroup in ("text", "key")
        json_parts.append(json.dumps(word) if is_string else "null" if word == "None" else word)
        depth += (word in "{[") - (word in "}]") if match.lastgroup == "sign" else 0
        if depth <= 0:
            break
    return read_document("".join(json_parts), 0)[0], pos


def read_keywords(text: str, function_name: str, pos: int) -> ParsedCall | None:
    """Parse keyword arguments of Python from offset `pos` to before a `)`; return (function_name, arguments, end), or
    None if they cannot be read. A quotation mark ends a string only before `)`, or before a comma and a keyword."""
    arguments, key_pattern = dict[str, Any](), re.compile(r"\s*(\w+)\s*=\s*")
    while (key_match := key_pattern.match(text, pos)) is not None:
        quote, pos = text[key_match.end() : key_match.end() + 1], key_match.end()
        if quote in ("'", '"'):
            string_match = re.compile(rf"(.*?){quote}(?=\s*(?:,\s*\w+\s*=|\)))", re.S).match(
                text, pos + 1
            )
            if string_match is None:
                return None
            arguments[key_match[1]], pos = string_match[1], string_match.end()
        else:
            arguments[key_match[1]], pos = _read_python_value(text, pos)
        pos = re.compile(r"\s*,?").match(text, pos).end()  # type: ignore[union-attr]
    end_match = re.compile(r"\s*(?=\))").match(text, pos)
    return None if end_match is None else (function_name, arguments, end_match.end())


def _read_python_value(text: str, at: int) -> tuple[Any, int]:
    """Parse the value at offset `at`, JSON or Python; returns the value and its end, or None and `at`."""
    document, end_pos = read_document(text, at)
    if end_pos > at:
        return document, end_pos
    for match in re.finditer(r"[,)]", text[at : at + LONGEST]):
        literal_text = text[at : at + match.start()].strip()
        if (literal_value := _parse_literal(literal_text)) != literal_text:
            return literal_value, at + match.start()
    return None, at


def _parse_literal(text: str) -> Any:
    """Parse a Python literal; returns the text itself if it is none."""
    try:
        return ast.literal_eval(text) if len(text) <= LONGEST else text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
