"""Unigram vocabularies (T5): a text is normalized, then divided into the tokens whose scores have the largest sum."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from packtrain.data.tokenizer import token_table
from packtrain.data.tokenizer.encoding import SPACE, Encoding
from packtrain.data.tokenizer.token_table import KEYS, USER_DEFINED, TokenizerError, read_numbers

# types of tokens into which texts are divided
MATCHED_TYPES = (token_table.NORMAL, USER_DEFINED, token_table.UNUSED)
UNKNOWN_PENALTY = np.float32(10)  # score of the worst token less that of an unknown character
LEAF_BIT, WIDE_BIT, VALUE = 1 << 8, 1 << 9, (1 << 31) - 1  # bits of an entry of the character map


class UnigramEncoding(Encoding):
    """The "t5" kind of vocabulary."""

    adds_eos = True

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(token_table.TokenTable(metadata, requires_types=True, eos=1, unk=2))
        num_tokens = len(self.table.tokens)
        token_types = read_numbers(metadata, "token_type", num_tokens).astype(int)  # as in the file
        scores = read_numbers(metadata, "scores", num_tokens).astype(np.float32)
        self._unknown_id = self.table.unknown_id("the vocabulary has no unknown token")
        self.strips_leading_space = token_table.flag(metadata, "add_space_prefix", False)
        self._joins_spaces = token_table.flag(metadata, "remove_extra_whitespaces", False)
        lowest = scores[token_types == token_table.NORMAL].min(initial=np.finfo(np.float32).max)
        self._unknown_score = float(lowest - UNKNOWN_PENALTY)
        self._scores = np.where(token_types == USER_DEFINED, 0, scores).tolist()
        self._matched_ids: list[int] = np.isin(token_types, MATCHED_TYPES).nonzero()[0].tolist()
        user_defined = (token_types == USER_DEFINED).nonzero()[0].tolist()
        self._user_defined_prefixes = _prefixes_of(self.table.tokens[id] for id in user_defined)
        self._character_map = CharacterMap(metadata)

    @cached_property
    def _ids_by_text(self) -> dict[bytes, int]:
        return {self.table.tokens[id]: id for id in self._matched_ids}

    @cached_property
    def _token_prefixes(self) -> set[bytes]:
        return _prefixes_of(self._ids_by_text)

    def _word_ids(self, text: str) -> list[int]:
        """Return the ids of the best tokens (Viterbi); unknown characters side by side are one unknown token."""
        raw = self._normalize_text(text.encode())
        length = len(raw)
        best = [-np.inf] * (length + 1)
        predecessors = [0] * (length + 1)
        token = [self._unknown_id] * (length + 1)
        best[0], start = 0.0, 0
        while start < length:
            width, sum, has_char_token = _character_nbytes(raw[start]), best[start], False
            for end in range(start + 1, length + 1):
                piece = raw[start:end]
                if piece not in self._token_prefixes:
                    break
                id = self._ids_by_text.get(piece)
                if id is not None:
                    has_char_token |= end - start == width
                    if sum + self._scores[id] > best[end]:
                        best[end], predecessors[end], token[end] = sum + self._scores[id], start, id
            end = min(start + width, length)
            if not has_char_token and sum + self._unknown_score > best[end]:
                best[end], predecessors[end] = sum + self._unknown_score, start
                token[end] = self._unknown_id
            start = end
        ids: list[int] = []
        while length > 0:
            if not (ids and ids[-1] == token[length] == self._unknown_id):
                ids.append(token[length])
            length = predecessors[length]
        return ids[::-1]

    def _normalize_text(self, raw: bytes) -> bytes:
        """Replace characters by the map, spaces by U+2581, and add U+2581 before the text, or each word, if set."""
        replaced = b"".join(self._replace_parts(raw))
        if self._joins_spaces:
            return b"".join(SPACE.encode() + word for word in replaced.split(b" ") if word)
        text = replaced.lstrip(b" ")
        num_spaces = len(replaced) - len(text) + (self.strips_leading_space and text != b"")
        return (b" " * num_spaces + text).replace(b" ", SPACE.encode())

    def _replace_parts(self, raw: bytes) -> Iterator[bytes]:
        """Yield parts of a text: user-defined tokens and other characters as they are, or replacements of the map."""
        offset = 0
        while offset < len(raw):
            nbytes = _prefix_length(raw, offset, self._user_defined_prefixes)
            if nbytes:
                yield raw[offset : offset + nbytes]
            elif replacement := self._character_map.find_longest(raw, offset):
                nbytes, replaced_bytes = replacement
                yield replaced_bytes
            else:
                nbytes = _character_nbytes(raw[offset])
                yield raw[offset : offset + nbytes]
            offset += nbytes


class CharacterMap:
    """SentencePiece's precompiled map: replacements of parts of a text before encoding.

    The map is a trie in one array: the child of node s by byte c is at BASE[s] ^ c, and holds c; see Kanda, Space- and
    Time-Efficient String Dictionaries (2018). After the trie come the replacements, each with a zero at its end.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        charsmap = np.asarray(metadata.get(f"{KEYS}precompiled_charsmap", ()))
        if charsmap.ndim != 1 or (charsmap.size and charsmap.dtype.kind not in "iu"):
            raise TokenizerError(f"{KEYS}precompiled_charsmap is no array of bytes")
        raw = charsmap.astype(np.uint8).tobytes()
        trie_nbytes = int.from_bytes(raw[:4], "little")
        if raw and not 4 + trie_nbytes < len(raw):
            fact = f"{KEYS}precompiled_charsmap has {len(raw)} bytes"
            raise TokenizerError(f"{fact}, and its array of {trie_nbytes} does not fit in")
        self._nodes: list[int] = np.frombuffer(raw[4 : 4 + trie_nbytes // 4 * 4], "<u4").tolist()
        self._replacement_texts = raw[4 + trie_nbytes :]

    def find_longest(self, raw: bytes, offset: int) -> tuple[int, bytes] | None:
        """Return (how many bytes at `offset` are replaced, their replacement); None if nothing is."""
        longest_match = None
        node = self._child_base(0) if self._nodes else 0
        for n in range(offset, len(raw) if self._nodes else offset):
            node ^= raw[n]
            if raw[n] == 0 or self._node_at(node) & (1 << 31 | 0xFF) != raw[n]:
                break
            has_value = self._node_at(node) & LEAF_BIT
            node ^= self._child_base(node)
            if has_value:
                longest_match = n + 1 - offset, self._node_at(node) & VALUE
        if longest_match is None:
            return None
        end = self._replacement_texts.find(b"\0", longest_match[1])
        if end < 0:
            raise TokenizerError(f"{KEYS}precompiled_charsmap has no end of a replacement")
        return longest_match[0], self._replacement_texts[longest_match[1] : end]

    def _node_at(self, index: int) -> int:
        if index >= len(self._nodes):
            raise TokenizerError(f"{KEYS}precompiled_charsmap has no entry {index}")
        return self._nodes[index]

    def _child_base(self, index: int) -> int:
        node = self._node_at(index)
        return node >> 10 << (8 if node & WIDE_BIT else 0)


def _character_nbytes(byte: int) -> int:
    """Return the number of bytes, 1 to 4, of the UTF-8 character that begins with this byte."""
    return 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4


def _prefixes_of(tokens: Iterable[bytes]) -> set[bytes]:
    return {token[:n] for token in tokens for n in range(1, len(token) + 1)}


def _prefix_length(raw: bytes, offset: int, prefixes: set[bytes]) -> int:
    """Return how many bytes from `offset` on begin, or are, a token; `prefixes`: all beginnings of tokens."""
    length = 0
    while offset + length < len(raw) and raw[offset : offset + length + 1] in prefixes:
        length += 1
    return length
