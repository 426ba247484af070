"""Tables of a vocabulary for the compiled tokenizer, the kernels, and lanes, each of which encodes on one thread.

Ids are those of the encodings' own code, which is the specification and serves short texts, where loading compiled
code would take longer.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.data.tokenizer.automaton import automata
from packtrain.data.tokenizer.split_rules import Threes
from packtrain.data.tokenizer.word_splitter import Classes

KEPT, KEPT_NBYTES, KEPT_IDS = 1 << 15, 22, 8  # words that a lane keeps, 2 MB, and their sizes
FEW = 1 << 18  # characters that are encoded without loading compiled code
LOOKED_UP = {False: 0, True: 1, "lines": 2}  # as in kernels.tokens
UNKNOWN = 255  # as in kernels.splitting
NONE = -1


def tokens() -> Any:
    return kernels.tokens


def splitting() -> Any:
    return kernels.splitting


def _capacity(count: int) -> int:
    """The size of a hash table that is at most two thirds full."""
    return 1 << (max(count, 1) * 3 // 2).bit_length()


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings by number, in a hash table; empty ones are not found."""

    text: np.ndarray
    starts: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> "Strings":
        starts = np.zeros(len(strings) + 1, np.int32)
        np.cumsum([*map(len, strings)], out=starts[1:])
        text = np.frombuffer(b"".join(strings), np.uint8)
        slots = np.full(_capacity(len(strings)), NONE, np.int32)
        tokens().fill_strings(text, starts, slots)
        return cls(text, starts, slots)


class Names:
    """Finds which of some names occur in a text."""

    def __init__(self, names: Sequence[str]) -> None:
        raw = [name.encode(errors="replace") for name in names]
        self._short = [number for number, name in enumerate(raw) if len(name) < 2]
        self._starts = np.zeros(len(raw) + 1, np.int32)
        np.cumsum([*map(len, raw)], out=self._starts[1:])
        self._text = np.frombuffer(b"".join(raw), np.uint8)
        pairs = [name[0] << 8 | name[1] if len(name) > 1 else 1 << 16 for name in raw]
        self._items = np.argsort(pairs, kind="stable").astype(np.int32)
        self._heads = np.searchsorted(np.sort(pairs), np.arange((1 << 16) + 1)).astype(np.int32)

    def within(self, text: str) -> list[int]:
        """The numbers of those that occur, in order; those of one byte always."""
        seen = np.zeros(len(self._starts) - 1, np.uint8)
        raw = np.frombuffer(text.encode(), np.uint8)
        splitting().spot(raw, self._text, self._starts, self._heads, self._items, seen)
        seen[self._short] = 1
        return np.flatnonzero(seen).tolist()


def pair_table(
    merges: Iterable[bytes], index: Mapping[bytes, int]
) -> tuple[np.ndarray, dict[bytes, int]]:
    """Merges by the numbers of their parts, for kernels.tokens; and numbers of parts that are no tokens."""
    extra_numbers: dict[bytes, int] = {}

    def number(part: bytes) -> int:
        token_id = index.get(part)
        return (
            extra_numbers.setdefault(part, len(index) + len(extra_numbers))
            if token_id is None
            else token_id
        )

    parted = [parts_of(merge) for merge in merges]
    lefts = np.array([number(left) for left, _ in parted], np.int32)
    rights = np.array([number(right) for _, right in parted], np.int32)
    merged_ids = np.array([number(left + right) for left, right in parted], np.int32)
    pairs = np.full((_capacity(len(lefts)), 2), NONE, np.int64)
    tokens().fill_pairs(lefts, rights, merged_ids, pairs)
    return pairs, extra_numbers


def parts_of(merge: bytes) -> tuple[bytes, bytes]:
    """The two parts; the first may begin with a space."""
    at = merge.find(b" ", 1)
    return (merge[:at], merge[at + 1 :]) if at > 0 else (b"", b"")


def join_table(joins: Iterable[str]) -> np.ndarray:
    """Pairs of characters as a hash table."""
    pairs = np.array([ord(pair[0]) << 21 | ord(pair[1]) for pair in joins], np.int64)
    table = np.full(_capacity(len(pairs)), NONE, np.int64)
    splitting().fill_joins(pairs, table)
    return table


class Words:
    """Splits by patterns: the classes of characters, looked up when a text has them, and what divides at each step."""

    def __init__(self, patterns: Sequence[str | Threes], classes: Classes) -> None:
        """The patterns are over class characters."""
        alphabet = "".join(map(chr, range(128))) + classes.names
        expressions = [
            pattern.of if isinstance(pattern, Threes) else pattern for pattern in patterns
        ]
        tables, numbers = automata(expressions, alphabet)
        self._steps = [
            _Runs(pattern, alphabet, numbers) if isinstance(pattern, Threes) else steps
            for pattern, steps in zip(patterns, tables, strict=True)
        ]
        self._numbers = np.full(0x110000, UNKNOWN, np.uint8)
        self._numbers[:128] = numbers[:128]
        self._named = dict(zip(alphabet, numbers.tolist(), strict=True))
        self._classes = classes

    def split(self, raw: np.ndarray, end_offsets: np.ndarray) -> tuple[np.ndarray, int]:
        compiled, symbols, at = splitting(), np.empty(len(raw), np.uint8), 0
        while (at := compiled.classify(raw, at, self._numbers, symbols)) < len(raw):
            code = ord(raw[at : at + 4].tobytes().decode(errors="ignore")[0])
            self._numbers[code] = self._named[self._classes[code]]
        count = len(end_offsets)
        for steps in self._steps:
            new_ends = np.empty(len(raw), np.int32)
            if isinstance(steps, _Runs):
                count = compiled.threes(
                    symbols, steps.inside, steps.after, end_offsets, count, new_ends
                )
            else:
                count = compiled.split(symbols, steps, 1, end_offsets, count, new_ends)
            end_offsets = new_ends
        return end_offsets, count


class _Runs:
    """What kernels.splitting.threes wants: which classes are in a run, and where it is cut."""

    def __init__(self, given: Threes, alphabet: str, numbers: np.ndarray) -> None:
        char_class = re.compile(given.of, re.ASCII)
        self.inside = np.zeros(256, np.uint8)
        self.inside[[n for c, n in zip(alphabet, numbers, strict=True) if char_class.match(c)]] = 1
        self.after = given.after


class Cuts:
    """Splits between characters that no token has side by side."""

    def __init__(self, joins: Iterable[str]) -> None:
        self._joins = join_table(joins)

    def split(self, raw: np.ndarray, end_offsets: np.ndarray) -> tuple[np.ndarray, int]:
        new_ends = np.empty(len(raw), np.int32)
        return new_ends, splitting().cut(raw, self._joins, end_offsets, len(end_offsets), new_ends)


@dataclass(frozen=True, slots=True)
class Tables:
    """What kernels.tokens.encode reads of a vocabulary.

    order    by token: which merges come first, for vocabularies with scores
    singles  the token of each byte
    tokens   how many of the numbers are tokens
    whole    words that are one of the strings are not merged; "lines": only those of line breaks
    letters  what merges are characters, not bytes
    """

    splitter: Words | Cuts
    strings: Strings
    singles: np.ndarray
    tokens: int
    pairs: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    order: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    unknown: int = NONE
    whole: bool | str = False
    letters: bool = False


class Lane:
    """Encodes with the tables; keeps the last words, so that it belongs to one thread at a time."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._text = np.zeros((KEPT, KEPT_NBYTES), np.uint8)
        self._kept = np.zeros((KEPT, 2 + KEPT_IDS), np.int32)

    def encode(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray] | None:
        """The ids (i32) of all texts, one after the other, and where those of each end; None if it has no ids."""
        t, raw = self._tables, np.frombuffer(b"".join(texts), np.uint8)
        parts = np.cumsum([*map(len, texts)], dtype=np.int64)
        end_offsets, count = t.splitter.split(raw, parts.astype(np.int32))
        longest = int(np.diff(end_offsets[:count], prepend=np.int32(0)).max(initial=0)) + 1
        workspace = (
            np.empty((4, longest), np.int32),
            *(np.empty(k * longest, np.int64) for k in (1, 3)),
        )
        # a space may be three bytes
        ids = np.empty((3 if len(t.order) else 1) * len(raw), np.int32)
        totals = np.empty(len(parts), np.int64)
        strings = t.strings.text, t.strings.starts, t.strings.slots
        vocabulary, lookup_mode = (strings, t.pairs, t.order, t.singles), LOOKED_UP[t.whole]
        total = tokens().encode(
            raw, end_offsets, count, parts, vocabulary, t.tokens, t.unknown, lookup_mode, t.letters,
            self._text, self._kept, workspace,
            ids, totals,
        )  # fmt: skip
        return None if total == NONE else (ids[:total], totals)
