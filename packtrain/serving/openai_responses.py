"""/v1/responses: OpenAI's Responses; a request becomes one of /v1/chat/completions, and its answer a list of items."""

import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.serving.answer_blocks import CALL, TEXT, THOUGHT, BlocksFormat
from packtrain.serving.generation_jobs import AnswerEnd, PromptProgress, TextDelta, TokenCounts
from packtrain.serving.json_fields import JsonBody
from packtrain.serving.openai_completions import JsonObject
from packtrain.serving.request_parsing import OpenAIRequest
from packtrain.serving.response_shapes import progress_fields, timing_fields, usage
from packtrain.serving.server_state import StoredResponses

MAX_ITEMS, MAX_PARTS = 1 << 16, 1 << 12
TRANSLATED = (
    "input", "instructions", "max_output_tokens", "text", "reasoning", "tools", "tool_choice",
    "previous_response_id", "stream_options", "include", "top_logprobs",
)  # fmt: skip
LOGPROBS = "message.output_text.logprobs"
TEXT_PARTS = {"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"}
ITEM_IDS = {THOUGHT: "rs", TEXT: "msg", CALL: "fc"}


# ---- requests


def chat_body(body: JsonBody, stored_responses: StoredResponses) -> JsonBody:
    """Convert a request of /v1/responses into a chat's. Raises InputError; HttpRefusal without the previous one."""
    body.refuse_unmet("responses")
    text = JsonBody(body.get_object("text"), "text")
    text.refuse_unmet("any")
    if LOGPROBS in body.get_list("include", MAX_PARTS):
        raise InputError(f"include: {LOGPROBS} is not supported; /v1/chat/completions returns them")
    previous_id = body.text("previous_response_id")
    messages = stored_responses.messages(previous_id) if previous_id else []
    messages += input_messages(body)
    if body.has("instructions"):  # those of earlier responses do not carry over
        messages.insert(0, {"role": "system", "content": body.text("instructions")})
    answer_format = text.get_object("format")
    effort = JsonBody(body.get_object("reasoning"), "reasoning").get("effort")
    fields = {
        "messages": messages,
        "tools": [chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed_tools(body))]
        or None,
        "tool_choice": body.get("tool_choice"), "response_format": answer_format or None, "reasoning_effort": effort,
    }  # fmt: skip
    if body.has("max_output_tokens"):
        fields["max_tokens"] = body.number("max_output_tokens", 0, 1, 1 << 30)
    return body.replaced(TRANSLATED, fields)


def listed_tools(body: JsonBody) -> list[Any]:
    return body.get_list("tools", MAX_PARTS)


def chat_tool(value: Any, field_path: str) -> JsonObject:
    """Convert a function tool into the shape of chats. Raises InputError for tools that run at OpenAI."""
    tool = JsonBody(value, field_path)
    if tool.text("type") != "function":
        fact = f"is {tool.text('type')!r}; it must be function: no other tools run here"
        raise InputError(tool.fact("type", fact))
    names = "name", "description", "parameters", "strict"
    function = {name: tool.get(name) for name in names if tool.has(name)}
    return {"type": "function", "function": function}


def input_messages(body: JsonBody) -> list[JsonObject]:
    """Convert `input`, a text or items, into messages of a chat; thoughts and calls become parts of an answer."""
    if isinstance(body.get("input"), str):
        return [{"role": "user", "content": body.get("input")}]
    messages = list[JsonObject]()
    for index, value in enumerate(body.get_list("input", MAX_ITEMS)):
        item = JsonBody(value, f"input[{index}]")
        kind = item.text("type", "message")
        if kind == "message":
            add_message(messages, item.text("role"), {"content": content_text(item, "content")})
        elif kind == "reasoning":
            thoughts = content_text(item, "content") or content_text(item, "summary")
            add_message(messages, "assistant", {"reasoning_content": thoughts})
        elif kind == "function_call":
            function = {"name": item.text("name"), "arguments": item.text("arguments")}
            call = {"id": item.text("call_id"), "type": "function", "function": function}
            add_message(messages, "assistant", {"tool_calls": [call]})
        elif kind == "function_call_output":
            output = content_text(item, "output")
            message = {"role": "tool", "tool_call_id": item.text("call_id"), "content": output}
            messages.append(message)
        else:
            kinds = "message, reasoning, function_call or function_call_output"
            raise InputError(item.fact("type", f"is {kind!r}; it must be {kinds}"))
    return messages


def add_message(messages: list[JsonObject], role: str, parts: JsonObject) -> None:
    """Append a message with fields `parts`; thoughts, words and calls of one answer join its last message instead."""
    last = messages[-1] if messages else {}
    if role != "assistant" or last.get("role") != role:
        messages.append({"role": role, "content": None, **parts})
    elif "tool_calls" in parts:
        last["tool_calls"] = [*last.get("tool_calls", ()), *parts["tool_calls"]]
    elif last.get("content") or last.get("tool_calls"):
        messages.append({"role": role, "content": None, **parts})
    else:
        last.update(parts)


def content_text(item: JsonBody, name: str) -> str:
    """Return a field's text, which may be in parts. Raises InputError for pictures, files and sound."""
    if isinstance(item.get(name), str):
        return item.text(name)
    texts = list[str]()
    for index, value in enumerate(item.get_list(name, MAX_PARTS)):
        part = JsonBody(value, item.path(f"{name}[{index}]"))
        kind = part.text("type")
        if kind not in TEXT_PARTS:
            raise InputError(part.fact("type", f"is {kind!r}; this model reads text only"))
        texts.append(part.text("refusal" if kind == "refusal" else "text"))
    return "\n".join(texts)


# ---- answers


class ResponsesFormat(BlocksFormat):
    """The JSON shape of answers of /v1/responses.

    body              the request, whose settings a response repeats
    messages          the conversation so far, which is stored with the answer
    """

    def __init__(
        self, model: str, tokenizer: Tokenizer, request: OpenAIRequest, body: JsonBody, messages: Sequence[JsonObject],
        stored_responses: StoredResponses,
    ) -> None:  # fmt: skip
        super().__init__(model, tokenizer, request)
        self._tokenizer, self._body = tokenizer, body
        self._messages, self._stored_responses = messages, stored_responses
        self._response_id, self._created = f"resp_{uuid4().hex}", int(time.time())
        self._items, self._item_id, self._num_events = list[JsonObject](), "", 0

    def _event(self, event_type: str, **fields: Any) -> JsonObject:
        self._num_events += 1
        number = self._num_events - 1
        return {"type": f"response.{event_type}", "sequence_number": number, **fields}

    def _response(self, status: str, **fields: Any) -> JsonObject:
        body = self._body
        choice = body.get("tool_choice") or "auto"
        warnings = self._request.warnings
        sampling = self._job.sampling
        return {
            "id": self._response_id, "object": "response", "created_at": self._created,
            "status": status, "error": None, "incomplete_details": None,
            "instructions": body.get("instructions"), "metadata": body.get("metadata") or {},
            "model": self._model, "output": [*self._items], "tool_choice": choice,
            "tools": listed_tools(body), "parallel_tool_calls": body.get_flag("parallel_tool_calls"),
            "temperature": sampling.temp, "top_p": sampling.top_p,
            "max_output_tokens": body.get("max_output_tokens"), "background": False,
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
            "store": body.get_flag("store", True), "truncation": "disabled", "usage": None,
            "text": body.get("text") or {"format": {"type": "text"}}, "user": body.get("user"),
            **({"warnings": [*warnings]} if warnings else {}), **fields,
        }  # fmt: skip

    def delta_events(self, number: int, delta: TextDelta) -> list[JsonObject]:
        return [e | self._timings(delta.counts) for e in super().delta_events(number, delta)]

    def _timings(self, counts: TokenCounts) -> JsonObject:
        return {"timings": timing_fields(counts)} if self._request.has_timings else {}

    def progress_events(self, number: int, update: PromptProgress) -> list[JsonObject]:
        fields = progress_fields(update, self._request.has_timings)
        return [self._event("in_progress", response=self._response("in_progress"), **fields)]

    def start_events(self) -> list[JsonObject]:
        events = "created", "in_progress"
        return [self._event(name, response=self._response("in_progress")) for name in events]

    def _place(self) -> JsonObject:
        return {"item_id": self._item_id, "output_index": self._num_blocks}

    def block_start(self, kind: str, call: JsonObject) -> Iterator[JsonObject]:
        self._item_id = new_item_id(kind)
        item = item_of(kind, call, self._item_id, "in_progress")
        yield self._event("output_item.added", output_index=self._num_blocks, item=item)
        if kind != CALL:
            part = part_of(kind, "")
            yield self._event("content_part.added", **self._place(), content_index=0, part=part)

    def block_delta(self, kind: str, text: str) -> JsonObject:
        if kind == CALL:
            return self._event("function_call_arguments.delta", **self._place(), delta=text)
        fields = {**self._place(), "content_index": 0, "delta": text}
        return self._event(f"{part_of(kind, '')['type']}.delta", **fields, **logprobs_of(kind))

    def block_end(self, kind: str, text: str, call: JsonObject) -> Iterator[JsonObject]:
        status = "incomplete" if self._is_cut else "completed"
        item = item_of(kind, call or text, self._item_id, status)
        self._items.append(item)
        if kind == CALL:
            fields = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **self._place(), **fields)
        else:
            fields, part = {**self._place(), "content_index": 0}, part_of(kind, text)
            yield self._event(f"{part['type']}.done", **fields, text=text, **logprobs_of(kind))
            yield self._event("content_part.done", **fields, part=part)
        yield self._event("output_item.done", output_index=self._num_blocks, item=item)

    def last_events(self, finish_word: str, end: AnswerEnd) -> list[JsonObject]:
        response = self._finished_response(finish_word, end)
        return [self._event(response["status"], response=response, **self._timings(end.counts))]

    def full_answer(
        self, blocks: Sequence[tuple[str, Any]], finish_word: str, end: AnswerEnd
    ) -> JsonObject:
        self._items = [item_of(*block, new_item_id(block[0]), "completed") for block in blocks]
        if finish_word == "length" and blocks and blocks[-1][0] != CALL:
            self._items[-1]["status"] = "incomplete"
        return self._finished_response(finish_word, end)

    def _finished_response(self, finish_word: str, end: AnswerEnd) -> JsonObject:
        """Return the whole response, and store the conversation unless the request forbids it."""
        if self._body.get_flag("store", True):
            answer = input_messages(JsonBody({"input": self._items}))
            is_system = self._body.has("instructions")
            self._stored_responses.store(self._response_id, [*self._messages[is_system:], *answer])
        counts = usage([end.counts])
        details = {"cached_tokens": end.counts.cached, "cache_write_tokens": 0}
        thoughts = [x["content"][0]["text"] for x in self._items if x["type"] == "reasoning"]
        thought_ids = [self._tokenizer.encode(text, bos=False, eos=False) for text in thoughts]
        token_counts = {
            "input_tokens": counts["prompt_tokens"], "input_tokens_details": details,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": sum(map(len, thought_ids))},
            "total_tokens": counts["total_tokens"],
        }  # fmt: skip
        if finish_word != "length":
            return self._response("completed", usage=token_counts, completed_at=int(time.time()))
        reason = {"reason": "max_output_tokens"}
        return self._response("incomplete", usage=token_counts, incomplete_details=reason)


def new_item_id(kind: str) -> str:
    return f"{ITEM_IDS[kind]}_{uuid4().hex}"


def part_of(kind: str, text: str) -> JsonObject:
    if kind == THOUGHT:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def logprobs_of(kind: str) -> JsonObject:
    """Return the field `logprobs`, empty, for events of kind TEXT, where the official client requires it; else {}."""
    return {"logprobs": []} if kind == TEXT else {}


def item_of(kind: str, content: Any, item_id: str, status: str) -> JsonObject:
    """Return an item of `output` with this kind, id and status, empty while "in_progress"; content: its text, or its
    call in the shape of chats."""
    is_done = status != "in_progress"
    if kind == CALL:
        function = content["function"]
        return {
            "type": "function_call", "id": item_id, "call_id": content["id"],
            "name": function["name"], "arguments": function["arguments"] if is_done else "",
            "status": status,
        }  # fmt: skip
    parts = [part_of(kind, content)] if is_done else []
    fields: JsonObject = {"type": "message", "role": "assistant"}
    if kind == THOUGHT:
        fields = {"type": "reasoning", "summary": []}
    return fields | {"id": item_id, "content": parts, "status": status}
