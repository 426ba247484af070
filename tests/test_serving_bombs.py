"""Few bytes that ask for much work or memory, and clients that hold theirs back, at a server with little room."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from packtrain.models.model_file import open_model
from tests.adapters import random_adapter
from tests.architectures import random_model
from tests.hostile_requests import BODY, Ask
from tests.servers import serve_process
from tests.test_serving_hostile import MEMORY, Hostile, ask_all, head

TEMPLATE = (
    "{% if messages[-1].content == 'grow' %}{% set all = namespace(x='x' * 1000) %}{% for n in range(60) %}{% set"
    " all.x = all.x + all.x %}{% endfor %}{{ all.x }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)  # fmt: skip
GRAMMARS = (
    'root ::= root "a" | "a"', "root ::= a\na ::= b\nb ::= a", 'root ::= (("a"*)*)*', 'root ::= "a"{1,100000000}',
    'root ::= (((((("a"{100}){100}){100}){100}){100}){100})', "root ::= " + "(" * 60_000, "root ::= [\0-\U0010ffff]*",
    "root ::= " + "|".join(f'"a{n}"' for n in range(6000)), "root ::= " + '"a"? ' * 5000, "root ::= [z-a]", "::=",
    "\n".join(f'r{n} ::= "a" r{n + 1}' for n in range(2000)) + '\nroot ::= r0\nr2000 ::= "b"',
    "root ::= s\ns ::= s s | ",
)  # fmt: skip
TEXT: dict[str, Any] = {"type": "string"}
PARTS = {f"p{n}": TEXT for n in range(1000)}
SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}}, {"$ref": "file:///etc/passwd"},
    {"$ref": "http://localhost/x"},
    *(TEXT | {"pattern": words} for words in ("^(a+)+$", "(a{1000}){1000}", "(" * 5000, "(?=a)b\\1", "y|" * 500)),
    *(TEXT | {"pattern": words} for words in ("((a{0,100}){0,100}){0,100}", ".*a.{30}", "\\p{L}{1,1000}", "[")),
    TEXT | {"minLength": 10**9}, {"type": "array", "minItems": 10**9}, {"type": "integer", "minimum": 10**300},
    {"type": "array", "items": {"type": "array", "minItems": 1000, "items": {"enum": [*range(2000)]}}},
    {"type": "number", "multipleOf": 1e-300}, {"type": "object", "properties": PARTS}, {"enum": [*PARTS]},
    {"type": "object", "properties": PARTS, "required": [*PARTS]},
    {"anyOf": [{"properties": {n: TEXT}} for n in PARTS]},
    {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(10)]} for i in range(10)]},
)  # fmt: skip
MUCH: tuple[dict[str, Any], ...] = (
    {"stop": ["a" * n for n in range(1, 65)]}, {"stop": ["a"] * 5000}, {"stop": "a" * (1 << 19)}, {"n": 32},
    {"logit_bias": [[n % 290, 1] for n in range(50_000)]}, {"logit_bias": [["the " * 250, 1]] * 200},
    {"logit_bias": [[n, False] for n in range(290)]}, {"logit_bias": [[n % 290, -1e300] for n in range(10_000)]},
    {"dry_multiplier": 1, "dry_sequence_breakers": ["the " * 2000] * 64}, {"samplers": ["top_k"] * 33},
    {"dry_multiplier": 1, "dry_base": 1e300, "dry_allowed_length": 0, "dry_penalty_last_n": -1}, {"temperature": 1e300},
    {"temperature": 1e-300}, {"mirostat": 2, "mirostat_tau": 1e300, "mirostat_eta": 1e300}, {"prompt": ["a"] * 32},
    {"mirostat": 1, "mirostat_tau": 0, "mirostat_eta": 1e300}, {"dynatemp_range": 1e300, "dynatemp_exponent": 1e300},
    {"repeat_penalty": 1e30, "frequency_penalty": -1e30, "repeat_last_n": -1}, {"n_probs": 290, "n_predict": 400},
    {"messages": [{"role": "user", "content": "a"}] * 10_000}, {"messages": [{"role": "user", "content": "grow"}]},
    {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(128)], "tool_choice": "required"},
    {"input": ["a b c"] * 512}, {"tokens": [40] * 100_000}, {"content": "\u4e00" * 100_000, "with_pieces": True},
)  # fmt: skip
ROUTE_FIELDS = {
    "/v1/embeddings": "input",
    "/tokenize": "content",
    "/detokenize": "tokens",
    "/apply-template": "messages",
    "/v1/chat/completions/input_tokens": "tools",
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    folder = tmp_path_factory.mktemp("bombs")
    random_model(folder / "m.gguf", "llama")
    random_adapter(folder / "a.gguf", open_model(folder / "m.gguf"))
    (folder / "t.jinja").write_text(TEMPLATE)
    flags = ["--ctx", "512", "--memory", f"{MEMORY >> 20}MiB", "--embeddings", "--chat-template"]
    flags += [str(folder / "t.jinja"), "--lora", str(folder / "a.gguf")]
    with serve_process(folder / "m.gguf", *flags) as served:
        hostile = Hostile(served, folder)
        yield hostile
        hostile.done.set()


@pytest.fixture
def server(started: Hostile) -> Iterator[Hostile]:
    yield started
    started.check()


def post_requests(path: str, *variants: dict[str, Any]) -> list[Ask]:
    return [Ask("POST", path, json.dumps(BODY | fields).encode()) for fields in variants]


@pytest.mark.grammar
def test_grammars_and_schemas_that_grow(server: Hostile) -> None:
    """Each is used or refused, and eight at once need no more memory than was planned."""
    ask_all(server, post_requests("/completion", *({"grammar": spec} for spec in GRAMMARS)))
    ask_all(server, post_requests("/completion", *({"json_schema": spec} for spec in SCHEMAS)))
    tool = {"type": "function", "function": {"name": "f"}}
    tools = [
        {"tools": [tool | {"function": {"name": "f", "parameters": spec}}]} for spec in SCHEMAS
    ]
    ask_all(server, post_requests("/v1/chat/completions", *tools))


def test_much_of_everything(server: Hostile) -> None:
    ask_all(
        server,
        [*post_requests("/completion", *MUCH), *post_requests("/v1/chat/completions", *MUCH)],
    )
    request_groups = [
        post_requests(path, *(fields for fields in MUCH if field in fields))
        for path, field in ROUTE_FIELDS.items()
    ]
    assert all(request_groups)
    ask_all(server, [ask for group in request_groups for ask in group])


def test_large_requests_that_are_held_back(server: Hostile) -> None:
    """Thirty of almost a MiB, of which the last byte comes late: few are read at once, and all are answered."""
    body = json.dumps(BODY | {"user": "u" * ((1 << 20) - 500)}).encode()
    last = threading.Event()

    def ask(number: int) -> bytes:
        with socket.create_connection(("127.0.0.1", server.port), timeout=120) as sock:
            sock.sendall(head(len(body)) + body[:-1])
            last.wait()
            sock.sendall(body[-1:])
            return sock.recv(12)

    with ThreadPoolExecutor(30) as pool:
        answers = pool.map(ask, range(30))
        time.sleep(0.5)
        assert server.good_answer() == server.before
        last.set()
        assert {*answers} == {b"HTTP/1.1 200"}


def test_a_request_that_is_much_too_large_is_told_so(server: Hostile) -> None:
    """Its client sends all of it before it reads the answer."""
    for nbytes in (2 << 20, 10 << 20):
        status, _, answer = server.ask(Ask("POST", "/completion", b" " * nbytes))
        assert status == 413 and b"more than 1,048,576 bytes" in answer


def test_slow_writers_keep_nobody_out(server: Hostile) -> None:
    slow = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(60)]
    body = json.dumps(BODY).encode()
    request_bytes = head(len(body)) + body
    for at in range(0, 60, 2):
        for sock in slow:
            sock.sendall(request_bytes[at : at + 2])
        if at % 20 == 0:
            assert server.good_answer() == server.before
    for sock in slow:
        sock.sendall(request_bytes[60:])
    for sock in slow:
        assert sock.recv(12) == b"HTTP/1.1 200"
        sock.close()
