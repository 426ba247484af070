"""Finds lexemes with which a lexer that takes the longest match, such as llguidance's, would misread a grammar.

`[ab]* "ab"` has the lexemes T0, [ab]+, and T1, ab. In "aab", T0 should end after the first a, but the next character
continues T0, which would swallow the rest. A lexeme conflicts if one of its texts begins with a text of any lexeme and
a character that may follow there. One regular expression describes such texts: llguidance tells whether any exists."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from packtrain.inference.grammar import nodes as grammar_nodes
from packtrain.inference.grammar import vocabulary_table
from packtrain.inference.grammar.nodes import GrammarRules, LexemeNode, Node, RepeatNode, TokenNode
from packtrain.inference.grammar.vocabulary_table import DEAD_END, LARK_HEADER, grammar_matcher

MAX_CHECKED_LENGTH = 1 << 18  # characters of all lexemes together, beyond which none is checked
MARKERS = 128  # characters of one byte
ANY_CHAR = -1  # in place of a lexeme: any character


def conflicting_lexemes(definitions: Sequence[str], extensions: Sequence[str]) -> list[int]:
    """Return the indices of lexemes that can swallow text of the next lexeme; if they are too long to check, of all.

    definitions  T0: …, T1: …, in llguidance's notation
    extensions   a lexeme and the characters that may follow: T0 /[…]/
    """
    if sum(map(len, definitions)) > MAX_CHECKED_LENGTH:
        return [*range(len(definitions))]
    lines = [LARK_HEADER, *definitions, f"E: ({' | '.join(extensions)}) /(?s:.*)/"]
    conflicts = list[int]()
    for start in range(0, len(definitions), MARKERS):
        count = min(MARKERS, len(definitions) - start)
        # a marker before the texts of each lexeme, so that the mask of the next byte tells which have any
        marked = [f"X{n}: /\\x{{{n:x}}}/ (T{start + n} & E)" for n in range(count)]
        begin = f"start: {' | '.join(f'X{n}' for n in range(count))}"
        matcher = grammar_matcher(_byte_tokenizer(), "\n".join([*lines, begin, *marked, ""]))
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        has_failed = matcher.is_error() and not matcher.get_error().startswith(DEAD_END)
        conflicts += [start + n for n in range(count) if mask[n] or has_failed]
    return conflicts


@cache
def _byte_tokenizer() -> Any:
    return vocabulary_table.llguidance().LLTokenizer("byte")


def follow_sets(rules: GrammarRules, num_lexemes: int) -> list[set[int]]:
    """Return for each lexeme the indices of those that can come after it, among them ANY_CHAR if any character can."""
    follow_by_lexeme: list[set[int]] = [set() for _ in range(num_lexemes)]
    follow_by_rule: dict[str, set[int]] = {rule_name: set() for rule_name in rules}
    heads = grammar_nodes.rule_heads(rules)

    @cache
    def head_lexemes(node: Node) -> tuple[set[int], bool]:
        leaves, is_nullable = grammar_nodes.node_heads(node, heads)
        lexemes = {leaf.lexeme_index for leaf in leaves if isinstance(leaf, LexemeNode)}
        has_any = any(isinstance(leaf, TokenNode) and leaf.is_negated for leaf in leaves)
        return lexemes | ({ANY_CHAR} if has_any else set()), is_nullable

    def visit(node: Node, following: set[int]) -> None:
        if isinstance(node, LexemeNode):
            follow_by_lexeme[node.lexeme_index] |= following
        elif isinstance(node, grammar_nodes.RuleReference):
            follow_by_rule[node.rule_name] |= following
        elif isinstance(node, RepeatNode):
            visit(node.child, following | head_lexemes(node.child)[0])
        for child in () if isinstance(node, RepeatNode) else reversed(grammar_nodes.parts_of(node)):
            visit(child, following)
            if isinstance(node, grammar_nodes.SequenceNode):
                first_lexemes, is_nullable = head_lexemes(child)
                following = first_lexemes | following if is_nullable else first_lexemes

    while True:
        num_before = sum(map(len, (*follow_by_lexeme, *follow_by_rule.values())))
        for rule_name, rule in rules.items():
            visit(rule, set(follow_by_rule[rule_name]))
        if num_before == sum(map(len, (*follow_by_lexeme, *follow_by_rule.values()))):
            return follow_by_lexeme
