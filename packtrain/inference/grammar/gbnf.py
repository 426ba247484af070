"""Parses GBNF, llama.cpp's notation of grammars (its grammars/README.md), into nodes; errors name line and column."""

import re
from collections.abc import Callable
from typing import NoReturn

from packtrain.common.errors import InputError
from packtrain.inference.grammar import nodes
from packtrain.inference.grammar.nodes import CharSet, GrammarRules, Node, RepeatNode, RuleReference

WORD, DIGITS = re.compile(r"[a-zA-Z0-9-]+"), re.compile(r"[0-9]+")
INLINE_SPACE, LINES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
TOKEN_PATTERN, HEX = re.compile(r"!?<(?:\[([0-9]{1,9})\]|[^>\s]*)>"), {"x": 2, "u": 4, "U": 8}
CHAR = re.compile(
    r'\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt"\\\[\]]))|[^\\]', re.DOTALL
)
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
REPEAT_BOUNDS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
MAX_DIGITS = 18
MOST_TIMES = 2000  # llama.cpp's MAX_REPETITION_THRESHOLD
MAX_DEPTH = 100
MAX_RULE_CHAIN = 500  # llguidance calls itself for each rule that names another


def parse_gbnf(
    text: str, token_id: Callable[[str], int | None] = lambda name: None, size: int = 10**9
) -> GrammarRules:
    """Parse the rules of a GBNF grammar, which begins at the rule `root`, into nodes by rule name. Raises InputError.

    token_id  returns the id of the token `<name>`, None if there is none
    size      size of the vocabulary, below which ids must be
    """
    return _GbnfParser(text, token_id, size).parse_rules()


class _GbnfParser:
    """A recursive-descent parser of GBNF: each method reads text at `pos` and moves it."""

    def __init__(self, text: str, token_id: Callable[[str], int | None], size: int) -> None:
        self.text, self.pos, self.depth, self.token_id, self.size = text, 0, 0, token_id, size

    def parse_rules(self) -> GrammarRules:
        rules: GrammarRules = {}
        self.skip_space(True)
        while self.pos < len(self.text):
            name = self.take(WORD, "a name of a rule")
            self.skip_space(False)
            if not self.text.startswith("::=", self.pos):
                self.fail("::= is expected after the name of a rule")
            self.pos += 3
            self.skip_space(True)
            rules[name] = self.parse_choice(False)
            if self.pos < len(self.text) and self.peek_char() not in "\r\n":
                self.fail(f"{self.peek_char()!r} is not expected")
            self.skip_space(True)
        self.check_references(rules)
        return rules

    def check_references(self, rules: GrammarRules) -> None:
        for rule in rules.values():
            for reference in nodes.names_in(rule):
                if reference.rule_name not in rules:
                    self.fail(f"there is no rule {reference.rule_name}", reference.offset)
        if "root" not in rules:
            self.fail("there is no rule root, where a grammar begins", 0)
        self.check_depth(rules)
        for rule_name, (head_nodes, _) in nodes.rule_heads(rules).items():
            for node in head_nodes:  # a rule that can begin with itself is refused, as in llama.cpp
                if isinstance(node, RuleReference) and node.rule_name == rule_name:
                    self.fail(f"rule {rule_name} can begin with itself", node.offset)

    def check_depth(self, rules: GrammarRules) -> None:
        """Raise InputError for a chain of over MAX_RULE_CHAIN references to rules: llguidance recurses along it."""
        seen_rules, path = {"root"}, [iter(nodes.names_in(rules["root"]))]
        while path:
            name = next((name for name in path[-1] if name.rule_name not in seen_rules), None)
            if name is None:
                path.pop()
                continue
            seen_rules.add(name.rule_name)
            path.append(iter(nodes.names_in(rules[name.rule_name])))
            if len(path) > MAX_RULE_CHAIN:
                self.fail(f"rules name one another more than {MAX_RULE_CHAIN} deep", name.offset)

    def fail(self, fact: str, error_pos: int | None = None) -> NoReturn:
        text_before = self.text[: self.pos if error_pos is None else error_pos]
        line, column = text_before.count("\n") + 1, len(text_before) - text_before.rfind("\n")
        raise InputError(f"grammar, line {line}, column {column}: {fact}")

    def peek_char(self) -> str:
        return self.text[self.pos : self.pos + 1]

    def skip_space(self, is_multiline: bool) -> None:
        match = (LINES if is_multiline else INLINE_SPACE).match(self.text, self.pos)
        self.pos = match.end() if match else self.pos

    def take(self, pattern: re.Pattern[str], description: str) -> str:
        match = pattern.match(self.text, self.pos)
        if match is None:
            place = "" if self.peek_char() else "the text ends where "
            self.fail(f"{place}{description} is expected")
        self.pos = match.end()
        return match[0]

    def parse_choice(self, is_multiline: bool) -> Node:
        """Parse alternatives `a | b`; is_multiline: line ends are spaces, as inside parentheses."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"groups are more than {MAX_DEPTH} deep")
        alternatives = [self.parse_sequence(is_multiline)]
        while self.peek_char() == "|":
            self.pos += 1
            self.skip_space(True)
            alternatives.append(self.parse_sequence(is_multiline))
        self.depth -= 1
        return alternatives[0] if len(alternatives) == 1 else nodes.ChoiceNode(tuple(alternatives))

    def parse_sequence(self, is_multiline: bool) -> Node:
        """Parse items up to the end of an alternative; is_multiline: see parse_choice."""
        parts: list[Node] = []
        while (next_char := self.peek_char()) and next_char not in "|)\r\n":
            if next_char in "*+?{":
                if not parts:
                    self.fail(f"{next_char} has nothing before it to repeat")
                parts[-1] = self.parse_repeat(parts[-1], is_multiline)
            elif (item_node := self.parse_item(next_char, is_multiline)) is not None:
                parts.append(item_node)
            else:
                self.fail(f"{next_char!r} is not expected")
            self.skip_space(is_multiline)
        return parts[0] if len(parts) == 1 else nodes.SequenceNode(tuple(parts))

    def parse_item(self, next_char: str, is_multiline: bool) -> Node | None:
        """Parse one item that begins with next_char; None if none does. is_multiline: see parse_choice."""
        if next_char == '"':
            return self.parse_literal()
        if next_char == "[":
            return self.parse_char_set()
        if next_char in "<!":
            return self.parse_token()
        if next_char == "(":
            self.pos += 1
            self.skip_space(True)
            group_node = self.parse_choice(True)
            if self.peek_char() != ")":
                self.fail(") is expected")
            self.pos += 1
            return group_node
        if next_char == ".":
            self.pos += 1
            return CharSet(nodes.ALL_CODES)
        name_start = self.pos
        return RuleReference(self.take(WORD, ""), name_start) if WORD.match(next_char) else None

    def parse_char(self) -> int:
        """Parse one character, perhaps escaped, into its code point."""
        match = CHAR.match(self.text, self.pos)
        if match is None:
            if not (escape := self.text[self.pos : self.pos + 2]):
                self.fail("the text ends inside quotes or brackets")
            num_digits = HEX.get(escape[1:])
            fact = f"needs {num_digits} hex digits" if num_digits else "is no escape"
            self.fail(f"{escape} {fact}")
        self.pos = match.end()
        if digits := match[1] or match[2] or match[3]:
            if int(digits, 16) > 0x10FFFF:
                self.fail(f"there is no character {digits}", self.pos - len(digits))
            return int(digits, 16)
        return ord(ESCAPES[match[4]] if match[4] else match[0])

    def parse_literal(self) -> Node:
        self.pos += 1
        code_points = []
        while self.peek_char() != '"':
            char_start = self.pos
            code_points.append(self.parse_char())
            if code_points[-1] in nodes.SURROGATES:
                self.fail(f"{code_points[-1]:X} is half a character", char_start)
        self.pos += 1
        return nodes.SequenceNode(tuple(CharSet(((code, code),)) for code in code_points))

    def parse_char_set(self) -> Node:
        self.pos += 1
        is_negated = self.peek_char() == "^"
        self.pos += is_negated
        code_ranges = []
        while self.peek_char() != "]":
            first_code = last_code = self.parse_char()
            if self.peek_char() == "-" and self.text[self.pos + 1 : self.pos + 2] != "]":
                self.pos += 1
                last_code = self.parse_char()
            code_ranges.append((first_code, last_code))
        self.pos += 1
        char_ranges = nodes.merge_ranges(code_ranges, is_negated)
        if not char_ranges:
            self.fail("the brackets hold no character")
        return CharSet(char_ranges)

    def parse_token(self) -> Node:
        token_start = self.pos
        token_text = self.take(TOKEN_PATTERN, "a token, <name> or <[id]>,")
        match = TOKEN_PATTERN.fullmatch(token_text)
        id_digits = match[1] if match else None
        id = int(id_digits) if id_digits else self.token_id(token_text.lstrip("!"))
        if id is None or id >= self.size:
            self.fail(f"the vocabulary has no token {token_text.lstrip('!')}", token_start)
        return nodes.TokenNode(id, token_text.startswith("!"))

    def parse_repeat(self, part: Node, is_multiline: bool) -> Node:
        repeat_sign = self.peek_char()
        node, num_repeats = part, 0  # repetitions that are nested directly in each other
        while isinstance(node, RepeatNode):
            node, num_repeats = node.child, num_repeats + 1
        if num_repeats == MAX_DEPTH:
            self.fail(f"repetitions are more than {MAX_DEPTH} deep")
        self.pos += 1
        if repeat_sign != "{":
            return RepeatNode(part, *REPEAT_BOUNDS[repeat_sign])
        self.skip_space(is_multiline)
        min_times = self.parse_count()
        max_times: int | None = min_times
        self.skip_space(is_multiline)
        if self.peek_char() == ",":
            self.pos += 1
            self.skip_space(is_multiline)
            max_times = self.parse_count() if DIGITS.match(self.peek_char()) else None
            self.skip_space(is_multiline)
        if self.peek_char() != "}":
            self.fail("} is expected")
        self.pos += 1
        if min_times > MOST_TIMES:
            self.fail(f"{min_times} repetitions are more than {MOST_TIMES}")
        if max_times is not None and max_times < min_times:
            self.fail(f"{{{min_times},{max_times}}} ends before it begins")
        return RepeatNode(
            part, min_times, None if max_times is not None and max_times > MOST_TIMES else max_times
        )

    def parse_count(self) -> int:
        digits = self.take(DIGITS, "a number of times")
        if len(digits) > MAX_DIGITS:
            self.fail(f"a number of {len(digits):,} digits is too large")
        return int(digits)
