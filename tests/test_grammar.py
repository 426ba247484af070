"""Grammars: llama.cpp's cases (tests/test-grammar-integration.cpp, rewritten) with the same verdicts, random grammars
against a matcher that shares no line, JSON schemas, triggers, and what is refused."""

import contextlib
import itertools
import json
import random
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.grammar import Grammar
from packtrain.inference.grammar.gbnf import parse_gbnf
from packtrain.inference.grammar.lark import to_lark
from packtrain.inference.grammar.schema import rebase_references
from packtrain.workflows.text_generation import GenerateSettings, generate
from tests.architectures import random_model

BYTES, CONTROLS = 3, 3 + 256
NAMES = [f"<|{n}|>" for n in range(30)]


def _tokenizer() -> Tokenizer:
    """All bytes, 30 control tokens and a few words."""
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    words = ["ab", "abc", '{"', '":', "true", "hello"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *NAMES, *words]
    kinds = [2, 3, 3, *[6] * 256, *[3] * 30, *[1] * len(words)]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [t.encode() for t in tokens],
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
        "tokenizer.ggml.eos_token_id": 2,
    }
    return Tokenizer(metadata)


TOKENIZER = _tokenizer()
needed = pytest.mark.grammar


def ids_of(text: str | list[int | str]) -> list[int]:
    """Bytes of texts; control tokens by number."""
    if isinstance(text, str):
        return [BYTES + byte for byte in text.encode()]
    return [
        i for part in text for i in ([CONTROLS + part] if isinstance(part, int) else ids_of(part))
    ]


def matches(grammar: Grammar, text: str | list[int | str]) -> bool:
    matcher = grammar.copy()
    for id in ids_of(text):
        allowed = matcher.allowed(TOKENIZER.vocab_size)
        assert allowed is not None
        if not allowed[id]:
            with pytest.raises(InputError, match="grammar: token"):
                matcher.accept(id)
            return False
        matcher.accept(id)
    final_allowed = matcher.allowed(TOKENIZER.vocab_size)
    assert final_allowed is not None and final_allowed[2] == matcher.is_complete
    return matcher.is_complete


def control(number: int) -> str:
    return f"<[{CONTROLS + number}]>"


SIMPLE = """
    root ::= expr
    expr ::= term ("+" term)*
    term ::= number
    number ::= [0-9]+"""
MEDIUM = r"""
    root ::= expression
    expression ::= term ws (("+"|"-") ws term)*
    term ::= factor ws (("*"|"/") ws factor)*
    factor ::= number | variable | "(" expression ")" | function-call
    number ::= [0-9]+
    variable ::= [a-zA-Z_][a-zA-Z0-9_]*
    function-call ::= variable ws "(" (expression ("," ws expression)*)? ")"
    ws ::= [ \t\n\r]?"""
SPLIT = f"root ::= {control(10)} content {control(11)}\ncontent ::= (!{control(11)})*"
TOOLS = f"""
    root ::= reasoning+ content tool-call*
    reasoning ::= {control(10)} (!{control(11)})* {control(11)}
    content ::= {control(20)} (!{control(21)})* {control(21)}
    tool-call ::= {control(12)} name {control(13)} args {control(14)}
    name ::= (!{control(13)})+
    args ::= (!{control(14)})*"""
SOUNDS = """
    root ::= cons+ vowel* cons? (vowel cons)*
    vowel ::= [aeiouy]
    cons ::= [bcdfghjklmnpqrstvwxyz]"""
LONG = "123+456*789-123/456+789*123-456/789+123*456-789/123+456*789-123/456+789*123-456"
CASES: dict[str, tuple[str, list[Any], list[Any]]] = {
    "simple": (SIMPLE, ["42", "1+2+3+4+5", "123+456"], ["+", "/ 3", "1+2+3+4+5+", "12a45"]),
    "tokens": (
        SPLIT,
        [
            [10, "hello world", 11],
            [10, "text with ", 12, " other tokens ", 13, " mixed in", 11],
            [10, 11],
            [10, 12, 13, 14, 15, 11],
            [10, "a", 11],
        ],
        [[10, "missing end token"], [10], ["missing start token", 11], [10, 11, 11], [11, "wrong order", 10]],
    ),
    "medium": (
        MEDIUM,
        [
            "42", "1*2*3*4*5", "x", "x+10", "x1+y2", "(a+b)*(c-d)", "func()", "func(x,y+2)", "a*(b+c)-d/e",
            "f(g(x),h(y,z))", "x + 10", "x1 + y2", "(a + b) * (c - d)", "func(x, y + 2)", "a * (b + c) - d / e",
            "f(g(x), h(y, z))", "123+456", "123*456*789-123/456+789*123", LONG,
        ],
        [
            "+", "/ 3x", "x + + y", "a * / b", "func(,)", "func(x y)", "(a + b", "x + y)", "a + b * (c - d", "42 +",
            "x +", "x + 10 +", "(a + b) * (c - d", "func(", "func(x, y + 2", "a * (b + c) - d /", "f(g(x), h(y, z)",
            f"{LONG}/",
        ],
    ),
    "tools": (
        TOOLS,
        [
            [10, "I am thinking", 11, 20, "hello world!", 21, 12, "search", 13, "query=test", 14],
            [10, "reasoning 1", 11, 10, "reasoning 2", 11, 20, 21, 12, "tool", 13, 14],
            [10, 11, 20, "content", 21],
            [10, "think", 12, " nested", 11, 20, 10, "more content", 21, 12, "fn", 13, "x=1", 14, 12, "fn2", 13, 14],
        ],
        [
            [20, "content only", 21],
            [10, "no closing reasoning"],
            [10, 11, 20, "no closing content"],
            [10, 11, 20, 21, 12, "incomplete tool"],
            [10, 11, 11, 20, 21],
        ],
    ),
    "special characters": (
        'root ::= ... "abc" ...',
        ["abcabcabc", "aaaabcccc", "🔵🟠✅abc❌🟠🔵"],
        ["aaabcccc", "aaaaabcccc", "aaaabccc", "aaaabccccc", "🔵🟠✅❌abc❌✅🟠🔵", "🔵🟠abc🟠🔵"],
    ),
    "*": ('root ::= "a"*', ["", "a", "aaaaa", "a" * 62], ["b", "ab", "aab", "ba", "a" * 62 + "b"]),
    "+": ('root ::= "a"+', ["a", "aaaaa", "a" * 62], ["", "b", "ab", "aab", "ba", "a" * 62 + "b"]),
    "?": ('root ::= "a"?', ["", "a"], ["b", "ab", "aa", "ba"]),
    "mixed": (SOUNDS, ["yes", "no", "noyes", "crwth", "four", "bryyyy"], ["yess", "yesno", "forty", "catyyy"]),
    "exactly": ("root ::= [ab]{4}", ["aaaa", "bbbb", "abab"], ["a", "b", "aaaaa"]),
    "at least": ("root ::= [ab]{4,}", ["aaaa", "aaaaab", "bbbb", "ababab"], ["", "aba"]),
    "at most": ("root ::= [ab]{0,4}", ["", "a", "aa", "aaa", "aaab"], ["aaaaa"]),
    "groups": (
        'root ::= ([ab]{2,3} ":" [cd]{1,2}){1,2}',
        ["ab:c", "abb:dd", "ab:cab:d"],
        ["", "a:c", "ab:", "ab:cccc", "ab:cab:dab:c"],
    ),
    "escapes": (
        r'root ::= "\x41\u00e4\U0001F535\n\t\"\\" [\]\[a-c-]+ # a comment',
        ['Aä🔵\n\t"\\a-]['],
        ["Aä🔵\n\t\"\\d", "A"],
    ),
    "a greedy lexer would fail": (
        'root ::= [ab]* x\nx ::= "(" x ")" | "ab"',
        ["aab", "ab", "ba((ab))"],
        ["aa", "(a)", ""],
    ),
}  # fmt: skip


@needed
@pytest.mark.parametrize("name", CASES)
def test_llama_cpps_cases(name: str):
    text, accepted, rejected = CASES[name]
    grammar = Grammar.from_gbnf(TOKENIZER, text)
    assert [t for t in accepted if not matches(grammar, t)] == []
    assert [t for t in rejected if matches(grammar, t)] == []


def random_node(rng: random.Random, depth: int, names: list[str]) -> Any:
    """A random node: a text, or a list that begins with its kind."""
    kind = rng.choice(
        ["text", "text", "set", "seq", "or", "rep", "name"] if depth else ["text", "set"]
    )
    if kind == "text":
        return "".join(rng.choices("abc", k=rng.randint(1, 2)))
    if kind == "set":
        return ["set", "".join(sorted(rng.sample("abc", 2)))]
    if kind == "name":  # behind a character, so that no rule begins with itself
        return ["seq", rng.choice("abc"), ["name", rng.choice(names)]]
    if kind == "rep":
        return [
            "rep",
            random_node(rng, depth - 1, names),
            *rng.choice([(0, None), (1, None), (0, 1), (1, 2)]),
        ]
    return [kind, *(random_node(rng, depth - 1, names) for _ in range(rng.randint(2, 3)))]


def render_node(node: Any) -> str:
    if isinstance(node, str):
        return f'"{node}"'
    kind, *parts = node
    if kind == "set":
        return f"[{parts[0]}]"
    if kind == "name":
        return str(parts[0])
    if kind == "rep":
        return f"({render_node(parts[0])}){{{parts[1]},{'' if parts[2] is None else parts[2]}}}"
    return f"({(' | ' if kind == 'or' else ' ').join(map(render_node, parts))})"


def match_ends(rules: dict[str, Any], node: Any, text: str, at: int) -> frozenset[int]:
    """Where a text of this node that begins here can end."""
    if isinstance(node, str):
        return frozenset([at + len(node)] if text.startswith(node, at) else [])
    kind, *parts = node
    if kind == "set":
        return frozenset([at + 1] if text[at : at + 1] and text[at] in parts[0] else [])
    if kind == "name":
        return match_ends(rules, rules[parts[0]], text, at)
    if kind == "or":
        return frozenset().union(*(match_ends(rules, part, text, at) for part in parts))
    if kind == "rep":
        part, min_count, max_count = parts
        end_offsets, offsets, count = set(), {at}, 0
        while offsets and (max_count is None or count <= max_count) and count <= len(text) + 2:
            end_offsets |= offsets if count >= min_count else set()
            offsets = {e for h in offsets for e in match_ends(rules, part, text, h)}
            count += 1
        return frozenset(end_offsets)
    places = {at}
    for part in parts:
        places = {e for p in places for e in match_ends(rules, part, text, p)}
    return frozenset(places)


@cache
def all_texts(longest: int) -> list[str]:
    strings = [""]
    for text in strings:
        if len(text) < longest:
            strings += [text + c for c in "abc"]
    return strings


@needed
@pytest.mark.parametrize("seed", range(40))
def test_random_grammars_match_what_their_characters_say(seed: int):
    rng = random.Random(seed)
    names = ["root", "x", "y"]
    rules = {name: random_node(rng, 3, names) for name in names}
    text = "\n".join(f"{name} ::= {render_node(rule)}" for name, rule in rules.items())
    grammar = Grammar.from_gbnf(TOKENIZER, text)
    sample = all_texts(4) + ["".join(rng.choices("abc", k=rng.randint(5, 7))) for _ in range(60)]
    expected = [t for t in sample if len(t) in match_ends(rules, rules["root"], t, 0)]
    assert [t for t in sample if matches(grammar, t)] == expected, text


def lexemes(text: str) -> list[str]:
    """The regular expressions of a grammar's lexemes, with characters as they are."""
    lines = [line for line in to_lark(parse_gbnf(text)).splitlines() if line.startswith("T")]
    return sorted(
        re.sub(r"\[\\x\{(\w+)}-\\x\{\1}]", lambda m: chr(int(m[1], 16)), line) for line in lines
    )


@needed
def test_lexemes_are_large_where_that_is_safe():
    safe = lexemes('root ::= "[" (word ("," word)*)? "]"\nword ::= "\\"" [c]* "\\"" | root')
    assert any("c){0,}" in line for line in safe)
    split = lexemes('root ::= [a]* x\nx ::= "(" x ")" | "ab"')
    assert not any("{0,}" in line for line in split)


WRONG = {
    'root ::= "a': (1, 12, "inside quotes"),
    "root ::= (a": (1, 12, r"\) is expected"),
    "root = x": (1, 6, "::= is expected"),
    "root ::= x": (1, 10, "no rule x"),
    'rot ::= "a"': (1, 1, "no rule root"),
    'root ::= "b"\nx ::= *': (2, 7, "nothing before it"),
    'root ::= "a"{2': (1, 15, "} is expected"),
    'root ::= "a"{x}': (1, 14, "a number of times is expected"),
    'root ::= "a"{9999}': (1, 19, "more than 2000"),
    'root ::= "\\q"': (1, 11, r"q is no escape"),
    "root ::= [\\u12]": (1, 11, "needs 4 hex digits"),
    "root ::= []": (1, 12, "no character"),
    'root ::= "a"{' + "9" * 5000 + "}": (1, 5014, "5,000 digits"),
    'root ::= "a"{1,' + "9" * 5000 + "}": (1, 5016, "5,000 digits"),
    'root ::= "a"' + "*" * 5000: (1, 113, "repetitions are more than 100 deep"),
    'root ::= "a\\uD800"': (1, 12, "D800 is half a character"),
    "root ::= [\\uD800-\\uDFFF]": (1, 25, "no character"),
    "root ::= <[" + "9" * 5000 + "]>": (1, 10, r"no token <\["),
    "root ::= r0\n" + "".join(f'r{i} ::= "(" r{i + 1}\n' for i in range(600)) + "r600 ::= root": (500, 14, "500 deep"),
    'root ::= "a" )': (1, 14, r"'\)' is not expected"),
    "root ::= <|nix|>": (1, 10, "no token <|nix|>"),
    "root ::= 'a'": (1, 10, "is not expected"),
    'root ::= "a" | root "a"': (1, 16, "begin with itself"),
    'root ::= asdf\nasdf ::= "a" | asdf "a"': (2, 16, "begin with itself"),
    'root ::= asdf\nasdf ::= "a" | foo "b"\nfoo ::= "c" | asdf "d" | "e"': (3, 15, "begin with itself"),
    'root ::= x\nx ::= "a" | foo "b"\nfoo ::= "c" | empty x "d" | "e"\nempty ::= "blah" | ': (3, 21, "itself"),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_wrong_grammars_are_refused_by_line_and_column(text: str):
    line, column, fact = WRONG[text]
    with pytest.raises(
        InputError, match=f"^grammar, line {line}, column {column}: .*{fact.replace('|', '[|]')}"
    ):
        parse_gbnf(text)


@needed
def test_large_grammars_are_read():
    """Long chains of rules, rules that double 40 times, many words, long words, many groups in each other."""
    rules = "\n".join(f'r{n} ::= ("," "k{n}" r{n + 1}) | r{n + 1}' for n in range(300))
    grammar = Grammar.from_gbnf(TOKENIZER, f'root ::= r0\n{rules}\nr300 ::= "."')
    assert matches(grammar, ",k7,k150,k299.") and not matches(grammar, ",k7,k5.")
    doubled = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)) + '\nr40 ::= "x"'
    allowed = Grammar.from_gbnf(TOKENIZER, f"root ::= r0\n{doubled}").allowed(300)
    assert allowed is not None and np.flatnonzero(allowed).tolist() == ids_of("x")
    words = " | ".join(f'"w{n}"' for n in range(5000))
    grammar = Grammar.from_gbnf(TOKENIZER, f'root ::= {words} | "{"z" * 9000}"')
    assert matches(grammar, "w4999") and not matches(grammar, "w5000")
    opened, closed = "(" * 50, ')+ "."' * 50
    grammar = Grammar.from_gbnf(TOKENIZER, f'root ::= {opened} "x" {closed}')
    assert matches(grammar, "x" + "." * 50) and not matches(grammar, "x" + "." * 49)


@needed
def test_what_llguidance_refuses_is_one_clear_line():
    for text, line in (
        (
            "root ::= <[99999]>",
            r"grammar, line 1, column 10: the vocabulary has no token <\[99999\]>",
        ),
        (f'root ::= "(" root ")" | "{"x" * 70000}"', "it is too large or too deep for llguidance"),
    ):
        with pytest.raises(InputError, match=f"{line}$"):
            Grammar.from_gbnf(TOKENIZER, text)
    for schema, line in (
        ('{"items":' * 400 + "{}" + "}" * 400, "it is too large or too deep for llguidance"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "JSON schema: it is nested too deep"),
        (f'{{"maximum": {"9" * 5000}}}', "JSON schema: a number has too many digits"),
        ('{"type": "string", "pattern": "("}', "regex parse error: unclosed group"),
        (
            '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
            "no token of this vocabulary can come next",
        ),
    ):
        with pytest.raises(InputError, match=f"{re.escape(line)}$"):
            Grammar.from_schema(TOKENIZER, schema)


@needed
def test_tokens_by_name_and_control_tokens_are_no_text():
    grammar = Grammar.from_gbnf(TOKENIZER, "root ::= <|4|> [^x] [^x] !<|5|>")
    assert matches(grammar, [4, "ab", 6]) and not matches(grammar, [4, "ab", 5])
    assert not matches(grammar, [5, "ab", 6])
    any_text = Grammar.from_gbnf(TOKENIZER, "root ::= .+")
    allowed = any_text.allowed(TOKENIZER.vocab_size + 7)
    assert allowed is not None and len(allowed) == TOKENIZER.vocab_size + 7
    assert not allowed[[0, 1, 2, *range(CONTROLS, CONTROLS + 30)]].any() and not allowed[-7:].any()


@needed
def test_a_mask_that_comes_again_is_unpacked_once_and_nobody_can_change_it():
    letters, size = Grammar.from_gbnf(TOKENIZER, "root ::= [a-z] [a-z]*"), TOKENIZER.vocab_size
    start = letters.allowed(size)
    letters.accept(ids_of("a")[0])
    fork, mask = letters.copy(), letters.allowed(size)
    assert start is not None and mask is not None and not start[2] and mask[2]
    assert (mask != start).sum() == 1  # the same letters, and the text may end
    letters.accept(ids_of("b")[0])
    assert letters.allowed(size) is mask and fork.allowed(size) is not start
    longer_mask = letters.allowed(size + 1)
    assert longer_mask is not None and len(longer_mask) == size + 1
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = True


HAS_A = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
HAS_B = {"type": "object", "properties": {"b": {"enum": [True]}}, "required": ["b"]}
SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "integer", "minimum": 0}, ["0", "10", "10000"], ["-1", "00", "01", "-0"]),
    ({"type": "integer", "minimum": -123, "maximum": 42}, ["-123", "-11", "0", "42"], ["-124", "43", "0123"]),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10000}, ["1", "9999"], ["0", "01", "10000"]),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ['"a"', '"🔵b"'], ['""', '"abc"', "a"]),
    ({"enum": ["red", 3, None, ["a"]]}, ['"red"', "3", "null", '["a"]'], ['"blue"', "4", "red"]),
    ({"const": "foo"}, ['"foo"'], ['"bar"', "foo"]),
    ({"type": "boolean"}, ["true", "false"], ["True", "1", '"true"']),
    ({"type": ["boolean", "null"]}, ["null", "true"], ["0"]),
    ({"type": "array", "items": {"type": "number"}, "minItems": 1}, ["[1]", "[1.5, -2e3]"], ["[]", '["a"]']),
    ({"type": "array", "prefixItems": [{"type": "string"}], "items": False}, ['["a"]'], ['["a", 1]', "[1]"]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ['"a"', "null"], ["1"]),
    ({"type": "string", "pattern": "^a{3}b$"}, ['"aaab"'], ['"aab"', '"aaabc"']),
    ({"type": "string", "format": "date"}, ['"2026-02-28"'], ['"2026-13-01"', '"today"']),
    (
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]},
        ['{"a":"x"}', '{"a": "x", "b": 2}', '{\n  "a": "x"\n}'],
        ["{}", '{"b": 2}', '{"a":"x","c":1}', '{"b":1,"a":"x"}', "\n\n\n{}", '{"a":   "x"}', '{"a":\n\n\n"x"}'],
    ),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, ['{"a":1,"z":2}', "{}"], ['{"a"}']),
    ({"type": "object"}, ["{}", '{"x": [1, {"y": null}]}'], ["[]", "1"]),
    (
        {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
            "v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}, "required": ["v"]}}},
        ['{"v": 1}', '{"v": 1, "next": {"v": 2}}'],
        ['{"next": {"v": 2}}', '{"v": 1, "next": 2}'],
    ),
    (
        {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                   {"properties": {"b": {"type": "integer"}}, "required": ["b"]}], "type": "object"},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}'],
    ),
    (
        {"allOf": [{"$ref": "#/$defs/A"}, HAS_B], "$defs": {"A": HAS_A}},
        ['{"a":7,"b":true}'],
        ['{"a":7}', '{"b":true}', '{"a":7,"b":true,"c":1}'],
    ),
    (
        {"allOf": [HAS_A, {"anyOf": [HAS_B, {"properties": {"c": {"const": 1}}, "required": ["c"]}]}]},
        ['{"a":7,"b":true}', '{"a":7,"c":1}'],
        ['{"a":7}', '{"a":7,"b":true,"d":1}'],
    ),
    ({"anyOf": [HAS_A, HAS_B]}, ['{"a":7}', '{"b":true}'], ['{"a":7,"b":true}', "{}"]),
    ({"type": "object", "oneOf": [HAS_A, HAS_B]}, ['{"a":7}', '{"b":true}'], ['{"a":7,"b":true}', "{}"]),
    ({**HAS_A, "anyOf": [{"required": ["a"]}, {"required": ["z"]}]}, ['{"a":7}', '{"a":7,"z":1}'], ['{"a":7,"y":1}']),
    (
        {"properties": {"next": {"allOf": [{"$ref": "#"}], "title": "N"}, "v": {"const": 1}}, "required": ["v"]},
        ['{"v":1}', '{"next":{"v":1},"v":1}'],
        ['{"next":{},"v":1}', '{"v":1,"w":1}'],
    ),
    (
        {"allOf": [HAS_A, HAS_B], "unevaluatedProperties": False},
        ['{"a":7,"b":true}'],
        ['{"a":7,"b":true,"c":1}'],
    ),
    (
        {"allOf": [{**HAS_A, "unevaluatedProperties": False}, {"properties": {"b": {"const": 1}}}]},
        ['{"a":7}'],
        ['{"a":7,"b":1}'],
    ),
    (
        {**HAS_A, "anyOf": [{"required": ["b"], "unevaluatedProperties": False}, {}]},
        ['{"a":7}'],
        ['{"a":7,"b":1}'],
    ),
    ({**HAS_A, "additionalProperties": True, "allOf": [HAS_B]}, ['{"a":7,"b":true,"c":1}'], ['{"a":7}']),
    (
        {"properties": {"format": {"type": "string", "format": "uri-reference"}, "n": {"format": "int32", "const": 5}}},
        ['{"format":"any"}', '{"n":5}'],
        ['{"format":5}'],
    ),
    ({"type": "array", "items": {"const": 1}, "uniqueItems": False}, ["[1,1]"], ["[2]"]),
    (
        {"properties": {"a": {"const": 1}, "ab": {}}, "additionalProperties": {"type": "null"}},
        ['{"a":1}', '{"a":1,"ab":2,"b":null,"":null}', '{"abc":null,"b\\n":null}'],
        [r'{"\u0061":null}', '{"a":null}', '{"b":1}', r'{"a\u0062":null}'],
    ),
    (
        {"allOf": [{"properties": {"a": {"const": 1}}}, {"additionalProperties": {"type": "integer"}}]},
        ['{"a":1,"b":2}'],
        [r'{"\u0061":2}', '{"b":null}'],
    ),
    (
        {"properties": {"a": {"const": 1}, "ab": {}}, "additionalProperties": True},
        ['{"a":1}', '{"a":1,"ab":2,"b":null,"":[]}', '{"abc":{},"b\\n":null}'],
        [r'{"\u0061":1}', '{"a":2}', r'{"a\u0062":null}', '{"a":1,"a":1}'],
    ),
    (
        {"properties": {"b\n": {"const": 1}}, "unevaluatedProperties": True},
        ['{"b\\n":1,"b":2}', r'{"\"":2,"a":1}'],
        ['{"b\\n":2}', r'{"b\u000a":2}'],
    ),
    (
        {"properties": {'"': {"const": 1}, "a\\": {"const": 2}}, "additionalProperties": {}},
        [r'{"\"":1,"a\\":2}', r'{"a":0,"\\":0,"\"\"":0}'],
        [r'{"\"":2}', r'{"a\\":1}', r'{"\u0022":2}', r'{"a\u005c":1}'],
    ),
    ({"type": "object", "patternProperties": {"^x": {"const": 1}}}, ['{"xy":1}', "{}"], ['{"xy":2}', r'{"\u0078":2}']),
    ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53)]),
    ({"type": "integer", "maximum": 2**53 + 3, "minimum": 2**53}, [str(2**53 + 2)], [str(2**53 + 4)]),
    ({"format": "date"}, ['"2024-02-29"', '"2000-02-29"'], ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"']),
    ({"format": "date-time"}, ['"2024-02-29T23:59:59Z"'], ['"2023-02-29T00:00:00Z"', '"2024-02-28T00:00:60Z"']),
    ({"format": "time", "pattern": "^2"}, ['"23:59:59.5Z"'], ['"23:00:60Z"', '"03:00:00Z"']),
    ({"format": "hostname"}, ['"a-b.example"'], ['"xn--X"', json.dumps(".".join(["a" * 60] * 5))]),
    ({"pattern": '^[^"]*$'}, [r'"a\\\n"'], [r'"\""']),
    (
        {"properties": {'"': {"const": 1}}, "additionalProperties": {"type": "null"}},
        [r'{"\"":1,"\\":null}'],
        [r'{"\"":null}'],
    ),
    ({"pattern": r"^[^\\\]]+$"}, [r'"a\"[\n"'], [r'"\\"', '"]"']),
    ({"pattern": r"^\S\\s[\s]$"}, [r'"a\\s "'], ['"\ufeff\\\\s "', '"a\\\\s\x85"', '"a  "']),
]  # fmt: skip


@needed
@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_schemas(number: int):
    schema, accepted, rejected = SCHEMAS[number]
    grammar = Grammar.from_schema(TOKENIZER, json.dumps(schema))
    assert [t for t in accepted if not matches(grammar, t)] == []
    assert [t for t in rejected if matches(grammar, t)] == []


OPEN_A = {**HAS_A, "additionalProperties": True}
REFUSED_SCHEMAS: list[tuple[Any, str]] = [
    ({"properties": {"n": {"minProperties": 2}}}, "n: minProperties of more than one name not required is"),
    ({"patternProperties": {"^x": {}}, "additionalProperties": True}, "patternProperties: additionalProperties"),
    ({"oneOf": [OPEN_A, HAS_B]}, "oneOf: an answer may fit several of its parts"),
    ({"properties": {"n": {"const": 2**53 + 1}}}, "n: const: a number has too many digits"),
    ({"enum": [[2**70]]}, "enum: a number has too many digits"),
    ({"pattern": "^[a[b]]$"}, "pattern is not supported"),
    ({"pattern": "^[^a&&b]$"}, "pattern is not supported"),
    ({"patternProperties": {"(?=x)": {}}}, "patternProperties is not supported"),
    ({"properties": {"a": {"properties": {"b": {"type": "hiccup"}}}, "c": {}}}, "a.b: type: Invalid type"),
    ({"properties": {"a": {"$ref": "http://localhost/x"}}, "$defs": {"x": {}}}, "a: $ref: Resource 'http://localhost/x'"),
    ({"type": "object", "properties": {"a": {"oneOf": [{"minimum": 1}, {"maximum": 2}]}}}, "a: oneOf"),
]  # fmt: skip


@needed
def test_schemas_that_are_refused():
    with pytest.raises(InputError, match="JSON schema, line 2, column 3"):
        Grammar.from_schema(TOKENIZER, "{\n  x}")
    with pytest.raises(InputError, match="must be an object"):
        Grammar.from_schema(TOKENIZER, "[]")
    for wrong in (
        {"type": "banana"},
        {"$ref": "#/nowhere"},
        {"type": "integer", "minimum": 5, "maximum": 4},
    ):
        with pytest.raises(InputError, match=r"JSON schema: (type|\$ref|minimum): "):
            Grammar.from_schema(TOKENIZER, json.dumps(wrong))
    branches = [{"properties": {"b": {"enum": [1]}}}, {"properties": {"c": {"enum": [1]}}}]
    with pytest.raises(InputError, match="unevaluatedProperties: beside parts of anyOf or oneOf"):
        Grammar.from_schema(
            TOKENIZER,
            json.dumps(HAS_A | {"anyOf": branches, "unevaluatedProperties": False}),
        )
    for key in ("properties", "required", "allOf", "anyOf", "oneOf", "$ref", "patternProperties"):
        for value in (5, "x", [5], {"a": 5}, [[]], None):
            with contextlib.suppress(InputError):  # which is all that may come
                Grammar.from_schema(TOKENIZER, json.dumps(HAS_A | {key: value}))
    for schema, fact in REFUSED_SCHEMAS:
        with pytest.raises(InputError, match=f"^JSON schema: {re.escape(fact)}"):
            Grammar.from_schema(TOKENIZER, json.dumps(schema))
    optional = {"properties": {"b": {"enum": [1]}}}
    for second_schema in ({"required": ["a"], **optional}, {"type": "object", "required": ["c"]}):
        with pytest.raises(InputError, match="oneOf: an answer may fit several of its parts"):
            Grammar.from_schema(TOKENIZER, json.dumps({"oneOf": [HAS_A, second_schema]}))


def test_references_move_also_in_properties_named_like_keywords():
    reference = {"$ref": "#/$defs/x"}
    schema = {"properties": {"default": reference, "enum": reference}, "default": reference}
    moved_reference = {"$ref": "#/properties/a/$defs/x"}
    assert rebase_references(schema, "#/properties/a") == {
        "properties": {"default": moved_reference, "enum": moved_reference},
        "default": reference,
    }


def is_valid(document: dict[str, int], schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """JSON Schema's meaning of the keywords below."""
    parts = [root["$defs"]["x"]] if "$ref" in schema else schema.get("allOf", [])
    properties = schema.get("properties", {})
    return (
        all(is_valid(document, part, root) for part in parts)
        and ("anyOf" not in schema or any(is_valid(document, x, root) for x in schema["anyOf"]))
        and all(
            document[name] in subschema["enum"]
            for name, subschema in properties.items()
            if name in document
        )
        and all(name in document for name in schema.get("required", []))
    )


@needed
@pytest.mark.parametrize("seed", range(6))
def test_documents_of_merged_objects_fit_the_schema_and_none_is_lost(seed: int):
    """All small documents of random merges: taken where the schema takes them and all their names stand in it."""
    rng, names = random.Random(seed), "abc"

    def objects() -> dict[str, Any]:
        chosen_names = rng.sample(names, rng.randint(1, 2))
        properties = {
            name: {"enum": rng.sample([1, 2], rng.randint(1, 2))} for name in chosen_names
        }
        return {
            "type": "object",
            "properties": properties,
            "required": chosen_names[: rng.randint(0, 2)],
        }

    merged = {
        "allOf": [objects(), {"anyOf": [objects(), {"$ref": "#/$defs/x"}]}],
        "$defs": {"x": objects()},
    }
    schema_text = json.dumps(merged)
    try:
        grammar = Grammar.from_schema(TOKENIZER, schema_text)
    except InputError:
        grammar = None
    for values in itertools.product([None, 1, 2], repeat=3):
        document = {name: value for name, value in zip(names, values, strict=True) if value}
        fits = is_valid(document, merged, merged)
        is_closed = all(f'"{name}": {{"enum"' in schema_text for name in document)
        is_accepted = grammar is not None and any(
            matches(grammar, json.dumps(dict(order)))
            for order in itertools.permutations(document.items())
        )
        assert is_accepted == (fits and is_closed), document


@needed
def test_copies_go_on_by_themselves():
    grammar = Grammar.from_gbnf(TOKENIZER, 'root ::= "ab" ("c" | "d") "e"')
    grammar.accept(ids_of("a")[0])
    copied = grammar.copy()
    for id in ids_of("bde"):
        grammar.accept(id)
    assert grammar.over and grammar.is_complete and not copied.over
    assert matches(copied, "bce") and not matches(copied, "e")


@needed
def test_lazy_grammars_begin_with_their_trigger():
    text = 'root ::= "<tool>" [0-9]+ "</tool>"'
    lazy = Grammar.from_gbnf(TOKENIZER, text, words=["<tool>"])
    for id in ids_of('some {" text <too'):
        assert lazy.allowed(9) is None and not lazy.over
        lazy.accept(id)
    for id in ids_of("l>"):
        lazy.accept(id)
    assert not lazy.awaits_trigger and matches(lazy, "12</tool>") and not matches(lazy, "x")
    token = Grammar.from_gbnf(TOKENIZER, "root ::= <|7|> [0-9]+", tokens=[CONTROLS + 7])
    for id in ids_of(["<|7|>", 6, 7]):
        assert token.awaits_trigger
        token.accept(id)
    assert matches(token, "42") and not matches(token, "x")


@needed
def test_a_trigger_in_the_middle_of_a_token():
    lazy = Grammar.from_gbnf(TOKENIZER, 'root ::= "bc" "d"+', words=["bc"])
    lazy.accept(TOKENIZER.vocab_size - 5)  # abc
    assert not lazy.awaits_trigger and matches(lazy, "dd") and not matches(lazy, "c")
    with pytest.raises(InputError, match="does not follow the grammar"):
        wrong = Grammar.from_gbnf(TOKENIZER, 'root ::= "bd"', words=["bc"])
        wrong.accept(TOKENIZER.vocab_size - 5)


@needed
def test_the_command_writes_what_the_grammar_says(tmp_path):
    path = tmp_path / "m.gguf"
    random_model(path, "llama")
    file = tmp_path / "g.gbnf"
    file.write_text('root ::= [a-e] [a-e] ("x" | "yy")')
    options = {
        "prompt": "the",
        "temp": 3.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "n_predict": 40,
    }
    outputs = set()
    for seed in range(4):
        done = generate(GenerateSettings(path, seed=seed, grammar_file=file, **options), Events())
        outputs.add(done.text.strip())
        assert (
            done.ended == "end"
            and len(done.text.strip()) in (3, 4)
            and set(done.text) <= set(" abcdexy")
        )
    assert len(outputs) > 1
    with pytest.raises(InputError, match="exclude each other"):
        generate(GenerateSettings(path, grammar="x", json_schema="{}"), Events())
    with pytest.raises(InputError, match=r"--grammar-file: .* does not exist"):
        generate(GenerateSettings(path, grammar_file=tmp_path / "no"), Events())


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("packtrain.inference.grammar.vocabulary_table.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install llguidance .*extra grammar"):
        Grammar.from_gbnf(_tokenizer(), 'root ::= "a"')
