"""JSON schemas: the grammar takes the documents that jsonschema takes, and writes no others.

As in llama.cpp, objects with properties take no others unless the schema says so, and properties come in the schema's
order: documents are made so. Documents that the grammar writes by chance must all be valid.
"""

import itertools
import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.variants.outcome import DIFFERENT, EQUAL, Outcome, refused_outcome
from packtrain.common.errors import InputError
from packtrain.inference.grammar import Grammar
from tests.test_grammar import BYTES, TOKENIZER

Schema = Any
NAMES = "a", "b", "c", "d"
PATTERNS = "^a+$", "b", "^[0-9]{2}-x?$", "(ab|cd)", "^(a|b)*c$", r"\d\.\w", "^x", "y$"
FORMATS = "date", "ipv4", "email", "uuid", "password", "binary"
TEXTS = ("", "a", "aab", "12-x", "ab", "cd", "1.a", "xy", "abc", "2024-02-29", "1.2.3.4", "a@b.co", "10:20:30Z",
         "123e4567-e89b-12d3-a456-426614174000", "2024-02-29T10:20:30Z", 'q"\\\n', "\u00e9")  # fmt: skip
NUMBERS = 0, 1, -1, 2, 3, 5, 7, 10, 12, 100, 0.5, -2.5, 1.25
MERGES = {"allOf", "anyOf", "oneOf", "$ref"}
OBJECTS = {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"}
MOST_ORDERS = 1000
LETTERS = [ord(c) for c in string.printable]
CLOSING_BYTES = [ord(c) for c in '"}],:{[0123456789abcxy.-']


def scalar_schema(rng: random.Random) -> Schema:
    """A schema of no objects or arrays."""
    choices: list[dict[str, Any]] = [
        {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {},
        {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(2, 5)},
        {"type": "string", "pattern": rng.choice(PATTERNS)}, {"type": "string", "format": rng.choice(FORMATS)},
        {"type": "integer", "minimum": rng.randrange(-3, 4), "maximum": rng.randrange(4, 30)},
        {"type": "integer", "multipleOf": rng.choice((2, 3, 5))}, {"type": "integer", "exclusiveMinimum": 2},
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": 7}, {"type": ["string", "null"]},
        {"type": ["integer", "boolean"], "maximum": 5}, {"enum": rng.sample(["a", 1, None, True, "ab", 2.5], 3)},
        {"const": rng.choice(("a", 3, None, {"a": 1}, [1, 2]))}, {"type": "string", "enum": ["a", "ab"]},
        {"minimum": 3}, {"maxLength": 2}, {"type": "integer", "enum": [1, 2, "x"]}, {"pattern": "^a"},
        {"type": "string", "pattern": "^a", "maxLength": 3}, {"type": "number", "multipleOf": 0.5},
    ]  # fmt: skip
    return rng.choice(choices)


def objects(rng: random.Random, depth: int, refs: list[str]) -> Schema:
    """An object with some properties and, now and then, keywords of objects."""
    names = [*NAMES[: rng.randrange(1, 4)]]
    rng.shuffle(names)
    object_schema: dict[str, Any] = {"type": "object"} if rng.random() < 0.9 else {}
    if rng.random() < 0.9:
        object_schema["properties"] = {name: schema(rng, depth - 1, refs) for name in names}
    if rng.random() < 0.7:
        object_schema["required"] = rng.sample(
            [*NAMES[:3]] if rng.random() < 0.1 else names, rng.randrange(len(names) + 1)
        )
    keyword_options = {
        "additionalProperties": rng.choice((False, True, {"type": "integer"})), "minProperties": 1, "maxProperties": 2,
        "patternProperties": {"^x": {"type": "integer"}}, "unevaluatedProperties": False, "title": "T",
        "description": "D", "propertyNames": {"maxLength": 1}, "dependentRequired": {"a": ["b"]},
    }  # fmt: skip
    key = rng.choice([*keyword_options][: 7 if rng.random() < 0.9 else 9])
    return object_schema | ({key: keyword_options[key]} if rng.random() < 0.3 else {})


def arrays(rng: random.Random, depth: int, refs: list[str]) -> Schema:
    """An array with some of its keywords."""
    keyword_options = {
        "items": schema(rng, depth - 1, refs), "minItems": rng.randrange(3), "maxItems": rng.randrange(1, 4),
        "prefixItems": [scalar_schema(rng), scalar_schema(rng)], "uniqueItems": rng.random() < 0.5,
        "contains": {"const": 1},
    }  # fmt: skip
    keys = rng.sample(
        [*keyword_options][: 4 if rng.random() < 0.8 else 6], rng.choice((1, 1, 2, 3))
    )
    return {"type": "array"} | {key: keyword_options[key] for key in keys}


def schema(rng: random.Random, depth: int, refs: list[str]) -> Schema:
    """A schema of so many levels; refs: names of definitions that it may use."""
    if depth <= 0 or rng.random() < 0.3:
        return (
            {"$ref": f"#/$defs/{rng.choice(refs)}"}
            if refs and rng.random() < 0.2
            else scalar_schema(rng)
        )
    common_kinds = "object", "array", "anyOf", "allOf"
    kind = rng.choice((*common_kinds, *common_kinds, *common_kinds, "oneOf", "oneOf", "not", "if"))
    if kind == "object":
        return objects(rng, depth, refs)
    if kind == "array":
        return arrays(rng, depth, refs)
    if kind == "not":
        return (
            scalar_schema(rng) | {"not": scalar_schema(rng)}
            if rng.random() < 0.3
            else objects(rng, depth, refs)
        )
    if kind == "if":
        return objects(rng, depth, refs) | (
            {"if": {}, "then": {}} if rng.random() < 0.2 else {"default": {}}
        )
    inner = objects if rng.random() < 0.7 else schema
    parts = [inner(rng, depth - 1, refs) for _ in range(rng.choice((1, 2, 2)))]
    if refs and rng.random() < 0.3:
        parts.append({"$ref": f"#/$defs/{rng.choice(refs)}"})
    base_schema = objects(rng, depth - 1, refs) if rng.random() < 0.3 else {}
    return base_schema | {kind: parts}


def parts_of(root: Schema, one: Schema, depth: int = 8) -> list[dict[str, Any]]:
    """A schema and what it merges."""
    if not isinstance(one, dict) or depth == 0:
        return []
    target = root["$defs"].get(one["$ref"].rsplit("/", 1)[1]) if "$ref" in one else None
    inner = [part for key in ("allOf", "anyOf", "oneOf") for part in one.get(key, ())]
    return [one, *(p for part in [*inner, target] for p in parts_of(root, part, depth - 1))]


def document(rng: random.Random, root: Schema, one: Schema, depth: int = 4) -> Any:
    """A value that may fit the schema: no properties but those that it names or allows."""
    parts = parts_of(root, one)
    fixed_values = [
        v for p in parts for v in [*p.get("enum", ()), *([p["const"]] if "const" in p else ())]
    ]
    if fixed_values and rng.random() < 0.8:
        return rng.choice(fixed_values)
    kinds = [
        k
        for p in parts
        for k in ([p["type"]] if isinstance(p.get("type"), str) else p.get("type", []))
    ]
    kinds += ["object"] * any("properties" in p for p in parts)
    kind = rng.choice(kinds or ["string", "integer", "null", "object", "array"])
    if kind == "object" and depth:
        named = {name: s for p in parts for name, s in p.get("properties", {}).items()}
        needed = {name for p in parts for name in p.get("required", ())}
        members = {
            n: document(rng, root, s, depth - 1)
            for n, s in named.items()
            if n in needed or rng.random() < 0.6
        }
        members |= {n: rng.choice(NUMBERS[:8]) for n in sorted(needed - named.keys())}
        is_open = any(p.get("additionalProperties") for p in parts) or not named
        if (
            is_open
            and rng.random() < 0.4
            and not any(p.get("additionalProperties") is False for p in parts)
        ):
            members["zz"] = rng.choice(NUMBERS[:8])
        return members
    if kind == "array" and depth:
        items: Any = next((p["items"] for p in parts if "items" in p), {})
        first: Any = next((p["prefixItems"] for p in parts if "prefixItems" in p), [])
        return [
            document(rng, root, first[i] if i < len(first) else items, depth - 1)
            for i in range(rng.randrange(4))
        ]
    if kind in ("number", "integer"):
        return rng.choice([n for n in NUMBERS if kind == "number" or isinstance(n, int)])
    return (
        rng.choice(TEXTS)
        if kind == "string"
        else rng.choice((True, False))
        if kind == "boolean"
        else None
    )


def closed(root: Schema, one: Schema, part: bool = False) -> Schema:
    """The schema with objects that take no properties but those of the parts that fit; part: of a merged one."""
    if not isinstance(one, dict):
        return one
    keys, inner = MERGES & one.keys(), {"allOf", "anyOf", "oneOf"} & one.keys()
    is_separate = (
        not part and len(keys) == 1 and not one.keys() & OBJECTS and len(one.get("allOf", "x")) == 1
    )
    if is_separate and "$ref" in one:
        return closed(root, root["$defs"][one["$ref"].rsplit("/", 1)[1]])
    named = {key: one[key] for key in ("properties", "patternProperties", "$defs") if key in one}
    closed_schema = one | {
        key: {name: closed(root, value, key == "$defs") for name, value in values.items()}
        for key, values in named.items()
    }
    closed_schema |= {
        key: closed(root, one[key]) for key in ("items", "additionalProperties") if key in one
    }
    closed_schema |= {
        key: [closed(root, value) for value in one[key]] for key in ("prefixItems",) if key in one
    }
    closed_schema |= {
        key: [closed(root, value, not is_separate) for value in one[key]] for key in inner
    }
    parts = parts_of(root, one)
    names_keys = any({"properties", "patternProperties"} & p.keys() for p in parts)
    is_restricted = any("additionalProperties" in p for p in parts) or not names_keys
    return (
        closed_schema
        if part or is_restricted or is_separate
        else closed_schema | {"unevaluatedProperties": False}
    )


def accepts_text(grammar: Grammar, text: str) -> bool:
    """Whether a text is one of the grammar's."""
    grammar_copy = grammar.copy()
    try:
        for byte in text.encode():
            grammar_copy.accept(BYTES + byte)
    except InputError:
        return False
    return grammar_copy.is_complete


def orders(value: Any) -> Iterator[Any]:
    """The value with the keys of its objects in all orders."""
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for inner in itertools.product(*(orders(value[key]) for key in keys)):
                yield dict(zip(keys, inner, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*map(orders, value)))
    else:
        yield value


def takes_any_order(grammar: Grammar, value: Any) -> bool:
    """Whether the grammar takes a document with its keys in some order."""
    first_orders = itertools.islice(orders(value), MOST_ORDERS)
    return any(accepts_text(grammar, json.dumps(one, ensure_ascii=False)) for one in first_orders)


def written(rng: random.Random, grammar: Grammar) -> str | None:
    """A document that the grammar writes by chance, mostly by characters that end something; None if it is long."""
    grammar_copy, text = grammar.copy(), bytearray()
    for _ in range(120):
        allowed = grammar_copy.allowed(TOKENIZER.vocab_size)
        assert allowed is not None
        if grammar_copy.is_complete and (rng.random() < 0.5 or grammar_copy.over):
            return text.decode()
        closing, any_ = (
            [b for b in candidates if allowed[BYTES + b]] for candidates in (CLOSING_BYTES, LETTERS)
        )
        if not any_:
            return None
        byte = rng.choice(closing if closing and rng.random() < 0.8 else any_)
        grammar_copy.accept(BYTES + byte)
        text.append(byte)
    return None


def compare(rng: random.Random, folder: Path) -> Outcome:
    """One variant: 60 documents by the schema, 15 by the grammar."""
    main_schema = objects(rng, 3, ["p", "q"]) if rng.random() < 0.4 else schema(rng, 3, ["p", "q"])
    root = main_schema | {"$defs": {"p": objects(rng, 1, []), "q": schema(rng, 2, ["p"])}}
    check, strict = (
        jsonschema.Draft202012Validator(one, format_checker=jsonschema.FormatChecker())
        for one in (root, closed(root, root))
    )
    documents = [document(rng, root, root) for _ in range(60)]
    shown = json.dumps(root)
    try:
        grammar = Grammar.from_schema(TOKENIZER, shown)
    except InputError as error:
        # the words are llguidance's, and true where they are of a definition that nothing fits
        fits = next(filter(strict.is_valid, documents), None)
        is_part = "required property" in str(error) or not all(
            any(check.evolve(schema=one).is_valid(document(rng, root, one)) for _ in range(60))
            for one in root["$defs"].values()
        )
        if "nsatisfiable" in str(error) and fits and not is_part:
            return Outcome(DIFFERENT, f"{shown}: {error}, but {json.dumps(fits)} fits")
        return refused_outcome(error)
    for one in documents:
        is_accepted = takes_any_order(grammar, one)
        if (check if is_accepted else strict).is_valid(one) != is_accepted:
            fact = "not valid, here taken" if is_accepted else "valid, here not taken"
            return Outcome(DIFFERENT, f"{shown}: {json.dumps(one)} is {fact}")
    for text in (written(rng, grammar) for _ in range(15)):
        if text is not None and not check.is_valid(json.loads(text)):
            return Outcome(DIFFERENT, f"{shown}: the grammar writes {text}, which is not valid")
    return Outcome(EQUAL, shown)
