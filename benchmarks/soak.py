"""The server for a long time under load that no one would wish for: it must live, leak nothing and stay in its memory.

    python -m benchmarks.soak MODEL.gguf [--minutes 30] [--memory 400MiB] [--clients 12]

Clients that ask and read, all APIs mixed: answers, tools, schemas, biases of many tokens, probabilities of prompts,
embeddings; that go away before, in or after a stream; that send garbage, half of a request, wrong keys, bodies that are
too large; that read a byte a second. Prints a line a minute: requests by status, private memory.
Exit code 1 after a crash, a status 500, a slot that stays busy, an answer that never comes, or memory beyond the plan.
"""

import argparse
import http.client
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.serving import server_process
from benchmarks.watched import private_nbytes_of
from packtrain.common.memory import parse_size

KEY = "soak-key"
PATHS = "/v1/chat/completions", "/v1/responses", "/v1/messages"
WORDS = "once", "upon", "a", "time", "there", "was", "little", "girl", "who"
FIELDS = "temperature", "messages", "stop", "n", "seed", "logit_bias", "max_tokens", "tools", "lora"
MAX_ID = 512  # tokens below it have biases
END = 60.0  # seconds in which all slots must be idle after the load


class Load:
    """Clients of one server, and what they saw."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.seen, self.stop = port, Counter[str](), threading.Event()
        self._seed, self._lock = seed, threading.Lock()

    def run(self, number: int) -> None:
        rng = random.Random(self._seed + number)
        kinds: list[Callable[[random.Random], str]] = [
            self.full_answer, self.full_answer, self.stream, self.leave, self.leave, self.garbage, self.half,
            self.wrong_key,
            self.huge, self.slow, self.odd, self.shaped, self.shaped, self.biased, self.scored, self.embed,
        ]  # fmt: skip
        while not self.stop.is_set():
            kind = rng.choice(kinds)
            try:
                outcome = kind(rng)
            except (OSError, http.client.HTTPException) as error:
                outcome = f"{kind.__name__} {type(error).__name__}"
            with self._lock:
                self.seen[outcome] += 1

    def count(self, words: str) -> int:
        """How many requests came to such an end."""
        return sum(count for name, count in self.seen.items() if name.endswith(words))

    def body(self, rng: random.Random, **fields: object) -> bytes:
        text = " ".join(rng.choices(WORDS, k=rng.choice((3, 20, 200, 3000))))
        max_tokens = rng.randrange(1, 200)
        chat = {
            "messages": [{"role": "user", "content": text}], "input": text,  # of all three APIs
            "max_tokens": max_tokens, "max_output_tokens": max_tokens + 16,
        }  # fmt: skip
        return json.dumps(
            chat | {"temperature": rng.choice((0, 1)), "n": rng.choice((1, 1, 2))} | fields
        ).encode()

    def ask(self, body: bytes, path: str = "", key: str = KEY) -> http.client.HTTPConnection:
        path = path or random.choice(PATHS)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", path, body, {"Authorization": f"Bearer {key}"})
        return connection

    def answered(self, connection: http.client.HTTPConnection, kind: str) -> str:
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return f"{kind} {answer.status}"

    def full_answer(self, rng: random.Random) -> str:
        return self.answered(self.ask(self.body(rng)), "whole")

    def stream(self, rng: random.Random) -> str:
        return self.answered(
            self.ask(self.body(rng, stream=True, logprobs=True, top_logprobs=5)), "stream"
        )

    def shaped(self, rng: random.Random) -> str:
        """Answers by a schema, or with a tool, in the shape of each API."""
        path = rng.choice(PATHS)
        kinds = "string", "integer", "number", "boolean", "array"
        names = [f"k{rng.randrange(10**6)}" for _ in range(rng.randrange(1, 6))]
        schema = {
            "type": "object", "properties": {name: {"type": rng.choice(kinds)} for name in names}, "required": names,
            "additionalProperties": False,
        }  # fmt: skip
        fields = rng.choice(shapes_of(path, schema)) | {"n": 1, "stream": rng.random() < 0.5}
        return self.answered(self.ask(self.body(rng, **fields), path), f"shaped {path[4:]}")

    def biased(self, rng: random.Random) -> str:
        count = rng.choice((1, 10, 100, 400))
        bias = {str(rng.randrange(MAX_ID)): rng.uniform(-100, 100) for _ in range(count)}
        return self.answered(self.ask(self.body(rng, logit_bias=bias), PATHS[0]), "biased")

    def scored(self, rng: random.Random) -> str:
        """Log-probabilities of several prompts."""
        prompts = [" ".join(rng.choices(WORDS, k=rng.choice((1, 30, 300)))) for _ in range(3)]
        fields = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1}
        return self.answered(self.ask(json.dumps(fields).encode(), "/v1/completions"), "scored")

    def embed(self, rng: random.Random) -> str:
        texts = [" ".join(rng.choices(WORDS, k=rng.choice((1, 30, 300)))) for _ in range(5)]
        return self.answered(
            self.ask(json.dumps({"input": texts}).encode(), "/v1/embeddings"), "embed"
        )

    def leave(self, rng: random.Random) -> str:
        """Go away after some bytes of a stream, or before the answer."""
        connection = self.ask(self.body(rng, stream=rng.random() < 0.7, max_tokens=2000))
        time.sleep(rng.random())
        if rng.random() < 0.5:
            connection.getresponse().read(rng.randrange(1, 500))
        connection.close()
        return "left"

    def garbage(self, rng: random.Random) -> str:
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as sock:
            sock.sendall(rng.randbytes(rng.randrange(1, 5000)))
            sock.shutdown(socket.SHUT_WR)
            answer = sock.recv(64)
        return f"garbage {answer[9:12].decode(errors='replace') or 'closed'}"

    def half(self, rng: random.Random) -> str:
        """Headers that promise more than is sent."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as sock:
            headers = "Host: a", f"Authorization: Bearer {KEY}", "Content-Length: 999", "", "{"
            head = "\r\n".join(("POST /completion HTTP/1.1", *headers)).encode()
            sock.sendall(head[: rng.randrange(20, len(head))])
            time.sleep(rng.random())
        return "half"

    def wrong_key(self, rng: random.Random) -> str:
        return self.answered(
            self.ask(self.body(rng), key=rng.choice(("", "x", KEY + "x"))), "wrong key"
        )

    def huge(self, rng: random.Random) -> str:
        return self.answered(
            self.ask(b'{"prompt": "' + b"a" * (3 << 20) + b'"}', "/completion"), "huge"
        )

    def slow(self, rng: random.Random) -> str:
        """Reads a byte now and then, for some seconds."""
        connection = self.ask(self.body(rng, stream=True, max_tokens=500))
        answer = connection.getresponse()
        for _ in range(rng.randrange(1, 8)):
            answer.read(1)
            time.sleep(1)
        connection.close()
        return f"slow {answer.status}"

    def odd(self, rng: random.Random) -> str:
        value: object = rng.choice((None, -1, 1e308, "x", [], {}, True, "\ud800", 10**400, [[[]]]))
        field = rng.choice(FIELDS)
        return self.answered(
            self.ask(json.dumps({**json.loads(self.body(rng)), field: value}).encode()), "odd"
        )


def shapes_of(path: str, schema: dict[str, object]) -> tuple[dict[str, object], ...]:
    """Return fields of a request that asks for a document by the schema, or for a call of a tool with it."""
    named = {"name": "f", "schema": schema}
    answer_format = {"type": "json_schema", **named}
    if path == "/v1/messages":
        tool = {"name": "f", "input_schema": schema}
        return {"output_config": {"format": answer_format}}, {"tools": [tool]}
    function = {"name": "f", "parameters": schema}
    if path == "/v1/responses":
        return {"text": {"format": answer_format}}, {"tools": [{"type": "function", **function}]}
    tools = [{"type": "function", "function": function}]
    return (
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"tools": tools, "tool_choice": "required"},
    )


def are_slots_idle(port: int) -> bool:
    """Whether the server says that no slot is busy."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/slots", headers={"Authorization": f"Bearer {KEY}"})
        slots = json.loads(connection.getresponse().read())
        return not any(slot["is_processing"] for slot in slots)
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return False
    finally:
        connection.close()


def watched(process: int, limit: int, minutes: float, load: Load) -> tuple[int, bool]:
    """The peak of the server's private memory, and whether it lived to the end."""
    peak, end, last_report = 0, time.monotonic() + 60 * minutes, time.monotonic()
    while time.monotonic() < end:
        now = private_nbytes_of(process)
        if not now:
            return peak, False
        peak = max(peak, now)
        if time.monotonic() - last_report >= 60:
            last_report = time.monotonic()
            counts = ", ".join(f"{name} {count}" for name, count in sorted(load.seen.items()))
            print(
                f"memory {now >> 20} of {limit >> 20} MiB, peak {peak >> 20}; {counts}", flush=True
            )
        time.sleep(0.5)
    return peak, True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--memory", default="400MiB")
    parser.add_argument("--clients", type=int, default=12)
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free_port:
        port = free_port.getsockname()[1]
    command = [sys.executable, "-m", "packtrain", "serve", str(args.model), "--port", str(port)]
    command += [
        "--memory",
        args.memory,
        "--api-key",
        KEY,
        "--chat-template",
        "chatml",
        "--ctx",
        "2048",
        "--embeddings",
    ]
    with server_process(command, port) as server:
        load, limit = Load(port, 1), parse_size(args.memory, "--memory")
        threads = [
            threading.Thread(target=load.run, args=(n,), daemon=True) for n in range(args.clients)
        ]
        for thread in threads:
            thread.start()
        peak, lives = watched(server.pid, limit, args.minutes, load)
        load.stop.set()
        end = time.monotonic() + END
        for thread in threads:  # those that still wait for an answer end with this process
            thread.join(max(end - time.monotonic(), 0))
        while lives and not (free := are_slots_idle(port)) and time.monotonic() < end:
            time.sleep(1)
        good = lives and free
        faults, num_timeouts = (load.count(words) for words in (" 500", " TimeoutError"))
        waiting = sum(thread.is_alive() for thread in threads)
        print(
            f"{sum(load.seen.values()):,} requests, peak {peak / 2**20:.1f} of {limit / 2**20:.1f} MiB,"
            f" {faults} with status 500, {num_timeouts} timed out, {waiting} clients still waited,"
            f" lived: {lives}, all slots idle: {good}",
            flush=True,
        )
        return 0 if good and not (faults or waiting) and peak <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
