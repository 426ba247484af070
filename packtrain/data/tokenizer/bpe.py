"""Byte-pair encoding: splits text into words by a pattern, then merges in the order of the file.

Tokens are spelled in GPT-2's alphabet of bytes, or, in vocabularies like Gemma 4's, in plain characters.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from packtrain.data.tokenizer.bpe_merges import merge
from packtrain.data.tokenizer.compiled import NONE, Strings, Tables, Words, pair_table
from packtrain.data.tokenizer.split_rules import RULES, Rule, after_any
from packtrain.data.tokenizer.token_table import (
    KEYS,
    NORMAL,
    TokenizerError,
    TokenTable,
    flag,
    numbers,
    texts,
)
from packtrain.data.tokenizer.word_splitter import WHITESPACE, Splitter, lowered

CACHED_TEXTS, CACHED_LENGTH = 1 << 16, 64
# GPT-2's alphabet: printable bytes map to themselves, the others to characters from 256 on, in order
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [b for b in range(256) if b not in _PRINTED]
ALPHABET = {b: chr(b) for b in _PRINTED} | {b: chr(256 + i) for i, b in enumerate(_HIDDEN)}
BYTES = {character: bytes([b]) for b, character in ALPHABET.items()}
# the same for str.translate, what is not in the alphabet becoming what Latin-1 cannot encode
_BYTES = dict.fromkeys(range(256), "\uffff") | {ord(c): chr(b) for b, c in ALPHABET.items()}


class BytePairs:
    """The "gpt2" and "gemma4" kinds of vocabulary. No space is added before the text."""

    eos = separated = space = leads = False
    compiles = True

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        name = metadata.get(f"{KEYS}pre", "default")
        name = "gemma4" if metadata.get(f"{KEYS}model") == "gemma4" else name
        if not isinstance(name, str) or name not in RULES:
            raise TokenizerError(
                f"{KEYS}pre is {name!r}; these are known: {', '.join(sorted(RULES))}"
            )
        missing = name == "kimi-k2" and f"{KEYS}merges" not in metadata  # as in llama.cpp
        self._merges = [] if missing else texts(metadata, "merges")
        self._rule, self._splitter = RULES[name], Splitter(RULES[name])
        self.bos, self.clean = self._rule.bos, self._rule.clean
        self.always = self._rule.whole == "lines"  # Gemma 4's
        tokens = texts(metadata, "tokens")
        kinds = np.full(len(tokens), NORMAL)
        if f"{KEYS}token_type" in metadata:
            kinds = numbers(metadata, "token_type", len(tokens))
        self.table = TokenTable(metadata, tokens, kinds)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a text, word by word; words are cached."""
        ids: list[int] = []
        for word in self._splitter.split(self._plain(text)):
            cached_ids = self._cache.get(word)
            ids += self._word(word) if cached_ids is None else cached_ids
        return ids

    def raw(self, text: str) -> bytes:
        """The text as `tables` want it."""
        return self._plain(text).encode()

    def tables(self) -> Tables:
        """The vocabulary for compiled code."""
        index, rule = self.table.index, self._rule
        pairs, extra_numbers = pair_table(self._merges, index)
        words = Words(self._splitter.patterns, self._splitter.classes)
        if not rule.spelled:
            singles = [NONE if id is None else id for id in map(self._byte, range(256))]
            strings = Strings.of([*self.table.tokens, *extra_numbers])
            return Tables(
                words,
                strings,
                np.array(singles, np.int32),
                len(index),
                pairs,
                whole=rule.whole,
                letters=True,
            )
        numbers = index | extra_numbers
        for character in ALPHABET.values():
            numbers.setdefault(character.encode(), len(numbers))
        return Tables(
            words,
            Strings.of(list(map(_unspelled, self.table.tokens)) if rule.whole else []),
            np.array([numbers[ALPHABET[b].encode()] for b in range(256)], np.int32),
            len(index),
            pairs,
            whole=rule.whole,
        )

    def can_cut(self, text: str, at: int) -> bool:
        """Whether a word always begins here, whatever comes before and after."""
        return not self.table.spans(text, at) and (self._rule.border or after_any)(text, at)

    def piece(self, token: bytes) -> bytes:
        """The bytes of a normal token."""
        if self._rule.spaces != " ":
            return token.replace(self._rule.spaces.encode(), b" ")
        return b"".join(BYTES.get(c, c.encode()) for c in token.decode(errors="replace"))

    @cached_property
    def _ranks(self) -> dict[bytes, int]:
        """Ranks of merges by "left right"; of duplicates the first counts."""
        merges = self._merges
        return dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))

    def _plain(self, text: str) -> str:
        spaces = self._rule.spaces
        return text if spaces == " " else text.replace(" ", spaces)

    def _byte(self, byte: int) -> int | None:
        return self.table.index.get(b"<0x%02X>" % byte)

    def _word(self, word: str) -> list[int]:
        ranks, index, rule = self._ranks, self.table.index, self._rule

        def cost(a: bytes, b: bytes) -> int | None:
            return ranks.get(b"%b %b" % (a, b))

        spelled = _spelled(word) if rule.spelled else word
        looked_up = rule.whole and (rule.whole != "lines" or word[0] == "\n")
        id = index.get(spelled.encode()) if looked_up else None
        parts = [] if id is not None else merge([c.encode() for c in spelled], cost)
        ids = (
            [token_id for part in parts for token_id in self._ids(part, rule)]
            if id is None
            else [id]
        )
        if len(word) <= CACHED_LENGTH and len(self._cache) < CACHED_TEXTS:
            self._cache[word] = ids
        return ids

    def _ids(self, part: bytes, rule: Rule) -> Sequence[int]:
        """The token of a merged part. Of one that is no token, plain vocabularies have bytes; else it is dropped, as in
        llama.cpp; every real vocabulary has all bytes."""
        id = self.table.index.get(part)
        if id is not None:
            return (id,)
        return () if rule.spelled else [id for b in part if (id := self._byte(b)) is not None]


class Segments(BytePairs):
    """The "whitespace" kind of vocabulary: whitespace only parts words, and has no tokens."""

    compiles = False

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata)
        preset = metadata.get(f"{KEYS}pre") != "whitespace"
        self._lower = flag(metadata, "normalizer.lowercase", preset)

    def encode(self, text: str) -> list[int]:
        text = "".join(map(lowered, text)) if self._lower else text
        ids: list[int] = []
        for part in filter(None, WHITESPACE.split(text)):
            ids += super().encode(part)
        return ids


def _spelled(word: str) -> str:
    return word.encode().decode("latin-1").translate(ALPHABET)


def _unspelled(token: bytes) -> bytes:
    """The bytes of the text that is spelled so; nothing if no text is."""
    try:
        return token.decode().translate(_BYTES).encode("latin-1")
    except UnicodeError:
        return b""
