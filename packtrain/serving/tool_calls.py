"""Tools: which an answer may call, the grammar of calls, and the calls in a text."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.conversations.messages import Conversation
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.grammar import Grammar
from packtrain.inference.grammar.schema import loosened, moved
from packtrain.inference.grammar.tool_call_grammar import Calls, either
from packtrain.serving.json_fields import LONGEST_GRAMMAR, Body
from packtrain.serving.tool_call_styles import ID, WILD, Style

MOST = 128
EXPLAINED = (
    "You can call functions. They are, as JSON:\n{tools}\n"
    "To call one, answer {example} and nothing else."
)
Call = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    functions  each with name, description and parameters
    choice     auto, required, or the name of one
    several    whether an answer may have several calls
    warnings   what answers are not held to
    """

    functions: tuple[Call, ...]
    choice: str
    several: bool
    style: Style
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, body: Body, conversation: Conversation, style: Style) -> "Tools | None":
        """Those that an answer may call. Raises InputError."""
        choice = body.get("tool_choice") if body.has("tool_choice") else "auto"
        functions = tuple(tool["function"] for tool in conversation.tools or ())
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            choice, functions = _allowed(choice, functions)
        elif isinstance(choice, dict):
            choice = _named(choice, "tool_choice")
        if not isinstance(choice, str):
            raise InputError("tool_choice must be auto, none, required, or an object with a name")
        names = [function["name"] for function in functions]
        if len(names) > MOST:
            raise InputError(f"tools has {len(names)} functions; at most {MOST}")
        if choice not in ("auto", "none", "required" if names else "auto", *names):
            raise InputError(f"tool_choice is {choice!r}; there is no such tool")
        if not functions or choice == "none":
            return None
        raw_tools = body.get("tools")
        raw_functions = (
            [definition.get("function", definition) for definition in raw_tools]
            if isinstance(raw_tools, list)
            else []
        )
        strict = {
            definition["name"] for definition in raw_functions if definition.get("strict")
        } | {choice}
        loose_functions, warnings = list[Call](), list[str]()
        for function in functions:
            unsupported = list[str]()
            loose_functions.append(
                function | {"parameters": loosened(function["parameters"], unsupported)}
            )
            facts = [f"tools: {function['name']}: {place}" for place in unsupported]
            if facts and strict & {function["name"], "required"}:
                raise InputError(f"{facts[0]} is not supported: no grammar can hold answers to it")
            warnings += [f"{fact} is not supported: answers may not keep to it" for fact in facts]
        is_parallel = body.flag("parallel_tool_calls")
        return cls(tuple(loose_functions), choice, is_parallel, style, tuple(warnings))

    @property
    def names(self) -> list[str]:
        return [function["name"] for function in self.functions]

    def grammar(self, tokenizer: Tokenizer, otherwise: str = "") -> Grammar:
        """Calls that fit the functions' parameters: from the first token on, or once one begins.

        otherwise  schema of a document that an answer is where it need not call. Raises InputError.
        """
        free = self.choice == "auto"
        chosen = [f for f in self.functions if free or self.choice in ("required", f["name"])]
        try:
            return self._grammar(tokenizer, chosen, otherwise if free else "")
        except (InputError, AttributeError, TypeError) as error:
            faults = (_fault(tokenizer, f["parameters"], f["name"]) for f in chosen)
            if fault := next(filter(None, faults), ""):
                raise InputError(f"tools: {fault}") from None
            if isinstance(error, InputError):
                raise
            raise InputError(
                "tools: a property is no object; this model's calls need that"
            ) from None

    def _grammar(self, tokenizer: Tokenizer, chosen: Sequence[Call], otherwise: str) -> Grammar:
        style, free = self.style, self.choice == "auto"
        if len(json.dumps(chosen)) > LONGEST_GRAMMAR:
            raise InputError(f"tools have more than {LONGEST_GRAMMAR:,} characters")
        builder = Calls(tokenizer, WILD)
        call = self._call(builder, chosen)
        opening = builder.split(style.opening)
        triggers = dict[str, Any]()
        if free and not otherwise:
            first = opening[0] if opening else None
            begin = self.beginnings if first is None else (str(first).split(ID)[0].strip(),)
            triggers = {"tokens": (first,)} if isinstance(first, int) else {"words": begin}
        repeated_calls = (
            f"({builder.text(style.again)} {call})*" if self.several and style.again else ""
        )
        start = " ".join(
            filter(
                None,
                (builder.text(opening, True), call, repeated_calls, builder.text(style.closing)),
            )
        )
        return Grammar(tokenizer, builder.grammar(start, otherwise), **triggers)

    def _call(self, builder: Calls, chosen: Sequence[Call]) -> str:
        """The grammar of one call of these functions."""
        style = self.style
        if style.middle is None:
            return builder.document(self._schema(chosen))
        middle = builder.text(style.middle)
        return either(
            [f"{json.dumps(f['name'])} {middle} {self._arguments(builder, f)}" for f in chosen]
        )

    def _arguments(self, builder: Calls, function: Call) -> str:
        """What stands behind a name: an object, or its parts one by one."""
        schema = function["parameters"] or {"type": "object"}
        if self.style.quote:
            return builder.bare(self.style.quote)
        if self.style.python:
            return self._keywords(builder, schema)
        if self.style.pair is None:
            return builder.document(schema)
        before, _, after = self.style.pair
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for key, property_schema in schema.get("properties", {}).items():
            kind = property_schema.get("type", "string" if "enum" in property_schema else "object")
            between = self.style.between(kind if isinstance(kind, str) else "object")
            text = f"{builder.text(before)} {json.dumps(key)} {builder.text(between)}"
            if property_schema.get("type") == "string" and not property_schema.keys() & {
                "enum",
                "const",
                "pattern",
            }:
                text = f"{text} {builder.free(after)}"
            elif all(isinstance(value, str) for value in property_schema.get("enum", [0])):
                text = f"{text} {either([json.dumps(x) for x in property_schema['enum']])} {builder.text(after)}"
            else:
                text = f"{text} {builder.document(property_schema | shared)} {builder.text(after)}"
            parts.append(text if key in schema.get("required", ()) else f"({text})?")
        return " ".join(parts)

    def _keywords(self, builder: Calls, schema: Call) -> str:
        """The arguments as keywords of Python, in the order of the schema."""
        quote, parts = self.style.python, []
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for key, property_schema in schema.get("properties", {}).items():
            free = property_schema.get("type") == "string" and not property_schema.keys() & {
                "enum",
                "const",
                "pattern",
            }
            value = (
                f"{json.dumps(quote)} {builder.free(quote)}"
                if free
                else builder.document(property_schema | shared)
            )
            text = f"{json.dumps(f'{key}=')} {value} /,? ?/"
            parts.append(text if key in schema.get("required", ()) else f"({text})?")
        return " ".join(parts)

    def _schema(self, chosen: Sequence[Call]) -> Call:
        """Of the object, or the list of objects, that calls one of these functions."""
        style = self.style
        calls = [_schema(f, style, f"#/$defs/{i}") for i, f in enumerate(chosen)]
        schema: Call = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if style.listed:
            limits = {} if self.several else {"maxItems": 1}
            schema = {"type": "array", "items": schema, "minItems": 1} | limits
        schema["$defs"] = {
            str(i): moved(f["parameters"] or {"type": "object"}, f"#/$defs/{i}")
            for i, f in enumerate(chosen)
        }
        return schema

    @property
    def beginnings(self) -> tuple[str, ...]:
        """Texts with which an answer begins to call."""
        return self.style.beginnings(self.names)

    @property
    def awaited(self) -> tuple[str, ...]:
        """The same, and with what may stand between words and a call, which is no part of them."""
        begin, style = self.beginnings, self.style
        separator = "" if style.opening.strip() or style.middle is None else style.again.strip()
        return (*begin, *(f"{separator}{text}" for text in begin)) if separator else begin

    def has_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether control tokens are part of calls: the text of an answer must show them then."""
        builder, style = Calls(tokenizer, WILD), self.style
        texts = style.opening, style.again, style.closing, style.middle or "", *(style.pair or ())
        return any(isinstance(part, int) for text in texts for part in builder.split(text))

    def parse(self, text: str) -> tuple[str, list[Call]]:
        """The content of an answer, and its calls, as OpenAI's API has them, up to one that cannot be read."""
        words, calls = self.style.parse(text, self.names)
        return words, [_call(name, arguments) for name, arguments in calls]


def _allowed(choice: Any, functions: tuple[Call, ...]) -> tuple[str, tuple[Call, ...]]:
    """The mode of allowed_tools, and those of the functions that it lists. Raises InputError."""
    options = Body(choice.get("allowed_tools", choice), "tool_choice.allowed_tools")
    allowed = [_named(item, "tool_choice.tools") for item in options.listed("tools", MOST)]
    if not allowed:
        raise InputError("tool_choice.allowed_tools.tools must list at least one tool")
    if unknown := {*allowed} - {function["name"] for function in functions}:
        raise InputError(f"tool_choice allows {min(unknown)!r}; there is no such tool")
    if (mode := options.text("mode", "auto")) not in ("auto", "required"):
        raise InputError(f"tool_choice.mode is {mode!r}; it must be auto or required")
    return mode, tuple(item for item in functions if item["name"] in allowed)


def _named(choice: Any, location: str) -> str:
    return Body(Body(choice, location).get("function") or choice, location).text("name")


def _fault(tokenizer: Tokenizer, schema: Any, at: str) -> str:
    """What is wrong with a schema, and with which of its properties; empty if nothing is."""
    try:
        Grammar.from_schema(tokenizer, json.dumps(schema or {"type": "object"}))
        return ""
    except InputError as error:
        fact = f"{at}: {error}"
    properties = schema.get("properties") if isinstance(schema, dict) else None
    shared = {key: schema[key] for key in ("$defs", "definitions") if properties and key in schema}
    parts = properties.items() if isinstance(properties, dict) else ()
    faults = (_fault(tokenizer, x | shared, f"{at}.{k}") for k, x in parts if isinstance(x, dict))
    return next(filter(None, faults), fact)


def explained(conversation: Conversation, style: Style) -> Conversation:
    """Tools as a system message, where the template has no place for them."""
    functions = (tool["function"] for tool in conversation.tools or ())
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    words, messages = EXPLAINED.format(tools=lines, example=style.example()), conversation.messages
    if messages[0]["role"] == "system":
        first, messages = messages[0], messages[1:]
        words = f"{first['content']}\n\n{words}"
    return replace(
        conversation, messages=[{"role": "system", "content": words}, *messages], tools=None
    )


def _schema(function: Call, style: Style, parameters: str) -> Call:
    key_schemas = {style.name: {"const": function["name"]}, style.arguments: {"$ref": parameters}}
    return {
        "type": "object",
        "properties": {
            key: key_schemas.get(key, {"type": "string"}) for key in style.keys or key_schemas
        },
        "required": [style.name, style.arguments],
        "additionalProperties": False,
    }


def _call(name: str, arguments: Any) -> Call:
    words = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": words},
    }
