"""WordPiece vocabularies (BERT): words are normalized, then the longest tokens are taken from the left.

A token that begins a word begins with U+2581, as llama.cpp's converter writes it."""

import unicodedata
from collections.abc import Mapping
from typing import Any

from packtrain.data.tokenizer.encoding import SPACE, Encoding
from packtrain.data.tokenizer.token_table import TokenTable, flag
from packtrain.data.tokenizer.word_splitter import WHITESPACE, Ranges, category, in_ranges, lowered

REPLACEMENT = 0xFFFD
# each character is a word; 2B920 for 2B820 as in llama.cpp and transformers
IDEOGRAPHS: Ranges = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class WordPieceEncoding(Encoding):
    """The "bert" kind of vocabulary: a text begins with the BOS token ([CLS]) and ends with the separator ([SEP])."""

    adds_bos = adds_eos = always_adds_bos = cleans_spaces = separated = True
    normalizers = "lowercase", "strip_accents"

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(TokenTable(metadata, bos=101, unk=100, sep=102))
        self._lowercase = flag(metadata, "normalizer.lowercase", True)
        self._strip_accents = flag(metadata, "normalizer.strip_accents", self._lowercase)
        self._max_token_nbytes = max(map(len, self.table.tokens), default=0)

    def _words(self, text: str) -> list[str]:
        return "".join(map(self._normalize, text)).split(" ")

    def can_cut(self, text: str, at: int) -> bool:
        """Whether text[at] is whitespace, which separates words and has no tokens, so that a text can be cut there."""
        return not self.table.may_span(text, at) and bool(WHITESPACE.match(text[at]))

    def _normalize(self, character: str) -> str:
        """Return a character in normal form, between spaces if it is a word; "" if it is dropped."""
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

    def _word_ids(self, word: str) -> list[int]:
        """Return the ids of the longest tokens from the left; the unknown token's if a rest remains."""
        if not word:
            return []
        raw, index = (SPACE + word).encode(), self.table.index
        ids: list[int] = []
        start = 0
        while start < len(raw):
            end_offsets = range(min(len(raw), start + self._max_token_nbytes), start, -1)
            end = next((end for end in end_offsets if raw[start:end] in index), None)
            if end is None:
                fact = "a word is not in the vocabulary, which has no unknown token"
                return [self.table.unknown_id(fact)]
            ids.append(index[raw[start:end]])
            start = end
        return ids
