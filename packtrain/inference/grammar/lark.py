"""A grammar in llguidance's notation, with the texts of GBNF: as large lexemes as read the same as its characters.

Parts without recursion are regular and become one lexeme, a regular expression: masks are then quick. Where the longest
lexeme would swallow what belongs to the next one (see lexer) a lexeme is one character.
"""

from collections.abc import Mapping
from itertools import groupby

from packtrain.inference.grammar import nodes as grammar_nodes
from packtrain.inference.grammar.gbnf import is_empty, nullable
from packtrain.inference.grammar.lexer import Automaton, TooLarge, followers
from packtrain.inference.grammar.nodes import (
    Chars,
    Choice,
    Name,
    Node,
    Repeat,
    Rules,
    Sequence,
    parts_of,
)

HEAD = '%llguidance {"no_forcing": true}\n'  # any tokens that spell a text can come, not only the canonical ones
MOST_GROUPS = 120  # in each other: half of what Rust reads, which counts their contents, too
MOST_TEXT = 1 << 20  # characters of the rules in a lexeme


def to_lark(rules: Rules) -> str:
    """The grammar as llguidance reads it."""
    lexemes = _Lexemes(rules)
    while True:
        read = lexemes.read()
        follow = followers(read, len(lexemes.nodes))
        if not any(follow):
            return _printed(read, lexemes)
        automaton = Automaton(rules)
        try:
            for node in lexemes.nodes:
                automaton.add(node)
            automaton.classify()
            conflicting = automaton.conflicts(follow)
        except (TooLarge, RecursionError):
            conflicting = {*range(len(lexemes.nodes))}
        large = [n for n in conflicting if not isinstance(lexemes.nodes[n], Chars)]
        if not large:
            return _printed(read, lexemes)
        for number in large:
            lexemes.divide(number)


class _Lexemes:
    """What of a grammar is read as lexemes: `nodes`."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.empty, self.nodes = rules, nullable(rules), list[Node]()
        self._divided, self._groups = set[Node](), dict[tuple[Node, ...], Node]()
        self._alike = list[list[Node]]()
        self._numbers: dict[str, int] = {}
        self.texts: dict[str, str] = {}  # of regular rules, as regular expressions
        self.depths: dict[str, int] = {}
        for name in grammar_nodes.ordered(rules):
            if self.is_regular(rules[name]):
                self.texts[name] = regex(rules[name], self.texts)
                self.depths[name] = self.depth(rules[name])

    def is_regular(self, *nodes: Node) -> bool:
        """Whether these name only rules that are, no tokens, and are not too large together."""
        names = [name for node in nodes for name in grammar_nodes.names_in(node)]
        if any(name.rule not in self.texts for name in names) or any(
            map(grammar_nodes.has_token, nodes)
        ):
            return False
        size = sum(len(self.texts[name.rule]) for name in names)
        return size <= MOST_TEXT and max(map(self.depth, nodes)) <= MOST_GROUPS

    def depth(self, node: Node) -> int:
        """How deep the groups of its text are, at most."""
        if isinstance(node, Name):
            return self.depths[node.rule]
        return 1 + max(map(self.depth, parts_of(node)), default=0)

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
                waiting += [reference.rule for reference in grammar_nodes.names_in(read[name])]
        return read

    def _read(self, node: Node) -> Node:
        if node not in self._divided and self.is_regular(node):
            return self._lexeme(node)
        if isinstance(node, Sequence | Choice) and node in self._divided:
            return type(node)(tuple(map(self._read, node.parts)))
        if isinstance(node, Sequence | Choice):
            parts: list[Node] = []
            for is_whole, run in groupby(node.parts, self._is_whole):
                group = tuple(run)
                is_lexeme = is_whole and self.is_regular(*group)
                parts += (
                    [self._read(self._group(node, group))] if is_lexeme else map(self._read, group)
                )
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
        number = self._numbers.setdefault(regex(node, self.texts), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(node)
            self._alike.append([])
        self._alike[number].append(node)
        return grammar_nodes.Lexeme(number, is_empty(node, self.empty))


def _printed(read: Rules, lexemes: _Lexemes) -> str:
    names = {name: f"r{number}" for number, name in enumerate(read)}
    lines = [HEAD, f"start: {names['root']}"]
    lines += [f"{names[name]}: {_shown(rule, names)}" for name, rule in read.items()]
    for number, node in enumerate(lexemes.nodes):
        nonempty = " & /(?s:.+)/" if is_empty(node, lexemes.empty) else ""
        lines.append(f"T{number}: /{regex(node, lexemes.texts)}/{nonempty}")
    return "\n".join(lines) + "\n"


def _shown(node: Node, names: dict[str, str]) -> str:
    if isinstance(node, grammar_nodes.Lexeme):
        return f"T{node.number}{'?' * node.empty}"
    if isinstance(node, Name):
        return names[node.rule]
    if isinstance(node, grammar_nodes.Token):
        return f"<[{'^' * node.other}{node.id}]>"
    if isinstance(node, Repeat):
        return f"({_shown(node.part, names)}){_times(node)}"
    sign = " | " if isinstance(node, Choice) else " "
    return (
        f"({sign.join(_shown(part, names) for part in parts_of(node))})" if parts_of(node) else '""'
    )


def _times(node: Repeat) -> str:
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def regex(node: Node, texts: Mapping[str, str]) -> str:
    """A regular node, as Rust's regular expressions are written; texts: those of rules."""
    if isinstance(node, Chars):
        ranges = (f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in node.ranges)
        return f"[{''.join(ranges)}]"
    if isinstance(node, Name):
        return texts[node.rule]
    if isinstance(node, Repeat):
        return f"(?:{regex(node.part, texts)}){_times(node)}"
    sign = "|" if isinstance(node, Choice) else ""
    return f"(?:{sign.join(regex(part, texts) for part in parts_of(node))})"
