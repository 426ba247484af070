"""Converts JSON schemas for llguidance, read as llama.cpp's json-schema-to-grammar reads them: objects have only named
properties unless the schema allows others, and white space is limited."""

import json
import math
import re
from collections.abc import Callable, Iterator
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
OPENING_KEYWORDS = OBJECTS - {"properties"}
WRAPPER_KEYS = {"name", "schema", "json_schema", "strict"}  # of a response_format
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
MAX_FAULT_LEVELS, MAX_FAULT_KEYS = 16, 64  # that are searched for the keyword of a fault
CONTEXT_KEYWORDS = {"type", "$schema", "$id", "$defs", "definitions"}
FAULT_PREFIX = r"^(JSON schema|grammar: it cannot be used(: failed to compile JSON schema)?): "
MAX_MULTIPLE = 1000  # without its point; llguidance's automaton has as many states for each digit
BOUND_KEYWORDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
# patterns without lookaround, \b and references, which no automaton reads, and sets, which ECMA-262 reads otherwise
READABLE_PATTERN = re.compile(
    r"([^\\[(]|\\[^bBk1-9]|\((?!\?<?[=!])|\[(?!\^?\])(\\.|(?!&&|--|~~)[^\]\[\\])*\])*", re.S
)
ANY_NAME = "^(?s:.*)$"
CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # JSON spells these in two ways: \n and \u000a
REPLACED_PARTS = {r"\s": r"[\s&&[^\x85]]", r"\S": r"[^\s\x1c-\x1f\ufeff]", "[^": r"[^\x00"}
LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
DATE = rf"^({LEAP_YEAR}-02-29|(\d{{3}}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)-((0[^2]|1.)-|02-([01]|2[^9])))"
FORMAT_LIMITS: dict[Any, dict[str, Any]] = {  # what llguidance's formats lack: calendar and length
    "date": {"pattern": DATE},
    "date-time": {"allOf": [{"pattern": DATE}, {"pattern": r":\d\d:[0-5]"}]},
    "time": {"pattern": r"^\d\d:\d\d:[0-5]"},
    "hostname": {"pattern": r"^[^-]*(-[^-]+)*$", "maxLength": 253},
}


def schema_to_lark(schema: Any) -> str:
    """Convert a parsed JSON schema to a grammar of its documents, in llguidance's notation. Raises InputError."""
    return f"{LARK_HEADER}start: %json {guidance_schema(schema)}\n"


def locate_fault(schema: Any, fault: str, build: Callable[[Any], object]) -> str:
    """Return a message with the property and keyword that make `build` refuse a schema; takes the schema apart. Removes
    keyword after keyword until `build` accepts the rest: the fault is in the one removed last, which is searched
    likewise. fault: the message about the whole schema."""
    node, is_names, names, keyword = schema, False, list[str](), ""
    for _ in range(MAX_FAULT_LEVELS):
        keys = sorted(node, key=CONTEXT_KEYWORDS.__contains__) if isinstance(node, dict) else []
        for key in keys[:MAX_FAULT_KEYS]:
            part = node.pop(key)
            node |= {key: {}} if is_names else {}
            try:
                build(schema)
                break
            except InputError as error:
                fault = str(error)
        else:
            break
        node[key] = part
        names, keyword = ([*names, key], "") if is_names else (names, key)
        node, is_names = part, key in NAMED_SCHEMAS and not is_names
    fact = re.sub(FAULT_PREFIX, "", fault).removeprefix(f"{keyword}: ")
    return ": ".join(filter(None, ("JSON schema", ".".join(names), keyword, fact)))


def parse_schema(text: str) -> Any:
    """Parse a JSON schema. Raises InputError unless it is an object of keywords that a grammar can enforce."""
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
    if WRAPPER_KEYS >= {*schema} - {"description"} != set():
        fact = f"JSON schema: {' and '.join(schema)} are no keywords of a schema"
        raise InputError(fact, "what stands in schema must stand in their place")
    loosened(schema, unsupported := list[str]())
    if unsupported:
        advice = "no grammar can hold to it"
        raise InputError(f"JSON schema: {unsupported[0]} is not supported", advice)
    return schema


def guidance_schema(schema: Any) -> str:
    """Convert a parsed schema to llguidance's JSON: only named properties, llama.cpp's white space. InputError."""
    closer = _SchemaCloser(schema)
    try:
        closed_schema = closer.closed(schema) | {"x-guidance": {"whitespace_pattern": WHITE}}
        return json.dumps(closed_schema | {"$defs": closer.parts})
    except RecursionError:
        raise InputError("JSON schema: it is nested too deep") from None
    except (AttributeError, TypeError, OverflowError) as error:
        raise InputError(f"JSON schema: a keyword has a value of another type: {error}") from None


def rebase_references(schema: Any, pointer: str) -> Any:
    """Return a schema whose `$ref`s work once it is part of another, at a JSON pointer. Raises InputError."""
    try:
        return _rebase(schema, pointer)
    except RecursionError:
        raise InputError("JSON schema: it is nested too deep") from None


def _rebase(schema: Any, pointer: str, has_names: bool = False) -> Any:
    """Return a part of a schema with `pointer` before its references; `has_names`: the part's keys are no keywords."""
    if isinstance(schema, list):
        return [_rebase(subschema, pointer) for subschema in schema]
    if not isinstance(schema, dict):
        return schema
    rebased_schema = {
        k: v if k in LITERAL_KEYWORDS and not has_names else _rebase(v, pointer, k in NAMED_SCHEMAS)
        for k, v in schema.items()
    }
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
        rebased_schema["$ref"] = pointer + ref[1:]
    return rebased_schema


def loosened(schema: Any, unsupported: list[str], at: str = "") -> Any:
    """Return a schema, at path `at`, without keywords that no grammar can enforce; adds paths to `unsupported`."""
    if isinstance(schema, list):
        return [loosened(subschema, unsupported, at) for subschema in schema]
    if not isinstance(schema, dict):
        return schema
    loose_schema = dict[str, Any]()
    for key, part in schema.items():
        patterns = part if key == "patternProperties" and isinstance(part, dict) else ()
        if not all(map(READABLE_PATTERN.fullmatch, patterns)):
            unsupported.append(f"{at}: {key}".removeprefix(": "))
        elif key in NAMED_SCHEMAS and isinstance(part, dict):
            subschemas = {k: {} if x is True else x for k, x in part.items()}
            loose_schema[key] = {
                k: loosened(x, unsupported, f"{at}.{k}".strip(".")) for k, x in subschemas.items()
            }
        elif (
            key in UNSUPPORTED_KEYWORDS
            or (key == "pattern" and not READABLE_PATTERN.fullmatch(str(part)))
            or (key == "multipleOf" and _has_large_digits(part))
            or (key == "minProperties" and _can_repeat_names(part, schema.get("required", ())))
        ):
            limits = {"multipleOf": f"{MAX_MULTIPLE:,}", "minProperties": "one name not required"}
            fact = f"{key} of more than {limits[key]}" if key in limits else key
            if (key, part) not in NOOP_KEYWORDS:
                unsupported.append(f"{at}: {fact}".removeprefix(": "))
        else:
            loose_schema[key] = part if key in LITERAL_KEYWORDS else loosened(part, unsupported, at)
    return loose_schema


def _can_repeat_names(min_count: Any, names: Any) -> bool:
    """Return whether minProperties `min_count` beside `required` cannot be enforced: a repeated name counts twice."""
    num_names = len({*map(str, names)}) if isinstance(names, list) else 0
    return isinstance(min_count, int | float) and min_count > num_names + 1


def automaton_pattern(pattern: str) -> str:
    """Convert an ECMA-262 pattern to llguidance's syntax, in which escapes of white space mean other characters.
    llguidance adds a quote and a backslash to sets of all control characters, so that sets without these lose NUL."""
    return re.sub(
        r'\\.|\[\^(?=[^\]]*["\\])', lambda part: REPLACED_PARTS.get(part[0], part[0]), pattern
    )


def other_names(names: set[str]) -> str:
    """Return a pattern of all property names but `names`, which llguidance itself lets pass if written with escapes."""
    first_chars = {name[0]: f"\\x{{{ord(name[0]):x}}}" for name in sorted(names) if name}
    choices = [
        f"{char_code}({other_names({name[1:] for name in names if name[:1] == char})})"
        for char, char_code in first_chars.items()
    ]
    choices.append(f"[^\\x00{''.join(first_chars.values())}](?s:.*)" if first_chars else "(?s:.+)")
    return "|".join([*choices, *(() if "" in names else ("",))])


def _written_integer(digits: str) -> int:
    """Return the integer that llguidance would write, which reads numbers as doubles: unequal if digits are lost."""
    value = float(digits)
    return int(value if abs(value) < 2**63 else Decimal(repr(value)))


def _has_large_digits(value: Any) -> bool:
    """Return whether the digits of a `multipleOf`, read without the point, are more than MAX_MULTIPLE."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return False
    number = Decimal(str(value)).normalize()
    return number.scaleb(max(-int(number.as_tuple().exponent), 0)) > MAX_MULTIPLE


class _SchemaCloser:
    """Closes objects to names that a schema does not mention; `parts`: the closed targets of its `$ref`s by name."""

    def __init__(self, root: Any) -> None:
        self._root, self._names, self.parts = root, dict[tuple[int, bool], str](), dict[str, Any]()

    def closed(self, schema: Any, is_merged: bool = False) -> Any:
        """Return a schema with closed objects; `is_merged`: it is part of another schema, which is closed as a whole.
        Objects without additionalProperties are closed, or a model would write on without end. Closed one by one, the
        parts of an allOf, anyOf or $ref would forbid each other's properties."""
        if not isinstance(schema, dict):
            return schema
        if limit := FORMAT_LIMITS.get(schema.get("format")):
            schema = schema | {"allOf": [*schema.get("allOf", ()), limit]}
        keys: Any = schema.keys() & COMBINING_KEYWORDS
        closed_schema = dict[str, Any](INTEGER_BOUNDS if "multipleOf" in schema else ())
        has_one_branch = len(keys) == 1 and ("allOf" not in keys or len(schema["allOf"]) == 1)
        is_separate = has_one_branch and not schema.keys() & OBJECTS and not is_merged
        if "oneOf" in keys and is_separate:
            self._check_distinct(schema["oneOf"])
        for key, part in schema.items():
            is_ignored = key in ANNOTATIONS or (key, part) in NOOP_KEYWORDS
            if not is_ignored and (key != "format" or part in FORMATS):
                closed_schema[key] = self._closed_value(key, part, not is_separate)
        is_part = is_merged and schema.get("unevaluatedProperties") is not False
        end = {} if is_separate or is_part else self._closure([*self._all_parts(schema, set())])
        if not end or keys or "additionalProperties" in schema:
            return {"allOf": [closed_schema, end]} if end else closed_schema
        properties = end["properties"] | closed_schema.get("properties", {})
        return end | closed_schema | {"properties": properties}

    def _closed_value(self, key: str, part: Any, is_merged: bool) -> Any:
        """Return a keyword's value with `closed` subschemas, patterns, bounds as llguidance reads them. InputError."""
        if key in NAMED_SCHEMAS and isinstance(part, dict):
            key_of = automaton_pattern if key == "patternProperties" else str
            return {key_of(name): self.closed(subschema) for name, subschema in part.items()}
        if key == "$ref":
            return self._definition_reference(part, is_merged)
        if key in LITERAL_KEYWORDS:
            if json.loads(json.dumps(part), parse_int=_written_integer) != part:
                raise InputError(f"JSON schema: {key}: a number has too many digits")
            return part
        if key == "pattern" and isinstance(part, str):
            return automaton_pattern(part)
        if key in BOUND_KEYWORDS:
            # a bound that a double holds: llguidance would round it, perhaps outwards
            if not isinstance(part, int) or float(part) == part:
                return part
            return int(math.nextafter(float(part), math.inf if "inimum" in key else -math.inf))
        if isinstance(part, list):
            is_part = is_merged and key in COMBINING_KEYWORDS
            return [self.closed(subschema, is_part) for subschema in part]
        return self.closed(part)

    def _closure(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what closes an object to names that none of its parts has or allows; {}: nothing. InputError."""
        additional = [p["additionalProperties"] for p in parts if "additionalProperties" in p]
        is_open = additional or any(p.get("unevaluatedProperties") for p in parts)
        closing_keywords = {"properties", "patternProperties", *(() if is_open else (UNEVALUATED,))}
        is_shut = bool(additional) and all(x is False for x in additional)
        if is_shut or not any(p.keys() & closing_keywords for p in parts):
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
        patterns = [automaton_pattern(x) for p in parts for x in p.get("patternProperties", ())]
        if is_open and patterns:
            message = "JSON schema: additionalProperties: beside patternProperties"
            raise InputError(message, "a name with escapes would pass by the patterns")
        values = [p[k] for p in parts for k in (UNEVALUATED, "additionalProperties") if k in p]
        # llguidance leaves out the names, in their usual spelling; a pattern that does so has slow masks
        is_free = all(x in (True, {}) for x in values) and not any(map(CONTROL.search, names))
        patterns += [ANY_NAME if is_free else f"^({other_names({*names})})$"] if is_open else []
        end = {"patternProperties": {x: {} for x in patterns}, "additionalProperties": False}
        return {"properties": {name: {} for name in names}, **end}

    def _all_parts(self, schema: Any, seen_ids: set[int]) -> Iterator[dict[str, Any]]:
        """Yield a schema and all parts that allOf, anyOf, oneOf and $ref merge into it."""
        if isinstance(schema, dict) and id(schema) not in seen_ids:
            seen_ids.add(id(schema))
            yield schema
            branch_lists = (schema.get(key, ()) for key in ("allOf", "anyOf", "oneOf"))
            for branch in (*chain(*branch_lists), self._reference_target(schema.get("$ref"))):
                yield from self._all_parts(branch, seen_ids)

    def _definition_reference(self, ref: Any, is_merged: bool) -> Any:
        """Return a `$ref` to the target of `ref`, closed (see `closed`) in `parts`, as a schema may contain itself."""
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
            if isinstance(target, list):
                target = {str(i): element for i, element in enumerate(target)}
            target = target.get(key) if isinstance(target, dict) else None
        return target

    def _check_distinct(self, branches: Any) -> None:
        """Raise InputError where an answer may fit several branches of a oneOf, which llguidance reads as anyOf."""
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
            is_closed = all(p.get(k, False) is False for p in branch for k in OPENING_KEYWORDS)
            is_distinct |= is_closed and bool(properties) and not required_names <= {*properties}
            is_distinct |= any("object" not in p.get("type", "object") for p in branch)
            is_distinct |= any(p.get("additionalProperties") is False for p in other_branch)
            if other_properties and not is_distinct:
                message = "JSON schema: oneOf: an answer may fit several of its parts"
                raise InputError(message, "each must require what others lack; or write anyOf")


def _allowed_values(schema: Any) -> set[str]:
    """Return the only values that a schema allows, as JSON; empty if the schema does not name them."""
    schema = schema if isinstance(schema, dict) else {}
    return {*map(json.dumps, schema.get("enum", [schema["const"]] if "const" in schema else ()))}
