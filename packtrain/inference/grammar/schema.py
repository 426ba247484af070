"""JSON schemas for llguidance, read as llama.cpp's json-schema-to-grammar reads them: no properties but those that are
named, unless the schema allows them, and as much white space."""

import json
import re
from collections.abc import Iterator
from itertools import chain, permutations
from typing import Any
from urllib.parse import unquote

from packtrain.common.errors import InputError
from packtrain.inference.grammar.lark import HEAD

PLAIN = {"const", "enum", "default", "examples", "required"}  # keywords whose values are no schemas
WHITE = r"( |\n{1,2}[ \t]{0,20})?"
NAMED = "properties", "$defs", "definitions", "patternProperties"  # of names, not keywords
MERGED = {"allOf", "anyOf", "oneOf", "$ref"}
OBJECTS = {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"}
ANNOTATIONS = {"$defs", "definitions", "title", "description", "default", "examples"}
FORMATS = {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}  # fmt: skip
IDLE = [("uniqueItems", False), ("unevaluatedProperties", False), ("unevaluatedProperties", True)]
UNHELD = {
    "not", "uniqueItems", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "propertyNames", "contains", "minContains", "maxContains", "unevaluatedItems",
}  # fmt: skip
AROUND = re.compile(r"\(\?<?[=!]|\\[bBk1-9]")  # in patterns: what no automaton reads


def of_schema(text: str) -> str:
    """The grammar of the documents that a schema describes. Raises InputError."""
    schema, unsupported = of_text(text), list[str]()
    loosened(schema, unsupported)
    if unsupported:
        raise InputError(
            f"JSON schema: {unsupported[0]} is not supported: no grammar can hold to it"
        )
    return f"{HEAD}start: %json {spaced(schema)}\n"


def of_text(text: str) -> Any:
    """The schema in a text. Raises InputError."""
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        location = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"JSON schema, {location}: {error.msg}") from None
    except RecursionError:
        raise InputError("JSON schema: it is nested too deep") from None
    except ValueError:
        raise InputError("JSON schema: a number has too many digits") from None
    if not isinstance(schema, dict):
        raise InputError("JSON schema: it must be an object, like {}")
    return schema


def spaced(schema: Any) -> str:
    """A schema as llguidance takes it, with as much space in documents as llama.cpp lets come."""
    closer = _Closer(schema)
    try:
        closed_schema = closer.closed(schema) | {"x-guidance": {"whitespace_pattern": WHITE}}
        return json.dumps(closed_schema | {"$defs": closer.parts})
    except RecursionError:
        raise InputError("JSON schema: it is nested too deep") from None
    except (AttributeError, TypeError) as error:
        raise InputError(f"JSON schema: a keyword has a value of another type: {error}") from None


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
    moved_schema = {key: part if key in PLAIN else _moved(part, to) for key, part in schema.items()}
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
        moved_schema["$ref"] = to + ref[1:]
    return moved_schema


def loosened(schema: Any, unsupported: list[str], at: str = "") -> Any:
    """The schema without what no grammar can hold answers to; `unsupported` gets each such keyword and its property."""
    if isinstance(schema, list):
        return [loosened(part, unsupported, at) for part in schema]
    if not isinstance(schema, dict):
        return schema
    loose_schema = dict[str, Any]()
    for key, part in schema.items():
        if key in NAMED and isinstance(part, dict):
            parts = {k: {} if x is True else x for k, x in part.items()}
            loose_schema[key] = {
                k: loosened(x, unsupported, f"{at}.{k}".strip(".")) for k, x in parts.items()
            }
        elif key in UNHELD or (key == "pattern" and AROUND.search(str(part))):
            unsupported += [f"{at}: {key}" if at else key] if part is not False else []
        else:
            loose_schema[key] = part if key in PLAIN else loosened(part, unsupported, at)
    return loose_schema


class _Closer:
    """Objects with properties take no others, where the schema does not say: what allOf and the like merge, once."""

    def __init__(self, root: Any) -> None:
        self._root, self._names, self.parts = root, dict[tuple[int, bool], str](), dict[str, Any]()

    def closed(self, schema: Any, merged: bool = False) -> Any:
        """merged: it is a part of another, which is closed."""
        if not isinstance(schema, dict):
            return schema
        keys, closed_schema = schema.keys() & MERGED, dict[str, Any]()
        single = len(keys) == 1 and ("allOf" not in keys or len(schema["allOf"]) == 1)
        is_separate = single and not schema.keys() & OBJECTS and not merged
        if "oneOf" in keys and is_separate:
            self._check_distinct(schema["oneOf"])
        for key, part in schema.items():
            if key in ANNOTATIONS or (key, part) in IDLE:
                continue
            if key in NAMED and isinstance(part, dict):
                closed_schema[key] = {
                    name: self.closed(subschema) for name, subschema in part.items()
                }
            elif key == "$ref":
                closed_schema[key] = self._named(part, not is_separate)
            elif key in MERGED and isinstance(part, list):
                closed_schema[key] = [self.closed(subschema, not is_separate) for subschema in part]
            elif key in PLAIN or key == "format":
                closed_schema |= {} if key == "format" and part not in FORMATS else {key: part}
            else:
                is_list = isinstance(part, list)
                closed_schema[key] = (
                    [self.closed(subschema) for subschema in part] if is_list else self.closed(part)
                )
        is_part = merged and schema.get("unevaluatedProperties") is not False
        end = {} if is_separate or is_part else self._end([*self._all(schema, set())])
        if not end or keys:
            return {"allOf": [closed_schema, end]} if end else closed_schema
        return (
            end
            | closed_schema
            | {"properties": end["properties"] | closed_schema.get("properties", {})}
        )

    def _end(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """What closes an object with all properties of its parts; nothing where one of them says what else may come."""
        named = any("properties" in p or p.get("unevaluatedProperties") is False for p in parts)
        if not named or any(
            "additionalProperties" in p or p.get("unevaluatedProperties") for p in parts
        ):
            return {}
        explicit = any(p.get("unevaluatedProperties") is False for p in parts)
        for p in parts if explicit else ():
            branches = ({n for q in self._all(x, set()) for n in q.get("properties", ())}
                        for x in chain(p.get("anyOf", ()), p.get("oneOf", ())))  # fmt: skip
            if len({*map(frozenset, branches)}) > 1:
                fact = "JSON schema: unevaluatedProperties: beside parts of anyOf or oneOf with other properties"
                raise InputError(fact, "write additionalProperties: false in each part")
        needed = (name for p in parts if not explicit for name in p.get("required", ()))
        names = [*(name for p in parts for name in p.get("properties", ())), *needed]
        patterns = [name for p in parts for name in p.get("patternProperties", ())]
        keys_by_keyword = {"properties": names, "patternProperties": patterns}
        return {k: {name: {} for name in x} for k, x in keys_by_keyword.items()} | {
            "additionalProperties": False
        }

    def _all(self, schema: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
        """The schema and all its parts."""
        if isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            yield schema
            lists = (schema.get(key, ()) for key in ("allOf", "anyOf", "oneOf"))
            for part in (*chain(*lists), self._target(schema.get("$ref"))):
                yield from self._all(part, seen)

    def _named(self, ref: Any, merged: bool) -> Any:
        """A reference to the target, closed or not: a schema may contain itself."""
        if (target := self._target(ref)) is None:
            return ref
        if (key := (id(target), merged)) not in self._names:
            self._names[key] = f"{len(self._names)}"
            self.parts[self._names[key]] = self.closed(target, merged)
        return f"#/$defs/{self._names[key]}"

    def _target(self, ref: Any) -> Any:
        """What a pointer leads to; None if nowhere."""
        target = self._root if isinstance(ref, str) and re.match(r"#(/|$)", ref) else None
        for step in map(unquote, str(ref).split("/")[1:]):
            key = step.replace("~1", "/").replace("~0", "~")
            items = (
                {str(i): element for i, element in enumerate(target)}
                if isinstance(target, list)
                else target
            )
            target = items.get(key) if isinstance(items, dict) else None
        return target

    def _check_distinct(self, branches: Any) -> None:
        """Raises InputError where a closed part of oneOf fits another one, which takes any properties."""
        for branch, other_branch in permutations(
            ([*self._all(part, set())] for part in branches), 2
        ):
            properties, other_properties = (
                dict(chain(*(p.get("properties", {}).items() for p in x)))
                for x in (branch, other_branch)
            )
            needed = {name for part in other_branch for name in part.get("required", ())}
            shared_values = [
                (_values(properties[n]), _values(other_properties[n]))
                for n in needed & properties.keys() & other_properties.keys()
            ]
            is_distinct = any(a and b and a.isdisjoint(b) for a, b in shared_values)
            is_distinct |= bool(properties) and not needed <= properties.keys()
            is_distinct |= any("object" not in p.get("type", "object") for p in branch)
            if (
                other_properties
                and not is_distinct
                and not any(p.get("additionalProperties") is False for p in other_branch)
            ):
                fact = "JSON schema: oneOf: an answer may fit several of its parts"
                raise InputError(fact, "each must require what others lack; or write anyOf")


def _values(schema: Any) -> set[str]:
    """The only values of a schema; empty if it does not name them."""
    schema = schema if isinstance(schema, dict) else {}
    return {*map(json.dumps, schema.get("enum", [schema["const"]] if "const" in schema else ()))}
