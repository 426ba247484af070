"""/v1/messages: Anthropic's shape of requests and answers; a request becomes one of /v1/chat/completions."""

import json
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.serving.answer_blocks import CALL, TEXT, THOUGHT, BlocksFormat
from packtrain.serving.generation_jobs import AnswerEnd
from packtrain.serving.json_fields import JsonBody
from packtrain.serving.openai_completions import JsonObject
from packtrain.serving.request_parsing import OpenAIRequest

MAX_MESSAGES, MAX_BLOCKS = 1 << 16, 1 << 12
TRANSLATED = (
    "messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "output_config",
    "output_format", "cache_control",
)  # fmt: skip
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {
    THOUGHT: ("thinking_delta", "thinking"), TEXT: ("text_delta", "text"), CALL: ("input_json_delta", "partial_json"),
}  # fmt: skip


# ---- requests


def chat_body(body: JsonBody) -> JsonBody:
    """Convert a request of /v1/messages into one of /v1/chat/completions. Raises InputError."""
    body.refuse_unmet("messages")
    messages = list[JsonObject]()
    if body.has("system"):
        system = {"role": "system", "content": body.get("system")}
        messages += chat_messages(JsonBody(system, "system"), {})
    call_names = dict[str, str]()
    for index, message in enumerate(body.get_list("messages", MAX_MESSAGES)):
        messages += chat_messages(JsonBody(message, f"messages[{index}]"), call_names)
    fields: JsonObject = {"messages": messages, "stop": body.get("stop_sequences")}
    fields |= tool_fields(body)
    output_config = JsonBody(body.get_object("output_config"), "output_config")
    answer_format = output_config.get("format") or body.get("output_format")
    fields |= {"response_format": answer_format, "reasoning_effort": output_config.get("effort")}
    thinking = JsonBody(body.get_object("thinking"), "thinking")
    thinking_type = thinking.text("type", "adaptive")
    if thinking_type not in ("enabled", "adaptive", "disabled"):
        fact = f"is {thinking_type!r}; it must be enabled, adaptive or disabled"
        raise InputError(thinking.fact("type", fact))
    if thinking.has("type"):
        is_on = {"chat_template_kwargs": {"enable_thinking": thinking_type != "disabled"}}
        fields |= {} if body.has("chat_template_kwargs") else is_on
    return body.replaced(TRANSLATED, fields)


def chat_messages(message: JsonBody, call_names: dict[str, str]) -> list[JsonObject]:
    """Convert a message of /v1/messages into messages of a chat: tools' results, then the text. Raises InputError.

    call_names  the names of tools by the ids of calls so far; this function adds the calls of this message
    """
    role, content = message.text("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InputError(message.fact("role", f"is {role!r}; it must be user or assistant"))
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts, thoughts = list[JsonObject](), list[str]()
    results, calls = list[JsonObject](), list[JsonObject]()
    for index, value in enumerate(message.get_list("content", MAX_BLOCKS)):
        block = JsonBody(value, message.path(f"content[{index}]"))
        kind = block.text("type")
        if kind == "text":
            texts.append({"type": "text", "text": block.text("text")})
        elif kind == "thinking" and role == "assistant":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use" and role == "assistant":
            call_names[block.text("id")] = block.text("name")
            arguments = json.dumps(block.get_object("input"))
            function = {"name": block.text("name"), "arguments": arguments}
            calls.append({"id": block.text("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            results.append(_tool_message(block, call_names))
        else:
            fact = f"is {kind!r}; {role} messages may have {BLOCKS[role]}"
            raise InputError(block.fact("type", fact))
    if role == "user":
        return [*results, *([{"role": role, "content": texts}] if texts else [])]
    chat_message: JsonObject = {"role": role, "content": texts or None}
    chat_message |= {"tool_calls": calls} if calls else {}
    return [chat_message | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})]


BLOCKS = {
    "user": "text and tool_result; this model reads text only", "assistant": "text, thinking and tool_use",
    "system": "text",
}  # fmt: skip


def _tool_message(block: JsonBody, call_names: dict[str, str]) -> JsonObject:
    """Convert a tool_result into a chat's tool message, with the name in call_names; a failed tool's begins Error."""
    call_id, content = block.text("tool_use_id"), block.get("content") or ""
    if block.get_flag("is_error"):
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        content = [{"type": "text", "text": "Error:"}, *parts]
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    return message | ({"name": call_names[call_id]} if call_id in call_names else {})


def tool_fields(body: JsonBody) -> JsonObject:
    """Convert tools and tool_choice to OpenAI's fields. Raises InputError, also for tools that run at Anthropic."""
    tools = list[JsonObject]()
    for index, value in enumerate(body.get_list("tools", MAX_BLOCKS)):
        tool = JsonBody(value, f"tools[{index}]")
        if tool.text("type", "custom") != "custom":
            kind = tool.text("type")
            raise InputError(tool.fact("type", f"is {kind!r}; a tool here needs an input_schema"))
        function: JsonObject = {"name": tool.text("name"), "description": tool.text("description")}
        if not tool.has("input_schema"):
            raise InputError(tool.fact("input_schema", "is required"))
        function["parameters"] = tool.get_object("input_schema")
        function["strict"] = tool.get_flag("strict")
        tools.append({"type": "function", "function": function})
    if not body.has("tool_choice"):
        return {"tools": tools or None}
    choice = JsonBody(body.get("tool_choice"), "tool_choice")
    kind = choice.text("type")
    if kind not in (*CHOICES, "tool"):
        raise InputError(choice.fact("type", f"is {kind!r}; it must be auto, any, tool or none"))
    named: Any = {"type": "function", "function": {"name": choice.text("name")}}
    choice_word = CHOICES.get(kind, named)
    fields: JsonObject = {"tools": tools or None, "tool_choice": choice_word}
    if choice.has("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = not choice.get_flag("disable_parallel_tool_use")
    return fields


# ---- answers


class MessagesFormat(BlocksFormat):
    """The JSON shape of answers of /v1/messages."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, request: OpenAIRequest, warnings: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, request)
        self._message_id = f"msg_{uuid4().hex}"
        self._warnings = [*warnings, *request.warnings]

    def _message(self, content: Sequence[JsonObject], counts: JsonObject) -> JsonObject:
        head = {
            "id": self._message_id, "type": "message", "role": "assistant", "model": self._model,
        }  # fmt: skip
        return {
            **head, "content": [*content], "stop_reason": None, "stop_sequence": None,
            "usage": counts, **({"warnings": self._warnings} if self._warnings else {}),
        }  # fmt: skip

    def start_events(self) -> list[JsonObject]:
        counts = {"input_tokens": len(self._job.prompt), "output_tokens": 0}
        return [{"type": "message_start", "message": self._message((), counts)}]

    def block_start(self, kind: str, call: JsonObject) -> Iterator[JsonObject]:
        # a stream sends the arguments after the call
        bare_call = call and call | {"function": call["function"] | {"arguments": ""}}
        content_block = block_of(kind, bare_call or "")
        yield {
            "type": "content_block_start", "index": self._num_blocks, "content_block": content_block
        }  # fmt: skip

    def block_delta(self, kind: str, text: str) -> JsonObject:
        delta_type, key = DELTAS[kind]
        delta = {"type": delta_type, key: text}
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def block_end(self, kind: str, text: str, call: JsonObject) -> Iterator[JsonObject]:
        if kind == THOUGHT:  # clients of Anthropic's API expect a signature, as in llama-server
            delta = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
        yield {"type": "content_block_stop", "index": self._num_blocks}

    def last_events(self, finish_word: str, end: AnswerEnd) -> list[JsonObject]:
        delta = {"type": "message_delta", "delta": stop_fields(finish_word, end)}
        return [delta | {"usage": self._counts(end)}, {"type": "message_stop"}]

    def full_answer(
        self, blocks: Sequence[tuple[str, Any]], finish_word: str, end: AnswerEnd
    ) -> JsonObject:
        content = [block_of(*block) for block in blocks]
        return self._message(content, self._counts(end)) | stop_fields(finish_word, end)

    def _counts(self, end: AnswerEnd) -> JsonObject:
        counts = end.counts
        return {
            "input_tokens": counts.prompt - counts.cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached, "output_tokens": counts.output_tokens,
        }  # fmt: skip


def block_of(kind: str, content: Any) -> JsonObject:
    """Return a block of an answer in Anthropic's shape; content: its text, or its call in OpenAI's shape."""
    if kind == CALL:
        function = content["function"]
        arguments = arguments_object(function["arguments"])
        return {
            "type": "tool_use", "id": content["id"], "name": function["name"], "input": arguments
        }  # fmt: skip
    if kind == THOUGHT:
        return {"type": "thinking", "thinking": content, "signature": ""}
    return {"type": "text", "text": content}


def arguments_object(text: str) -> Any:
    """Return the arguments of a call, parsed from JSON; {"arguments": text} for a text that is no JSON."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"arguments": text}


def stop_fields(finish_word: str, end: AnswerEnd) -> JsonObject:
    """Return why an answer ended, as the fields stop_reason and stop_sequence; finish_word: OpenAI's finish_reason."""
    if end.reason == "stop" and finish_word == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_text}
    is_full = end.reason == "context"
    reason = "model_context_window_exceeded" if is_full else STOP_REASONS[finish_word]
    return {"stop_reason": reason, "stop_sequence": None}
