"""SentencePiece vocabularies: a score for each token, spaces as U+2581, bytes as <0x00> to <0xFF>."""

import re
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np

from packtrain.data.tokenizer.compiled import NONE, BoundarySplitter, EncodingTables, StringTable
from packtrain.data.tokenizer.encoding import SPACE, Encoding, merge_parts
from packtrain.data.tokenizer.token_table import TokenTable, flag, read_numbers

WORD = re.compile(r" *[^ \n]+|\n| +")
TOKEN_SEPARATOR = "\udfff"  # half of a surrogate pair, which no text contains


class SentencePieceEncoding(Encoding):
    """The "llama" kind of vocabulary: adjacent parts that form a token are joined, the best score first."""

    adds_bos = has_tables = True

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(TokenTable(metadata, requires_types=True, bos=1, eos=2, unk=0))
        self._scores = read_numbers(metadata, "scores", len(self.table.tokens))
        self.adds_space = self.strips_leading_space = flag(metadata, "add_space_prefix", True)

    def _words(self, text: str) -> list[str]:
        """Split a text into words, if no token spans several words."""
        text = text.replace(SPACE, " ")
        return WORD.findall(text) if self._has_words else [text]

    def raw(self, text: str) -> bytes:
        """Return the bytes of a text as the compiled encoder reads them: U+2581 is a space, as in the tables."""
        return text.replace(SPACE, " ").encode()

    def build_tables(self) -> EncodingTables:
        """Build the compiled encoder's tables; a token with a plain space is never found in a text."""
        space, tokens = SPACE.encode(), self.table.tokens
        joins = (pair.replace(SPACE, " ") for pair in self._joins)
        _, merge_order = np.unique(self._scores, return_inverse=True)
        return EncodingTables(
            BoundarySplitter(joins), StringTable.of([b"" if b" " in t else t.replace(space, b" ") for t in tokens]),
            np.array([NONE if id is None else id for id in self._byte_ids], np.int32), len(tokens),
            order=(merge_order.max(initial=0) - merge_order).astype(np.int32),
            unknown=NONE if self.table.unk is None else self.table.unk, letters=True,
        )  # fmt: skip

    def can_cut(self, text: str, at: int) -> bool:
        """Whether no token can span text[at - 1 : at + 1]; never at whitespace, which special tokens may swallow."""
        pair = text[at - 1 : at + 1].replace(" ", SPACE)
        return not text[at].isspace() and pair not in self._joins

    @cached_property
    def _token_costs(self) -> list[float]:
        return [-float(score) for score in self._scores]  # the best score is the smallest cost

    @cached_property
    def _joins(self) -> set[str]:
        """Return pairs of adjacent characters that occur in some token; no other pairs can merge."""
        tokens = TOKEN_SEPARATOR.join(token.decode(errors="replace") for token in self.table.tokens)
        tokens = tokens.replace(" ", SPACE)
        return {pair for pair in set(map(add, tokens, tokens[1:])) if TOKEN_SEPARATOR not in pair}

    @cached_property
    def _has_words(self) -> bool:
        """Whether no token spans several words, so that words can be encoded one by one."""
        return not any("\n" in p or (p.endswith(SPACE) and p != SPACE * 2) for p in self._joins)

    @cached_property
    def _byte_ids(self) -> list[int | None]:
        index = self.table.index
        return [index.get(b"<0x%02X>" % b, index.get(bytes([b]))) for b in range(256)]

    def _word_ids(self, word: str) -> list[int]:
        """Return the ids of a word, encoded in pieces that cannot merge with each other."""
        word, ids = word.replace(" ", SPACE), []
        cuts = [i for i, pair in enumerate(map(add, word, word[1:]), 1) if pair not in self._joins]
        for start, end in pairwise([0, *cuts, len(word)]):
            ids += self._cached_ids(word[start:end], self._merged_ids)
        return ids

    def _merged_ids(self, piece: str) -> list[int]:
        index, costs = self.table.index, self._token_costs

        def cost(a: bytes, b: bytes) -> float | None:
            id = index.get(a + b)
            return None if id is None else costs[id]

        merged_symbols = merge_parts([character.encode() for character in piece], cost)
        return [id for part in merged_symbols for id in self._part_ids(part)]

    def _part_ids(self, part: bytes) -> list[int]:
        """Return the id of a merged part; else the ids of its bytes; else the unknown token's."""
        id = self.table.index.get(part)
        if id is not None:
            return [id]
        ids = [id for b in part if (id := self._byte_ids[b]) is not None]
        if len(ids) == len(part):
            return ids
        fact = f"no token for {part.decode(errors='replace')!r}, none for its bytes {part.hex(' ')}"
        return [self.table.unknown_id(f"{fact}, and no unknown token")]
