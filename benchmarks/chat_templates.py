"""Prompts and ids of conversations beside llama.cpp's server: its /apply-template and /tokenize.

    python -m benchmarks.chat_templates LLAMA_SERVER MODEL.gguf

The model, any small one, is given each template of tests/templates.py in turn. For every turn of the assistant the
server's prompt must be the text before what is learnt, and its ids those of the sample. A template that has no form for
calls of tools is not asked about them. Exit code 0 if all are equal.
"""

import argparse
import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError

from packtrain import gguf
from packtrain.gguf import GGUF, Value
from packtrain.samples.mask import Masker
from packtrain.samples.messages import Conversation
from packtrain.samples.render import Renderer
from packtrain.template import ChatTemplate
from packtrain.tokenizer import Tokenizer
from tests.templates import CHATS
from tests.test_masks import RECORDS, conversation

SECONDS = 60.0


@contextmanager
def served(program: str, model: Path) -> Iterator[str]:
    """The address of a server of the model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "-m", str(model), "--port", str(port), "--jinja", "-c", "512", "-t", "1"]
    address = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=log) as child,
    ):
        try:
            until = time.monotonic() + SECONDS
            while not answers(address):
                if child.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{program} does not serve: {log.read()[-500:].decode()}")
                time.sleep(0.1)
            yield address
        finally:
            child.terminate()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2):
            return True
    except (URLError, OSError):
        return False


def ask(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as reply:
        return json.loads(reply.read())


def as_request(found: Conversation, until: int) -> dict[str, Any]:
    """The messages before a turn as the server takes them: arguments of calls as JSON."""
    messages = []
    for message in found.messages[:until]:
        calls = [
            {
                **c,
                "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])},
            }
            for c in message.get("tool_calls", ())
        ]
        messages.append({**message, "tool_calls": calls} if calls else message)
    return {"messages": messages} | ({"tools": found.tools} if found.tools else {})


def compare(
    address: str, renderer: Renderer, masker: Masker, found: Conversation
) -> Iterator[bool]:
    """For each turn whether its prompt is the server's, and for each sample whether its ids are."""
    bos = (
        masker.tokenizer.piece(masker.tokenizer.bos or 0).decode()
        if masker.tokenizer.add_bos
        else ""
    )
    turns = [i for i, message in enumerate(found.messages) if message["role"] == "assistant"]
    prompts = [ask(f"{address}/apply-template", as_request(found, i))["prompt"] for i in turns]
    samples = renderer.render(found)
    learnt = [one.text[:begin].removeprefix(bos) for one in samples for begin, _ in one.spans]
    yield from (a == b for a, b in zip(learnt, prompts, strict=True))
    for one in samples:
        body = {"content": one.text.removeprefix(bos), "add_special": True}
        yield ask(f"{address}/tokenize", body)["tokens"] == masker.conversation(one).ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="llama.cpp's llama-server")
    parser.add_argument("model", type=Path, help="a small GGUF model")
    given = parser.parse_args()
    base, bad = GGUF(given.model), 0
    tensors = {name: base.array(name) for name in base.entries}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for name, chat in CHATS.items():
            template = {"tokenizer.chat_template": Value("string", chat.source)}
            gguf.write(path, dict(base.values) | template, tensors)
            tokenizer = Tokenizer(GGUF(path).metadata)
            masker = Masker(tokenizer)
            texts = [tokenizer.piece(id or 0).decode() for id in (tokenizer.bos, tokenizer.eos)]
            renderer = Renderer(ChatTemplate(chat.source, *texts), masker.ends)
            records = [r for r in RECORDS.values() if renderer.takes_calls or "tools" not in r]
            with served(given.server, path) as address:
                same = [
                    good
                    for record in records
                    for good in compare(
                        address, renderer, masker, conversation(record, Path(folder))
                    )
                ]
            bad += same.count(False)
            print(f"{name:10} {same.count(True)} of {len(same)} prompts and samples are equal")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
