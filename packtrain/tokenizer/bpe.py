"""Byte-level BPE as in GPT-2: splits text into words by a pattern, then merges in the order of the file."""

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from packtrain.tokenizer.compiled import Strings, Tables, Words, pair_table
from packtrain.tokenizer.merge import merge
from packtrain.tokenizer.table import (
    KEYS,
    NORMAL,
    USER_DEFINED,
    TokenizerError,
    TokenTable,
    numbers,
    texts,
)
from packtrain.tokenizer.words import CLASS_OF, GAPS, NAMES, RULES, Splitter

CACHED_TEXTS, CACHED_LENGTH = 1 << 16, 64
# GPT-2's alphabet: printable bytes map to themselves, the others to characters from 256 on, in order
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [b for b in range(256) if b not in _PRINTED]
ALPHABET = {b: chr(b) for b in _PRINTED} | {b: chr(256 + i) for i, b in enumerate(_HIDDEN)}
BYTES = {character: bytes([b]) for b, character in ALPHABET.items()}
# the same for str.translate, what is not in the alphabet becoming what Latin-1 cannot encode
_BYTES = dict.fromkeys(range(256), "\uffff") | {ord(c): chr(b) for b, c in ALPHABET.items()}


class BytePairs:
    """The "gpt2" kind of vocabulary. No space is added before the text, and a space belongs to the word after it."""

    space = False

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        name = metadata.get(f"{KEYS}pre", "default")
        if not isinstance(name, str) or name not in RULES:
            raise TokenizerError(
                f"{KEYS}pre is {name!r}; these are known: {', '.join(sorted(RULES))}"
            )
        self._merges = texts(metadata, "merges")
        self._rule, self._splitter = RULES[name], Splitter(RULES[name])
        self.bos = self._rule.bos
        tokens = texts(metadata, "tokens")
        kinds = np.full(len(tokens), NORMAL)
        if f"{KEYS}token_type" in metadata:
            kinds = numbers(metadata, "token_type", len(tokens))
        self.table = TokenTable(metadata, tokens, kinds)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a text, word by word; words are cached."""
        ids: list[int] = []
        for word in self._splitter.split(text):
            known = self._cache.get(word)
            ids += self._word(word) if known is None else known
        return ids

    def raw(self, text: str) -> bytes:
        """The text as `tables` want it."""
        return text.encode()

    def tables(self) -> Tables:
        """The vocabulary for compiled code."""
        index, rule = self.table.index, self._rule
        pairs, others = pair_table(self._merges, index)
        numbers = index | others
        for character in ALPHABET.values():
            numbers.setdefault(character.encode(), len(numbers))
        return Tables(
            Words([pattern.removesuffix(GAPS) for pattern in rule.patterns], NAMES, CLASS_OF),
            Strings.of(list(map(_unspelled, self.table.tokens)) if rule.whole else []),
            np.array([numbers[ALPHABET[b].encode()] for b in range(256)], np.int32),
            len(index),
            pairs,
            whole=rule.whole,
        )

    def can_cut(self, text: str, at: int) -> bool:
        """Whether a word always begins here, whatever comes before and after.

        That is a space after something else; a line that begins with a letter; or the comma or full stop of a script
        without spaces.
        """
        a, b = text[at - 1], text[at]
        if a + b in self._inside or self.table.swallow:
            return False
        if a == "\n":
            return b.isalpha() and at > 1 and not text[at - 2].isspace()
        return (b == " " and not a.isspace()) or (b in "\u3001\u3002\uff0c" and a.isalpha())

    def piece(self, token: bytes) -> bytes:
        """The bytes of a normal token."""
        return b"".join(BYTES.get(c, c.encode()) for c in token.decode(errors="replace"))

    @cached_property
    def _ranks(self) -> dict[bytes, int]:
        """Ranks of merges by "left right"; of duplicates the first counts."""
        merges = self._merges
        return dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))

    @cached_property
    def _inside(self) -> set[str]:
        """Adjacent characters within user-defined tokens, which are found in any text."""
        given = (text for text, id in self.table.specials if self.table.kinds[id] == USER_DEFINED)
        return {a + b for text in given for a, b in pairwise(text)}

    def _word(self, word: str) -> list[int]:
        ranks, index = self._ranks, self.table.index

        def cost(a: bytes, b: bytes) -> int | None:
            return ranks.get(b"%b %b" % (a, b))

        spelled = word.encode().decode("latin-1").translate(ALPHABET)
        id = index.get(spelled.encode()) if self._rule.whole else None
        parts = [] if id is not None else merge([c.encode() for c in spelled], cost)
        # a part that is no token is dropped, as in llama.cpp; every real vocabulary has all bytes
        ids = [index[part] for part in parts if part in index] if id is None else [id]
        if len(word) <= CACHED_LENGTH and len(self._cache) < CACHED_TEXTS:
            self._cache[word] = ids
        return ids


def _unspelled(token: bytes) -> bytes:
    """The bytes of the text that is spelled so; nothing if no text is."""
    try:
        return token.decode().translate(_BYTES).encode("latin-1")
    except UnicodeError:
        return b""
