"""The compiled tokenizer: a vocabulary's tables for the kernels, and encoders, each of which encodes on one thread.

Ids are those of the encodings' own code, which is the specification and serves short texts, for which loading compiled
code would take longer."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.data.tokenizer.automaton import build_automata
from packtrain.data.tokenizer.split_rules import DigitGroups
from packtrain.data.tokenizer.word_splitter import CharacterClasses

CACHED_WORDS, CACHED_WORD_NBYTES, CACHED_WORD_IDS = 1 << 15, 22, 8  # 2 MB per encoder
COMPILE_THRESHOLD = 1 << 18  # characters that are encoded without loading compiled code
LOOKED_UP = {False: 0, True: 1, "lines": 2}  # as in kernels.tokens
UNKNOWN_CLASS = 255  # as in kernels.splitting
NONE = -1
KERNELS: Any = kernels  # whose modules load on first use


def _table_capacity(num_entries: int) -> int:
    """Return the size of a hash table that is at most two thirds full."""
    return 1 << (max(num_entries, 1) * 3 // 2).bit_length()


def _join_strings(strings: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return (the bytes of all strings, u8; where each begins, and at last their end)."""
    starts = np.cumsum([0, *map(len, strings)], dtype=np.int32)
    return np.frombuffer(b"".join(strings), np.uint8), starts


@dataclass(frozen=True, slots=True)
class StringTable:
    """A hash table of strings that finds their numbers; empty strings are not found."""

    joined_text: np.ndarray
    string_starts: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> "StringTable":
        """Build the hash table of these strings: string -> index."""
        joined_text, string_starts = _join_strings(strings)
        slots = np.full(_table_capacity(len(strings)), NONE, np.int32)
        KERNELS.tokens.fill_strings(joined_text, string_starts, slots)
        return cls(joined_text, string_starts, slots)


class NameFinder:
    """Finds which of some names occur in a text."""

    def __init__(self, names: Sequence[str]) -> None:
        name_bytes = [name.encode(errors="replace") for name in names]
        self._short_indices = [index for index, name in enumerate(name_bytes) if len(name) < 2]
        self._text, self._name_starts = _join_strings(name_bytes)
        prefixes = [name[0] << 8 | name[1] if len(name) > 1 else 1 << 16 for name in name_bytes]
        self._items = np.argsort(prefixes, kind="stable").astype(np.int32)
        self._heads = np.searchsorted(np.sort(prefixes), np.arange((1 << 16) + 1)).astype(np.int32)

    def find(self, text: str) -> list[int]:
        """Return, ascending, the indices of names that occur in the text, and of all names of less than two bytes."""
        is_found = np.zeros(len(self._name_starts) - 1, np.uint8)
        raw = np.frombuffer(text.encode(), np.uint8)
        KERNELS.splitting.find_names(
            raw, self._text, self._name_starts, self._heads, self._items, is_found
        )
        is_found[self._short_indices] = 1
        return np.flatnonzero(is_found).tolist()


def pair_table(
    merges: Iterable[bytes], index: Mapping[bytes, int]
) -> tuple[np.ndarray, dict[bytes, int]]:
    """Return (hash table: ids of a merge's parts -> merged id; ids for parts that `index`, token -> id, lacks)."""
    extra_ids: dict[bytes, int] = {}

    def part_id(part: bytes) -> int:
        token_id = index.get(part)
        if token_id is None:
            return extra_ids.setdefault(part, len(index) + len(extra_ids))
        return token_id

    merge_parts = [split_merge(merge) for merge in merges]
    lefts = np.array([part_id(left) for left, _ in merge_parts], np.int32)
    rights = np.array([part_id(right) for _, right in merge_parts], np.int32)
    merged_ids = np.array([part_id(left + right) for left, right in merge_parts], np.int32)
    merge_pairs = np.full((_table_capacity(len(lefts)), 2), NONE, np.int64)
    KERNELS.tokens.fill_pairs(lefts, rights, merged_ids, merge_pairs)
    return merge_pairs, extra_ids


def split_merge(merge: bytes) -> tuple[bytes, bytes]:
    """Split a merge into its two parts; the first may begin with a space."""
    space_index = merge.find(b" ", 1)
    return (merge[:space_index], merge[space_index + 1 :]) if space_index > 0 else (b"", b"")


def join_table(joins: Iterable[str]) -> np.ndarray:
    """Build a hash table of `joins`, pairs of characters that stand side by side in some token."""
    pair_codes = np.array([ord(pair[0]) << 21 | ord(pair[1]) for pair in joins], np.int64)
    hash_table = np.full(_table_capacity(len(pair_codes)), NONE, np.int64)
    KERNELS.splitting.fill_join_table(pair_codes, hash_table)
    return hash_table


class PatternSplitter:
    """Splits texts by patterns; looks up classes of characters when a text has them."""

    def __init__(self, patterns: Sequence[str | DigitGroups], classes: CharacterClasses) -> None:
        alphabet = "".join(map(chr, range(128))) + classes.names
        expressions = [p.of if isinstance(p, DigitGroups) else p for p in patterns]
        step_tables, numbers = build_automata(expressions, alphabet)
        self._split_steps = [
            _digit_runs(pattern, alphabet, numbers) if isinstance(pattern, DigitGroups) else steps
            for pattern, steps in zip(patterns, step_tables, strict=True)
        ]
        self._class_numbers = np.full(0x110000, UNKNOWN_CLASS, np.uint8)
        self._class_numbers[:128] = numbers[:128]
        self._numbers_by_character = dict(zip(alphabet, numbers.tolist(), strict=True))
        self._classes = classes

    def split(self, raw: np.ndarray, word_ends: np.ndarray) -> tuple[np.ndarray, int]:
        """Split words, which end at `word_ends` in `raw`, at patterns' matches; return (ends of words, how many)."""
        kernel_module, symbols, at = KERNELS.splitting, np.empty(len(raw), np.uint8), 0
        while (at := kernel_module.classify(raw, at, self._class_numbers, symbols)) < len(raw):
            code = ord(raw[at : at + 4].tobytes().decode(errors="ignore")[0])
            self._class_numbers[code] = self._numbers_by_character[self._classes[code]]
        num_words = len(word_ends)
        for steps in self._split_steps:
            new_ends = np.empty(len(raw), np.int32)
            if isinstance(steps, tuple):
                num_words = kernel_module.cut_threes(
                    symbols, *steps, word_ends, num_words, new_ends
                )
            else:
                num_words = kernel_module.split(symbols, steps, 1, word_ends, num_words, new_ends)
            word_ends = new_ends
        return word_ends, num_words


def _digit_runs(
    digit_groups: DigitGroups, alphabet: str, numbers: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Return what kernels.splitting.cut_threes takes, (u8 (256,): 1 for classes in runs of digits; whether runs are cut
    after groups), from `alphabet`, a character of each class, and their class `numbers`."""
    char_class = re.compile(digit_groups.of, re.ASCII)
    is_inside = np.zeros(256, np.uint8)
    is_inside[[n for c, n in zip(alphabet, numbers, strict=True) if char_class.match(c)]] = 1
    return is_inside, digit_groups.cut_after


class BoundarySplitter:
    """Splits a text between characters that no token has side by side."""

    def __init__(self, joins: Iterable[str]) -> None:
        """joins: pairs of characters that stand side by side in some token; between others texts are divided."""
        self._join_table = join_table(joins)

    def split(self, raw: np.ndarray, word_ends: np.ndarray) -> tuple[np.ndarray, int]:
        new_ends = np.empty(len(raw), np.int32)
        return new_ends, KERNELS.splitting.cut_unjoined(
            raw, self._join_table, word_ends, len(word_ends), new_ends
        )


@dataclass(frozen=True, slots=True)
class EncodingTables:
    """Tables of a vocabulary that kernels.tokens.encode reads.

    singles        token of each byte
    tokens         ids below this are tokens; others are parts of merges that are no tokens
    pairs          merges by the numbers of their parts; `order`: ranks of tokens, for vocabularies with scores
    ignore_merges  words that are one of the strings are not merged; "lines": only words of line breaks
    letters        merges start from characters, not bytes
    """

    splitter: PatternSplitter | BoundarySplitter
    strings: StringTable
    singles: np.ndarray
    tokens: int
    pairs: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    order: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    unknown: int = NONE
    ignore_merges: bool | str = False
    letters: bool = False


class CompiledEncoder:
    """Encodes texts by compiled code; caches words, and therefore belongs to one thread at a time."""

    def __init__(self, tables: EncodingTables) -> None:
        self._tables = tables
        self._cached_text = np.zeros((CACHED_WORDS, CACHED_WORD_NBYTES), np.uint8)
        self._cached_ids = np.zeros((CACHED_WORDS, 2 + CACHED_WORD_IDS), np.int32)

    def encode(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return (ids (i32) of all texts in sequence, the end of each text's ids); None if a text has no ids."""
        t, raw = self._tables, np.frombuffer(b"".join(texts), np.uint8)
        parts = np.cumsum([*map(len, texts)], dtype=np.int64)
        word_ends, count = t.splitter.split(raw, parts.astype(np.int32))
        max_word_nbytes = int(np.diff(word_ends[:count], prepend=np.int32(0)).max(initial=0)) + 1
        workspace = (
            np.empty((4, max_word_nbytes), np.int32), *(np.empty(k * max_word_nbytes, np.int64) for k in (1, 3)),
        )  # fmt: skip
        # a space may be three bytes
        ids = np.empty((3 if len(t.order) else 1) * len(raw), np.int32)
        id_ends = np.empty(len(parts), np.int64)
        strings = t.strings.joined_text, t.strings.string_starts, t.strings.slots
        vocabulary, lookup_mode = (strings, t.pairs, t.order, t.singles), LOOKED_UP[t.ignore_merges]
        num_ids = KERNELS.tokens.encode(
            raw, word_ends, count, parts, vocabulary, t.tokens, t.unknown, lookup_mode, t.letters,
            self._cached_text, self._cached_ids, workspace,
            ids, id_ends,
        )  # fmt: skip
        return None if num_ids == NONE else (ids[:num_ids], id_ends)
