"""Tools that an answer may call and the grammar of calls; tool_call_styles parses calls from a text."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.conversations.messages import Conversation
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.grammar import Grammar
from packtrain.inference.grammar.schema import loosened, rebase_references
from packtrain.inference.grammar.tool_call_grammar import ToolCallRules, alternation
from packtrain.serving.json_fields import MAX_GRAMMAR_CHARS, JsonBody
from packtrain.serving.tool_call_styles import ID_MARK, WILD, ToolCallStyle

MAX_TOOLS = 128
EXPLAINED = (
    "You can call functions. They are, as JSON:\n{tools}\n"
    "To call one, answer {example} and nothing else."
)
Call = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of a request.

    functions       each with name, description and parameters
    choice          auto, required, or the name of a tool
    allow_parallel  whether an answer may have several calls
    warnings        sentences about keywords of schemas to which no grammar holds answers. A strict, named or required
                    tool with such a keyword is refused. With choice auto a tool may never be called: refusing it would
                    be wrong, and so would silence; clients ignore fields that they do not know
    """

    functions: tuple[Call, ...]
    choice: str
    allow_parallel: bool
    style: ToolCallStyle
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_request(
        cls, body: JsonBody, conversation: Conversation, style: ToolCallStyle
    ) -> "RequestTools | None":
        """Parse the tools that an answer may call; None without tools, or for tool_choice none. Raises InputError."""
        choice = body.get("tool_choice") if body.has("tool_choice") else "auto"
        functions = tuple(tool["function"] for tool in conversation.tools or ())
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            choice, functions = _allowed_functions(choice, functions)
        elif isinstance(choice, dict):
            kind = choice.get("type")
            choice = kind if kind in ("auto", "none", "required") else _named(choice, "tool_choice")
        if not isinstance(choice, str):
            raise InputError("tool_choice must be auto, none, required, or an object with a name")
        names = [function["name"] for function in functions]
        if len(names) > MAX_TOOLS:
            raise InputError(f"tools has {len(names)} functions; at most {MAX_TOOLS}")
        if choice not in ("auto", "none", "required" if names else "auto", *names):
            raise InputError(f"tool_choice is {choice!r}; there is no such tool")
        if not functions or choice == "none":
            return None
        raw_tools = body.get("tools") if isinstance(body.get("tools"), list) else []
        raw_functions = [definition.get("function", definition) for definition in raw_tools]
        strict_names = {f["name"] for f in raw_functions if f.get("strict")} | {choice}
        loose_functions, warnings = list[Call](), list[str]()
        for function in functions:
            unsupported = list[str]()
            parameters = loosened(function["parameters"], unsupported)
            loose_functions.append(function | {"parameters": parameters})
            facts = [f"tools: {function['name']}: {place}" for place in unsupported]
            if facts and strict_names & {function["name"], "required"}:
                raise InputError(f"{facts[0]} is not supported: no grammar can hold answers to it")
            warnings += [f"{fact} is not supported: answers may not keep to it" for fact in facts]
        is_parallel = body.get_flag("parallel_tool_calls")
        return cls(tuple(loose_functions), choice, is_parallel, style, tuple(warnings))

    @property
    def names(self) -> list[str]:
        return [function["name"] for function in self.functions]

    def grammar(self, tokenizer: Tokenizer, otherwise: str = "") -> Grammar:
        """Create the grammar of calls whose arguments fit the functions' parameters. Raises InputError.

        otherwise  JSON schema of answers that call nothing; without one, a grammar for choice auto is lazy: any text
                   may come before a call
        """
        is_free = self.choice == "auto"
        chosen = [f for f in self.functions if is_free or self.choice in ("required", f["name"])]
        try:
            return self._grammar(tokenizer, chosen, otherwise if is_free else "")
        except (InputError, AttributeError, TypeError) as error:
            for function in chosen:
                try:
                    schema_text = json.dumps(function["parameters"] or {"type": "object"})
                    Grammar.from_schema(tokenizer, schema_text)
                except InputError as fault:
                    raise InputError(f"tools: {function['name']}: {fault}") from None
            if isinstance(error, InputError):
                raise
            fact = "tools: a property is no object; this model's calls need that"
            raise InputError(fact) from None

    def _grammar(self, tokenizer: Tokenizer, chosen: Sequence[Call], otherwise: str) -> Grammar:
        style, is_free = self.style, self.choice == "auto"
        if len(json.dumps(chosen)) > MAX_GRAMMAR_CHARS:
            raise InputError(f"tools have more than {MAX_GRAMMAR_CHARS:,} characters")
        builder = ToolCallRules(tokenizer, WILD)
        call = self._call_rule(builder, chosen)
        opening = builder.split_tokens(style.opening)
        triggers = dict[str, Any]()
        if is_free and not otherwise:
            first = opening[0] if opening else None
            begin = self.call_openings if first is None else (str(first).split(ID_MARK)[0].strip(),)
            triggers = {"tokens": (first,)} if isinstance(first, int) else {"words": begin}
        repeated_calls = ""
        if self.allow_parallel and style.separator:
            repeated_calls = f"({builder.text(style.separator)} {call})*"
        parts = builder.text(opening, True), call, repeated_calls, builder.text(style.closing)
        start_rule = " ".join(filter(None, parts))
        return Grammar(tokenizer, builder.build_grammar(start_rule, otherwise), **triggers)

    def _call_rule(self, builder: ToolCallRules, chosen: Sequence[Call]) -> str:
        """Return the grammar's rule that reads one call of any of these functions."""
        style = self.style
        if style.middle is None:
            return builder.document(self._calls_schema(chosen))
        middle = builder.text(style.middle)
        return alternation(
            [f"{json.dumps(f['name'])} {middle} {self._arguments_rule(builder, f)}" for f in chosen]
        )

    def _arguments_rule(self, builder: ToolCallRules, function: Call) -> str:
        """Return the rule that reads a function's arguments behind its name: as an object, or one by one."""
        schema = function["parameters"] or {"type": "object"}
        if self.style.quote:
            return builder.bare_object_rule(self.style.quote)
        if self.style.python:
            return self._keywords_rule(builder, schema)
        if self.style.pair is None:
            return builder.document(schema)
        before_key, _, after = self.style.pair
        shared = _definitions(schema)
        argument_rules = []
        for key, property_schema in schema.get("properties", {}).items():
            kind = property_schema.get("type", "string" if "enum" in property_schema else "object")
            between = self.style.value_separator(kind if isinstance(kind, str) else "object")
            text = f"{builder.text(before_key)} {json.dumps(key)} {builder.text(between)}"
            if _is_free_text(property_schema):
                text = f"{text} {builder.free_text_rule(after)}"
            elif all(isinstance(value, str) for value in property_schema.get("enum", [0])):
                text = f"{text} {alternation([json.dumps(x) for x in property_schema['enum']])} {builder.text(after)}"
            else:
                text = f"{text} {builder.document(property_schema | shared)} {builder.text(after)}"
            argument_rules.append(text if key in schema.get("required", ()) else f"({text})?")
        return " ".join(argument_rules)

    def _keywords_rule(self, builder: ToolCallRules, schema: Call) -> str:
        """Return the rule that reads arguments as keywords of Python, in the order of the schema."""
        quote, argument_rules = self.style.python, []
        shared_definitions = _definitions(schema)
        for key, property_schema in schema.get("properties", {}).items():
            value_rule = f"{json.dumps(quote)} {builder.free_text_rule(quote)}"
            if not _is_free_text(property_schema):
                value_rule = builder.document(property_schema | shared_definitions)
            text = f"{json.dumps(f'{key}=')} {value_rule} /,? ?/"
            argument_rules.append(text if key in schema.get("required", ()) else f"({text})?")
        return " ".join(argument_rules)

    def _calls_schema(self, chosen: Sequence[Call]) -> Call:
        """Return the JSON schema of the object, or the list of objects, that calls these functions."""
        style = self.style
        call_schemas = [_call_schema(f, style, f"#/$defs/{i}") for i, f in enumerate(chosen)]
        schema: Call = call_schemas[0] if len(call_schemas) == 1 else {"anyOf": call_schemas}
        if style.is_list:
            item_limits = {} if self.allow_parallel else {"maxItems": 1}
            schema = {"type": "array", "items": schema, "minItems": 1} | item_limits
        schema["$defs"] = {
            str(i): rebase_references(f["parameters"] or {"type": "object"}, f"#/$defs/{i}")
            for i, f in enumerate(chosen)
        }
        return schema

    @property
    def call_openings(self) -> tuple[str, ...]:
        """Texts with which a call in an answer begins."""
        return self.style.call_openings(self.names)

    @property
    def stream_openings(self) -> tuple[str, ...]:
        """Texts at which a stream waits, as a call may begin: `call_openings`, also with a separator before them."""
        openings, style = self.call_openings, self.style
        separator = "" if style.opening.strip() or style.middle is None else style.separator.strip()
        return (*openings, *(f"{separator}{text}" for text in openings)) if separator else openings

    def has_tokens(self, tokenizer: Tokenizer) -> bool:
        """Return whether control tokens are part of calls, so that the text of an answer must contain them."""
        builder, style = ToolCallRules(tokenizer, WILD), self.style
        texts = [style.opening, style.separator, style.closing, style.middle or ""]
        texts += style.pair or ()
        return any(isinstance(part, int) for text in texts for part in builder.split_tokens(text))

    def parse(self, text: str) -> tuple[str, list[Call]]:
        """Split an answer into content and calls in OpenAI's shape, up to a call that cannot be read."""
        answer_words, parsed_calls = self.style.parse(text, self.names)
        return answer_words, [_openai_call(name, arguments) for name, arguments in parsed_calls]


def _is_free_text(schema: Call) -> bool:
    return schema.get("type") == "string" and not schema.keys() & {"enum", "const", "pattern"}


def _definitions(schema: Call) -> Call:
    """Return the `$defs` and `definitions` of a schema, to which references in its properties may point."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _allowed_functions(choice: Any, functions: tuple[Call, ...]) -> tuple[str, tuple[Call, ...]]:
    """Return (mode, those of `functions` that it lists) of a tool_choice of type allowed_tools. Raises InputError."""
    options = JsonBody(choice.get("allowed_tools", choice), "tool_choice.allowed_tools")
    allowed = [_named(item, "tool_choice.tools") for item in options.get_list("tools", MAX_TOOLS)]
    if not allowed:
        raise InputError("tool_choice.allowed_tools.tools must list at least one tool")
    if unknown_names := {*allowed} - {function["name"] for function in functions}:
        raise InputError(f"tool_choice allows {min(unknown_names)!r}; there is no such tool")
    if (mode := options.text("mode", "auto")) not in ("auto", "required"):
        raise InputError(f"tool_choice.mode is {mode!r}; it must be auto or required")
    return mode, tuple(tool_choice for tool_choice in functions if tool_choice["name"] in allowed)


def _named(choice: Any, field_path: str) -> str:
    return JsonBody(JsonBody(choice, field_path).get("function") or choice, field_path).text("name")


def with_tools_prompt(conversation: Conversation, style: ToolCallStyle) -> Conversation:
    """Return a conversation with its tools in a system message, for templates that have no place for them."""
    functions = (tool["function"] for tool in conversation.tools or ())
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    words, messages = EXPLAINED.format(tools=lines, example=style.example()), conversation.messages
    if messages[0]["role"] == "system":
        first_message, messages = messages[0], messages[1:]
        words = f"{first_message['content']}\n\n{words}"
    return replace(
        conversation, messages=[{"role": "system", "content": words}, *messages], tools=None
    )


def _call_schema(function: Call, style: ToolCallStyle, parameters: str) -> Call:
    key_schemas = {style.name: {"const": function["name"]}, style.arguments: {"$ref": parameters}}
    return {
        "type": "object",
        "properties": {
            key: key_schemas.get(key, {"type": "string"}) for key in style.keys or key_schemas
        },
        "required": [style.name, style.arguments],
        "additionalProperties": False,
    }


def _openai_call(name: str, arguments: Any) -> Call:
    words = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": words},
    }  # fmt: skip
