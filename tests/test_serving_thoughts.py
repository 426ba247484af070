"""Thoughts of a model are told apart from its answer, whole and in streams."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from packtrain.serving.reasoning_text import (
    MARKS,
    ReasoningSplitter,
    is_thinking,
    split_reasoning,
    thinking_marks,
)

starlette = pytest.importorskip("starlette")

from starlette.testclient import TestClient  # noqa: E402

from packtrain.common.events import Events  # noqa: E402
from packtrain.data.chat_template import ChatTemplate  # noqa: E402
from packtrain.data.conversations.conversation_renderer import ConversationRenderer  # noqa: E402
from packtrain.serving.http_app import app  # noqa: E402
from packtrain.workflows.model_server import ServeSettings, load_server  # noqa: E402
from tests.architectures import random_model  # noqa: E402
from tests.templates import GEMMA_4, GEMMA_4_ENDS  # noqa: E402

CHATS = "/v1/chat/completions"
# as templates of models that think: they drop the thoughts of earlier answers
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if opened %}<think>\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("<think>\na b\n</think>\n\nc d", False, ("a b", "c d")),
        ("\n <think>a</think>c", False, ("a", "c")),
        ("a </thin b\n</think>\n c </think>", True, ("a </thin b", "c </think>")),
        ("<think>\n\n</think>\n\nc", False, ("", "c")),
        ("no <think>a</think>", False, ("", "no <think>a</think>")),
        ("<thin air", False, ("", "<thin air")),
        ("<thi", False, ("", "<thi")),
        (" ", False, ("", " ")),
        ("still </th", True, ("still </th", "")),
        ("still\n", True, ("still", "")),
        ("<think>still", False, ("still", "")),
        ("", True, ("", "")),
    ],
)
def test_a_text_is_split_alike_in_all_pieces(text, thinking, expected):
    assert split_reasoning(text, thinking) == expected
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            thoughts = ReasoningSplitter(thinking)
            pieces = text[:first], text[first:second], text[second:]
            outputs = [*map(thoughts.add_piece, pieces), thoughts.flush()]
            assert ("".join(t for t, _ in outputs), "".join(c for _, c in outputs)) == expected


def test_prompts_that_open_thoughts():
    assert is_thinking("<assistant><think>\n", None)
    assert not is_thinking("<assistant>", None)
    assert not is_thinking("what is <think>? <assistant>", None)
    assert is_thinking("", "<think>one")
    assert not is_thinking("", "<think>one</think> so")


CHANNEL = "<|channel>thought", "<channel|>"


def test_the_marks_of_a_template():
    """Its own, as the renderer finds them, where it has no <think>; in all pieces, too."""
    assert thinking_marks(TEMPLATE, ("", "")) == MARKS
    assert thinking_marks("{{ messages }}", ("", "")) is None
    renderer = ConversationRenderer(ChatTemplate(GEMMA_4), [*GEMMA_4_ENDS])
    assert thinking_marks(GEMMA_4, renderer.marks) == CHANNEL
    text = "<|channel>thought\na </think> b\n<channel|>c d"
    assert split_reasoning(text, False, CHANNEL) == ("a </think> b", "c d")
    thoughts = ReasoningSplitter(False, CHANNEL)
    outputs = [*map(thoughts.add_piece, text), thoughts.flush()]
    assert ("".join(t for t, _ in outputs), "".join(c for _, c in outputs)) == (
        "a </think> b",
        "c d",
    )
    assert split_reasoning("<|channel>thought\n<channel|>c", False, CHANNEL) == ("", "c")
    assert is_thinking("<|turn>model\n<|channel>thought\n", None, CHANNEL)
    assert not is_thinking("<|turn>model\n<|channel>thought\n<channel|>", None, CHANNEL)


@pytest.mark.grammar
def test_an_answer_with_a_channel(tmp_path):
    random_model(tmp_path / "m.gguf", "llama")
    (tmp_path / "template.jinja").write_text(GEMMA_4)
    options: dict[str, Any] = {
        "ctx": 512,
        "chat_template": str(tmp_path / "template.jinja"),
        "seed": 1,
    }
    server = load_server(ServeSettings(tmp_path / "m.gguf", **options), Events())
    with TestClient(app(server), raise_server_exceptions=False) as client:
        payload = request("<|channel>thought\nthe a\n<channel|>the answer")
        message = post_chat(client, **payload)
        said = {"reasoning_content": "the a", "content": "the answer"}
        assert {name: message[name] for name in said} == said == stream_message(client, **payload)
    server.engine.close(0)


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("thoughts")
    random_model(folder / "m.gguf", "llama")
    (folder / "template.jinja").write_text(TEMPLATE)
    options: dict[str, Any] = {
        "ctx": 256,
        "chat_template": str(folder / "template.jinja"),
        "seed": 1,
    }
    server = load_server(ServeSettings(folder / "m.gguf", **options), Events())
    with TestClient(app(server), raise_server_exceptions=False) as client:
        yield client
    server.engine.close(0)


def request(answer: str, **fields: Any) -> dict[str, Any]:
    """A chat whose answer is given by a grammar."""
    grammar = f"root ::= {json.dumps(answer)}"
    user = {"role": "user", "content": "the a"}
    return {"messages": [user], "grammar": grammar, "max_tokens": 100} | fields


def post_chat(client: TestClient, **fields: Any) -> Any:
    answer = client.post(CHATS, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def stream_message(client: TestClient, **fields: Any) -> dict[str, str]:
    """What the deltas of a stream say together."""
    message = dict[str, str]()
    for line in client.post(CHATS, json=fields | {"stream": True}).text.split("\n\n"):
        if line.startswith("data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"]
            for name in ("reasoning_content", "content"):
                message[name] = message.get(name, "") + (delta.get(name) or "")
    return message


CASES = [
    ("<think>\nthe a\n</think>\n\nthe answer", {}, "the a", "the answer"),
    ("the a</think>the answer", {"chat_template_kwargs": {"opened": True}}, "the a", "the answer"),
    ("the answer", {}, "", "the answer"),
    ("<think>a</think>b", {"reasoning_format": "none"}, "", "<think>a</think>b"),
]


@pytest.mark.grammar
@pytest.mark.parametrize(("answer", "fields", "thought", "content"), CASES)
def test_an_answer_and_its_thoughts(client, answer, fields, thought, content):
    payload = request(answer, **fields)
    message = post_chat(client, **payload)
    assert message.get("reasoning_content", "") == thought
    assert message["content"] == content
    assert stream_message(client, **payload) == {"reasoning_content": thought, "content": content}


def test_a_format_that_is_none(client):
    answer = client.post(CHATS, json=request("a", reasoning_format="odd"))
    assert answer.status_code == 400
    assert "must be one of auto, none, deepseek" in answer.json()["error"]["message"]
