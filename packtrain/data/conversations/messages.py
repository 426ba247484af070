"""Messages in the form that chat templates take: roles, content, tool calls with parsed arguments, call ids.

Turns the values of a record into a conversation; InputError names the place and the expected value."""

import json
import re
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.conversations.field_meanings import LOSS, MESSAGE, PART, TURN, check, weight_of
from packtrain.data.text.documents import valid_text

Message = dict[str, Any]
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
ROLES |= {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"function": "tool", "function_response": "tool", "ipython": "tool", "model": "assistant"}
CALL_EXAMPLE = '{"name": …, "arguments": …}'
# names of the arguments of a call, and of a tool's schema: OpenAI's, those of Anthropic, MCP and Gemini, and others
ARGUMENT_NAMES = "arguments", "parameters", "input", "args", "kwargs"
SCHEMA_NAMES = (
    "parameters", "input_schema", "inputSchema", "parameters_json_schema", "parametersJsonSchema", "arguments",
)  # fmt: skip
TOOL_TYPES = None, "function", "custom"
# fields with one meaning: they must not differ
TWINS = ("content", "value"), ("reasoning_content", "reasoning"), ("reasoning_content", "thinking")
# templates may read them
KEPT_FIELDS = {"tool_call_id", "name", "reasoning_content", "thinking"}
MESSAGE_FIELDS = {"role", "content", "from", "value", "tool_calls", "function_call", "reasoning"}
MESSAGE_FIELDS |= KEPT_FIELDS | LOSS.keys()
WORD = re.compile(r"\w+")
RECORD_ADVICE = (
    'a record is like {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]},'
    ' {"prompt": "…", "completion": "…"}, {"prompt": "…", "chosen": "…", "rejected": "…"} or {"text": "…"}'
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with role and content, the last one the assistant's; `location` is the place in the file.

    opened               the assistant spoke first, in a turn that was dropped
    num_answer_messages  only the assistant's turns among the last N messages are trained on; 0: all
    """

    location: str
    messages: list[Message]
    tools: list[Any] | None = None
    opened: bool = False
    num_answer_messages: int = 0


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """A chosen and a rejected answer to the same prompt."""

    location: str
    chosen: Conversation
    rejected: Conversation


def make_pair(
    location: str, prompt: list[Message], answers: dict[str, list[Message]], tools: Any
) -> AnswerPair:
    """Build a pair of prompt and answers {"chosen": …, "rejected": …} at `location` of the data. Raises InputError."""
    conversations = {}
    for name, messages in answers.items():
        if not messages or messages[-1]["role"] != "assistant":
            raise InputError(f"{location}: {name} must end with the assistant's answer")
        _check_has_trained_turn(f"{location}: {name}", messages)
        full_conversation = make_conversation(location, [*prompt, *messages], tools)
        conversations[name] = replace(full_conversation, num_answer_messages=len(messages))
    if answers["chosen"] == answers["rejected"]:
        raise InputError(f"{location}: chosen and rejected are equal", "they must differ")
    return AnswerPair(location, conversations["chosen"], conversations["rejected"])


def make_conversation(location: str, messages: list[Message], tools: Any) -> Conversation:
    """Check a conversation; drop turns before the user's first and after the assistant's last. Raises InputError."""
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise InputError(f"{location} has no turn of the assistant to train on")
    num_system = sum(1 for _ in takewhile(lambda m: m["role"] in ("system", "developer"), messages))
    # an opening turn of the assistant answers nothing, and most templates refuse it; Axolotl drops it, too
    turns = list(dropwhile(lambda m: m["role"] == "assistant", messages[num_system:]))
    if not turns:
        raise InputError(f"{location} has no answer of the assistant to train on")
    if turns[0]["role"] != "user":
        advice = "it must be the user"
        raise InputError(f"{location}: the first to speak is {turns[0]['role']}", advice)
    _check_has_trained_turn(location, turns)
    dropped_opening = len(turns) < len(messages) - num_system
    messages = messages[:num_system] + turns
    _assign_call_ids(messages)
    return Conversation(location, messages, _check_tools(tools, location), dropped_opening)


def _check_has_trained_turn(location: str, turns: list[Message]) -> None:
    if not any(m["role"] == "assistant" and m.get("weight") != 0 for m in turns):
        raise InputError(f"{location} has no answer with a weight of 1 to train on")


def parse_if_json(value: Any, at: str) -> Any:
    """Parse a text, as of a table's cell, as JSON; blank texts and other values stay. Raises InputError at `at`."""
    return _json(value, at, '[{"role": …}]') if isinstance(value, str) and value.strip() else value


def question(turns: Any, tools: Any, location: str) -> Conversation:
    """Build a conversation that waits for an answer from a chat request; contents may be empty. Raises InputError."""
    messages = read_messages(turns, location, "messages", allow_empty=True)
    _assign_call_ids(messages)
    return Conversation(location, messages, _check_tools(tools, location))


def read_messages(turns: Any, location: str, name: str, allow_empty: bool = False) -> list[Message]:
    """Check `turns`, a list of messages or its JSON text, and return them in the form that templates take. Errors call
    them `name` of the record at `location`."""
    turns = parse_if_json(turns, f"{location}: {name}")
    if not isinstance(turns, list) or not turns:
        raise InputError(f"{location}: {name} must be a list of messages", RECORD_ADVICE)
    return [_message(turn, f"{location}: {name}[{i}]", allow_empty) for i, turn in enumerate(turns)]


def _message(turn: Any, at: str, allow_empty: bool) -> Message:
    """Check a message, return it in the form that templates take, its role by the usual name. Raises InputError."""
    turn = check_object(turn, at)
    raw_role = turn.get("role", turn.get("from"))
    role = ROLES.get(raw_role.lower()) if isinstance(raw_role, str) else None
    if role is None:
        advice = "it must be system, user, assistant or tool"
        raise InputError(f"{at}: role is {raw_role!r}", advice)
    if ROLES.get(str(turn.get("from") or raw_role).lower()) != role:
        raise InputError(f"{at}: role and from differ", "one of them must go")
    check(turn, at, MESSAGE if allow_empty else TURN)
    for name, twin in TWINS:
        if turn.get(name) and turn.get(twin) not in (None, "", turn[name]):
            raise InputError(f"{at}: {name} and {twin} differ", "one of them must go")
    content = turn.get("content", turn.get("value"))
    calls: Any = turn.get("tool_calls")
    if legacy_call := turn.get("function_call"):
        if calls:
            raise InputError(f"{at} has tool_calls and function_call", "one of them must go")
        calls = [legacy_call]
    if raw_role.lower() == "function_call":
        content, calls = "", _json(content, f"{at}: the call", CALL_EXAMPLE)
    if calls and role != "assistant":
        raise InputError(f"{at}: the {role} calls a tool", "only the assistant can")
    extra_fields = {name: turn[name] for name in sorted(KEPT_FIELDS & set(turn))}
    if turn.get("reasoning"):
        extra_fields.setdefault("reasoning_content", turn["reasoning"])
    for thought_field in ("reasoning_content", "thinking"):
        valid_text(extra_fields.get(thought_field) or "", f"{at}: {thought_field}", RECORD_ADVICE)
    extra_fields |= {} if allow_empty else weight_of(turn, role, at)
    if calls:
        parsed_calls = [_call(call, at) for call in (calls if isinstance(calls, list) else [calls])]
        content_text = _content_text(content, at) if content else ""
        return {"role": role, "content": content_text, **extra_fields, "tool_calls": parsed_calls}
    if allow_empty and content is None:
        if "content" not in turn:
            raise InputError(f"{at} has no content")
        content = ""  # null: clients send back an answer without words so
    return new_message(role, content, at, allow_empty) | extra_fields


def new_message(role: str, content: Any, at: str, allow_empty: bool = False) -> Message:
    """Return a checked message; only a tool's may be empty, unless `allow_empty`. Raises InputError, at `at`."""
    text = _content_text(content, at)
    if role != "tool" and not allow_empty and not text.strip():
        raise InputError(f"{at}: the {role}'s content is empty", "it must have words")
    return {"role": role, "content": text}


def _content_text(content: Any, at: str) -> str:
    """Return the text of a message's content, a text or a list of text parts. Raises InputError, at `at`."""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = repr(part.get("type")) if isinstance(part, dict) else "no object"
                advice = "only text is supported"
                raise InputError(f"{at}: content has a part that is not text: {kind}", advice)
            check(part, at, PART)
        content = "".join(
            valid_text(part.get("text"), f"{at}: text", RECORD_ADVICE) for part in content
        )
    return valid_text(content, f"{at}: content", RECORD_ADVICE)


def _call(call: Any, at: str) -> Message:
    """Return a tool call in templates' form, with its arguments as an object. Raises InputError, at `at`."""
    call = check_object(call, f"{at}: tool_calls")
    # values may stand beside the function, too
    function = {**call, **check_object(call.get("function", call), f"{at}: function")}
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"{at}: a tool call needs a name")
    arguments = _named_value(function, ARGUMENT_NAMES, at)
    if isinstance(arguments, str):
        arguments = arguments.strip() and _json(arguments, f"{at}: arguments", '{"city": "Oslo"}')
    if arguments and not isinstance(arguments, dict):
        raise InputError(f"{at}: arguments are {type(arguments).__name__}, not an object")
    tool_call = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    return tool_call if call.get("id") is None else {"id": call["id"], **tool_call}


def _named_value(values: Message, names: tuple[str, ...], at: str) -> Any:
    """Return the value under one of these names, or None. Raises InputError, at `at`, if their values differ."""
    present_names = [name for name in names if values.get(name) is not None]
    if any(values[name] != values[present_names[0]] for name in present_names):
        raise InputError(f"{at}: {' and '.join(present_names)} differ", "one of them must go")
    return values[present_names[0]] if present_names else None


def _assign_call_ids(messages: list[Message]) -> None:
    """Give calls without an id one of nine characters, as some templates require, and their results the same id."""
    pending_ids: list[str] = []
    num_calls = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            num_calls += 1
            pending_ids.append(call.setdefault("id", f"call{num_calls:05d}"))
        if message["role"] == "tool" and pending_ids:
            call_id, next_id = message.get("tool_call_id"), pending_ids.pop(0)
            message["tool_call_id"] = next_id if call_id is None else call_id


def with_text_arguments(message: Message) -> Message:
    """Return the message with its calls' arguments as JSON text, for templates that add them to other text."""
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def name_call_ids(messages: list[Message]) -> list[Message]:
    """Give calls, and their results, ids that contain the function's name, for templates that write only ids."""
    ids, output, num_calls = dict[str, str](), list[Message](), 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            name, call_id = call["function"]["name"], str(call.get("id", ""))
            names_function = re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", call_id)
            ids[call_id] = call_id if names_function else f"functions.{name}:{num_calls}"
            calls.append({**call, "id": ids[call_id]})
            num_calls += 1
        answers = ids.get(str(message.get("tool_call_id", "")))
        id_fields = {"tool_calls": calls} if calls else {"tool_call_id": answers} if answers else {}
        output.append({**message, **id_fields})
    return output


def is_lost(message: Message, text: str) -> bool:
    """Whether a text lacks the words of a message that is not the assistant's, whose spacing and quotes a template may
    change, or the name of its speaker; tools are known by the ids of their calls."""
    content, is_assistant = message["content"].strip(), message["role"] == "assistant"
    forms = content, json.dumps(content, ensure_ascii=False)[1:-1]
    has_words = is_assistant or any(form in text for form in forms)
    name = "" if message["role"] == "tool" else message.get("name") or ""
    return str(name) not in text or not (
        has_words or {*WORD.findall(content)} <= {*WORD.findall(text)}
    )


def _check_tools(tools: Any, location: str) -> list[Any] | None:
    """Return tools (a list, or its JSON text) in llama.cpp's form for templates, or None. Raises InputError."""
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, f"{location}: tools", '[{"name": …, "parameters": …}]')
    if not tools:
        return None
    if not isinstance(tools, list):
        fact = f"{location}: tools must be a list of objects, each with name and parameters"
        raise InputError(fact)
    functions = []
    for i, tool in enumerate(tools):
        at = f"{location}: tools[{i}]"
        tool = check_object(tool, at)
        function = {**tool, **check_object(tool.get("function", tool), at)}
        if not isinstance(function.get("name"), str):
            raise InputError(f"{at} has no name", "it must be an object with name and parameters")
        if tool.get("type") not in TOOL_TYPES:
            raise InputError(f"{at}: type is {tool['type']!r}", "it must be function")
        schema, text = _named_value(function, SCHEMA_NAMES, at) or {}, function.get("description")
        described = {"name": function["name"], "description": text or "", "parameters": schema}
        functions.append({"type": "function", "function": described})
    return functions


def _json(text: Any, at: str, example: str) -> Any:
    """Parse the JSON text at `at`, a place in the data. Raises InputError, which shows an example."""
    try:
        return json.loads(valid_text(text, at, RECORD_ADVICE))
    except (ValueError, RecursionError):
        raise InputError(f"{at} is not JSON", f"it must be like {example}") from None


def check_object(value: Any, at: str) -> Message:
    if not isinstance(value, dict):
        raise InputError(f"{at} is {type(value).__name__}, not an object", RECORD_ADVICE)
    return value
