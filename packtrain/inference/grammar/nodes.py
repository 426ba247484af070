"""The nodes of a grammar's syntax tree. Sets of characters are sorted ranges of code points, both ends included."""

from dataclasses import dataclass

MAX_CODE_POINT = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
SURROGATES = range(0xD800, 0xE000)  # code points that no text has
ALL_CODES: Ranges = ((0, 0xD7FF), (0xE000, MAX_CODE_POINT))


@dataclass(frozen=True, eq=False)
class CharSet:
    """One character out of a set."""

    code_ranges: Ranges


@dataclass(frozen=True, eq=False)
class TokenNode:
    """One token by its id, or if negated any other token."""

    token_id: int
    is_negated: bool


@dataclass(frozen=True, eq=False)
class RuleReference:
    """A reference to a rule by name; `offset`: its place in the grammar's text, for errors."""

    rule_name: str
    offset: int


@dataclass(frozen=True, eq=False)
class SequenceNode:
    children: "tuple[Node, ...]"


@dataclass(frozen=True, eq=False)
class ChoiceNode:
    children: "tuple[Node, ...]"


@dataclass(frozen=True, eq=False)
class RepeatNode:
    """A child repeated `min_count` to `max_count` times; None: without limit."""

    child: "Node"
    min_count: int
    max_count: int | None


@dataclass(frozen=True, eq=False)
class LexemeNode:
    """A lexeme, a regular expression that the lexer reads at once, see lark; `empty`: the lexeme is optional."""

    lexeme_index: int
    empty: bool


Node = LexemeNode | CharSet | TokenNode | RuleReference | SequenceNode | ChoiceNode | RepeatNode
GrammarRules = dict[str, Node]
Heads = tuple[frozenset[Node], bool]  # see node_heads


def parts_of(node: Node) -> "tuple[Node, ...]":
    """Return the nodes directly inside a node, in order."""
    if isinstance(node, SequenceNode | ChoiceNode):
        return node.children
    return (node.child,) if isinstance(node, RepeatNode) else ()


def has_token(node: Node) -> bool:
    return isinstance(node, TokenNode) or any(map(has_token, parts_of(node)))


def names_in(node: Node) -> list[RuleReference]:
    """Return all references to rules inside a node, in order."""
    if isinstance(node, RuleReference):
        return [node]
    return [reference for child in parts_of(node) for reference in names_in(child)]


def dependency_order(rules: GrammarRules) -> list[str]:
    """Return the names of the rules, each rule after those that it refers to, except in recursion."""
    rule_order, seen = list[str](), set[str]()
    reference_stack = [("", iter([RuleReference(next_rule, 0) for next_rule in rules]))]
    while reference_stack:
        rule_name, names = reference_stack[-1]
        next_rule = next((name.rule_name for name in names if name.rule_name not in seen), None)
        if next_rule is None:
            rule_order.append(rule_name)
            reference_stack.pop()
        else:
            seen.add(next_rule)
            reference_stack.append((next_rule, iter(names_in(rules[next_rule]))))
    return rule_order[:-1]


def rule_heads(rules: GrammarRules) -> "dict[str, Heads]":
    """Return by rule the nodes with which its texts can begin, and whether they can be empty, see `node_heads`."""
    heads: dict[str, Heads] = dict.fromkeys(rules, (frozenset(), False))
    rule_order = dependency_order(rules)
    while True:
        old_heads = heads.copy()
        for rule_name in rule_order:
            heads[rule_name] = node_heads(rules[rule_name], heads)
        if heads == old_heads:
            return heads


def node_heads(node: Node, heads: "dict[str, Heads]") -> Heads:
    """Return (leaves with which a node's texts can begin, whether a text can be empty); `heads`: these by rule."""
    if isinstance(node, RuleReference):
        rule_leaves, is_nullable = heads[node.rule_name]
        return rule_leaves | {node}, is_nullable
    if not (parts := parts_of(node)):
        is_nullable = node.empty if isinstance(node, LexemeNode) else isinstance(node, SequenceNode)
        return frozenset(() if isinstance(node, SequenceNode) else (node,)), is_nullable
    part_heads = [node_heads(part, heads) for part in parts]
    is_nullable = (any if isinstance(node, ChoiceNode) else all)(empty for _, empty in part_heads)
    if isinstance(node, SequenceNode) and not is_nullable:  # up to the first part with a text
        part_heads = part_heads[: [empty for _, empty in part_heads].index(False) + 1]
    leaves = frozenset[Node]().union(*(part_leaves for part_leaves, _ in part_heads))
    return leaves, is_nullable or (isinstance(node, RepeatNode) and not node.min_count)


def merge_ranges(code_ranges: list[tuple[int, int]], is_negated: bool = False) -> Ranges:
    """Return ranges (first, last) of code points sorted and joined, or if negated all others; without surrogates."""
    joined: list[tuple[int, int]] = []
    for first_code, last_code in sorted(r for r in code_ranges if r[0] <= r[1]):
        if joined and first_code <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(last_code, joined[-1][1])
        else:
            joined.append((first_code, last_code))
    if is_negated:
        gap_starts = [-1, *(last_code for _, last_code in joined)]
        gap_ends = [*(first_code for first_code, _ in joined), MAX_CODE_POINT + 1]
        joined = [(a + 1, b - 1) for a, b in zip(gap_starts, gap_ends, strict=True)]
    first_code, last_code = SURROGATES[0] - 1, SURROGATES[-1] + 1
    cut = [(a, min(b, first_code)) for a, b in joined] + [(max(a, last_code), b) for a, b in joined]
    return tuple(sorted((a, b) for a, b in cut if a <= b))
