"""Unigram vocabularies (T5): a text is normalized, then divided into the tokens whose scores have the largest sum."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from packtrain.data.tokenizer import token_table
from packtrain.data.tokenizer.compiled import Tables
from packtrain.data.tokenizer.token_table import (
    KEYS,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    TokenizerError,
    flag,
)

SPACE = "\u2581".encode()
MATCHED = (NORMAL, USER_DEFINED, UNUSED)  # kinds of tokens that texts are divided into
PENALTY = np.float32(10)  # how much less an unknown character scores than the worst token
LEAF, WIDE, VALUE = 1 << 8, 1 << 9, (1 << 31) - 1  # bits of an entry of the replacements


class Unigrams:
    """The "t5" kind of vocabulary."""

    bos = always = separated = space = clean = compiles = False
    eos = True

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        tokens = token_table.texts(metadata, "tokens")
        kinds = token_table.numbers(metadata, "token_type", len(tokens)).astype(int)
        scores = token_table.numbers(metadata, "scores", len(tokens)).astype(np.float32)
        self.table = token_table.TokenTable(metadata, tokens, kinds, eos=1, unk=2)
        if self.table.unk is None:
            raise TokenizerError(
                f"the vocabulary has no unknown token; {KEYS}unknown_token_id must name one"
            )
        self._unknown = self.table.unk
        self.leads = flag(metadata, "add_space_prefix", False)
        self._joins_spaces = flag(metadata, "remove_extra_whitespaces", False)
        lowest = scores[kinds == NORMAL].min(initial=np.finfo(np.float32).max)
        self._unknown_score = float(lowest - PENALTY)
        self._scores = np.where(kinds == USER_DEFINED, 0, scores).tolist()
        self._found: list[int] = np.isin(kinds, MATCHED).nonzero()[0].tolist()
        user_defined = (kinds == USER_DEFINED).nonzero()[0].tolist()
        self._mine = _beginnings(self.table.tokens[id] for id in user_defined)
        self._replacements = Replacements(metadata)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {self.table.tokens[id]: id for id in self._found}

    @cached_property
    def _begun(self) -> set[bytes]:
        return _beginnings(self._ids)

    def encode(self, text: str) -> list[int]:
        """The best tokens (Viterbi); unknown characters side by side are one unknown token."""
        raw = self._normalized(text.encode())
        size = len(raw)
        best = [-np.inf] * (size + 1)
        predecessors = [0] * (size + 1)
        token = [self._unknown] * (size + 1)
        best[0], start = 0.0, 0
        while start < size:
            width, sum, has_char_token = _width(raw[start]), best[start], False
            for end in range(start + 1, size + 1):
                part = raw[start:end]
                if part not in self._begun:
                    break
                id = self._ids.get(part)
                if id is not None:
                    has_char_token |= end - start == width
                    if sum + self._scores[id] > best[end]:
                        best[end], predecessors[end], token[end] = sum + self._scores[id], start, id
            end = min(start + width, size)
            if not has_char_token and sum + self._unknown_score > best[end]:
                best[end], predecessors[end], token[end] = (
                    sum + self._unknown_score,
                    start,
                    self._unknown,
                )
            start = end
        ids: list[int] = []
        while size > 0:
            if not (ids and ids[-1] == token[size] == self._unknown):
                ids.append(token[size])
            size = predecessors[size]
        return ids[::-1]

    def raw(self, text: str) -> bytes:
        return text.encode()

    def tables(self) -> Tables:
        raise NotImplementedError("Unigram has no compiled code")

    def can_cut(self, text: str, at: int) -> bool:
        return False  # what is best depends on all of the text

    def piece(self, token: bytes) -> bytes:
        """The bytes of a normal token."""
        return token.replace(SPACE, b" ")

    def _normalized(self, raw: bytes) -> bytes:
        """With replacements, U+2581 for spaces, and one before the text or before each word if so asked."""
        out, has_output, inside = bytearray(), False, False
        for part in self._parts(raw):
            for at in range(len(part)):
                byte = part[at : at + 1]
                if byte != b" ":
                    if not inside and (self._joins_spaces or (self.leads and not has_output)):
                        out += SPACE
                        has_output = True
                    inside = True
                    out += byte
                else:
                    inside = False
                    out += b"" if self._joins_spaces else SPACE
        return bytes(out)

    def _parts(self, raw: bytes) -> Iterator[bytes]:
        """Beginnings of user-defined tokens and other characters as they are, what has a replacement as that."""
        at = 0
        while at < len(raw):
            count = _longest(raw, at, self._mine)
            if count:
                yield raw[at : at + count]
            elif replacement := self._replacements.longest(raw, at):
                count, replaced_bytes = replacement
                yield replaced_bytes
            else:
                count = _width(raw[at])
                yield raw[at : at + count]
            at += count


class Replacements:
    """What parts of a text are replaced by before they are encoded: SentencePiece's precompiled map of characters.

    It is a trie in one array: the child of node s by byte c is at BASE[s] ^ c, and holds c; see Kanda, Space- and
    Time-Efficient String Dictionaries (2018). After it come the replacements, each with a zero at its end.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        charsmap = np.asarray(metadata.get(f"{KEYS}precompiled_charsmap", ()))
        if charsmap.ndim != 1 or (charsmap.size and charsmap.dtype.kind not in "iu"):
            raise TokenizerError(f"{KEYS}precompiled_charsmap is no array of bytes")
        raw = charsmap.astype(np.uint8).tobytes()
        count = int.from_bytes(raw[:4], "little")
        if raw and not 4 + count < len(raw):
            raise TokenizerError(
                f"{KEYS}precompiled_charsmap has {len(raw)} bytes, and its array of {count} does not fit in"
            )
        self._nodes: list[int] = np.frombuffer(raw[4 : 4 + count // 4 * 4], "<u4").tolist()
        self._texts = raw[4 + count :]

    def longest(self, raw: bytes, at: int) -> tuple[int, bytes] | None:
        """How many bytes are replaced here, and by what."""
        longest_match = None
        node = self._base(0) if self._nodes else 0
        for n in range(at, len(raw) if self._nodes else at):
            node ^= raw[n]
            if raw[n] == 0 or self._node(node) & (1 << 31 | 0xFF) != raw[n]:
                break
            leaf = self._node(node) & LEAF
            node ^= self._base(node)
            if leaf:
                longest_match = n + 1 - at, self._node(node) & VALUE
        if longest_match is None:
            return None
        end = self._texts.find(b"\0", longest_match[1])
        if end < 0:
            raise TokenizerError(f"{KEYS}precompiled_charsmap has no end of a replacement")
        return longest_match[0], self._texts[longest_match[1] : end]

    def _node(self, at: int) -> int:
        if at >= len(self._nodes):
            raise TokenizerError(f"{KEYS}precompiled_charsmap has no entry {at}")
        return self._nodes[at]

    def _base(self, at: int) -> int:
        node = self._node(at)
        return node >> 10 << (8 if node & WIDE else 0)


def _width(byte: int) -> int:
    """Bytes of the character that begins with this one."""
    return 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4


def _beginnings(tokens: Iterable[bytes]) -> set[bytes]:
    return {token[:n] for token in tokens for n in range(1, len(token) + 1)}


def _longest(raw: bytes, at: int, prefixes: set[bytes]) -> int:
    """How many bytes from here on are the beginning of something known, as in llama.cpp, whether or not it ends."""
    count = 0
    while at + count < len(raw) and raw[at : at + count + 1] in prefixes:
        count += 1
    return count
