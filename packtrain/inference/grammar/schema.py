"""JSON schemas for llguidance, read as llama.cpp's json-schema-to-grammar reads them: no properties but those that are
named, unless the schema allows them, and as much white space."""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import chain, permutations
from typing import Any
from urllib.parse import unquote

from packtrain.common.errors import InputError
from packtrain.inference.grammar.vocabulary_table import LARK_HEADER

# keywords whose values are no schemas
LITERAL_KEYWORDS = {"const", "enum", "default", "examples", "required"}
WHITE = r"( |\n{1,2}[ \t]{0,20})?"
NAMED_SCHEMAS = "properties", "$defs", "definitions", "patternProperties"  # keys in them are names
COMBINING_KEYWORDS = {"allOf", "anyOf", "oneOf", "$ref"}
OBJECTS = {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"}
ANNOTATIONS = {"$defs", "definitions", "title", "description", "default", "examples"}
FORMATS = {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}  # fmt: skip
UNEVALUATED = "unevaluatedProperties"
NOOP_KEYWORDS = [("uniqueItems", False), (UNEVALUATED, False), (UNEVALUATED, True)]
UNSUPPORTED_KEYWORDS = {
    "not", "uniqueItems", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "propertyNames", "contains", "minContains", "maxContains", "unevaluatedItems",
}  # fmt: skip
# numbers whose multiples would have any number of digits; a double holds no larger one of 16 digits
INTEGER_BOUNDS = {"minimum": -9_999_999_999_999_998, "maximum": 9_999_999_999_999_998}
MAX_MULTIPLE = 1000  # without its point; llguidance's automaton has as many states for each digit
LOOKAROUND = re.compile(r"\(\?<?[=!]|\\[bBk1-9]")  # parts of patterns that no automaton reads


def schema_to_lark(text: str) -> str:
    """Convert a JSON schema to the grammar of its documents, for llguidance. Raises InputError."""
    schema, unsupported = parse_schema(text), list[str]()
    loosened(schema, unsupported)
    if unsupported:
        raise InputError(
            f"JSON schema: {unsupported[0]} is not supported: no grammar can hold to it"
        )
    return f"{LARK_HEADER}start: %json {guidance_schema(schema)}\n"


def parse_schema(text: str) -> Any:
    """Parse a JSON schema, which must be an object. Raises InputError."""
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


def guidance_schema(schema: Any) -> str:
    """Convert a schema to llguidance's, with closed objects, and as much white space as llama.cpp allows."""
    closer = _SchemaCloser(schema)
    try:
        closed_schema = closer.closed(schema) | {"x-guidance": {"whitespace_pattern": WHITE}}
        return json.dumps(closed_schema | {"$defs": closer.parts})
    except RecursionError:
        raise InputError("JSON schema: it is nested too deep") from None
    except (AttributeError, TypeError) as error:
        raise InputError(f"JSON schema: a keyword has a value of another type: {error}") from None


def rebase_references(schema: Any, pointer: str) -> Any:
    """Return a schema whose references work once it is part of another, at `pointer`. Raises InputError."""
    try:
        return _moved(schema, pointer)
    except RecursionError:
        raise InputError("JSON schema: it is nested too deep") from None


def _moved(schema: Any, pointer: str, has_names: bool = False) -> Any:
    """Return a schema with moved references; `has_names`: the keys are names, perhaps those of keywords."""
    if isinstance(schema, list):
        return [_moved(subschema, pointer) for subschema in schema]
    if not isinstance(schema, dict):
        return schema
    rebased_schema = {
        k: v if k in LITERAL_KEYWORDS and not has_names else _moved(v, pointer, k in NAMED_SCHEMAS)
        for k, v in schema.items()
    }
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
        rebased_schema["$ref"] = pointer + ref[1:]
    return rebased_schema


def loosened(schema: Any, unsupported: list[str], at: str = "") -> Any:
    """Return a schema without keywords that no grammar can enforce; adds each of them to `unsupported`."""
    if isinstance(schema, list):
        return [loosened(subschema, unsupported, at) for subschema in schema]
    if not isinstance(schema, dict):
        return schema
    loose_schema = dict[str, Any]()
    for key, part in schema.items():
        if key in NAMED_SCHEMAS and isinstance(part, dict):
            subschemas = {k: {} if x is True else x for k, x in part.items()}
            loose_schema[key] = {
                k: loosened(x, unsupported, f"{at}.{k}".strip(".")) for k, x in subschemas.items()
            }
        elif (
            key in UNSUPPORTED_KEYWORDS
            or (key == "pattern" and LOOKAROUND.search(str(part)))
            or (key == "multipleOf" and _has_large_digits(part))
        ):
            fact = f"{key} of more than {MAX_MULTIPLE:,}" if key == "multipleOf" else key
            if (key, part) not in NOOP_KEYWORDS:
                unsupported.append(f"{at}: {fact}" if at else fact)
        else:
            loose_schema[key] = part if key in LITERAL_KEYWORDS else loosened(part, unsupported, at)
    return loose_schema


def _has_large_digits(value: Any) -> bool:
    """Return whether a number without its point is more than MAX_MULTIPLE."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return False
    number = Decimal(str(value)).normalize()
    return number.scaleb(max(-int(number.as_tuple().exponent), 0)) > MAX_MULTIPLE


class _SchemaCloser:
    """Closes objects: they take only named properties, where the schema does not say. Merged parts are closed once."""

    def __init__(self, root: Any) -> None:
        self._root, self._names, self.parts = root, dict[tuple[int, bool], str](), dict[str, Any]()

    def closed(self, schema: Any, is_merged: bool = False) -> Any:
        """Return a schema with closed objects; `is_merged`: it is part of another schema, which is closed as a whole.

        Objects without additionalProperties are closed, or a model would write on without end. Closed one by one, the
        parts of an allOf, anyOf or $ref would forbid each other's properties.
        """
        if not isinstance(schema, dict):
            return schema
        keys: Any = schema.keys() & COMBINING_KEYWORDS
        closed_schema = dict[str, Any](INTEGER_BOUNDS if "multipleOf" in schema else ())
        has_one_branch = len(keys) == 1 and ("allOf" not in keys or len(schema["allOf"]) == 1)
        is_separate = has_one_branch and not schema.keys() & OBJECTS and not is_merged
        if "oneOf" in keys and is_separate:
            self._check_distinct(schema["oneOf"])
        for key, part in schema.items():
            if key in ANNOTATIONS or (key, part) in NOOP_KEYWORDS:
                continue
            if key in NAMED_SCHEMAS and isinstance(part, dict):
                closed_schema[key] = {name: self.closed(x) for name, x in part.items()}
            elif key == "$ref":
                closed_schema[key] = self._definition_reference(part, not is_separate)
            elif key in COMBINING_KEYWORDS and isinstance(part, list):
                closed_schema[key] = [self.closed(subschema, not is_separate) for subschema in part]
            elif key in LITERAL_KEYWORDS or key == "format":
                closed_schema |= {} if key == "format" and part not in FORMATS else {key: part}
            else:
                is_list = isinstance(part, list)
                closed_schema[key] = (
                    [self.closed(subschema) for subschema in part] if is_list else self.closed(part)
                )
        is_part = is_merged and schema.get("unevaluatedProperties") is not False
        end = {} if is_separate or is_part else self._end([*self._all_parts(schema, set())])
        if not end or keys:
            return {"allOf": [closed_schema, end]} if end else closed_schema
        return (
            end
            | closed_schema
            | {"properties": end["properties"] | closed_schema.get("properties", {})}
        )

    def _end(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the schema that closes an object with all its parts; {} where a part says what else may come."""
        named = any("properties" in p or p.get("unevaluatedProperties") is False for p in parts)
        if not named or any(
            "additionalProperties" in p or p.get("unevaluatedProperties") for p in parts
        ):
            return {}
        is_explicit = any(p.get("unevaluatedProperties") is False for p in parts)
        for p in parts if is_explicit else ():
            branches = ({n for q in self._all_parts(x, set()) for n in q.get("properties", ())}
                        for x in chain(p.get("anyOf", ()), p.get("oneOf", ())))  # fmt: skip
            if len({*map(frozenset, branches)}) > 1:
                message = "JSON schema: unevaluatedProperties: beside parts of anyOf or oneOf with other properties"
                raise InputError(message, "write additionalProperties: false in each part")
        required_names = (name for p in parts if not is_explicit for name in p.get("required", ()))
        names = [*(name for p in parts for name in p.get("properties", ())), *required_names]
        patterns = [name for p in parts for name in p.get("patternProperties", ())]
        keys_by_keyword = {"properties": names, "patternProperties": patterns}
        return {k: {name: {} for name in x} for k, x in keys_by_keyword.items()} | {
            "additionalProperties": False
        }

    def _all_parts(self, schema: Any, seen_ids: set[int]) -> Iterator[dict[str, Any]]:
        """Yield a schema and all parts that allOf, anyOf, oneOf and $ref merge into it."""
        if isinstance(schema, dict) and id(schema) not in seen_ids:
            seen_ids.add(id(schema))
            yield schema
            branch_lists = (schema.get(key, ()) for key in ("allOf", "anyOf", "oneOf"))
            for branch in (*chain(*branch_lists), self._reference_target(schema.get("$ref"))):
                yield from self._all_parts(branch, seen_ids)

    def _definition_reference(self, ref: Any, is_merged: bool) -> Any:
        """Return a reference to the closed target, added to `parts`: a schema may contain itself."""
        if (target := self._reference_target(ref)) is None:
            return ref
        if (definition_key := (id(target), is_merged)) not in self._names:
            self._names[definition_key] = f"{len(self._names)}"
            self.parts[self._names[definition_key]] = self.closed(target, is_merged)
        return f"#/$defs/{self._names[definition_key]}"

    def _reference_target(self, ref: Any) -> Any:
        """Return the schema that a JSON pointer leads to; None if there is none."""
        target = self._root if isinstance(ref, str) and re.match(r"#(/|$)", ref) else None
        for pointer_step in map(unquote, str(ref).split("/")[1:]):
            key = pointer_step.replace("~1", "/").replace("~0", "~")
            children = (
                {str(i): element for i, element in enumerate(target)}
                if isinstance(target, list)
                else target
            )
            target = children.get(key) if isinstance(children, dict) else None
        return target

    def _check_distinct(self, branches: Any) -> None:
        """Raise InputError where an answer may fit several branches of a oneOf."""
        for branch, other_branch in permutations(
            ([*self._all_parts(branch_schema, set())] for branch_schema in branches), 2
        ):
            properties, other_properties = (
                dict(chain(*(p.get("properties", {}).items() for p in x)))
                for x in (branch, other_branch)
            )
            required_names = {name for part in other_branch for name in part.get("required", ())}
            shared_values = [
                (_allowed_values(properties[n]), _allowed_values(other_properties[n]))
                for n in required_names & properties.keys() & other_properties.keys()
            ]
            is_distinct = any(a and b and a.isdisjoint(b) for a, b in shared_values)
            is_distinct |= bool(properties) and not required_names <= properties.keys()
            is_distinct |= any("object" not in p.get("type", "object") for p in branch)
            if (
                other_properties
                and not is_distinct
                and not any(p.get("additionalProperties") is False for p in other_branch)
            ):
                message = "JSON schema: oneOf: an answer may fit several of its parts"
                raise InputError(message, "each must require what others lack; or write anyOf")


def _allowed_values(schema: Any) -> set[str]:
    """Return the only values that a schema allows, as JSON; empty if the schema does not name them."""
    schema = schema if isinstance(schema, dict) else {}
    return {*map(json.dumps, schema.get("enum", [schema["const"]] if "const" in schema else ()))}
