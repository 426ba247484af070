"""Whether a lexer that always takes the longest lexeme reads a grammar as its characters say.

Of all lexemes at once an automaton is made (positions, Glushkov 1961; sets of them, Rabin and Scott 1959). Where a
lexeme has ended, a character that may follow it and that continues another one is a conflict.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

from packtrain.inference.grammar import nodes
from packtrain.inference.grammar.nodes import (
    Choice,
    Lexeme,
    Name,
    Node,
    Ranges,
    Repeat,
    Rules,
    Sequence,
)

MOST_PLACES, MOST_STATES = 3000, 3000
ANY = -1  # in place of a lexeme: any character


class TooLarge(Exception):
    """The automaton would be too large."""


@dataclass
class Span:
    """Places at which a text of a node can begin and end, and whether it can be empty."""

    first: set[int]
    last: set[int]
    empty: bool


@dataclass
class Automaton:
    """Places are characters of lexemes; bits of a mask are classes of characters that no set tells apart."""

    rules: Rules
    ranges: list[Ranges] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    after: list[set[int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)

    def add(self, node: Node) -> None:
        """One more lexeme."""
        self.spans.append(self.span(node, len(self.spans)))

    def span(self, node: Node, owner: int) -> Span:
        if isinstance(node, Name):
            return self.span(self.rules[node.rule], owner)
        if isinstance(node, nodes.Chars):
            if len(self.ranges) == MOST_PLACES:
                raise TooLarge
            self.ranges.append(node.ranges)
            self.owner.append(owner)
            self.after.append(set())
            places = {len(self.ranges) - 1}
            return Span(places, places, False)
        if isinstance(node, Choice):
            spans = [self.span(part, owner) for part in node.parts]
            first, last = (
                set().union(*each) for each in zip(*((s.first, s.last) for s in spans), strict=True)
            )
            return Span(first, last, any(s.empty for s in spans))
        if isinstance(node, Repeat):
            return self.repeated(node, owner)
        assert isinstance(node, Sequence)
        sequence_span = Span(set(), set(), True)
        for part in node.parts:
            sequence_span = self.joined(sequence_span, self.span(part, owner))
        return sequence_span

    def joined(self, a: Span, b: Span) -> Span:
        for place in a.last:
            self.after[place] |= b.first
        first = a.first | b.first if a.empty else a.first
        return Span(first, a.last | b.last if b.empty else b.last, a.empty and b.empty)

    def repeated(self, node: Repeat, owner: int) -> Span:
        """{m,n} as + or *, which has more texts: conflicts are not missed."""
        if node.most == 0:
            return Span(set(), set(), True)
        span = self.span(node.part, owner)
        if node.most != 1:
            self.joined(span, span)
        return Span(span.first, span.last, span.empty or not node.least)

    def classify(self) -> None:
        """Masks of the places."""
        edges = sorted({edge for r in self.ranges for low, high in r for edge in (low, high + 1)})
        masks_by_ranges: dict[Ranges, int] = {}
        for r in self.ranges:
            if r not in masks_by_ranges:
                spans = ((bisect_left(edges, low), bisect_left(edges, high + 1)) for low, high in r)
                masks_by_ranges[r] = sum((1 << b) - (1 << a) for a, b in spans)
            self.masks.append(masks_by_ranges[r])

    def conflicts(self, follow: list[set[int]]) -> set[int]:
        """Lexemes that can swallow what belongs to the one after another; follow: lexemes that can come next."""
        heads = [self.mask(span.first) for span in self.spans]
        next = [0] * len(heads)
        heads.append(-1)  # every bit: a token other than one can begin with any character
        for number, lexemes in enumerate(follow):
            for successor in lexemes:
                next[number] |= heads[successor]
        lasts = {place for span in self.spans for place in span.last}
        conflicting, seen = set[int](), set[frozenset[int]]()
        waiting = self.split({place for span in self.spans for place in span.first})
        while waiting:
            state = waiting.pop()
            if state in seen:
                continue
            if len(seen) == MOST_STATES:
                raise TooLarge
            seen.add(state)
            next_places = set[int]().union(*(self.after[place] for place in state))
            follow_mask = 0
            for place in state & lasts:
                follow_mask |= next[self.owner[place]]
            conflicting |= {
                self.owner[place] for place in next_places if self.masks[place] & follow_mask
            }
            waiting += self.split(next_places)
        return conflicting

    def mask(self, places: set[int]) -> int:
        mask = 0
        for place in places:
            mask |= self.masks[place]
        return mask

    def split(self, places: set[int]) -> list[frozenset[int]]:
        """The states that these places become, by the character that comes."""
        groups = [(self.mask(places), frozenset[int]())]
        for place in places:
            mask, split = self.masks[place], []
            for group, members in groups:
                if group & mask:
                    split.append((group & mask, members | {place}))
                if group & ~mask:
                    split.append((group & ~mask, members))
            groups = split
        return [members for _, members in groups if members]


def followers(rules: Rules, count: int) -> list[set[int]]:
    """For each lexeme those that can come after it."""
    followers_of: list[set[int]] = [set() for _ in range(count)]
    heads = _heads(rules)
    after_rule: dict[str, set[int]] = {name: set() for name in rules}

    def visit(node: Node, after: set[int]) -> None:
        if isinstance(node, Lexeme):
            followers_of[node.number] |= after
        elif isinstance(node, Name):
            after_rule[node.rule] |= after
        elif isinstance(node, Choice):
            for part in node.parts:
                visit(part, after)
        elif isinstance(node, Repeat):
            visit(node.part, after | head(node.part, heads)[0])
        elif isinstance(node, Sequence):
            for part in reversed(node.parts):
                visit(part, after)
                first, empty = head(part, heads)
                after = first | after if empty else first

    while True:
        before = sum(map(len, followers_of)) + sum(map(len, after_rule.values()))
        for name, rule in rules.items():
            visit(rule, set(after_rule[name]))
        if before == sum(map(len, followers_of)) + sum(map(len, after_rule.values())):
            return followers_of


Heads = dict[str, tuple[set[int], bool]]


def _heads(rules: Rules) -> Heads:
    heads: Heads = {name: (set(), False) for name in rules}
    while True:
        updated = {name: head(rule, heads) for name, rule in rules.items()}
        if updated == heads:
            return heads
        heads = updated


def head(node: Node, heads: Heads) -> tuple[set[int], bool]:
    """The lexemes with which a node begins, and whether it can be empty."""
    if isinstance(node, Lexeme):
        return {node.number}, node.empty
    if isinstance(node, nodes.Token):
        return {ANY} if node.other else set(), False
    if isinstance(node, Name):
        return heads[node.rule]
    if isinstance(node, Repeat):
        first, empty = head(node.part, heads)
        return first, empty or not node.least
    first, empty = set[int](), isinstance(node, Sequence)
    for part in node.parts if isinstance(node, Sequence | Choice) else ():
        part_first, part_empty = head(part, heads)
        first = first | part_first if empty or isinstance(node, Choice) else first
        empty = empty and part_empty if isinstance(node, Sequence) else empty or part_empty
    return first, empty
