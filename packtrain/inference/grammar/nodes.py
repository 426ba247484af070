"""What a grammar is made of. Sets of characters are sorted ranges of code points, both ends included."""

from dataclasses import dataclass

MOST_CODE = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
SURROGATES = range(0xD800, 0xE000)  # no text has them
EVERY: Ranges = ((0, 0xD7FF), (0xE000, MOST_CODE))


@dataclass(frozen=True, eq=False)
class Chars:
    """One character out of a set."""

    ranges: Ranges


@dataclass(frozen=True, eq=False)
class Token:
    """One token by its id, or any other one."""

    id: int
    other: bool


@dataclass(frozen=True, eq=False)
class Name:
    """What a rule says."""

    rule: str
    at: int


@dataclass(frozen=True, eq=False)
class Sequence:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, eq=False)
class Choice:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, eq=False)
class Repeat:
    """`least` to `most` times; most None: without limit."""

    part: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, eq=False)
class Lexeme:
    """What the lexer reads at once, see lark; `empty`: or nothing."""

    number: int
    empty: bool


Node = Lexeme | Chars | Token | Name | Sequence | Choice | Repeat
Rules = dict[str, Node]


def parts_of(node: Node) -> "tuple[Node, ...]":
    if isinstance(node, Sequence | Choice):
        return node.parts
    return (node.part,) if isinstance(node, Repeat) else ()


def has_token(node: Node) -> bool:
    return isinstance(node, Token) or any(map(has_token, parts_of(node)))


def names_in(node: Node) -> list[Name]:
    """Every rule that it names, in order."""
    if isinstance(node, Name):
        return [node]
    return [name for part in parts_of(node) for name in names_in(part)]


def ordered(rules: Rules) -> list[str]:
    """All rules, those that a rule names before it, but where it is recursive."""
    order, seen = list[str](), set[str]()
    path = [("", iter([Name(name, 0) for name in rules]))]
    while path:
        rule_name, names = path[-1]
        name = next((name.rule for name in names if name.rule not in seen), None)
        if name is None:
            order.append(rule_name)
            path.pop()
        else:
            seen.add(name)
            path.append((name, iter(names_in(rules[name]))))
    return order[:-1]


def merged(ranges: list[tuple[int, int]], negated: bool = False) -> Ranges:
    """Sorted and joined, or all other characters; without surrogates."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(r for r in ranges if r[0] <= r[1]):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    if negated:
        gap_starts = [-1, *(high for _, high in joined)]
        begins = [*(low for low, _ in joined), MOST_CODE + 1]
        joined = [(a + 1, b - 1) for a, b in zip(gap_starts, begins, strict=True)]
    low, high = SURROGATES[0] - 1, SURROGATES[-1] + 1
    cut = [(a, min(b, low)) for a, b in joined] + [(max(a, high), b) for a, b in joined]
    return tuple(sorted((a, b) for a, b in cut if a <= b))
