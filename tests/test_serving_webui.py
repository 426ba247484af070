"""The calls that Open WebUI makes, with and without a key, and those of browsers: CORS."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.clients import ASK, Api, listening_server, model_api, openai, openai_client

KEY = "secret-key"
BEARER = {"Authorization": f"Bearer {KEY}"}
# what stands beside model and messages in its requests; most of it is for itself
COMMON_FIELDS: dict[str, Any] = {
    "stream": True, "stream_options": {"include_usage": True}, "params": {}, "files": [], "tool_ids": [],
    "features": {"image_generation": False, "code_interpreter": False, "web_search": False, "memory": False},
    "variables": {"{{USER_NAME}}": "User", "{{CURRENT_DATE}}": "2026-01-01"}, "tool_servers": [],
    "model_item": {"id": "m.gguf", "object": "model", "owned_by": "openai", "urlIdx": 0},
    "session_id": "wPxqQ3jZ8mQ1AAAB", "chat_id": "7d8f8a1e-0c5e-4f3e-9a53-9a3c0f9e3b55",
    "id": "e1c7d2a4-8a7c-4b57-b1df-1d6d2c8e6a10", "metadata": {"task": None, "function_calling": "native"},
    "background_tasks": {"title_generation": True, "tags_generation": True, "follow_up_generation": True},
}  # fmt: skip
TASK = '### Task:\nGenerate a concise title.\n### Output:\nJSON format: { "title": "your title" }'


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with model_api(tmp_path_factory.mktemp("webui"), ctx=4096) as api:
        yield api


@pytest.fixture(scope="module")
def locked(api) -> Iterator[str]:
    """The same engine behind a key."""
    with listening_server(api.server, KEY) as address:
        yield address


@pytest.fixture(scope="module", params=["open", "locked", "without /v1"])
def webui(api, locked, request) -> Iterator[httpx.Client]:
    """Its connection: an address and a key, which any is where none is asked for."""
    headers = {"Authorization": "Bearer any"} if request.param == "open" else BEARER
    base = {"open": f"{api.address}/v1", "locked": f"{locked}/v1", "without /v1": locked}
    address = base[request.param]
    headers |= {"Content-Type": "application/json", "X-OpenWebUI-User-Name": "User"}
    with httpx.Client(base_url=address, headers=headers, timeout=60) as client:
        yield client


def events(lines: Iterator[str]) -> list[Any]:
    """The events of a stream, which ends with [DONE]."""
    payloads = [line.removeprefix("data: ") for line in lines if line]
    assert payloads.pop() == "[DONE]"
    return [json.loads(payload) for payload in payloads]


def test_its_conversation(webui, api):
    """The check of a connection, a chat, its title, tags and follow-ups, and the next question."""
    checked = webui.get("/models")
    assert checked.status_code == 200 and checked.headers["content-type"] == "application/json"
    (model,) = checked.json()["data"]
    messages = [{"role": "system", "content": "e"}, *ASK]
    request = {"model": model["id"], "messages": messages, "max_tokens": 12, "temperature": 0}
    with webui.stream("POST", "/chat/completions", json=request | COMMON_FIELDS) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        first, *parts, counts = events(answer.iter_lines())
    assert first["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    assert parts[-1]["choices"][0]["finish_reason"] == "length" and text
    assert counts["usage"]["completion_tokens"] == 12
    full_answer = webui.post(
        "/chat/completions", json=request | COMMON_FIELDS | {"stream": False}
    ).json()
    assert full_answer["choices"][0]["message"]["content"] == text
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "e"}]
    for task in ("title_generation", "tags_generation", "follow_up_generation"):
        metadata = {
            "task": task,
            "task_body": {"model": "m.gguf"},
            "chat_id": COMMON_FIELDS["chat_id"],
        }
        body = {"model": "m.gguf", "messages": [{"role": "user", "content": TASK}], "stream": False}
        task_answer = webui.post(
            "/chat/completions", json=body | {"max_completion_tokens": 5, "metadata": metadata}
        ).json()
        assert task_answer["usage"]["completion_tokens"] <= 5
        assert isinstance(task_answer["choices"][0]["message"]["content"], str)
    next_answer = webui.post("/chat/completions", json=request | {"messages": messages}).json()
    assert next_answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 40
    assert api.becomes_idle()


def test_a_click_on_stop_frees_the_slot(webui, api):
    """In the middle of an answer, and before its first word."""
    request = {
        "model": "m",
        "messages": ASK,
        "stream": True,
        "max_tokens": 3000,
        "ignore_eos": True,
    }
    with webui.stream("POST", "/chat/completions", json=request) as answer:
        lines = (line for line in answer.iter_lines() if '"content": "' in line)
        assert next(lines)
    written = api.server.engine.totals.output_tokens
    assert api.becomes_idle() and api.server.engine.totals.output_tokens - written < 100
    long = [{"role": "user", "content": "the a " * 600}]
    with webui.stream("POST", "/chat/completions", json=request | {"messages": long}) as answer:
        assert answer.status_code == 200
    assert api.becomes_idle() and api.server.engine.totals.output_tokens - written < 200


def test_tools_in_a_stream_as_it_asks_for_them(webui):
    pytest.importorskip("llguidance")
    parameters = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"]}  # fmt: skip
    tool = {"type": "function", "function": {"name": "get_time", "parameters": parameters}}
    request = {"model": "m", "messages": ASK, "tools": [tool], "tool_choice": "required"}
    body = request | COMMON_FIELDS | {"temperature": 0, "max_tokens": 300}
    with webui.stream("POST", "/chat/completions", json=body) as answer:
        choices = [event["choices"][0] for event in events(answer.iter_lines()) if event["choices"]]
    calls = [call for event in choices for call in event["delta"].get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls] == ["get_time"]
    assert json.loads(calls[0]["function"]["arguments"])["zone"] in ("utc", "cet")
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_its_search_asks_for_embeddings(api):
    request = {"model": "m.gguf", "input": ["the a", "e"]}
    response = httpx.post(f"{api.address}/v1/embeddings", json=request, timeout=60).json()
    assert [entry["index"] for entry in response["data"]] == [0, 1]
    assert len(response["data"][0]["embedding"]) == api.server.model.config.embedding_length


def test_an_empty_key_is_none(api, locked):
    """It sends `Bearer `, which its HTTP client lets through."""
    for address, status in ((api.address, 200), (locked, 401)):
        url = urlsplit(address)
        connection = HTTPConnection(url.hostname or "", url.port, timeout=60)
        body = json.dumps({"messages": ASK, "max_tokens": 1})
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer "})
        assert connection.getresponse().status == status
        connection.close()


def test_keys_are_asked_for(locked):
    with openai_client(locked, api_key="wrong") as wrong:
        with pytest.raises(openai.AuthenticationError) as refused:
            wrong.chat.completions.create(model="m", messages=ASK)
        assert refused.value.type == "authentication_error"
        assert wrong.models.list().data[0].id == "m.gguf"
    with openai_client(locked, api_key=KEY) as right:
        answer = right.chat.completions.create(model="m", messages=ASK, max_tokens=1)
        assert answer.usage.completion_tokens == 1
        assert right.models.retrieve("m.gguf").id == "m.gguf"
    for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Basic eDp5"}):
        refused = httpx.post(
            f"{locked}/v1/chat/completions", json={"messages": ASK}, headers=headers
        )
        assert refused.status_code == 401


ORIGIN = {"Origin": "http://localhost:3000"}


def allows_credentials(answer: httpx.Response) -> bool:
    """Whether a page that asks with `credentials: "include"` may read the answer: browsers then refuse a `*`."""
    origin, credentials = (
        answer.headers[f"access-control-allow-{name}"] for name in ("origin", "credentials")
    )
    return origin == ORIGIN["Origin"] and credentials == "true"


@pytest.mark.parametrize("path, method", [("/v1/chat/completions", "POST"), ("/v1/models", "GET")])
def test_a_page_of_another_origin_may_ask(locked, path, method):
    """The browser asks first, without a key; then it sends the key, and reads what comes, errors too."""
    names = "authorization,content-type,x-openwebui-user-name"
    preflight_headers = {
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": names,
    }
    for extra_headers in ({}, {"Access-Control-Request-Private-Network": "true"}):
        preflight = httpx.options(
            f"{locked}{path}", headers=ORIGIN | preflight_headers | extra_headers
        )
        assert preflight.status_code == 200 and allows_credentials(preflight)
        assert method in preflight.headers["access-control-allow-methods"]
        allowed = preflight.headers["access-control-allow-headers"].lower()
        assert all(name in allowed for name in names.split(","))
        assert "access-control-allow-private-network" not in preflight.headers
    for headers in (ORIGIN | BEARER, ORIGIN):
        body = {"json": {"messages": ASK, "max_tokens": 1}} if method == "POST" else {}
        answer = httpx.request(method, f"{locked}{path}", headers=headers, timeout=60, **body)
        assert allows_credentials(answer)
