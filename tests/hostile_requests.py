"""Requests that no one would wish for, for every route of the server: from a seed, always the same list.

Bodies are texts, since much of what is wrong with them cannot be made by a writer of JSON.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from packtrain.serving.http_app import app
from packtrain.serving.json_fields import FIELDS

HOLE = "@hole@"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# one body for all routes, so that a new one is asked, too: each takes what it knows
BODY: dict[str, Any] = {
    "prompt": "the a", "messages": [{"role": "user", "content": "the a"}], "content": "the a", "input": "the a",
    "tokens": [40, 41], "filename": "a.bin", "n_predict": 2, "max_tokens": 2, "temperature": 0,
}  # fmt: skip
FIELD_VALUES: dict[str, Any] = {
    "messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "name": "b", "tool_calls": [TOOL]}],
    "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": True,
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": {}}}}},
    "json_schema": {"type": "array", "items": {"enum": ["a", 1]}}, "grammar": 'root ::= "a"', "stop": ["a"],
    "stream": True, "stream_options": {"include_usage": True}, "n": 2, "seed": 1, "logprobs": True, "top_logprobs": 2,
    "n_probs": 2, "logit_bias": [[40, 1.0]], "samplers": ["top_k"], "dry_sequence_breakers": ["a"], "id_slot": 0,
    "cache_prompt": True, "lora": [{"id": 0, "scale": 0.5}], "ignore_eos": False, "return_tokens": True,
    "response_fields": ["content"], "add_special": True, "parse_special": True, "with_pieces": True,
    "encoding_format": "float", "dimensions": 4, "max_completion_tokens": 2, "model": "m", "user": "u", "timings": True,
    "prompt": [[1, 40], "a", {"prompt_string": "a"}], "input": [[1, 40], [41]],
}  # fmt: skip
VALUES = (
    "null", "true", "false", "0", "-1", "1", "0.5", "1e308", "-1e308", "1e999", "-1e999", "1e-320", "NaN", "-Infinity",
    "1" + "0" * 400, "9" * 5000, '""', '"x"', r'"\ud800"', r'"a\u0000b"', '"\ufeff\u202e\U0001f600"', "[]", "{}",
    "[[]]",
    '"' + "the " * (1 << 17) + '"', '"' + "\u4e00" * (1 << 17) + '"', "[" * 500 + "]" * 500, "[" * 5000 + "]" * 5000,
    '{"a":' * 500 + "1" + "}" * 500, "[null]", '[1,"a",null,{}]', "[" + "0," * 20000 + "0]", '{"":{}}', r'["\udfff"]',
    "[1e999]", '{"40":1e999}', '{"40":' + "1" + "0" * 400 + "}", "[[40," + "1" + "0" * 400 + "]]", '"../../etc/passwd"',
    '"/etc/passwd"', "[true]", '[["a","b"]]', '{"type":"x"}', '{"$ref":"#"}', "[" + '"a",' * 5000 + '"a"]', "-0.0",
    '{"id":0,"scale":NaN}', '[{"id":0,"scale":1e999}]', '[{"id":true}]', "18446744073709551616", "2147483648",
)  # fmt: skip
BODIES = (
    b"", b" ", b"{", b"}", b"null", b"[]", b"[[]]", b"5", b'"x"', b"{'a': 1}", b'{"a": 1,}', b"\xff\xfe{\x00}\x00",
    b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\xff"}', b"\xef\xbb\xbf{}", b'{"prompt": "a", "prompt": 5}', b"\x00",
    b"[" * 200_000, b'{"a":' * 100_000, b"[" + b"[]," * 300_000 + b"[]]", b"{" + b'"":{},' * 140_000 + b'"":1}',
    b'{"prompt": "a"} x', b"prompt=a&n_predict=1", b'{"messages": "' + b"\\u0000" * 1000 + b'"}', b"nan", b"1e999",
)  # fmt: skip
TYPES = (
    "text/plain",
    "multipart/form-data; boundary=x",
    "application/json; charset=utf-16",
    "",
    "x" * 5000,
)
PARTS = (
    "0",
    "1",
    "-1",
    "9",
    "9" * 30,
    "9" * 5000,
    "x",
    "%00",
    "..",
    "%2e%2e",
    "0%2f..",
    "%d9%a1",
    "+1",
    "%201",
    "%",
    "%ff",
)
QUERIES = (
    "",
    "action=save",
    "action=restore",
    "action=erase",
    "action=",
    "action=%00",
    "action=save&action=erase",
    "%",
)
METHODS = "GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"


def nested(count: int, schema: Any) -> Any:
    """Objects in objects."""
    for _ in range(count):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubled(count: int, schema: Any) -> Any:
    for _ in range(count):
        schema = {"anyOf": [schema, schema]}
    return schema


SCHEMAS: tuple[Any, ...] = (
    nested(30, {}), nested(200, {}), doubled(11, {"type": "integer"}), {"$ref": "#"}, {"$ref": "file:///etc/passwd"},
    {"$ref": "http://127.0.0.1:1/"}, {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    "$ref": "#/$defs/a"},
    {"$defs": {"a": nested(1, {"$ref": "#/$defs/a"})}, "$ref": "#/$defs/a"}, {"enum": [f"x{n}" for n in range(5000)]},
    {"pattern": "(a+)+$", "type": "string"}, {"pattern": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}", "type": "string"},
    {"pattern": ".*a.{30}$", "type": "string"}, {"pattern": "(?<!a)b\\1", "type": "string"}, {"minLength": 10**9,
    "type": "string"},
    {"type": "array", "minItems": 10**9}, {"type": "integer", "multipleOf": 982451653}, {"minimum": 10**300,
    "type": "integer"},
    {"type": "object", "properties": {f"p{n}": {} for n in range(2000)}}, {"type": ["string",
    "null"] * 1000}, {"not": {}},
)  # fmt: skip
GRAMMARS = (
    'root ::= root "a" | "a"', "root ::= a\na ::= b\nb ::= a", f'root ::= {"(" * 5000}"a"{")" * 5000}', 'root ::= "\0"',
    'root ::= (("a"{1,1000}){1,1000}){1,1000}', 'root ::= "a"{1000000000}', 'root ::= ((("a"*)*)*)*',
    "root ::= nope", "x",
    "root ::= " + " ".join(['"a"?'] * 3000), "root ::= " + " | ".join(f'"{n}"' for n in range(5000)),
    "root ::= <[999999999]>",
    "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)) + '\nr40 ::= "y"', 'root ::= ""',
    "root ::= r0\n" + "\n".join(f"r{n} ::= (r{n + 1} | r{n + 1} r{n + 1})*" for n in range(8)) + "\nr8 ::= [a-z]",
    "root ::= .* \"a\" " + ". " * 40, "root ::= [a-z]* \"a\" " + "[a-z] " * 25, f'root ::= "{"a" * 30_000}"',
    'root ::= "a" ' * 9000,
)  # fmt: skip
BOMBS: tuple[dict[str, Any], ...] = (
    *({"json_schema": schema} for schema in SCHEMAS), *({"grammar": grammar} for grammar in GRAMMARS),
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": doubled(13, {})}}],
    "tool_choice": "required"},
    {"tools": [{"type": "function", "function": {"name": f"f{n}", "parameters": {}}} for n in range(1000)]},
    {"stop": [f"s{n}" for n in range(5000)]}, {"stop": ["a" * 500_000]}, {"stop": [""] * 60}, {"prompt": ["a"] * 1000},
    {"stop": ["the" * n for n in range(60)]}, {"logit_bias": {str(n % 280): 1 for n in range(100_000)}},
    {"logit_bias": [[n % 280, 0.5] for n in range(100_000)]}, {"logit_bias": [[n % 280, 0.5] for n in range(9_000)]},
    {"logit_bias": [["the a " * 100, -1]] * 5000}, {"logit_bias": [[n, False] for n in range(280)]}, {"n": 32,
    "n_predict": 9},
    {"n": 10**6}, {"n_probs": 280, "n_predict": 100}, {"n": 4, "logprobs": True, "top_logprobs": 20, "max_tokens": -1},
    {"samplers": ["top_k"] * 1000}, {"samplers": ["temperature"] * 30}, {"dry_sequence_breakers": ["a" * 1000] * 64,
    "dry_multiplier": 1},
    {"prompt": "xQzJ" * 250_000, "content": "xQzJ" * 250_000,
    "input": "xQzJ" * 250_000}, {"content": "\u4e00" * 300_000},
    {"content": "xQ\u00e9" * 200_000, "with_pieces": True}, {"input": ["a"] * 3000}, {"input": ["a b c"] * 300},
    {"messages": [{"role": "user", "content": "a"}] * 20_000}, {"messages": [{"role": "user",
    "content": "a " * 400_000}]},
    {"messages": [{"role": "user", "content": "{{ 9**9**9 }}{% for a in range(10**9) %}{% endfor %}"}]},
    {"tokens": [40] * 130_000}, {"tokens": [40] * 140_000}, {"penalty_last_n": 2**31,
    "repeat_penalty": 1.1}, {"min_keep": 2**40}, {"mirostat": 2, "mirostat_tau": 1e300},
    {"dry_multiplier": 1, "dry_allowed_length": 0, "dry_base": 1e300, "n_predict": 50}, {"temperature": 1e300,
    "dynatemp_range": 1e300},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method} {self.path[:80]} {self.body[:200]!r} ({len(self.body)} bytes) {str(self.headers)[:80]}"


def routes() -> list[tuple[str, str]]:
    """Path and method of each route, as the application has them."""
    application = app(cast(Any, None))
    return sorted(
        (route.path, method)
        for route in cast(Any, application.routes)
        for method in route.methods
        if method != "HEAD"
    )


def value_paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a document, at any depth."""
    if at:
        yield at
    pairs: Any = value.items() if isinstance(value, dict) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    for key, part in pairs:
        yield from value_paths(part, (*at, key))


def replace_at(value: Any, at: tuple[Any, ...], by: Any) -> Any:
    if not at:
        return by
    copy = value.copy()
    copy[at[0]] = replace_at(value[at[0]], at[1:], by)
    return copy


def spoiled_bodies() -> list[str]:
    """The body with each value at each place of it."""
    all_fields = {
        **FIELD_VALUES,
        **{name: 1 for name in FIELDS if name not in FIELD_VALUES and name not in BODY},
    }
    bodies = list[str]()
    for keys in [*value_paths(BODY), *value_paths(all_fields)]:
        body = {**BODY, keys[0]: all_fields.get(keys[0], BODY.get(keys[0]))}
        text = json.dumps(replace_at(body, keys, HOLE))
        bodies += [text.replace(f'"{HOLE}"', value) for value in VALUES]
    return bodies


def requests(seed: int, each: int) -> list[Ask]:
    """So many wrong bodies for each route, and each other thing that can be wrong with it once."""
    rng, asks, bodies = random.Random(seed), list[Ask](), spoiled_bodies()
    for path, method in routes():
        url = path.replace("{id}", "0")
        query = "?action=restore" if "{" in path else ""
        valid_body = json.dumps(BODY).encode()
        asks += [
            Ask(wrong_method, url, valid_body) for wrong_method in METHODS if wrong_method != method
        ]
        asks += [Ask(method, path.replace("{id}", part) + query, valid_body) for part in PARTS]
        asks += [Ask(method, f"{url}?{query}", valid_body) for query in QUERIES]
        if method == "POST":
            asks += [Ask(method, url + query, body) for body in BODIES]
            asks += [Ask(method, url, valid_body, {"Content-Type": kind}) for kind in TYPES]
            asks += [Ask(method, url + query, text.encode()) for text in rng.sample(bodies, each)]
    rng.shuffle(asks)
    return asks


def bombs() -> list[Ask]:
    """Each bomb for chats, and for others of the routes by turns."""
    posts = [path.replace("{id}", "0") for path, method in routes() if method == "POST"]
    asks = list[Ask]()
    for number, bomb in enumerate(BOMBS):
        body = json.dumps(BODY | bomb, ensure_ascii=False).encode()
        places = "/v1/chat/completions", posts[number % len(posts)]
        asks += [Ask("POST", path, body) for path in places]
    return asks
