"""Texts that follow random JSON schemas: each is valid by the package jsonschema, and none is written without end."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.inference.grammar import Grammar
from packtrain.inference.grammar.tool_call_grammar import ToolCallRules
from packtrain.serving.tool_calls import WILD
from tests.test_grammar import BYTES, TOKENIZER

pytestmark = pytest.mark.grammar

END = 2
PIECES = [TOKENIZER.piece(id) for id in range(TOKENIZER.vocab_size)]
CLOSING = [BYTES + byte for byte in b'"}],:0']
# the bytes that a model without sense would always write, the first one that can come
PREFERENCES = (
    b"0123456789eE.+- \n",
    b"9876543210.eE-+ \n",
    b"\n \t09.eE-",
    b"eE.09-+ ",
    b".0eE-+ ",
    b"-3456789012",
)
NUMBERS: list[Any] = [
    {"type": "integer"},
    {"type": "number"},
    {"type": "integer", "minimum": 0},
    {"type": "integer", "maximum": 5},
    {"type": "integer", "minimum": 10**17},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "minimum": -2.5, "exclusiveMaximum": 0.75},
    {"type": "number", "multipleOf": 0.01},
    {"type": ["integer", "null"]},
    {"enum": [1, 10**20]},
    {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    {"$ref": "#/$defs/n", "$defs": {"n": {"allOf": [{"type": "number"}, {"minimum": 3}]}}},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "duration"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"n": {"type": "integer"}, "x": {"type": "number"}}, "required": ["n", "x"]},
]  # fmt: skip


def write(grammar: Grammar, choose: Callable[[np.ndarray, int], int], max_tokens: int) -> bytes:
    """The text of a grammar whose tokens `choose` picks from a mask; fails if the text does not end."""
    text = b""
    for position in range(max_tokens):
        mask = grammar.allowed(TOKENIZER.vocab_size)
        assert mask is not None
        id = choose(mask, position)
        if id == END:
            return text
        grammar.accept(id)
        text += PIECES[id]
        if grammar.over:
            return text
    raise AssertionError(f"no end after {max_tokens} tokens: {text[:80]!r}")


def preferring(preference: bytes) -> Callable[[np.ndarray, int], int]:
    def choose(mask: np.ndarray, position: int) -> int:
        preferred = (BYTES + byte for byte in preference if mask[BYTES + byte])
        return next(preferred, END if mask[END] else int(np.flatnonzero(mask)[0]))

    return choose


@pytest.mark.parametrize("number", range(len(NUMBERS)))
def test_digits_and_white_space_end(number: int):
    schema = NUMBERS[number]
    grammar = Grammar.from_schema(TOKENIZER, json.dumps(schema))
    for preference in PREFERENCES:
        json.loads(write(grammar.copy(), preferring(preference), 400))


def test_numbers_have_at_most_16_digits_in_a_row_and_strings_any_number():
    number, longest = Grammar.from_schema(TOKENIZER, '{"type": "number"}'), PREFERENCES[1]
    assert write(number, preferring(longest), 60) == b"9" * 16 + b"." + b"9" * 16 + b"e" + b"9" * 16
    pattern = {"type": "string", "pattern": "^[0-9]{20,30}$"}
    digits = Grammar.from_schema(TOKENIZER, json.dumps(pattern))
    assert write(digits, preferring(longest), 60) == b'"' + b"9" * 30 + b'"'
    text = Grammar.from_schema(TOKENIZER, '{"type": "string", "maxLength": 40}')
    assert write(text, preferring(b"9"), 60).startswith(b'"' + b"9" * 30)


def test_numbers_of_bare_arguments_end():
    rules = ToolCallRules(TOKENIZER, WILD)
    grammar = Grammar(TOKENIZER, rules.build_grammar(rules.bare_object_rule("'")))
    for byte in b"{n:":
        grammar.accept(BYTES + byte)
    assert write(grammar, preferring(b"9}"), 60) == b"9" * 16 + b"}"


def test_multiples_of_large_numbers_are_refused():
    for value in (86400, 12.345):
        schema = {"properties": {"n": {"multipleOf": value}}}
        with pytest.raises(InputError, match="n: multipleOf of more than 1,000 is not supported"):
            Grammar.from_schema(TOKENIZER, json.dumps(schema))


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(
        ("integer", "number", "string", "enum", "null", "array", "object", "anyOf", "allOf", "ref")[
            : 5 + 5 * (depth > 0)
        ]
    )
    low = rng.randint(-20, 20)
    if kind in ("integer", "number"):
        limits = {
            "minimum": low,
            "maximum": low + 30,
            "exclusiveMinimum": low - 1,
            "multipleOf": rng.choice((2, 3, 7)),
        }
        return {"type": kind} | {
            k: limits[k] for k in rng.sample(sorted(limits), rng.randint(0, 2))
        }
    if kind == "string":
        return {"type": "string"} | rng.choice(
            (
                {"maxLength": 5},
                {"minLength": 2, "maxLength": 4},
                {"pattern": "^[a-c]{1,3}$"},
                {"format": "uuid"},
                {"format": "ipv4"},
            )
        )
    if kind == "enum":
        return {"enum": rng.sample(["a", 'b"', 1, -2.5, None, True, [1, {"x": 2}]], 3)}
    if kind == "null":
        return {"type": ["null", "boolean"]}
    if kind == "array":
        first = [random_schema(rng, depth - 1) for _ in range(rng.randint(0, 2))]
        return {
            "type": "array",
            "prefixItems": first,
            "items": random_schema(rng, depth - 1),
            "minItems": rng.randint(0, 2),
            "maxItems": 3,
        }
    if kind == "object":
        properties = {
            name: random_schema(rng, depth - 1)
            for name in rng.sample(["a", "b", 'ü "', "$ref"], rng.randint(1, 3))
        }
        required = rng.sample(sorted(properties), rng.randint(0, len(properties)))
        extra = rng.choice(
            ({}, {"additionalProperties": random_schema(rng, 0), "maxProperties": 4})
        )
        return {"type": "object", "properties": properties, "required": required} | extra
    if kind == "ref":
        return {"$ref": "#/$defs/shared"}
    return {kind: [random_schema(rng, depth - 1) for _ in range(2 if kind == "anyOf" else 1)]}


def wandering(rng: random.Random) -> Callable[[np.ndarray, int], int]:
    """Chooses any token that can come, and more and more those that close what is open."""

    def choose(mask: np.ndarray, position: int) -> int:
        if mask[END] and (position > 100 or rng.random() < 0.5):
            return END
        closing = [id for id in CLOSING if mask[id]]
        if closing and (position > 30 or rng.random() < 0.3):
            return closing[0] if position > 30 else rng.choice(closing)
        ids = [int(id) for id in np.flatnonzero(mask) if id != END]
        likely_ids = [id for id in ids if PIECES[id].isascii() and rng.random() < 0.7]
        return rng.choice(likely_ids or ids or [END])

    return choose


@pytest.mark.parametrize("seed", range(4))
def test_texts_of_random_schemas_are_valid(seed: int):
    jsonschema = pytest.importorskip("jsonschema")
    rng, num_checked = random.Random(seed), 0
    for _ in range(10):
        schema = random_schema(rng, 3) | {"$defs": {"shared": random_schema(rng, 1)}}
        try:
            grammar = Grammar.from_schema(TOKENIZER, json.dumps(schema))
        except InputError:  # no document fits the schema
            continue
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.FormatChecker()
        )
        for _ in range(6):
            document = json.loads(write(grammar.copy(), wandering(rng), 2000))
            assert [error.message for error in validator.iter_errors(document)] == [], schema
            num_checked += 1
    assert num_checked > 24
