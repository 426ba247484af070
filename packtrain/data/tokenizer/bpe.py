"""Byte-pair encoding: splits text into words by a pattern, then merges their parts in the order of the file.

Tokens are spelled in GPT-2's alphabet of bytes, or, in vocabularies like Gemma 4's, in plain characters."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from packtrain.data.tokenizer import compiled, token_table
from packtrain.data.tokenizer.encoding import Encoding, merge_parts
from packtrain.data.tokenizer.split_rules import RULES, SplitRule, after_any
from packtrain.data.tokenizer.token_table import KEYS, TokenTable, flag, read_strings
from packtrain.data.tokenizer.word_splitter import WHITESPACE, WordSplitter, lowered

# GPT-2's alphabet: printable bytes map to themselves, the others to characters from 256 on, in order
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [b for b in range(256) if b not in _PRINTED]
ALPHABET = {b: chr(b) for b in _PRINTED} | {b: chr(256 + i) for i, b in enumerate(_HIDDEN)}
BYTES = {character: bytes([b]) for b, character in ALPHABET.items()}
# BYTES for str.translate; characters outside the alphabet become one that Latin-1 cannot encode
_BYTES = dict.fromkeys(range(256), "\uffff") | {ord(c): chr(b) for b, c in ALPHABET.items()}


class BytePairEncoding(Encoding):
    """The "gpt2" and "gemma4" kinds of vocabulary, which add no space before the text."""

    has_tables = True

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        name = metadata.get(f"{KEYS}pre", "default")
        name = "gemma4" if metadata.get(f"{KEYS}model") == "gemma4" else name
        if not isinstance(name, str) or name not in RULES:
            fact = f"{KEYS}pre is {name!r}; these are known: {', '.join(sorted(RULES))}"
            raise token_table.TokenizerError(fact)
        has_no_merges = name == "kimi-k2" and f"{KEYS}merges" not in metadata  # as in llama.cpp
        self._merges = [] if has_no_merges else read_strings(metadata, "merges")
        self._rule, self._splitter = RULES[name], WordSplitter(RULES[name])
        self.adds_bos, self.cleans_spaces = self._rule.adds_bos, self._rule.cleans_spaces
        self.always_adds_bos = self._rule.ignore_merges == "lines"  # true for Gemma 4
        super().__init__(TokenTable(metadata))

    def _words(self, text: str) -> list[str]:
        return self._splitter.split(self._replace_spaces(text))

    def raw(self, text: str) -> bytes:
        """Return a text as bytes, with the vocabulary's character for spaces."""
        return self._replace_spaces(text).encode()

    def build_tables(self) -> compiled.EncodingTables:
        index, rule = self.table.index, self._rule
        merge_pairs, extra_ids = compiled.pair_table(self._merges, index)
        splitter = compiled.PatternSplitter(self._splitter.patterns, self._splitter.classes)
        if rule.byte_level:
            symbol_ids = index | extra_ids
            for character in ALPHABET.values():
                symbol_ids.setdefault(character.encode(), len(symbol_ids))
            strings = [*map(_decode_spelling, self.table.tokens)] if rule.ignore_merges else []
            singles = [symbol_ids[ALPHABET[b].encode()] for b in range(256)]
        else:
            strings = [*self.table.tokens, *extra_ids]
            singles = [compiled.NONE if id is None else id for id in map(self._byte_id, range(256))]
        return compiled.EncodingTables(
            splitter, compiled.StringTable.of(strings), np.array(singles, np.int32), len(index), merge_pairs,
            ignore_merges=rule.ignore_merges, letters=not rule.byte_level,
        )  # fmt: skip

    def can_cut(self, text: str, at: int) -> bool:
        """Whether a word always begins at text[at], whatever surrounds the text, so that it can be cut there."""
        return not self.table.may_span(text, at) and (self._rule.border or after_any)(text, at)

    def piece(self, token: bytes) -> bytes:
        """Return the text that a token stands for, as bytes."""
        if self._rule.space_text != " ":
            return token.replace(self._rule.space_text.encode(), b" ")
        return b"".join(BYTES.get(c, c.encode()) for c in token.decode(errors="replace"))

    @cached_property
    def _merge_ranks(self) -> dict[bytes, int]:
        """Return the ranks of merges by b"left right"; of duplicates the first counts."""
        merges = self._merges
        return dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))

    def _replace_spaces(self, text: str) -> str:
        spaces = self._rule.space_text
        return text if spaces == " " else text.replace(" ", spaces)

    def _byte_id(self, byte: int) -> int | None:
        return self.table.index.get(b"<0x%02X>" % byte)

    def _word_ids(self, word: str) -> list[int]:
        """Return the ids of a word: its parts after all merges."""
        ranks, index, rule = self._merge_ranks, self.table.index, self._rule

        def cost(a: bytes, b: bytes) -> int | None:
            return ranks.get(b"%b %b" % (a, b))

        spelled_word = (
            word.encode().decode("latin-1").translate(ALPHABET) if rule.byte_level else word
        )
        is_looked_up = rule.ignore_merges and (rule.ignore_merges != "lines" or word[0] == "\n")
        id = index.get(spelled_word.encode()) if is_looked_up else None
        parts = [] if id is not None else merge_parts([c.encode() for c in spelled_word], cost)
        return [i for part in parts for i in self._part_ids(part, rule)] if id is None else [id]

    def _part_ids(self, part: bytes, rule: SplitRule) -> Sequence[int]:
        """Return the ids of a merged part: its token, else its bytes' tokens; none by a byte-level rule (llama.cpp)."""
        id = self.table.index.get(part)
        if id is not None:
            return (id,)
        return () if rule.byte_level else [id for b in part if (id := self._byte_id(b)) is not None]


class WhitespaceEncoding(BytePairEncoding):
    """The "whitespace" kind of vocabulary: whitespace separates words and has no tokens."""

    has_tables = False
    normalizers = ("lowercase",)

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata)
        default_lower = metadata.get(f"{KEYS}pre") != "whitespace"
        self._lower = flag(metadata, "normalizer.lowercase", default_lower)

    def encode(self, text: str) -> list[int]:
        text = "".join(map(lowered, text)) if self._lower else text
        ids: list[int] = []
        for word in filter(None, WHITESPACE.split(text)):
            ids += super().encode(word)
        return ids


def _decode_spelling(token: bytes) -> bytes:
    """Return the bytes that a token spells in GPT-2's alphabet; b"" if it is not spelled so."""
    try:
        return token.decode().translate(_BYTES).encode("latin-1")
    except UnicodeError:
        return b""
