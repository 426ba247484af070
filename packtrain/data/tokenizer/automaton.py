"""Patterns of words as automata over classes of characters, which match as Python's `re` does.

A pattern consists of characters, classes, groups, `|`, `?`, `+`, `*`, `{a}`, `{a,b}`, and `(?!x)` for one character x.
The state of an automaton is the list of places in the pattern where a match may go on, the preferred one first."""

import re
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

INSIDE_CLASS, END_CLASS, FIRST_CLASS = 0, 1, 2  # classes of kernels.splitting; the others follow
ATOM = re.compile(r"\[(?:\\.|[^\]\\])+\]|\\.|[^()|?*+{}\[\]]", re.DOTALL)
REPEAT = re.compile(r"([?*+])|\{(\d+)(?:,(\d+))?\}")
REPEAT_COUNTS = {"?": (0, 1), "*": (0, None), "+": (1, None)}


class PatternInstruction(NamedTuple):
    """An instruction by opcode: consume one character of the set; none of the set ahead; split by steps; match."""

    opcode: str
    characters: frozenset[str] = frozenset()
    steps: tuple[int, ...] = ()  # from this instruction to those where a match may go on


Code = list[PatternInstruction]


class PatternCompiler:
    """Compiles a pattern to instructions (`places`) over the characters of an alphabet."""

    def __init__(self, pattern: str, alphabet: str) -> None:
        self._pattern, self._alphabet, self._position = pattern, alphabet, 0
        self.places = self._parse_choice()
        if self._position < len(pattern):
            raise ValueError(f"{pattern!r} cannot be read from {self._position} on")
        self.places.append(PatternInstruction("match"))

    def _accept(self, text: str) -> bool:
        """Pass over `text` if the pattern goes on with it; return whether it did."""
        matches = self._pattern.startswith(text, self._position)
        self._position += len(text) * matches
        return matches

    def _parse_choice(self) -> Code:
        branches = [self._parse_sequence()]
        while self._accept("|"):
            branches.append(self._parse_sequence())
        if len(branches) == 1:
            return branches[0]
        starts = [*accumulate((len(branch) + 1 for branch in branches), initial=1)]
        code = [_fork(*starts[:-1])]
        for branch in branches:
            code += branch
            code.append(_fork(starts[-1] - len(code)))
        return code

    def _parse_sequence(self) -> Code:
        code: Code = []
        while self._position < len(self._pattern) and self._pattern[self._position] not in "|)":
            code += self._parse_repeat(self._parse_item())
        return code

    def _parse_item(self) -> Code:
        is_lookahead = self._accept("(?!")
        if not is_lookahead and (self._accept("(?:") or self._accept("(")):
            code = self._parse_choice()
            self._accept(")")
            return code
        match = ATOM.match(self._pattern, self._position)
        if match is None:
            raise ValueError(f"{self._pattern!r} cannot be read from {self._position} on")
        self._position = match.end()
        if is_lookahead:
            self._accept(")")
        characters = frozenset(filter(re.compile(match[0], re.ASCII).match, self._alphabet))
        return [PatternInstruction("ahead" if is_lookahead else "one", characters)]

    def _parse_repeat(self, item: Code) -> Code:
        match = REPEAT.match(self._pattern, self._position)
        if match is None:
            return item
        self._position = match.end()
        min_times, max_times = (
            REPEAT_COUNTS[match[1]] if match[1] else (int(match[2]), int(match[3] or match[2]))
        )
        if max_times is None:  # back to the split as often as there are items
            return item * min_times + [_fork(1, len(item) + 2), *item, _fork(-len(item) - 1)]
        num_optional, step = max_times - min_times, len(item) + 1
        code = item * min_times
        for num_left in range(num_optional, 0, -1):
            code += [_fork(1, num_left * step), *item]
        return code


def _fork(*steps: int) -> PatternInstruction:
    """Return an instruction after which a match may go on at several others, `steps` away, the preferred one first."""
    return PatternInstruction("split", steps=steps)


def build_automata(patterns: Iterable[str], alphabet: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Return (a table of next states [state, class] of each pattern, see `_step_table`; the class, u8, of each
    character of the alphabet). State 0 is the end, state 1 the beginning."""
    step_tables = [_step_table(pattern, alphabet) for pattern in patterns]
    joined = np.vstack(step_tables)
    _, first_columns, column_classes = np.unique(
        joined[:, FIRST_CLASS:], axis=1, return_index=True, return_inverse=True
    )
    columns = [INSIDE_CLASS, END_CLASS, *(FIRST_CLASS + first_columns)]
    compact_tables = [np.ascontiguousarray(table[:, columns]) for table in step_tables]
    return compact_tables, (column_classes.reshape(-1) + FIRST_CLASS).astype(np.uint8)


def _step_table(pattern_text: str, alphabet: str) -> np.ndarray:
    """Return a pattern's automaton, i32 [state, class]: twice the next state, + 1 if a match ends before the character.
    Class 0 is none, class 1 the end, then each character of the alphabet has a class."""
    instructions = PatternCompiler(pattern_text, alphabet).places
    representatives, columns = _group_characters(instructions, alphabet)
    states, rows = dict[tuple[int, ...], int]({(): 0, (0,): 1}), list[list[int]]()
    while len(rows) < len(states):
        state = [*states][len(rows)]
        table_row = []
        for character in (*representatives, None):
            next_state, matched = _advance_state(instructions, state, character)
            table_row.append(2 * states.setdefault(next_state, len(states)) + matched)
        rows.append([2 * states[state], table_row[-1], *(table_row[column] for column in columns)])
    return np.array(rows, np.int32)


def _group_characters(places: list[PatternInstruction], alphabet: str) -> tuple[str, list[int]]:
    """Group characters that no instruction tells apart; returns (one of each group, each character's group number)."""
    character_sets = list({instruction.characters for instruction in places})
    columns: dict[tuple[bool, ...], int] = {}
    class_numbers = [
        columns.setdefault(tuple(c in of for of in character_sets), len(columns)) for c in alphabet
    ]
    return "".join(alphabet[class_numbers.index(n)] for n in range(len(columns))), class_numbers


def _advance_state(
    places: list[PatternInstruction], state: tuple[int, ...], character: str | None
) -> tuple[tuple[int, ...], bool]:
    """Return (next state, whether a match ends before `character`). States are the indices in the pattern, `places`,
    where a match may go on; a character of None is the end of the text."""
    next_indices: list[int] = []
    seen_indices: set[int] = set()
    pending = list(reversed(state))
    while pending:
        index = pending.pop()
        if index in seen_indices:
            continue
        seen_indices.add(index)
        instruction = places[index]
        if instruction.opcode == "match":
            return tuple(next_indices), True  # all other places rank lower
        if instruction.opcode == "split":
            pending += (index + step for step in reversed(instruction.steps))
        elif instruction.opcode == "ahead":
            pending += [index + 1] * (character not in instruction.characters)
        elif character in instruction.characters:
            next_indices.append(index + 1)
    return tuple(next_indices), False
