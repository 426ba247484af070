"""GBNF, llama.cpp's notation of grammars (grammars/README.md), read into nodes; what is wrong, by line and column."""

import re
from collections.abc import Callable
from typing import NoReturn

from packtrain.common.errors import InputError
from packtrain.inference.grammar import nodes
from packtrain.inference.grammar.nodes import (
    EVERY,
    SURROGATES,
    Chars,
    Name,
    Node,
    Repeat,
    Rules,
    Sequence,
)

WORD, INTEGER = re.compile(r"[a-zA-Z0-9-]+"), re.compile(r"[0-9]+")
SPACE, LINES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
TOKEN, HEX = re.compile(r"!?<(?:\[([0-9]{1,9})\]|[^>\s]*)>"), {"x": 2, "u": 4, "U": 8}
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
TIMES = {"*": (0, None), "+": (1, None), "?": (0, 1)}
MOST_DIGITS = 18
MOST_TIMES = 2000  # llama.cpp's MAX_REPETITION_THRESHOLD
MOST_DEPTH = 100
MOST_CHAIN = 500  # llguidance calls itself for each rule that names another


def parse(
    text: str, token_id: Callable[[str], int | None] = lambda name: None, size: int = 10**9
) -> Rules:
    """The rules of a grammar that begins at `root`. Raises InputError.

    token_id  the id of `<name>`
    size      of the vocabulary
    """
    return _Reader(text, token_id, size).rules()


class _Reader:
    def __init__(self, text: str, token_id: Callable[[str], int | None], size: int) -> None:
        self.text, self.at, self.depth, self.token_id, self.size = text, 0, 0, token_id, size

    def rules(self) -> Rules:
        rules: Rules = {}
        self.space(True)
        while self.at < len(self.text):
            name = self.take(WORD, "a name of a rule")
            self.space(False)
            if not self.text.startswith("::=", self.at):
                self.fail("::= is expected after the name of a rule")
            self.at += 3
            self.space(True)
            rules[name] = self.choice(False)
            if self.at < len(self.text) and self.peek() not in "\r\n":
                self.fail(f"{self.peek()!r} is not expected")
            self.space(True)
        self.check(rules)
        return rules

    def check(self, rules: Rules) -> None:
        for rule in rules.values():
            for name in nodes.names_in(rule):
                if name.rule not in rules:
                    self.fail(f"there is no rule {name.rule}", name.at)
        if "root" not in rules:
            self.fail("there is no rule root, where a grammar begins", 0)
        self.check_depth(rules)
        empty = nullable(rules)
        first = {name: begins(rule, empty) for name, rule in rules.items()}
        for rule_name in rules:
            self.check_left(first, rule_name)

    def check_depth(self, rules: Rules) -> None:
        seen, path = {"root"}, [iter(nodes.names_in(rules["root"]))]
        while path:
            name = next((name for name in path[-1] if name.rule not in seen), None)
            if name is None:
                path.pop()
                continue
            seen.add(name.rule)
            path.append(iter(nodes.names_in(rules[name.rule])))
            if len(path) > MOST_CHAIN:
                self.fail(f"rules name one another more than {MOST_CHAIN} deep", name.at)

    def check_left(self, first: dict[str, list[Name]], rule: str) -> None:
        """llama.cpp refuses rules that begin with themselves."""
        seen, waiting = set[str](), [*first[rule]]
        while waiting:
            name = waiting.pop()
            if name.rule == rule:
                self.fail(f"rule {rule} can begin with itself", name.at)
            if name.rule not in seen:
                seen.add(name.rule)
                waiting += first[name.rule]

    def fail(self, fact: str, at: int | None = None) -> NoReturn:
        before = self.text[: self.at if at is None else at]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise InputError(f"grammar, line {line}, column {column}: {fact}")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def space(self, lines: bool) -> None:
        match = (LINES if lines else SPACE).match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, pattern: re.Pattern[str], description: str) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            self.fail(
                f"{description} is expected"
                if self.peek()
                else f"the text ends where {description} is expected"
            )
        self.at = match.end()
        return match[0]

    def choice(self, inside: bool) -> Node:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            self.fail(f"groups are more than {MOST_DEPTH} deep")
        parts = [self.sequence(inside)]
        while self.peek() == "|":
            self.at += 1
            self.space(True)
            parts.append(self.sequence(inside))
        self.depth -= 1
        return parts[0] if len(parts) == 1 else nodes.Choice(tuple(parts))

    def sequence(self, inside: bool) -> Node:
        parts: list[Node] = []
        while (sign := self.peek()) and sign not in "|)\r\n":
            if sign in "*+?{":
                if not parts:
                    self.fail(f"{sign} has nothing before it to repeat")
                parts[-1] = self.repeat(parts[-1], inside)
            elif (part := self.item(sign, inside)) is not None:
                parts.append(part)
            else:
                self.fail(f"{sign!r} is not expected")
            self.space(inside)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def item(self, sign: str, inside: bool) -> Node | None:
        if sign == '"':
            return self.literal()
        if sign == "[":
            return self.set()
        if sign in "<!":
            return self.token()
        if sign == "(":
            self.at += 1
            self.space(True)
            part = self.choice(True)
            if self.peek() != ")":
                self.fail(") is expected")
            self.at += 1
            return part
        if sign == ".":
            self.at += 1
            return Chars(EVERY)
        start = self.at
        return Name(self.take(WORD, ""), start) if WORD.match(sign) else None

    def char(self) -> int:
        """One character, perhaps escaped."""
        sign = self.peek()
        if not sign:
            self.fail("the text ends inside quotes or brackets")
        self.at += 1
        if sign != "\\":
            return ord(sign)
        kind = self.peek()
        self.at += 1
        if kind in ESCAPES:
            return ord(ESCAPES[kind])
        digits = self.text[self.at : self.at + HEX.get(kind, 0)]
        if not re.fullmatch(r"[0-9a-fA-F]+", digits) or len(digits) < HEX.get(kind, 1):
            self.at -= 2
            self.fail(
                f"\\{kind} is no escape"
                if kind not in HEX
                else f"\\{kind} needs {HEX[kind]} hex digits"
            )
        self.at += len(digits)
        if int(digits, 16) > 0x10FFFF:
            self.fail(f"there is no character {digits}", self.at - len(digits))
        return int(digits, 16)

    def literal(self) -> Node:
        self.at += 1
        codes = []
        while self.peek() != '"':
            start = self.at
            codes.append(self.char())
            if codes[-1] in SURROGATES:
                self.fail(f"{codes[-1]:X} is half a character", start)
        self.at += 1
        return Sequence(tuple(Chars(((code, code),)) for code in codes))

    def set(self) -> Node:
        self.at += 1
        negated = self.peek() == "^"
        self.at += negated
        ranges = []
        while self.peek() != "]":
            low = high = self.char()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = self.char()
            ranges.append((low, high))
        self.at += 1
        char_ranges = nodes.merged(ranges, negated)
        if not char_ranges:
            self.fail("the brackets hold no character")
        return Chars(char_ranges)

    def token(self) -> Node:
        start = self.at
        text = self.take(TOKEN, "a token, <name> or <[id]>,")
        match = TOKEN.fullmatch(text)
        number = match[1] if match else None
        id = int(number) if number else self.token_id(text.lstrip("!"))
        if id is None or id >= self.size:
            self.fail(f"the vocabulary has no token {text.lstrip('!')}", start)
        return nodes.Token(id, text.startswith("!"))

    def repeat(self, part: Node, inside: bool) -> Node:
        sign = self.peek()
        if repetitions(part) == MOST_DEPTH:
            self.fail(f"repetitions are more than {MOST_DEPTH} deep")
        self.at += 1
        if sign != "{":
            return Repeat(part, *TIMES[sign])
        self.space(inside)
        min_times = self.times()
        max_times: int | None = min_times
        self.space(inside)
        if self.peek() == ",":
            self.at += 1
            self.space(inside)
            max_times = self.times() if INTEGER.match(self.peek()) else None
            self.space(inside)
        if self.peek() != "}":
            self.fail("} is expected")
        self.at += 1
        if min_times > MOST_TIMES:
            self.fail(f"{min_times} repetitions are more than {MOST_TIMES}")
        if max_times is not None and max_times < min_times:
            self.fail(f"{{{min_times},{max_times}}} ends before it begins")
        return Repeat(
            part, min_times, None if max_times is not None and max_times > MOST_TIMES else max_times
        )

    def times(self) -> int:
        digits = self.take(INTEGER, "a number of times")
        if len(digits) > MOST_DIGITS:
            self.fail(f"a number of {len(digits):,} digits is too large")
        return int(digits)


def repetitions(node: Node) -> int:
    """How many of them repeat one another."""
    count = 0
    while isinstance(node, Repeat):
        node, count = node.part, count + 1
    return count


def begins(node: Node, empty: dict[str, bool]) -> list[Name]:
    """The rules with which a text of this node can begin."""
    if isinstance(node, Name):
        return [node]
    if isinstance(node, nodes.Choice):
        return [name for part in node.parts for name in begins(part, empty)]
    if isinstance(node, Repeat):
        return begins(node.part, empty)
    names: list[Name] = []
    for part in node.parts if isinstance(node, Sequence) else ():
        names += begins(part, empty)
        if not is_empty(part, empty):
            break
    return names


def is_empty(node: Node, empty: dict[str, bool]) -> bool:
    """Whether the empty text is one of this node."""
    if isinstance(node, Name):
        return empty[node.rule]
    if isinstance(node, Repeat):
        return not node.least or is_empty(node.part, empty)
    if isinstance(node, nodes.Choice):
        return any(is_empty(part, empty) for part in node.parts)
    return isinstance(node, Sequence) and all(is_empty(part, empty) for part in node.parts)


def nullable(rules: Rules) -> dict[str, bool]:
    """Which rules have the empty text."""
    is_nullable, order = dict.fromkeys(rules, False), nodes.ordered(rules)
    while True:
        before = sum(is_nullable.values())
        for name in order:
            is_nullable[name] = is_empty(rules[name], is_nullable)
        if sum(is_nullable.values()) == before:
            return is_nullable
