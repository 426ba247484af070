"""The grammar of calls of tools, part by part, in llguidance's notation: texts and documents, one after the other."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from packtrain.data.tokenizer import CONTROL, Tokenizer
from packtrain.inference.grammar.lark import HEAD
from packtrain.inference.grammar.schema import of_text, spaced

SPACE, ANY = r"/[ \t\n]{0,8}/", r"/(?s:.*)/"


class Calls:
    """Rules as they are needed; `wild` has the patterns of characters that stand for others."""

    def __init__(self, tokenizer: Tokenizer, wild: Mapping[str, str]) -> None:
        self._wild, self._rules = wild, list[str]()
        kinds = zip(tokenizer.tokens, tokenizer.kinds, strict=True)
        self._ids = {
            token.decode(errors="replace"): id
            for id, (token, kind) in enumerate(kinds)
            if kind == CONTROL and token
        }
        names = sorted(self._ids, key=len, reverse=True)
        self._parts = re.compile("|".join(map(re.escape, [*names, *wild])) or "(?!)")

    def split(self, text: str) -> list[str | int]:
        """A text as control tokens, by their ids, and what stands between them, without white space around it."""
        parts, at = list[str | int](), 0
        for part in self._parts.finditer(text):
            if part[0] in self._ids:
                parts += [text[at : part.start()], self._ids[part[0]]]
                at = part.end()
        return [x for x in (*parts, text[at:]) if isinstance(x, int) or x.strip()]

    def text(self, text: str | Sequence[str | int], first: bool = False) -> str:
        """The text, or its parts; white space around and between them may differ, but not before the `first` one."""
        parts = self.split(text) if isinstance(text, str) else text
        symbols = (f"<[{part}]>" if isinstance(part, int) else self._words(part) for part in parts)
        return " ".join(
            [*(() if first else (SPACE,)), *(f"{symbol} {SPACE}" for symbol in symbols)]
        )

    def _words(self, text: str) -> str:
        words = (x for word in text.split() for x in (self._word(word), SPACE))
        return " ".join([*words][:-1])

    def _word(self, word: str) -> str:
        pieces = re.split(f"([{''.join(map(re.escape, self._wild))}])", word)
        return " ".join(
            f"/{self._wild[x]}/" if x in self._wild else json.dumps(x) for x in pieces if x
        )

    def document(self, schema: Any) -> str:
        """A JSON document."""
        return self._rule("", f"%json {spaced(schema)}")

    def free(self, until: str) -> str:
        """Any text up to this one, and that."""
        parts = self.split(until)
        if parts and isinstance(parts[0], int):
            return f"{self._rule('', ANY)} {self.text(parts)}"
        first, *other_parts = parts
        stop = self._rule(f"[suffix={json.dumps(str(first).strip())}]", ANY)
        return f"{stop} {self.text(other_parts)}"

    def bare(self, quote: str) -> str:
        """An object with bare keys, and strings between such quotes: of any kind, as in llama.cpp's grammar."""
        if not any(rule.startswith("bare:") for rule in self._rules):
            text = f"{self.text(quote, True)} {self.free(quote)}"
            scalar = r"/-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null/"
            self._rules += [
                'bare: "{" (pair ("," pair)*)? "}"\n',
                r"pair: /[^:{}\[\],\s]+/ " + '":" value\n',
                f'value: {text} | bare | "[" (value ("," value)*)? "]" | {scalar}\n',
            ]
        return "bare"

    def _rule(self, attributes: str, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}\n")
        return name

    def grammar(self, start: str, otherwise: str = "") -> str:
        """The whole; otherwise: the schema of a document that may come instead. Raises InputError."""
        if otherwise:
            start = f"{start} | {self.document(of_text(otherwise))}"
        return f"{HEAD}start: {start}\n{''.join(self._rules)}"


def either(choices: Collection[str]) -> str:
    return f"({' | '.join(choices)})"
