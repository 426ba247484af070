"""The grammar of tool calls in llguidance's notation, built part by part of texts and JSON documents."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from packtrain.data.tokenizer import CONTROL, Tokenizer
from packtrain.inference.grammar.schema import guidance_schema, parse_schema
from packtrain.inference.grammar.vocabulary_table import LARK_HEADER

SPACE, ANY_TEXT_RULE = r"/[ \t\n]{0,8}/", r"/(?s:.*)/"


class ToolCallRules:
    """Builds rules of a tool-call grammar; `wildcards`: what characters of texts stand for, as regular expressions."""

    def __init__(self, tokenizer: Tokenizer, wildcards: Mapping[str, str]) -> None:
        self._wild, self._rules = wildcards, list[str]()
        token_kinds = zip(tokenizer.tokens, tokenizer.token_types, strict=True)
        self._control_ids = {
            token.decode(errors="replace"): id
            for id, (token, kind) in enumerate(token_kinds)
            if kind == CONTROL and token
        }
        control_names = sorted(self._control_ids, key=len, reverse=True)
        self._parts = re.compile("|".join(map(re.escape, [*control_names, *wildcards])) or "(?!)")

    def split_tokens(self, text: str) -> list[str | int]:
        """Split a text into the ids of its control tokens and the texts between them, without blank texts."""
        text_parts, at = list[str | int](), 0
        for token_match in self._parts.finditer(text):
            if token_match[0] in self._control_ids:
                text_parts += [text[at : token_match.start()], self._control_ids[token_match[0]]]
                at = token_match.end()
        return [x for x in (*text_parts, text[at:]) if isinstance(x, int) or x.strip()]

    def text(self, text: str | Sequence[str | int], is_first: bool = False) -> str:
        """Return symbols that read a text, or its `split_tokens`, and white space around; none before if `is_first`."""
        parts = self.split_tokens(text) if isinstance(text, str) else text
        symbols = (
            f"<[{x}]>" if isinstance(x, int) else f" {SPACE} ".join(map(self._word_rule, x.split())) for x in parts
        )  # fmt: skip
        return " ".join(
            [*(() if is_first else (SPACE,)), *(f"{symbol} {SPACE}" for symbol in symbols)]
        )

    def _word_rule(self, word: str) -> str:
        pieces = re.split(f"([{''.join(map(re.escape, self._wild))}])", word)
        return " ".join(
            f"/{self._wild[x]}/" if x in self._wild else json.dumps(x) for x in pieces if x
        )

    def document(self, schema: Any) -> str:
        """Add a rule of a JSON document with this schema, and return its name."""
        return self._add_rule("", f"%json {guidance_schema(schema)}")

    def free_text_rule(self, stop_text: str) -> str:
        """Add rules, and return the symbols that read any text up to and with `stop_text`."""
        stop_parts = self.split_tokens(stop_text)
        if stop_parts and isinstance(stop_parts[0], int):
            return f"{self._add_rule('', ANY_TEXT_RULE)} {self.text(stop_parts)}"
        first_part, *other_parts = stop_parts
        stop_rule = self._add_rule(f"[suffix={json.dumps(str(first_part).strip())}]", ANY_TEXT_RULE)
        return f"{stop_rule} {self.text(other_parts)}"

    def bare_object_rule(self, quote: str) -> str:
        """Add a rule once, for objects with unquoted keys and strings in `quote`, as in llama.cpp; return its name."""
        if not any(rule.startswith("bare:") for rule in self._rules):
            string_rule = f"{self.text(quote, True)} {self.free_text_rule(quote)}"
            scalar_pattern = (
                r"/-?[0-9]{1,16}(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,16})?|true|false|null/"
            )
            self._rules += [
                'bare: "{" (pair ("," pair)*)? "}"\n', r"pair: /[^:{}\[\],\s]+/ " + '":" value\n',
                f'value: {string_rule} | bare | "[" (value ("," value)*)? "]" | {scalar_pattern}\n',
            ]  # fmt: skip
        return "bare"

    def _add_rule(self, attributes: str, rule_body: str) -> str:
        rule_name = f"r{len(self._rules)}"
        self._rules.append(f"{rule_name}{attributes}: {rule_body}\n")
        return rule_name

    def build_grammar(self, start_rule: str, otherwise: str = "") -> str:
        """Return the Lark grammar of `start_rule`, or of it and a document of JSON schema `otherwise`. InputError."""
        if otherwise:
            start_rule = f"{start_rule} | {self.document(parse_schema(otherwise))}"
        return f"{LARK_HEADER}start: {start_rule}\n{''.join(self._rules)}"


def alternation(alternatives: Collection[str]) -> str:
    return f"({' | '.join(alternatives)})"
