"""Patterns of words as automata over classes of characters, which match as Python's `re` does.

A pattern consists of characters, classes, groups, `|`, `?`, `+`, `*`, `{a}`, `{a,b}`, and `(?!x)` for one character x.
The state of an automaton is the list of places in the pattern where a match may go on, the preferred one first.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

INSIDE_CLASS, END_CLASS, FIRST_CLASS = 0, 1, 2  # classes of kernels.splitting; the others follow
ATOM = re.compile(r"\[(?:\\.|[^\]\\])+\]|\\.|[^()|?*+{}\[\]]", re.DOTALL)
REPEAT = re.compile(r"([?*+])|\{(\d+)(?:,(\d+))?\}")
REPEAT_COUNTS = {"?": (0, 1), "*": (0, None), "+": (1, None)}


class PatternInstruction(NamedTuple):
    """An instruction by opcode: consume one character of the set; none of the set ahead; split to targets; match."""

    opcode: str
    characters: frozenset[str] = frozenset()
    targets: tuple[int, ...] = ()


EmitCode = Callable[[list[PatternInstruction]], None]


class PatternCompiler:
    """Compiles a pattern to instructions (`places`) over the characters of an alphabet."""

    def __init__(self, pattern: str, alphabet: str) -> None:
        self._pattern, self._alphabet, self._position = pattern, alphabet, 0
        self.places: list[PatternInstruction] = []
        self._parse_choice()(self.places)
        if self._position < len(pattern):
            raise ValueError(f"{pattern!r} cannot be read from {self._position} on")
        self.places.append(PatternInstruction("match"))

    def _accept(self, text: str) -> bool:
        matches = self._pattern.startswith(text, self._position)
        self._position += len(text) * matches
        return matches

    def _parse_choice(self) -> EmitCode:
        """Parse alternatives; as all parsers, return a function that appends the instructions to code."""
        branches = [self._parse_sequence()]
        while self._accept("|"):
            branches.append(self._parse_sequence())
        return branches[0] if len(branches) == 1 else lambda code: _emit_choice(code, branches)

    def _parse_sequence(self) -> EmitCode:
        emitters: list[EmitCode] = []
        while self._position < len(self._pattern) and self._pattern[self._position] not in "|)":
            emitters.append(self._parse_repeat(self._parse_item()))

        def emit(code: list[PatternInstruction]) -> None:
            for emit_item in emitters:
                emit_item(code)

        return emit

    def _parse_item(self) -> EmitCode:
        if self._accept("(?!"):
            return self._parse_lookahead("ahead")
        if self._accept("(?:") or self._accept("("):
            choice = self._parse_choice()
            self._accept(")")
            return choice
        return self._parse_character("one")

    def _parse_lookahead(self, opcode: str) -> EmitCode:
        character = self._parse_character(opcode)
        self._accept(")")
        return character

    def _parse_character(self, opcode: str) -> EmitCode:
        match = ATOM.match(self._pattern, self._position)
        if match is None:
            raise ValueError(f"{self._pattern!r} cannot be read from {self._position} on")
        self._position = match.end()
        char_class = re.compile(match[0], re.ASCII)
        place = PatternInstruction(opcode, frozenset(filter(char_class.match, self._alphabet)))
        return lambda code: code.append(place)

    def _parse_repeat(self, emit_item: EmitCode) -> EmitCode:
        match = REPEAT.match(self._pattern, self._position)
        if match is None:
            return emit_item
        self._position = match.end()
        min_times, max_times = (
            REPEAT_COUNTS[match[1]] if match[1] else (int(match[2]), int(match[3] or match[2]))
        )
        return lambda code: _emit_repeat(code, emit_item, min_times, max_times)


def _emit_choice(code: list[PatternInstruction], branches: list[EmitCode]) -> None:
    split_index, branch_ends, branch_starts = len(code), list[int](), list[int]()
    code.append(PatternInstruction("split"))
    for branch in branches:
        branch_starts.append(len(code))
        branch(code)
        branch_ends.append(len(code))
        code.append(PatternInstruction("split"))
    code[split_index] = PatternInstruction("split", targets=tuple(branch_starts))
    for branch_end in branch_ends:
        code[branch_end] = PatternInstruction("split", targets=(len(code),))


def _emit_repeat(
    code: list[PatternInstruction], emit_item: EmitCode, min_times: int, max_times: int | None
) -> None:
    for _ in range(min_times):
        emit_item(code)
    split_indices = []
    for _ in range(1 if max_times is None else max_times - min_times):
        split_indices.append(len(code))
        code.append(PatternInstruction("split"))
        emit_item(code)
    if max_times is None:
        code.append(PatternInstruction("split", targets=(split_indices[0],)))
    for split_index in split_indices:
        code[split_index] = PatternInstruction("split", targets=(split_index + 1, len(code)))


def build_automata(patterns: Iterable[str], alphabet: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Return each pattern's table of steps, [state, class] as kernels.splitting reads it, and each character's class.

    State 0 is the end, state 1 the beginning.
    """
    step_tables = [_step_table(pattern, alphabet) for pattern in patterns]
    joined = np.vstack(step_tables)
    _, first_columns, column_classes = np.unique(
        joined[:, FIRST_CLASS:], axis=1, return_index=True, return_inverse=True
    )
    columns = [INSIDE_CLASS, END_CLASS, *(FIRST_CLASS + first_columns)]
    compact_tables = [np.ascontiguousarray(table[:, columns]) for table in step_tables]
    return compact_tables, (column_classes.reshape(-1) + FIRST_CLASS).astype(np.uint8)


def _step_table(pattern_text: str, alphabet: str) -> np.ndarray:
    """Return the table of steps of a pattern, with a class for each character."""
    instructions = PatternCompiler(pattern_text, alphabet).places
    representatives, columns = _group_characters(instructions, alphabet)
    states, rows = {(): 0, (0,): 1}, []
    for state in _each_state(states):
        table_row = []
        for character in (*representatives, None):
            next_state, matched = _advance_state(instructions, state, character)
            table_row.append(2 * states.setdefault(next_state, len(states)) + matched)
        rows.append([2 * states[state], table_row[-1], *(table_row[column] for column in columns)])
    return np.array(rows, np.int32)


def _group_characters(places: list[PatternInstruction], alphabet: str) -> tuple[str, list[int]]:
    """Group characters that no instruction tells apart; returns one of each group, and each character's group."""
    character_sets = list({instruction.characters for instruction in places})
    columns: dict[tuple[bool, ...], int] = {}
    class_numbers = [
        columns.setdefault(tuple(c in of for of in character_sets), len(columns)) for c in alphabet
    ]
    return "".join(alphabet[class_numbers.index(n)] for n in range(len(columns))), class_numbers


def _each_state(states: dict[tuple[int, ...], int]) -> Iterator[tuple[int, ...]]:
    seen_states, num_done = list(states), 0
    while num_done < len(seen_states):
        yield seen_states[num_done]
        num_done += 1
        seen_states += islice(states, len(seen_states), None)


def _advance_state(
    places: list[PatternInstruction], state: tuple[int, ...], character: str | None
) -> tuple[tuple[int, ...], bool]:
    """Return the state after a character (None: the end of the text), and whether a match ends before it."""
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
            pending += reversed(instruction.targets)
        elif instruction.opcode == "ahead":
            pending += [index + 1] * (character not in instruction.characters)
        elif character in instruction.characters:
            next_indices.append(index + 1)
    return tuple(next_indices), False
