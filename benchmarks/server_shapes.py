"""Requests to llama.cpp's server and to packtrain serve on the same file: a table of benchmarks.conformance.

    python -m benchmarks.server_shapes MODEL.gguf --llama-server PATH

What is compared is the form of the answers: statuses, keys and types of JSON, and the sequence of events of a stream.
Differences that are wanted are named in WANTED, with a reason; any other is a fault.
"""

import argparse
import http.client
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.serving import server_process

OURS, THEIRS = 8983, 8984
PROMPT = "Once upon a time"
TEXT = {"prompt": PROMPT, "n_predict": 4, "temperature": 0}
USER = {"role": "user", "content": "Tell me a story"}
CHAT = {"messages": [USER], "max_tokens": 4, "temperature": 0}
STREAM = {"stream": True}
COUNTED = {"stream": True, "stream_options": {"include_usage": True}}
PARAMETERS = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": PARAMETERS}}
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
CHATS = "/v1/chat/completions"

# path, body; without one it is a GET
REQUESTS: tuple[tuple[str, Any], ...] = (
    ("/health", None),
    ("/v1/models", None),
    ("/props", None),
    ("/slots", None),
    ("/metrics", None),
    ("/lora-adapters", None),
    ("/nothing", None),
    ("/tokenize", {"content": PROMPT}),
    ("/tokenize", {"content": PROMPT, "with_pieces": True, "add_special": True}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [1, 403, 407]}),
    ("/apply-template", {"messages": [USER]}),
    ("/apply-template", {}),
    (f"{CHATS}/input_tokens", {"messages": [USER]}),
    ("/completion", TEXT),
    ("/completion", TEXT | STREAM),
    ("/completion", TEXT | {"n_probs": 2}),
    ("/completion", TEXT | STREAM | {"n_probs": 2}),
    ("/completion", TEXT | {"n_probs": 2, "post_sampling_probs": True, "temperature": 1.0}),
    ("/completion", TEXT | {"return_tokens": True, "stop": ["a"]}),
    ("/completion", TEXT | {"prompt": [PROMPT, [1, 403]]}),
    ("/completion", TEXT | {"response_fields": ["content", "generation_settings/n_predict"]}),
    ("/completion", TEXT | STREAM | {"timings_per_token": True}),
    ("/completion", TEXT | STREAM | {"return_progress": True, "cache_prompt": False}),
    ("/completion", TEXT | {"ignore_eos": True, "logit_bias": [[5, 1.0], [6, False]]}),
    ("/completion", TEXT | {"samplers": ["top_k", "temperature"], "n_indent": 1, "n_keep": 4}),
    ("/completion", TEXT | {"grammar": 'root ::= "a" "b"', "t_max_predict_ms": 1000}),
    ("/completion", TEXT | {"grammar": "root ::= ("}),
    ("/completion", TEXT | {"json_schema": SCHEMA, "n_predict": 40}),
    ("/completion", TEXT | {"temperature": "hot"}),
    ("/completion", {}),
    ("/completion", TEXT | {"prompt": PROMPT * 200}),
    ("/completion", TEXT | STREAM | {"prompt": PROMPT * 200}),
    ("/v1/completions", TEXT),
    ("/v1/completions", TEXT | STREAM),
    ("/v1/completions", TEXT | COUNTED),
    ("/v1/completions", TEXT | {"logprobs": 2}),
    ("/v1/completions", TEXT | STREAM | {"logprobs": 2}),
    (CHATS, CHAT),
    (CHATS, CHAT | STREAM),
    (CHATS, CHAT | COUNTED),
    (CHATS, CHAT | {"logprobs": True, "top_logprobs": 2}),
    (CHATS, CHAT | STREAM | {"logprobs": True, "top_logprobs": 2}),
    (CHATS, CHAT | STREAM | {"timings_per_token": True}),
    (CHATS, CHAT | STREAM | {"return_progress": True, "cache_prompt": False}),
    (CHATS, CHAT | {"n": 2}),
    (CHATS, CHAT | {"verbose": True}),
    (CHATS, CHAT | {"messages": [USER, {"role": "assistant", "content": "I am"}]}),
    (CHATS, CHAT | {"add_generation_prompt": True, "continue_final_message": True,
                    "messages": [USER, {"role": "assistant", "content": "I am"}]}),
    (CHATS, CHAT | {"response_format": {"type": "json_object", "schema": SCHEMA}, "max_tokens": 40}),
    (CHATS, CHAT | {"response_format": {"type": "sound"}}),
    (CHATS, CHAT | {"tools": [TOOL], "tool_choice": "none"}),
    (CHATS, CHAT | {"messages": [{}]}),
    (CHATS, {}),
    ("/slots/0?action=save", {"filename": "one.bin"}),
    ("/slots/0?action=restore", {"filename": "one.bin"}),
    ("/slots/0?action=restore", {"filename": "none.bin"}),
    ("/slots/0?action=erase", {}),
    ("/slots/0?action=burn", {}),
    ("/slots/9?action=erase", {}),
    ("/lora-adapters", []),
    ("/v1/embeddings", {"input": PROMPT}),
)  # fmt: skip

# a difference (pattern) and why it is wanted
EXPECTED_DIFFERENCES = {
    r"\.tfs: number here": "tail-free sampling, a sampler that llama-server no longer has",
    r"^/v1/completions event 1.usage: none here|^/v1/completions event [23]: ": (
        "counts of /v1/completions come in an event of their own and only when asked for, as OpenAI says"
    ),
    r"logprobs\.(text_offset|token_logprobs|tokens|top_logprobs): list here": (
        "probabilities of /v1/completions are in OpenAI's lists, too, which its clients read"
    ),
    r"^\S+ type: text here, none": "errors have the type around them that Anthropic's clients read",
    r"^/props model_hash: text here": "the page tells by it which model has answered",
    r"^/props (media_marker|cors_proxy_enabled|ui_settings): none here": (
        "there are no images, no proxy and no settings of llama-server's page"
    ),
    r"^/props chat_template_caps\..*: none here": "what a template does is told as far as it is tried",
    r"^/slots/9\S* status: 400 here": "a slot that is not there is refused; llama-server takes another",
}


@dataclass(frozen=True)
class Difference:
    path: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.path}: {self.ours} here, {self.theirs} in llama-server"


def ask(port: int, path: str, body: Any) -> tuple[int, str, bytes]:
    """Status, type and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    words = None if body is None else json.dumps(body)
    connection.request(
        "GET" if body is None else "POST", path, words, {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    return answer.status, answer.headers["content-type"].split(";")[0], answer.read()


def parsed(kind: str, text: bytes) -> Any:
    """JSON; the events of a stream, of which equal forms that follow each other are one; names of metrics."""
    if kind == "application/json":
        return json.loads(text)
    if kind == "text/event-stream":
        lines = [line[6:] for line in text.decode().split("\n\n") if line.startswith("data: ")]
        events = [line if line == "[DONE]" else json.loads(line) for line in lines]
        return {
            f"event {n}": next(equal_events)
            for n, (_, equal_events) in enumerate(groupby(events, form))
        }
    names = re.findall(r"# TYPE (\S+) (\S+)", text.decode(errors="replace"))
    return dict(names) or text.decode()


def form(value: Any) -> str:
    """Keys and types of a value."""
    if isinstance(value, dict):
        form_by_key = {key: form(value[key]) for key in sorted(value) if key != "top_logprobs"}
        return str(form_by_key)  # those have tokens for keys
    return f"[{form(value[0])}]" if isinstance(value, list) and value else word(value)


def word(value: Any) -> str:
    """What JSON calls a value."""
    kinds = {dict: "object", list: "list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "number")


def compare_values(our_value: Any, their_value: Any, path: str = "") -> Iterator[Difference]:
    """Where two values differ in form; of lists the first value counts."""
    if isinstance(our_value, dict) and isinstance(their_value, dict):
        for key in sorted({*our_value, *their_value}):
            if key in our_value and key in their_value:
                yield from compare_values(
                    our_value[key], their_value[key], f"{path}.{key}".strip(".")
                )
            else:
                words_seen = [
                    word(side[key]) if key in side else "none" for side in (our_value, their_value)
                ]
                yield Difference(f"{path}.{key}".strip("."), *words_seen)
    elif (
        isinstance(our_value, list) and isinstance(their_value, list) and our_value and their_value
    ):
        yield from compare_values(our_value[0], their_value[0], f"{path}[]")
    elif word(our_value) != word(their_value):
        yield Difference(path, word(our_value), word(their_value))


def differences(path: str, body: Any) -> list[Difference]:
    """How the answers to a request differ."""
    (code, kind, our_body), (code2, kind2, their_body) = (
        ask(port, path, body) for port in (OURS, THEIRS)
    )
    mismatches = [
        Difference(name, str(a), str(b))
        for name, a, b in (("status", code, code2), ("type", kind, kind2))
        if a != b
    ]
    return mismatches or [*compare_values(parsed(kind, our_body), parsed(kind2, their_body))]


def expected_reason(path: str, mismatch: Difference) -> str:
    """Why a difference is wanted; "" if it is not."""
    line = f"{path} {mismatch}"
    return next(
        (
            reason_text
            for pattern, reason_text in EXPECTED_DIFFERENCES.items()
            if re.search(pattern, line)
        ),
        "",
    )


def rows(server: str | Path, model: Path) -> Iterator[tuple[bool, str]]:
    """Whether all is well, and a line of the table, for each path; then what is wanted."""
    os.environ["LD_LIBRARY_PATH"] = str(Path(server).resolve().parent)
    used, counts = dict[str, int](), dict[str, list[int]]()
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        our_command = [sys.executable, "-m", "packtrain", "serve", str(model), "--port", str(OURS)]
        peer_flags = ["--port", str(THEIRS), "-t", "1", "--jinja", "-np", "2"]
        peer_command = [str(server), "-m", str(model), *peer_flags]
        common_flags = ["-c", "512", "--metrics", "--chat-template", "chatml", "--slot-save-path"]
        with (
            server_process([*our_command, "-np", "2", *common_flags, a], OURS),
            server_process([*peer_command, *common_flags, b, "-kvu", "--slots"], THEIRS),
        ):
            for path, body in REQUESTS:
                count = counts.setdefault(path.split("?")[0], [0, 0, 0])
                explained = [(one, expected_reason(path, one)) for one in differences(path, body)]
                for one, explanation in explained:
                    if explanation:
                        used[explanation] = used.get(explanation, 0) + 1
                    else:
                        print(f"{path} {json.dumps(body)[:150]}: {one}", file=sys.stderr)
                is_expected = bool(explained) and all(explanation for _, explanation in explained)
                count[0 if not explained else 1 if is_expected else 2] += 1
    for path, (num_equal, meant, wrong) in counts.items():
        yield (
            not wrong,
            f"| {path} | {num_equal + meant + wrong} | {num_equal} | {meant} | {wrong} |",
        )
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    yield True, f"| all | {sum(total)} | {total[0]} | {total[1]} | {total[2]} |"
    for n, (explanation, times) in enumerate(used.items()):
        yield True, f"{'' if n else chr(10)}- {explanation} ({times})"


HEADING = """| path of the server | requests | same form as llama-server's | with wanted differences | others |
|---|---|---|---|---|"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, required=True)
    args = parser.parse_args()
    print(HEADING)
    result_rows = [*rows(args.llama_server, args.model)]
    print("\n".join(line for _, line in result_rows))
    return 0 if all(is_good for is_good, _ in result_rows) else 1


if __name__ == "__main__":
    sys.exit(main())
