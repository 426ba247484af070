"""Messages in the form that chat templates take: roles, content, tool calls with parsed arguments, call ids.

Turns the values of a record into a conversation; InputError names the place and what is expected.
"""

import json
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.conversations.field_meanings import LOSS, MESSAGE, PART, TURN, check, weight_of
from packtrain.data.text.documents import sound

Message = dict[str, Any]
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
ROLES |= {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"function": "tool", "function_response": "tool", "ipython": "tool", "model": "assistant"}
CALL = '{"name": …, "arguments": …}'
# templates may read them
KEPT_FIELDS = {"tool_call_id", "name", "reasoning_content", "thinking"}
MESSAGE_FIELDS = {"role", "content", "from", "value", "tool_calls", "function_call", "reasoning"}
MESSAGE_FIELDS |= KEPT_FIELDS | LOSS.keys()
WANTED = (
    'a record is like {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]},'
    ' {"prompt": "…", "completion": "…"}, {"prompt": "…", "chosen": "…", "rejected": "…"} or {"text": "…"}'
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with role and content, the last one the assistant's; `where` is the place in the file.

    opened  the assistant spoke first; that turn was dropped
    answer  only the assistant's turns among so many last messages are trained on; 0: all
    """

    where: str
    messages: list[Message]
    tools: list[Any] | None = None
    opened: bool = False
    answer: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to the same prompt."""

    where: str
    chosen: Conversation
    rejected: Conversation


def pair(
    location: str, prompt: list[Message], answers: dict[str, list[Message]], tools: Any
) -> Pair:
    """The answers by name, `chosen` and `rejected`, after a prompt."""
    by_name = {}
    for name, messages in answers.items():
        if not messages or messages[-1]["role"] != "assistant":
            raise InputError(f"{location}: {name} must end with the assistant's answer")
        _check_learnt(f"{location}: {name}", messages)
        full_conversation = conversation(location, [*prompt, *messages], tools)
        by_name[name] = replace(full_conversation, answer=len(messages))
    if answers["chosen"] == answers["rejected"]:
        raise InputError(f"{location}: chosen and rejected are equal", "they must differ")
    return Pair(location, by_name["chosen"], by_name["rejected"])


def conversation(location: str, messages: list[Message], tools: Any) -> Conversation:
    """A checked conversation: the user speaks first, the assistant last; drops turns before and after that."""
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise InputError(f"{location} has no turn of the assistant to train on")
    start = sum(1 for _ in takewhile(lambda m: m["role"] in ("system", "developer"), messages))
    turns = list(dropwhile(lambda m: m["role"] == "assistant", messages[start:]))
    if not turns:
        raise InputError(f"{location} has no answer of the assistant to train on")
    if turns[0]["role"] != "user":
        raise InputError(
            f"{location}: the first to speak is {turns[0]['role']}", "it must be the user"
        )
    _check_learnt(location, turns)
    opened = len(turns) < len(messages) - start
    messages = messages[:start] + turns
    _name_calls(messages)
    return Conversation(location, messages, _tools(tools, location), opened)


def _check_learnt(location: str, turns: list[Message]) -> None:
    if not any(m["role"] == "assistant" and m.get("weight") != 0 for m in turns):
        raise InputError(f"{location} has no answer with a weight of 1 to train on")


def parsed(value: Any, at: str) -> Any:
    """A list or an object, parsed if it is JSON text, as in a table cell."""
    return _json(value, at, '[{"role": …}]') if isinstance(value, str) and value.strip() else value


def question(turns: Any, tools: Any, location: str) -> Conversation:
    """A conversation that waits for an answer; contents may be empty."""
    messages = read_messages(turns, location, "messages", empty=True)
    _name_calls(messages)
    return Conversation(location, messages, _tools(tools, location))


def read_messages(turns: Any, location: str, name: str, empty: bool = False) -> list[Message]:
    turns = parsed(turns, f"{location}: {name}")
    if not isinstance(turns, list) or not turns:
        raise InputError(f"{location}: {name} must be a list of messages", WANTED)
    return [_message(turn, f"{location}: {name}[{i}]", empty) for i, turn in enumerate(turns)]


def _message(turn: Any, at: str, empty: bool) -> Message:
    turn = an_object(turn, at)
    raw_role = turn.get("role", turn.get("from"))
    role = ROLES.get(raw_role.lower()) if isinstance(raw_role, str) else None
    if role is None:
        raise InputError(
            f"{at}: role is {raw_role!r}", "it must be system, user, assistant or tool"
        )
    check(turn, at, MESSAGE if empty else TURN)
    content = turn.get("content", turn.get("value"))
    calls: Any = turn.get("tool_calls")
    if legacy := turn.get("function_call"):
        if calls:
            raise InputError(f"{at} has tool_calls and function_call", "one of them must go")
        calls = [legacy]
    if raw_role == "function_call":
        content, calls = "", _json(content, f"{at}: the call", CALL)
    if calls and role != "assistant":
        raise InputError(f"{at}: the {role} calls a tool", "only the assistant can")
    extra_fields = {name: turn[name] for name in sorted(KEPT_FIELDS & set(turn))}
    if turn.get("reasoning"):
        extra_fields.setdefault("reasoning_content", turn["reasoning"])
    for thoughts in ("reasoning_content", "thinking"):
        sound(extra_fields.get(thoughts) or "", f"{at}: {thoughts}", WANTED)
    extra_fields |= {} if empty else weight_of(turn, role, at)
    if calls:
        parsed_calls = [_call(call, at) for call in (calls if isinstance(calls, list) else [calls])]
        words = _content(content, at) if content else ""
        return {"role": role, "content": words, **extra_fields, "tool_calls": parsed_calls}
    if empty and content is None:
        if "content" not in turn:
            raise InputError(f"{at} has no content")
        content = ""  # null, as clients repeat an answer without words
    return new_message(role, content, at, empty) | extra_fields


def new_message(role: str, content: Any, at: str, empty: bool = False) -> Message:
    """A message; only a tool's may be empty, unless all may."""
    text = _content(content, at)
    if role != "tool" and not empty and not text.strip():
        raise InputError(f"{at}: the {role}'s content is empty", "it must have words")
    return {"role": role, "content": text}


def _content(content: Any, at: str) -> str:
    """The text of a message's content, which may be a list of parts."""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = repr(part.get("type")) if isinstance(part, dict) else "no object"
                raise InputError(
                    f"{at}: content has a part that is not text: {kind}", "only text is supported"
                )
            check(part, at, PART)
        content = "".join(sound(part.get("text"), f"{at}: text", WANTED) for part in content)
    return sound(content, f"{at}: content", WANTED)


def _call(call: Any, at: str) -> Message:
    """A tool call in the form that templates take, with its arguments as an object."""
    call = an_object(call, f"{at}: tool_calls")
    function = an_object(call.get("function", call), f"{at}: function")
    name = function.get("name")
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        raise InputError(f"{at}: a tool call needs a name")
    if isinstance(arguments, str):
        arguments = arguments.strip() and _json(arguments, f"{at}: arguments", '{"city": "Oslo"}')
    tool_call = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    return tool_call if call.get("id") is None else {"id": call["id"], **tool_call}


def _name_calls(messages: list[Message]) -> None:
    """Give calls without an id one of nine characters, as some templates require, and their results the same."""
    waiting: list[str] = []
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            count += 1
            waiting.append(call.setdefault("id", f"call{count:05d}"))
        if message["role"] == "tool" and waiting:
            call_id, first = message.get("tool_call_id"), waiting.pop(0)
            message["tool_call_id"] = first if call_id is None else call_id


def _tools(tools: Any, location: str) -> list[Any] | None:
    """Tools as llama.cpp's server passes them to templates: these fields, in this order."""
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, f"{location}: tools", '[{"name": …, "parameters": …}]')
    if not tools:
        return None
    if not isinstance(tools, list):
        raise InputError(
            f"{location}: tools must be a list of objects, each with name and parameters"
        )
    functions = []
    for i, tool in enumerate(tools):
        at = f"{location}: tools[{i}]"
        tool = an_object(tool, at)
        function = an_object(tool.get("function", tool), at)
        if not isinstance(function.get("name"), str):
            raise InputError(f"{at} has no name", "it must be an object with name and parameters")
        with_defaults = {"name": "", "description": "", "parameters": {}} | function
        function = {key: with_defaults[key] for key in ("name", "description", "parameters")}
        functions.append({"type": "function", "function": function})
    return functions


def _json(text: Any, at: str, example: str) -> Any:
    try:
        return json.loads(sound(text, at, WANTED))
    except (ValueError, RecursionError):
        raise InputError(f"{at} is not JSON", f"it must be like {example}") from None


def worded(value: Any, at: str) -> str:
    text = sound(value, at, WANTED)
    if not text.strip():
        raise InputError(f"{at} is empty", "it must have words")
    return text


def an_object(value: Any, at: str) -> Message:
    if not isinstance(value, dict):
        raise InputError(f"{at} is {type(value).__name__}, not an object", WANTED)
    return value


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
