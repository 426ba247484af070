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
            here = {len(self.ranges) - 1}
            return Span(here, here, False)
        if isinstance(node, Choice):
            spans = [self.span(part, owner) for part in node.parts]
            first, last = (
                set().union(*each) for each in zip(*((s.first, s.last) for s in spans), strict=True)
            )
            return Span(first, last, any(s.empty for s in spans))
        if isinstance(node, Repeat):
            return self.repeated(node, owner)
        assert isinstance(node, Sequence)
        whole = Span(set(), set(), True)
        for part in node.parts:
            whole = self.joined(whole, self.span(part, owner))
        return whole

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
        known: dict[Ranges, int] = {}
        for r in self.ranges:
            if r not in known:
                spans = ((bisect_left(edges, low), bisect_left(edges, high + 1)) for low, high in r)
                known[r] = sum((1 << b) - (1 << a) for a, b in spans)
            self.masks.append(known[r])

    def conflicts(self, follow: list[set[int]]) -> set[int]:
        """Lexemes that can swallow what belongs to the one after another; follow: lexemes that can come next."""
        heads = [self.mask(span.first) for span in self.spans]
        next = [0] * len(heads)
        heads.append(-1)  # every bit: a token other than one can begin with any character
        for number, lexemes in enumerate(follow):
            for other in lexemes:
                next[number] |= heads[other]
        lasts = {place for span in self.spans for place in span.last}
        found, seen = set[int](), set[frozenset[int]]()
        waiting = self.split({place for span in self.spans for place in span.first})
        while waiting:
            state = waiting.pop()
            if state in seen:
                continue
            if len(seen) == MOST_STATES:
                raise TooLarge
            seen.add(state)
            more = set[int]().union(*(self.after[place] for place in state))
            ended = 0
            for place in state & lasts:
                ended |= next[self.owner[place]]
            found |= {self.owner[place] for place in more if self.masks[place] & ended}
            waiting += self.split(more)
        return found

    def mask(self, places: set[int]) -> int:
        found = 0
        for place in places:
            found |= self.masks[place]
        return found

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
    found: list[set[int]] = [set() for _ in range(count)]
    heads = _heads(rules)
    ends: dict[str, set[int]] = {name: set() for name in rules}

    def visit(node: Node, after: set[int]) -> None:
        if isinstance(node, Lexeme):
            found[node.number] |= after
        elif isinstance(node, Name):
            ends[node.rule] |= after
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
        before = sum(map(len, found)) + sum(map(len, ends.values()))
        for name, rule in rules.items():
            visit(rule, set(ends[name]))
        if before == sum(map(len, found)) + sum(map(len, ends.values())):
            return found


Heads = dict[str, tuple[set[int], bool]]


def _heads(rules: Rules) -> Heads:
    heads: Heads = {name: (set(), False) for name in rules}
    while True:
        now = {name: head(rule, heads) for name, rule in rules.items()}
        if now == heads:
            return heads
        heads = now


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
        more, none = head(part, heads)
        first = first | more if empty or isinstance(node, Choice) else first
        empty = empty and none if isinstance(node, Sequence) else empty or none
    return first, empty
