"""Finds lexemes for which a lexer that takes the longest match would misread a grammar.

One automaton is built of all lexemes (positions, Glushkov 1961; sets of them, Rabin and Scott 1959). Where a
lexeme has ended, a character that may follow it and that continues another one is a conflict.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

from packtrain.inference.grammar import nodes
from packtrain.inference.grammar.nodes import ChoiceNode, LexemeNode, Node, RepeatNode, SequenceNode

MAX_POSITIONS, MAX_STATES = 3000, 3000
ANY_CHAR = -1  # in place of a lexeme: any character


class AutomatonTooLarge(Exception):
    """The automaton would be too large."""


@dataclass
class NodeSpan:
    """Positions at which a text of a node can begin and end, and whether the text can be empty."""

    first: set[int]
    last: set[int]
    empty: bool


@dataclass
class Automaton:
    """Positions are characters of lexemes; bits of a mask are classes of characters that no set tells apart."""

    rules: nodes.GrammarRules
    ranges: list[nodes.Ranges] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    next_positions: list[set[int]] = field(default_factory=list)
    lexeme_spans: list[NodeSpan] = field(default_factory=list)
    char_masks: list[int] = field(default_factory=list)

    def add_lexeme(self, node: Node) -> None:
        """Add the positions of one more lexeme."""
        self.lexeme_spans.append(self.node_span(node, len(self.lexeme_spans)))

    def node_span(self, node: Node, lexeme_index: int) -> NodeSpan:
        """Add the positions of a node, and return its span. Raises AutomatonTooLarge."""
        if isinstance(node, nodes.RuleReference):
            return self.node_span(self.rules[node.rule_name], lexeme_index)
        if isinstance(node, nodes.CharSet):
            if len(self.ranges) == MAX_POSITIONS:
                raise AutomatonTooLarge
            self.ranges.append(node.code_ranges)
            self.owner.append(lexeme_index)
            self.next_positions.append(set())
            positions = {len(self.ranges) - 1}
            return NodeSpan(positions, positions, False)
        if isinstance(node, ChoiceNode):
            spans = [self.node_span(child, lexeme_index) for child in node.children]
            first_positions, last = (
                set().union(*each) for each in zip(*((s.first, s.last) for s in spans), strict=True)
            )
            return NodeSpan(first_positions, last, any(child_span.empty for child_span in spans))
        if isinstance(node, RepeatNode):
            return self.repeat_span(node, lexeme_index)
        assert isinstance(node, SequenceNode)
        sequence_span = NodeSpan(set(), set(), True)
        for child in node.children:
            sequence_span = self.join_spans(sequence_span, self.node_span(child, lexeme_index))
        return sequence_span

    def join_spans(self, a: NodeSpan, b: NodeSpan) -> NodeSpan:
        """Let span `b` follow span `a`, and return the span of both."""
        for position in a.last:
            self.next_positions[position] |= b.first
        first = a.first | b.first if a.empty else a.first
        return NodeSpan(first, a.last | b.last if b.empty else b.last, a.empty and b.empty)

    def repeat_span(self, node: RepeatNode, lexeme_index: int) -> NodeSpan:
        """Return the span of {m,n} read as + or *, which have more texts: no conflict is missed."""
        if node.max_count == 0:
            return NodeSpan(set(), set(), True)
        child_span = self.node_span(node.child, lexeme_index)
        if node.max_count != 1:
            self.join_spans(child_span, child_span)
        return NodeSpan(child_span.first, child_span.last, child_span.empty or not node.min_count)

    def classify_chars(self) -> None:
        """Compute `char_masks`, the classes of characters of each position."""
        edges = sorted({edge for r in self.ranges for low, high in r for edge in (low, high + 1)})
        mask_by_ranges: dict[nodes.Ranges, int] = {}
        for r in self.ranges:
            if r not in mask_by_ranges:
                spans = ((bisect_left(edges, low), bisect_left(edges, high + 1)) for low, high in r)
                mask_by_ranges[r] = sum((1 << b) - (1 << a) for a, b in spans)
            self.char_masks.append(mask_by_ranges[r])

    def conflicting_lexemes(self, follow_sets: list[set[int]]) -> set[int]:
        """Return lexemes that can swallow text of the next lexeme; `follow_sets`: lexemes that can come after each."""
        head_masks = [self.union_mask(lexeme_span.first) for lexeme_span in self.lexeme_spans]
        follow_masks = [0] * len(head_masks)
        head_masks.append(-1)  # every bit: a token other than one can begin with any character
        for lexeme_index, successors in enumerate(follow_sets):
            for successor in successors:
                follow_masks[lexeme_index] |= head_masks[successor]
        lasts = {position for lexeme_span in self.lexeme_spans for position in lexeme_span.last}
        conflicting_indices, seen_states = set[int](), set[frozenset[int]]()
        waiting = self.split({position for span in self.lexeme_spans for position in span.first})
        while waiting:
            state = waiting.pop()
            if state in seen_states:
                continue
            if len(seen_states) == MAX_STATES:
                raise AutomatonTooLarge
            seen_states.add(state)
            next_places = set[int]().union(*(self.next_positions[position] for position in state))
            follow_mask = 0
            for position in state & lasts:
                follow_mask |= follow_masks[self.owner[position]]
            conflicting_indices |= {
                self.owner[place] for place in next_places if self.char_masks[place] & follow_mask
            }
            waiting += self.split(next_places)
        return conflicting_indices

    def union_mask(self, places: set[int]) -> int:
        combined_mask = 0
        for position in places:
            combined_mask |= self.char_masks[position]
        return combined_mask

    def split(self, places: set[int]) -> list[frozenset[int]]:
        """Split a set of positions into states, one for each class of the next character."""
        state_groups = [(self.union_mask(places), frozenset[int]())]
        for position in places:
            char_mask, split_groups = self.char_masks[position], []
            for group_mask, group_positions in state_groups:
                if group_mask & char_mask:
                    split_groups.append((group_mask & char_mask, group_positions | {position}))
                if group_mask & ~char_mask:
                    split_groups.append((group_mask & ~char_mask, group_positions))
            state_groups = split_groups
        return [group_positions for _, group_positions in state_groups if group_positions]


def follow_sets(rules: nodes.GrammarRules, num_lexemes: int) -> list[set[int]]:
    """Return for each lexeme the lexemes that can come after it."""
    follow_by_lexeme: list[set[int]] = [set() for _ in range(num_lexemes)]
    rule_heads = _rule_heads(rules)
    follow_by_rule: dict[str, set[int]] = {rule_name: set() for rule_name in rules}

    def visit(node: Node, following: set[int]) -> None:
        if isinstance(node, LexemeNode):
            follow_by_lexeme[node.lexeme_index] |= following
        elif isinstance(node, nodes.RuleReference):
            follow_by_rule[node.rule_name] |= following
        elif isinstance(node, ChoiceNode):
            for child in node.children:
                visit(child, following)
        elif isinstance(node, RepeatNode):
            visit(node.child, following | node_head(node.child, rule_heads)[0])
        elif isinstance(node, SequenceNode):
            for child in reversed(node.children):
                visit(child, following)
                first_lexemes, is_nullable = node_head(child, rule_heads)
                following = first_lexemes | following if is_nullable else first_lexemes

    while True:
        num_before = sum(map(len, follow_by_lexeme)) + sum(map(len, follow_by_rule.values()))
        for rule_name, rule in rules.items():
            visit(rule, set(follow_by_rule[rule_name]))
        if num_before == sum(map(len, follow_by_lexeme)) + sum(map(len, follow_by_rule.values())):
            return follow_by_lexeme


RuleHeads = dict[str, tuple[set[int], bool]]


def _rule_heads(rules: nodes.GrammarRules) -> RuleHeads:
    rule_heads: RuleHeads = {rule_name: (set(), False) for rule_name in rules}
    while True:
        updated = {rule_name: node_head(rule, rule_heads) for rule_name, rule in rules.items()}
        if updated == rule_heads:
            return rule_heads
        rule_heads = updated


def node_head(node: Node, rule_heads: RuleHeads) -> tuple[set[int], bool]:
    """Return the lexemes with which a node begins, and whether it can be empty."""
    if isinstance(node, LexemeNode):
        return {node.lexeme_index}, node.empty
    if isinstance(node, nodes.TokenNode):
        return {ANY_CHAR} if node.is_negated else set(), False
    if isinstance(node, nodes.RuleReference):
        return rule_heads[node.rule_name]
    if isinstance(node, RepeatNode):
        first, empty = node_head(node.child, rule_heads)
        return first, empty or not node.min_count
    first, empty = set[int](), isinstance(node, SequenceNode)
    for child in node.children if isinstance(node, SequenceNode | ChoiceNode) else ():
        child_lexemes, part_empty = node_head(child, rule_heads)
        first = first | child_lexemes if empty or isinstance(node, ChoiceNode) else first
        empty = empty and part_empty if isinstance(node, SequenceNode) else empty or part_empty
    return first, empty
