"""A grammar in llguidance's notation, with the texts of GBNF: as large lexemes as read the same as its characters.

Parts without recursion are regular and become one lexeme, a regular expression: masks are then quick. Where the longest
lexeme would swallow what belongs to the next one (see lexing) a lexeme is one character.
"""

from itertools import groupby

from packtrain.grammar.gbnf import is_empty, nullable
from packtrain.grammar.lexing import Automaton, TooLarge, followers
from packtrain.grammar.nodes import (
    Chars,
    Choice,
    Lexeme,
    Name,
    Node,
    Ranges,
    Repeat,
    Rules,
    Sequence,
    Token,
    names_in,
    parts_of,
)

HEAD = '%llguidance {"no_forcing": true}\n'  # any tokens that spell a text can come, not only the canonical ones
SURROGATES = 0xD800, 0xDFFF


def to_lark(rules: Rules) -> str:
    """The grammar as llguidance reads it."""
    made = _Lexemes(rules)
    while True:
        read = made.read()
        automaton = Automaton(rules)
        try:
            for node in made.nodes:
                automaton.add(node)
            automaton.classify()
            wrong = automaton.conflicts(followers(read, len(made.nodes)))
        except TooLarge:
            wrong = {*range(len(made.nodes))}
        large = [n for n in wrong if not isinstance(made.nodes[n], Chars)]
        if not large:
            return _printed(read, made)
        for number in large:
            made.divide(number)


class _Lexemes:
    """What of a grammar is read as lexemes: `nodes`."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.empty, self.nodes = rules, nullable(rules), list[Node]()
        self._divided, self._groups = set[Node](), dict[tuple[Node, ...], Node]()
        self._alike = list[list[Node]]()
        self._numbers: dict[str, int] = {}
        self._regular: dict[str, bool] = {}
        for name in rules:
            self._regular[name] = not self._is_recursive(name)
        while True:  # a rule that names one that is not regular is not
            wrong = [
                n for n, good in self._regular.items() if good and not self.is_regular(rules[n])
            ]
            if not wrong:
                break
            self._regular |= dict.fromkeys(wrong, False)

    def _is_recursive(self, rule: str) -> bool:
        seen, waiting = set[str](), [rule]
        while waiting:
            for name in names_in(self.rules[waiting.pop()]):
                if name.rule == rule:
                    return True
                if name.rule not in seen:
                    seen.add(name.rule)
                    waiting.append(name.rule)
        return False

    def is_regular(self, node: Node) -> bool:
        if isinstance(node, Name):
            return self._regular[node.rule]
        return not isinstance(node, Token) and all(map(self.is_regular, parts_of(node)))

    def divide(self, number: int) -> None:
        """Read the parts of a lexeme one by one."""
        self._divided.update(self._alike[number])

    def read(self) -> Rules:
        """The rules that are left, of lexemes."""
        self.nodes, self._alike, self._numbers = [], [], {}
        read, waiting = Rules(), ["root"]
        while waiting:
            name = waiting.pop()
            if name not in read:
                read[name] = self._read(self.rules[name])
                waiting += [found.rule for found in names_in(read[name])]
        return read

    def _read(self, node: Node) -> Node:
        if node not in self._divided and self.is_regular(node):
            return self._lexeme(node)
        if isinstance(node, Sequence | Choice) and node in self._divided:
            return type(node)(tuple(map(self._read, node.parts)))
        if isinstance(node, Sequence | Choice):
            parts: list[Node] = []
            for whole, run in groupby(node.parts, self._is_whole):
                group = tuple(run)
                parts += [self._read(self._group(node, group))] if whole else map(self._read, group)
            return type(node)(tuple(parts))
        if isinstance(node, Repeat):
            return Repeat(self._read(node.part), node.least, node.most)
        return node

    def _is_whole(self, node: Node) -> bool:
        return node not in self._divided and self.is_regular(node)

    def _group(self, node: Sequence | Choice, parts: tuple[Node, ...]) -> Node:
        """Neighbours that are regular, as one node, the same one each time."""
        if len(parts) == 1:
            return parts[0]
        return self._groups.setdefault(parts, type(node)(parts))

    def _lexeme(self, node: Node) -> Node:
        if isinstance(node, Sequence) and not node.parts:
            return node
        number = self._numbers.setdefault(regex(node, self.rules), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(node)
            self._alike.append([])
        self._alike[number].append(node)
        return Lexeme(number, is_empty(node, self.empty))


def _printed(read: Rules, made: _Lexemes) -> str:
    names = {name: f"r{number}" for number, name in enumerate(read)}
    lines = [HEAD, f"start: {names['root']}"]
    lines += [f"{names[name]}: {_shown(rule, names)}" for name, rule in read.items()]
    for number, node in enumerate(made.nodes):
        least = " & /(?s:.+)/" if is_empty(node, made.empty) else ""
        lines.append(f"T{number}: /{regex(node, made.rules)}/{least}")
    return "\n".join(lines) + "\n"


def _shown(node: Node, names: dict[str, str]) -> str:
    if isinstance(node, Lexeme):
        return f"T{node.number}{'?' * node.empty}"
    if isinstance(node, Name):
        return names[node.rule]
    if isinstance(node, Token):
        return f"<[{'^' * node.other}{node.id}]>"
    if isinstance(node, Repeat):
        return f"({_shown(node.part, names)}){_times(node)}"
    sign = " | " if isinstance(node, Choice) else " "
    return (
        f"({sign.join(_shown(part, names) for part in parts_of(node))})" if parts_of(node) else '""'
    )


def _times(node: Repeat) -> str:
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def regex(node: Node, rules: Rules) -> str:
    """A regular node, as Rust's regular expressions are written."""
    if isinstance(node, Chars):
        return f"[{''.join(_classes(node.ranges))}]"
    if isinstance(node, Name):
        return regex(rules[node.rule], rules)
    if isinstance(node, Repeat):
        return f"(?:{regex(node.part, rules)}){_times(node)}"
    sign = "|" if isinstance(node, Choice) else ""
    return f"(?:{sign.join(regex(part, rules) for part in parts_of(node))})"


def _classes(ranges: Ranges) -> list[str]:
    """Ranges without surrogates, which no text has."""
    low, high = SURROGATES
    cut = [(a, min(b, low - 1)) for a, b in ranges] + [(max(a, high + 1), b) for a, b in ranges]
    return [f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in cut if a <= b]
