"""Conversations beside llama.cpp's server, its /apply-template and /tokenize: a table of benchmarks.conformance.

A small model of random weights with the vocabulary that a template belongs to is served with each template of
tests/templates.py. For every turn of the assistant the server's prompt must be the text before what is learnt, and its
ids those of the sample. A template that has no form for calls of tools is not asked about them.
"""

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

from packtrain.data.chat_template import ChatTemplate
from packtrain.data.conversations.conversation_renderer import ConversationRenderer
from packtrain.data.conversations.loss_mask import LossMasker
from packtrain.data.conversations.messages import Conversation
from packtrain.data.tokenizer import Tokenizer
from packtrain.gguf import GGUF, MetadataValue
from packtrain.models.config import Config
from packtrain.models.model_file import save_model
from tests.architectures import random_weights
from tests.templates import CHATS
from tests.test_masks import RECORDS, make_conversation

SECONDS = 60.0


@contextmanager
def server_address(program: str, model: Path) -> Iterator[str]:
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
            deadline = time.monotonic() + SECONDS
            while not answers(address):
                if child.poll() is not None or time.monotonic() > deadline:
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


def as_request(chat: Conversation, num_messages: int) -> dict[str, Any]:
    """The messages before a turn as the server takes them: arguments of calls as JSON."""
    messages = []
    for message in chat.messages[:num_messages]:
        calls = [
            {
                **c,
                "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])},
            }
            for c in message.get("tool_calls", ())
        ]
        messages.append({**message, "tool_calls": calls} if calls else message)
    return {"messages": messages} | ({"tools": chat.tools} if chat.tools else {})


def compare(
    address: str, renderer: ConversationRenderer, masker: LossMasker, chat: Conversation
) -> Iterator[bool]:
    """For each turn whether its prompt is the server's, and for each sample whether its ids are."""
    bos = (
        masker.tokenizer.piece(masker.tokenizer.bos or 0).decode()
        if masker.tokenizer.add_bos
        else ""
    )
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    prompts = [ask(f"{address}/apply-template", as_request(chat, i))["prompt"] for i in turns]
    samples = renderer.render(chat)
    trained_prompts = [
        sample.text[:begin].removeprefix(bos) for sample in samples for begin, _ in sample.spans
    ]
    yield from (a == b for a, b in zip(trained_prompts, prompts, strict=True))
    for sample in samples:
        body = {"content": sample.text.removeprefix(bos), "add_special": True}
        yield ask(f"{address}/tokenize", body)["tokens"] == masker.mask_conversation(sample).ids


HEADING = """| chat template | vocabulary | prompts and samples | equal to llama-server's |
|---|---|---|---|"""


def rows(server: str, vocabularies: Path) -> Iterator[tuple[bool, str]]:
    """Whether all is equal, and a row of the table, for each template."""
    for name, chat in CHATS.items():
        vocabulary = chat.vocabulary or "llama-spm"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            save(path, vocabularies / f"ggml-vocab-{vocabulary}.gguf", chat.source)
            tokenizer = Tokenizer(GGUF(path).metadata)
            masker = LossMasker(tokenizer)
            bos, eos = (tokenizer.piece(id or 0).decode() for id in (tokenizer.bos, tokenizer.eos))
            renderer = ConversationRenderer(ChatTemplate(chat.source, bos, eos), masker.eog_texts)
            chosen_records = [
                r for r in RECORDS.values() if renderer.takes_calls or "tools" not in r
            ]
            conversations = [make_conversation(record, Path(folder)) for record in chosen_records]
            with server_address(server, path) as address:
                matches = [
                    x
                    for example in conversations
                    for x in compare(address, renderer, masker, example)
                ]
        yield all(matches), f"| {name} | {vocabulary} | {len(matches)} | {sum(matches)} |"


def save(path: Path, vocabulary: Path, template: str) -> None:
    """A model of random weights with the vocabulary of another file and a template."""
    values = {k: v for k, v in GGUF(vocabulary).values.items() if k.startswith("tokenizer.")}
    values["tokenizer.chat_template"] = MetadataValue("string", template)
    count = len(values["tokenizer.ggml.tokens"].value)
    config = Config(count, 512, 64, 1, 128, 2, 2)
    save_model(path, config, values, random_weights(config).__getitem__, name="random")
