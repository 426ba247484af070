"""Tools: how models of a chat template call them, as a grammar and in a text."""

import json
import uuid
from dataclasses import dataclass, replace
from typing import Any

from packtrain.errors import InputError
from packtrain.grammar import Grammar
from packtrain.grammar.schema import moved
from packtrain.samples.messages import Conversation
from packtrain.serving.asked import LONGEST_GRAMMAR, Body
from packtrain.tokenizer import CONTROL, Tokenizer

MOST = 128
EXPLAINED = (
    "You can call functions. They are, as JSON:\n{tools}\n"
    'To call one, answer <tool_call>{{"name": NAME, "arguments": {{…}}}}</tool_call> and nothing else.'
)
Call = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Style:
    """How a call is written: texts around its JSON, the name of its arguments, and whether calls are a list."""

    opening: str
    closing: str
    arguments: str = "arguments"
    listed: bool = False


HERMES = Style("<tool_call>", "</tool_call>")
MISTRAL = Style("[TOOL_CALLS]", "", listed=True)
LLAMA = Style('{"name":', "", "parameters")  # nothing stands around it: this is how it begins


def style_of(template: str) -> Style:
    """The style that a chat template teaches; Hermes's if it teaches none."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    plain = "<tool_call>" not in template and "tools" in template
    return LLAMA if plain and '"parameters"' in template else HERMES


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    functions  each with name, description and parameters
    choice     auto, required, or the name of one
    several    whether an answer may have several calls
    """

    functions: tuple[Call, ...]
    choice: str
    several: bool
    style: Style

    @classmethod
    def of(cls, body: Body, conversation: Conversation, template: str) -> "Tools | None":
        """Those that an answer may call. Raises InputError."""
        choice = body.get("tool_choice") or "auto"
        if isinstance(choice, dict):
            choice = Body(choice.get("function", choice), "tool_choice").text("name")
        if not isinstance(choice, str):
            raise InputError("tool_choice must be auto, none, required, or an object with a name")
        functions = tuple(tool["function"] for tool in conversation.tools or ())
        names = [function["name"] for function in functions]
        if len(names) > MOST:
            raise InputError(f"tools has {len(names)} functions; at most {MOST}")
        if choice not in ("auto", "none", "required", *names):
            raise InputError(f"tool_choice is {choice!r}; there is no such tool")
        if not functions or choice == "none":
            return None
        return cls(functions, choice, body.flag("parallel_tool_calls"), style_of(template))

    def grammar(self, tokenizer: Tokenizer, otherwise: str = "") -> Grammar:
        """Calls that fit the functions' parameters: from the first token on, or once one begins.

        otherwise  schema of a document that an answer is where it need not call. Raises InputError.
        """
        style, free = self.style, self.choice == "auto"
        lazy = free and not otherwise
        chosen = [f for f in self.functions if free or self.choice in ("required", f["name"])]
        calls = [_schema(f, style.arguments, f"#/$defs/{i}") for i, f in enumerate(chosen)]
        schema: Call = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if style.listed:
            most = {} if self.several else {"maxItems": 1}
            schema = {"type": "array", "items": schema, "minItems": 1} | most
        schema["$defs"] = {
            str(i): moved(f["parameters"] or {"type": "object"}, f"#/$defs/{i}")
            for i, f in enumerate(chosen)
        }
        if len(json.dumps(schema)) > LONGEST_GRAMMAR:
            raise InputError(f"tools have more than {LONGEST_GRAMMAR:,} characters")
        token = self.token(tokenizer)
        opening = token if token is not None else "" if style is LLAMA else style.opening
        words = (style.opening,) if lazy and token is None else ()
        return Grammar.of_calls(
            tokenizer, schema, opening, style.closing, several=self.several and not style.listed,
            words=words, tokens=(token,) if lazy and token is not None else (),
            otherwise=otherwise if free else "",
        )  # fmt: skip

    def token(self, tokenizer: Tokenizer) -> int | None:
        """The control token with which calls begin, if there is one: a text of answers would not show it."""
        text = self.style.opening.encode()
        found = tokenizer.tokens.index(text) if text in tokenizer.tokens else None
        return found if found is not None and tokenizer.kinds[found] == CONTROL else None

    def parse(self, text: str) -> tuple[str, list[Call]]:
        """The content of an answer, and its calls, as OpenAI's API has them, up to one that cannot be read."""
        style, names = self.style, {function["name"] for function in self.functions}
        begin = text.find(style.opening)
        if begin < 0:
            return text, []
        rest = text[begin:] if style is LLAMA else text[begin + len(style.opening) :]
        pieces = rest.split(style.opening) if style is HERMES else [rest]
        found = list[Call]()
        for piece in pieces:
            call = _json(piece.split(style.closing)[0] if style.closing else piece)
            calls = call if isinstance(call, list) else [call]
            if not all(isinstance(one, dict) and one.get("name") in names for one in calls):
                break
            found += [_call(one["name"], one.get(style.arguments, {})) for one in calls]
        return (text[:begin].rstrip(), found) if found else (text, [])


def explained(conversation: Conversation) -> Conversation:
    """Tools as a system message, where the template has no place for them."""
    functions = (tool["function"] for tool in conversation.tools or ())
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    words, messages = EXPLAINED.format(tools=lines), conversation.messages
    if messages[0]["role"] == "system":
        first, messages = messages[0], messages[1:]
        words = f"{first['content']}\n\n{words}"
    return replace(
        conversation, messages=[{"role": "system", "content": words}, *messages], tools=None
    )


def _schema(function: Call, arguments: str, parameters: str) -> Call:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            arguments: {"$ref": parameters},
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _call(name: str, arguments: Any) -> Call:
    words = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": words},
    }


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
