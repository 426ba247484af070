"""Patterns of words as automata over classes of characters, which match as Python's `re` does.

A pattern consists of characters, classes, groups, `|`, `?`, `+`, `*`, `{a}`, `{a,b}`, and `(?!x)` for one character x.
The state of an automaton is the list of places in the pattern where a match may go on, the preferred one first.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

INSIDE, ENDING, FIRST_CLASS = 0, 1, 2  # classes of kernels.splitting; the others follow
ATOM = re.compile(r"\[(?:\\.|[^\]\\])+\]|\\.|[^()|?*+{}\[\]]", re.DOTALL)
REPEAT = re.compile(r"([?*+])|\{(\d+)(?:,(\d+))?\}")
TIMES = {"?": (0, 1), "*": (0, None), "+": (1, None)}


class Place(NamedTuple):
    """An instruction: a character of a set, none of a set ahead, go on at one of several places, or the match."""

    kind: str
    of: frozenset[str] = frozenset()
    to: tuple[int, ...] = ()


Emit = Callable[[list[Place]], None]


class Pattern:
    """The instructions of a pattern over the characters of an alphabet."""

    def __init__(self, pattern: str, alphabet: str) -> None:
        self._pattern, self._alphabet, self._at = pattern, alphabet, 0
        self.places: list[Place] = []
        self._choice()(self.places)
        if self._at < len(pattern):
            raise ValueError(f"{pattern!r} cannot be read from {self._at} on")
        self.places.append(Place("match"))

    def _next(self, text: str) -> bool:
        matches = self._pattern.startswith(text, self._at)
        self._at += len(text) * matches
        return matches

    def _choice(self) -> Emit:
        branches = [self._sequence()]
        while self._next("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else lambda code: _one_of(code, branches)

    def _sequence(self) -> Emit:
        items: list[Emit] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            items.append(self._repeated(self._item()))

        def emit(code: list[Place]) -> None:
            for item in items:
                item(code)

        return emit

    def _item(self) -> Emit:
        if self._next("(?!"):
            return self._group("ahead")
        if self._next("(?:") or self._next("("):
            choice = self._choice()
            self._next(")")
            return choice
        return self._character("one")

    def _group(self, kind: str) -> Emit:
        character = self._character(kind)
        self._next(")")
        return character

    def _character(self, kind: str) -> Emit:
        match = ATOM.match(self._pattern, self._at)
        if match is None:
            raise ValueError(f"{self._pattern!r} cannot be read from {self._at} on")
        self._at = match.end()
        char_class = re.compile(match[0], re.ASCII)
        place = Place(kind, frozenset(filter(char_class.match, self._alphabet)))
        return lambda code: code.append(place)

    def _repeated(self, item: Emit) -> Emit:
        match = REPEAT.match(self._pattern, self._at)
        if match is None:
            return item
        self._at = match.end()
        min_times, max_times = (
            TIMES[match[1]] if match[1] else (int(match[2]), int(match[3] or match[2]))
        )
        return lambda code: _times(code, item, min_times, max_times)


def _one_of(code: list[Place], branches: list[Emit]) -> None:
    split, branch_ends, starts = len(code), list[int](), list[int]()
    code.append(Place("split"))
    for branch in branches:
        starts.append(len(code))
        branch(code)
        branch_ends.append(len(code))
        code.append(Place("split"))
    code[split] = Place("split", to=tuple(starts))
    for end in branch_ends:
        code[end] = Place("split", to=(len(code),))


def _times(code: list[Place], item: Emit, min_times: int, max_times: int | None) -> None:
    for _ in range(min_times):
        item(code)
    splits = []
    for _ in range(1 if max_times is None else max_times - min_times):
        splits.append(len(code))
        code.append(Place("split"))
        item(code)
    if max_times is None:
        code.append(Place("split", to=(splits[0],)))
    for split in splits:
        code[split] = Place("split", to=(split + 1, len(code)))


def automata(patterns: Iterable[str], alphabet: str) -> tuple[list[np.ndarray], np.ndarray]:
    """The steps of each pattern, [state, class] as kernels.splitting wants them, and the class of each character.

    State 0 is the end, state 1 the beginning.
    """
    tables = [_steps(pattern, alphabet) for pattern in patterns]
    joined = np.vstack(tables)
    _, first, classes = np.unique(
        joined[:, FIRST_CLASS:], axis=1, return_index=True, return_inverse=True
    )
    columns = [INSIDE, ENDING, *(FIRST_CLASS + first)]
    compact_tables = [np.ascontiguousarray(table[:, columns]) for table in tables]
    return compact_tables, (classes.reshape(-1) + FIRST_CLASS).astype(np.uint8)


def _steps(pattern: str, alphabet: str) -> np.ndarray:
    """The steps of a pattern with a class for each character."""
    places = Pattern(pattern, alphabet).places
    alike, columns = _alike(places, alphabet)
    states, rows = {(): 0, (0,): 1}, []
    for state in _growing(states):
        row = []
        for character in (*alike, None):
            after, matched = _step(places, state, character)
            row.append(2 * states.setdefault(after, len(states)) + matched)
        rows.append([2 * states[state], row[-1], *(row[column] for column in columns)])
    return np.array(rows, np.int32)


def _alike(places: list[Place], alphabet: str) -> tuple[str, list[int]]:
    """One character of all that no place tells apart, and by character which of those stands for it."""
    sets = list({place.of for place in places})
    columns: dict[tuple[bool, ...], int] = {}
    class_numbers = [
        columns.setdefault(tuple(character in of for of in sets), len(columns))
        for character in alphabet
    ]
    return "".join(alphabet[class_numbers.index(n)] for n in range(len(columns))), class_numbers


def _growing(states: dict[tuple[int, ...], int]) -> Iterator[tuple[int, ...]]:
    seen_states, done = list(states), 0
    while done < len(seen_states):
        yield seen_states[done]
        done += 1
        seen_states += islice(states, len(seen_states), None)


def _step(
    places: list[Place], state: tuple[int, ...], character: str | None
) -> tuple[tuple[int, ...], bool]:
    """The places after a character, None for the end of the text, and whether a match ends before it."""
    after: list[int] = []
    seen: set[int] = set()
    waiting = list(reversed(state))
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        place = places[at]
        if place.kind == "match":
            return tuple(after), True  # all other places are less preferred
        if place.kind == "split":
            waiting += reversed(place.to)
        elif place.kind == "ahead":
            waiting += [at + 1] * (character not in place.of)
        elif character in place.of:
            after.append(at + 1)
    return tuple(after), False
