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


def pair(where: str, prompt: list[Message], answers: dict[str, list[Message]], tools: Any) -> Pair:
    """The answers by name, `chosen` and `rejected`, after a prompt."""
    found = {}
    for name, messages in answers.items():
        if not messages or messages[-1]["role"] != "assistant":
            raise InputError(f"{where}: {name} must end with the assistant's answer")
        _check_learnt(f"{where}: {name}", messages)
        whole = conversation(where, [*prompt, *messages], tools)
        found[name] = replace(whole, answer=len(messages))
    if answers["chosen"] == answers["rejected"]:
        raise InputError(f"{where}: chosen and rejected are equal", "they must differ")
    return Pair(where, found["chosen"], found["rejected"])


def conversation(where: str, messages: list[Message], tools: Any) -> Conversation:
    """A checked conversation: the user speaks first, the assistant last; drops turns before and after that."""
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise InputError(f"{where} has no turn of the assistant to train on")
    start = sum(1 for _ in takewhile(lambda m: m["role"] in ("system", "developer"), messages))
    turns = list(dropwhile(lambda m: m["role"] == "assistant", messages[start:]))
    if not turns:
        raise InputError(f"{where} has no answer of the assistant to train on")
    if turns[0]["role"] != "user":
        raise InputError(
            f"{where}: the first to speak is {turns[0]['role']}", "it must be the user"
        )
    _check_learnt(where, turns)
    opened = len(turns) < len(messages) - start
    messages = messages[:start] + turns
    _name_calls(messages)
    return Conversation(where, messages, _tools(tools, where), opened)


def _check_learnt(where: str, turns: list[Message]) -> None:
    if not any(m["role"] == "assistant" and m.get("weight") != 0 for m in turns):
        raise InputError(f"{where} has no answer with a weight of 1 to train on")


def parsed(given: Any, at: str) -> Any:
    """A list or an object, parsed if it is JSON text, as in a table cell."""
    return _json(given, at, '[{"role": …}]') if isinstance(given, str) and given.strip() else given


def question(turns: Any, tools: Any, where: str) -> Conversation:
    """A conversation that waits for an answer; contents may be empty."""
    messages = read_messages(turns, where, "messages", empty=True)
    _name_calls(messages)
    return Conversation(where, messages, _tools(tools, where))


def read_messages(turns: Any, where: str, name: str, empty: bool = False) -> list[Message]:
    turns = parsed(turns, f"{where}: {name}")
    if not isinstance(turns, list) or not turns:
        raise InputError(f"{where}: {name} must be a list of messages", WANTED)
    return [_message(turn, f"{where}: {name}[{i}]", empty) for i, turn in enumerate(turns)]


def _message(turn: Any, at: str, empty: bool) -> Message:
    turn = an_object(turn, at)
    given = turn.get("role", turn.get("from"))
    role = ROLES.get(given.lower()) if isinstance(given, str) else None
    if role is None:
        raise InputError(f"{at}: role is {given!r}", "it must be system, user, assistant or tool")
    check(turn, at, MESSAGE if empty else TURN)
    content = turn.get("content", turn.get("value"))
    calls: Any = turn.get("tool_calls")
    if legacy := turn.get("function_call"):
        if calls:
            raise InputError(f"{at} has tool_calls and function_call", "one of them must go")
        calls = [legacy]
    if given == "function_call":
        content, calls = "", _json(content, f"{at}: the call", CALL)
    if calls and role != "assistant":
        raise InputError(f"{at}: the {role} calls a tool", "only the assistant can")
    kept = {name: turn[name] for name in sorted(KEPT_FIELDS & set(turn))}
    if turn.get("reasoning"):
        kept.setdefault("reasoning_content", turn["reasoning"])
    for thoughts in ("reasoning_content", "thinking"):
        sound(kept.get(thoughts) or "", f"{at}: {thoughts}", WANTED)
    kept |= {} if empty else weight_of(turn, role, at)
    if calls:
        parsed_calls = [_call(call, at) for call in (calls if isinstance(calls, list) else [calls])]
        words = _content(content, at) if content else ""
        return {"role": role, "content": words, **kept, "tool_calls": parsed_calls}
    if empty and content is None:
        if "content" not in turn:
            raise InputError(f"{at} has no content")
        content = ""  # null, as clients repeat an answer without words
    return new_message(role, content, at, empty) | kept


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
            given, first = message.get("tool_call_id"), waiting.pop(0)
            message["tool_call_id"] = first if given is None else given


def _tools(tools: Any, where: str) -> list[Any] | None:
    """Tools as llama.cpp's server passes them to templates: these fields, in this order."""
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, f"{where}: tools", '[{"name": …, "parameters": …}]')
    if not tools:
        return None
    if not isinstance(tools, list):
        raise InputError(f"{where}: tools must be a list of objects, each with name and parameters")
    functions = []
    for i, tool in enumerate(tools):
        at = f"{where}: tools[{i}]"
        tool = an_object(tool, at)
        function = an_object(tool.get("function", tool), at)
        if not isinstance(function.get("name"), str):
            raise InputError(f"{at} has no name", "it must be an object with name and parameters")
        given = {"name": "", "description": "", "parameters": {}} | function
        function = {key: given[key] for key in ("name", "description", "parameters")}
        functions.append({"type": "function", "function": function})
    return functions


def _json(text: Any, at: str, like: str) -> Any:
    try:
        return json.loads(sound(text, at, WANTED))
    except (ValueError, RecursionError):
        raise InputError(f"{at} is not JSON", f"it must be like {like}") from None


def worded(given: Any, at: str) -> str:
    text = sound(given, at, WANTED)
    if not text.strip():
        raise InputError(f"{at} is empty", "it must have words")
    return text


def an_object(found: Any, at: str) -> Message:
    if not isinstance(found, dict):
        raise InputError(f"{at} is {type(found).__name__}, not an object", WANTED)
    return found


def listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []
