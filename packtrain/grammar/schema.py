"""JSON schemas for llguidance, read as llama.cpp's json-schema-to-grammar reads them: no properties but those that are
named, unless the schema allows them, and as much white space."""

import json
from typing import Any

from packtrain.errors import InputError
from packtrain.grammar.lark import HEAD

WHITE = r"( |\n{1,2}[ \t]{0,20})?"


def of_schema(text: str) -> str:
    """The grammar of the documents that a schema describes. Raises InputError."""
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"JSON schema, {where}: {error.msg}") from None
    except RecursionError:
        raise InputError("JSON schema: it is nested too deep") from None
    except ValueError:
        raise InputError("JSON schema: a number has too many digits") from None
    if not isinstance(schema, dict):
        raise InputError("JSON schema: it must be an object, like {}")
    try:
        closed = _closed(schema) | {"x-guidance": {"whitespace_pattern": WHITE}}
    except RecursionError:
        raise InputError("JSON schema: it is nested too deep") from None
    return f"{HEAD}start: %json {json.dumps(closed)}\n"


def of_calls(schema: Any, opening: str, closing: str, several: bool) -> str:
    """The grammar of texts between which a JSON document stands, once or several times; as llguidance writes them."""
    closed = _closed(schema) | {"x-guidance": {"whitespace_pattern": WHITE}}
    call = " ".join(filter(None, (opening, "document", closing)))
    again = f" (/\\s*/ {call})*" if several else ""
    return f"{HEAD}start: {call}{again}\ndocument: %json {json.dumps(closed)}\n"


def _closed(schema: Any, merged: bool = False) -> Any:
    """Objects with properties take no others, where the schema does not say; parts of allOf are `merged`."""
    if isinstance(schema, list):
        return [_closed(part, merged) for part in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {"const", "enum", "default", "examples", "required"}
    found = {
        key: part if key in plain else _closed(part, key == "allOf") for key, part in schema.items()
    }
    for key in ("properties", "$defs", "definitions", "patternProperties"):  # names, not keywords
        if isinstance(named := schema.get(key), dict):
            found[key] = {name: _closed(part) for name, part in named.items()}
    if isinstance(schema.get("properties"), dict) and not merged:
        found.setdefault("additionalProperties", False)
    return found
