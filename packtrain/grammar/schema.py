"""JSON schemas for llguidance, read as llama.cpp's json-schema-to-grammar reads them: no properties but those that are
named, unless the schema allows them, and as much white space."""

import json
from typing import Any

from packtrain.errors import InputError
from packtrain.grammar.lark import HEAD

PLAIN = {"const", "enum", "default", "examples", "required"}  # keywords whose values are no schemas
WHITE = r"( |\n{1,2}[ \t]{0,20})?"
NAMED = "properties", "$defs", "definitions", "patternProperties"  # of names, not keywords


def of_schema(text: str) -> str:
    """The grammar of the documents that a schema describes. Raises InputError."""
    return f"{HEAD}start: %json {spaced(of_text(text))}\n"


def of_text(text: str) -> Any:
    """The schema in a text. Raises InputError."""
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
    return schema


def spaced(schema: Any) -> str:
    """A schema as llguidance takes it, with as much space in documents as llama.cpp lets come."""
    try:
        return json.dumps(_closed(schema) | {"x-guidance": {"whitespace_pattern": WHITE}})
    except RecursionError:
        raise InputError("JSON schema: it is nested too deep") from None


def moved(schema: Any, to: str) -> Any:
    """A schema that is to be part of another, at this pointer, where its references find it. Raises InputError."""
    try:
        return _moved(schema, to)
    except RecursionError:
        raise InputError("JSON schema: it is nested too deep") from None


def _moved(schema: Any, to: str) -> Any:
    if isinstance(schema, list):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: part if key in PLAIN else _moved(part, to) for key, part in schema.items()}
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
        found["$ref"] = to + ref[1:]
    return found


def _closed(schema: Any, merged: bool = False) -> Any:
    """Objects with properties take no others, where the schema does not say; parts of allOf are `merged`."""
    if isinstance(schema, list):
        return [_closed(part, merged) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict[str, Any]()
    for key, part in schema.items():
        if key in NAMED and isinstance(part, dict):
            found[key] = {name: _closed(one) for name, one in part.items()}
        else:
            found[key] = part if key in PLAIN else _closed(part, key == "allOf")
    if isinstance(schema.get("properties"), dict) and not merged:
        found.setdefault("additionalProperties", False)
    return found
