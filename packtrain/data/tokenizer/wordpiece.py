"""WordPiece vocabularies (BERT): words are normalized, then the longest tokens are taken from the left.

A token that begins a word begins with U+2581, as llama.cpp's converter writes it.
"""

import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy as np

from packtrain.data.tokenizer import token_table
from packtrain.data.tokenizer.compiled import EncodingTables
from packtrain.data.tokenizer.token_table import KEYS, NORMAL, TokenTable, flag, read_numbers
from packtrain.data.tokenizer.word_splitter import WHITESPACE, Ranges, category, in_ranges, lowered

WORD_START = "\u2581"
CACHED_TEXTS, CACHED_LENGTH = 1 << 16, 64
REPLACEMENT = 0xFFFD
# each character is a word; 2B920 for 2B820 as in llama.cpp and transformers
IDEOGRAPHS: Ranges = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class WordPieceEncoding:
    """The "bert" kind of vocabulary: a text begins with the BOS token ([CLS]) and ends with the separator ([SEP])."""

    adds_bos = adds_eos = always_adds_bos = cleans_spaces = separated = True
    adds_space = strips_leading_space = has_tables = False

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        tokens = token_table.read_strings(metadata, "tokens")
        token_types = np.full(len(tokens), NORMAL)
        if f"{KEYS}token_type" in metadata:
            token_types = read_numbers(metadata, "token_type", len(tokens))
        self.table = TokenTable(metadata, tokens, token_types, bos=101, unk=100, sep=102)
        self._lowercase = flag(metadata, "normalizer.lowercase", True)
        self._strip_accents = flag(metadata, "normalizer.strip_accents", self._lowercase)
        self._max_token_nbytes = max(map(len, self.table.tokens), default=0)
        self._word_cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in "".join(map(self._normalize, text)).split(" "):
            cached_ids = self._word_cache.get(word)
            ids += self._word(word) if cached_ids is None else cached_ids
        return ids

    def raw(self, text: str) -> bytes:
        return text.encode()

    def build_tables(self) -> EncodingTables:
        raise NotImplementedError("WordPiece has no compiled code")

    def can_cut(self, text: str, at: int) -> bool:
        """Whether a place is whitespace, which separates words and has no tokens."""
        return not self.table.may_span(text, at) and bool(WHITESPACE.match(text[at]))

    def piece(self, token: bytes) -> bytes:
        """Return the bytes of a normal token."""
        return token.replace(WORD_START.encode(), b" ")

    def _normalize(self, character: str) -> str:
        """Return a character in normal form; with spaces around it if it is a word."""
        if WHITESPACE.match(character):
            return " "
        if self._strip_accents:
            character = unicodedata.normalize("NFD", character)[0]
        code = ord(character)
        kind = category(code)
        if code in (0, REPLACEMENT) or kind == "C" or (self._strip_accents and kind == "M"):
            return ""
        normalized = lowered(character) if self._lowercase else character
        is_separate = kind == "P" or (kind == "S" and code < 127) or in_ranges(code, IDEOGRAPHS)
        return f" {normalized} " if is_separate else normalized

    def _word(self, word: str) -> list[int]:
        """Return the ids of the longest tokens from the left; the unknown token's if a rest remains."""
        if not word:
            return []
        raw, index = (WORD_START + word).encode(), self.table.index
        ids: list[int] = []
        start = 0
        while start < len(raw):
            end_offsets = range(min(len(raw), start + self._max_token_nbytes), start, -1)
            end = next((end for end in end_offsets if raw[start:end] in index), None)
            if end is None:
                ids = [self._unknown_id()]
                break
            ids.append(index[raw[start:end]])
            start = end
        if len(word) <= CACHED_LENGTH and len(self._word_cache) < CACHED_TEXTS:
            self._word_cache[word] = ids
        return ids

    def _unknown_id(self) -> int:
        if self.table.unk is None:
            raise token_table.TokenizerError(
                f"a word is not in the vocabulary, which has no unknown token; {KEYS}unknown_token_id must name one"
            )
        return self.table.unk
