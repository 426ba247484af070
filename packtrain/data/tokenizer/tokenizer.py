"""One interface to both kinds of vocabulary: special tokens, BOS and EOS, streams of text and of ids."""

import codecs
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Protocol

import numpy as np

from packtrain.data.tokenizer.bpe import BytePairs, Segments
from packtrain.data.tokenizer.compiled import FEW, Lane, Names, Tables
from packtrain.data.tokenizer.spm import SentencePieces
from packtrain.data.tokenizer.token_table import (
    BYTE,
    BYTE_NAME,
    CONTROL,
    KEYS,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    TokenizerError,
    TokenTable,
    flag,
    wanted,
)
from packtrain.data.tokenizer.unigram import Unigrams
from packtrain.data.tokenizer.wordpiece import WordPieces

BATCH = 1 << 17  # characters that are encoded at a time, where they can be cut
WHITESPACE = " \t\n\v\f\r"
EMPTY = np.empty(0, np.int32)
CLEANED = [
    (re.compile(" (?=[?!.,])"), ""),
    (re.compile(" ' "), "'"),
    (re.compile(" (?='(?:s|m|re|ve))"), ""),
]
Parts = list[str | int]  # text, and ids of special tokens


class Encoding(Protocol):
    """How a kind of vocabulary encodes text without special tokens.

    bos, eos    whether to add a BOS and an EOS token by default
    space       whether to add a space before the text, and after special tokens
    leads       whether the space before a text that comes back is not part of it
    always      whether a BOS token, and an EOS token if by default, is added even where the file says otherwise
    separated   whether the separator ends a text, not EOS
    clean       whether llama_detokenize removes spaces before punctuation
    compiles    whether there are `tables`
    """

    table: TokenTable
    bos: bool
    eos: bool
    space: bool
    leads: bool
    always: bool
    separated: bool
    clean: bool
    compiles: bool

    def encode(self, text: str) -> list[int]: ...
    def raw(self, text: str) -> bytes: ...
    def tables(self) -> Tables: ...
    def can_cut(self, text: str, at: int) -> bool: ...
    def piece(self, token: bytes) -> bytes: ...


KINDS: dict[str, Callable[[Mapping[str, Any]], Encoding]] = {
    "llama": SentencePieces,
    "gpt2": BytePairs,
    "gemma4": BytePairs,
    "whitespace": Segments,
    "bert": WordPieces,
    "t5": Unigrams,
}


class Tokenizer:
    """The vocabulary of a file and its rules.

    tokens            texts by id, as in the file; empty ones are named [EMPTY_<id>]
    kinds             token types by id: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE
    bos eos unk eot   ids, or None; eot is the end of a turn
    ends              ids that end generation
    swallow           ids of tokens that swallow the whitespace after them; swallow_before: before them
    """

    def __init__(self, metadata: Mapping[str, Any], few: int = FEW) -> None:
        """few: how many characters are encoded before compiled code is loaded."""
        model = wanted(metadata, "model")
        if not isinstance(model, str) or model not in KINDS:
            raise TokenizerError(f"{KEYS}model is {model!r}; these are known: {', '.join(KINDS)}")
        self._encoding: Encoding = KINDS[model](metadata)
        self._table = table = self._encoding.table
        self.tokens, self.kinds, self.vocab_size = table.tokens, table.kinds, len(table.tokens)
        self.bos, self.eos, self.unk, self.eot = table.bos, table.eos, table.unk, table.eot
        self.ends = table.ends
        self.swallow, self.swallow_before = table.swallow, table.swallow_before
        self.add_bos = flag(metadata, "add_bos_token", self._encoding.bos) or self._encoding.always
        encoding = self._encoding
        self.add_eos = flag(metadata, "add_eos_token", encoding.eos) or (
            encoding.eos and encoding.always
        )
        self.last = table.sep if encoding.separated else table.eos
        self.add_space_prefix, self.leads = encoding.space, encoding.leads
        self._added(None, None)
        self._few = few
        self._lane: Lane | None = None
        self._tables: Tables | None = None
        self._names: dict[bool, Names] = {}
        self._always = [(t, id) for t, id in table.specials if table.kinds[id] == USER_DEFINED]

    # ---- text to ids

    def encode(
        self, text: str, bos: bool | None = None, eos: bool | None = None, special: bool = True
    ) -> list[int]:
        """The ids of a text; bos and eos add their ids, None: as the file says.

        special  text that spells a control or unknown token, such as `<s>`, becomes that token: pass False for
                 untrusted text. User-defined tokens are always matched.
        """
        first, last = self._added(bos, eos)
        parts, _ = self._parts(_sound(text), special, self.add_space_prefix)
        return first + self._joined(parts) + last

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """The ids of a long text that comes in pieces, as `encode(text, bos=False, eos=False, special=False)`."""
        marked = chain(((piece, False) for piece in pieces), [("", True)])
        for parts, _ in self.stretches(marked):
            yield self._joined(parts)

    def stretches(self, pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[Parts, bool]]:
        """Of texts that come as (piece, whether the text ends with it), parts whose ids depend on nothing else."""
        rest, prefix = "", self.add_space_prefix
        for piece, is_last in pieces:
            before, rest = len(rest), rest + _sound(piece)
            border = len(rest) if is_last else self._border(rest, before)
            if border or is_last:
                parts, prefix = self._parts(rest[:border], False, prefix)
                rest = rest[border:]
                yield parts, is_last
            prefix = self.add_space_prefix if is_last else prefix

    @property
    def compiles(self) -> bool:
        """Whether there have been so many characters that compiled code is worth loading."""
        return self._few <= 0 and self._encoding.compiles

    def lane(self) -> Lane:
        """Compiled code for one thread."""
        if self._tables is None:
            self._tables = self._encoding.tables()
        return Lane(self._tables)

    def arrays(self, batch: Sequence[Parts], lane: Lane | None) -> list[np.ndarray]:
        """The ids (i32) of each list of parts; may be called on several threads, with a lane each."""
        texts = [part for parts in batch for part in parts if isinstance(part, str)]
        encoded_texts = iter(self._encoded(texts, lane))
        id_parts = (
            [[p] if isinstance(p, int) else next(encoded_texts) for p in parts] for parts in batch
        )
        return [np.concatenate([EMPTY, *parts], dtype=np.int32) for parts in id_parts]

    def _border(self, text: str, since: int) -> int:
        """The last place from `since` on where the text can be cut without changing ids, or 0."""
        places = range(len(text) - 1, max(since, 1) - 1, -1)
        return next((at for at in places if self._encoding.can_cut(text, at)), 0)

    def _parts(self, text: str, special: bool, prefix: bool) -> tuple[Parts, bool]:
        """A text and its special tokens, with a leading space if `prefix`, and whether text after it would get one."""
        self._few -= len(text)
        parts: Parts = []
        for part in self._split(text, self._specials_in(text, special)):
            parts.append(part if isinstance(part, int) or not prefix else " " + part)
            prefix = self.add_space_prefix and isinstance(part, int)
        return parts, prefix

    def _joined(self, parts: Parts) -> list[int]:
        """The ids of parts."""
        if self.compiles and self._lane is None:
            self._lane = self.lane()
        ids: list[int] = []
        for batch in self._batches(parts):
            encoded_texts = iter(
                self._encoded([p for p in batch if isinstance(p, str)], self._lane)
            )
            for part in batch:
                ids += [part] if isinstance(part, int) else _listed(next(encoded_texts))
        return ids

    def _batches(self, parts: Parts) -> Iterator[Parts]:
        """The parts in several lists, so that encoding a long text takes no more memory than a short one."""
        if sum(len(part) for part in parts if isinstance(part, str)) <= BATCH:
            yield parts
            return
        for part in parts:
            while isinstance(part, str) and len(part) > BATCH:
                cut = self._border(part[:BATCH], 0) or self._border(part, BATCH)
                if not cut:
                    break
                yield [part[:cut]]
                part = part[cut:]
            yield [part]

    def _encoded(self, texts: list[str], lane: Lane | None) -> Iterator[list[int] | np.ndarray]:
        """Ids of each text, by compiled code if there is a lane."""
        ids_and_ends = lane.encode([self._encoding.raw(text) for text in texts]) if lane else None
        if ids_and_ends is None:
            return map(self._encoding.encode, texts)  # or it says why there are none
        return (
            ids_and_ends[0][start:end] for start, end in pairwise([0, *ids_and_ends[1].tolist()])
        )

    def _added(self, bos: bool | None, eos: bool | None) -> tuple[list[int], list[int]]:
        """The BOS and EOS ids to add around the ids of a text; None: as the file says."""
        bos, eos = self.add_bos if bos is None else bos, self.add_eos if eos is None else eos
        for is_requested, id, name in (
            (bos, self.bos, "bos"),
            (eos, self.last, "seperator" if self._encoding.separated else "eos"),
        ):
            if is_requested and id is None:
                raise TokenizerError(
                    f"{name} is to be added, but the vocabulary of {self.vocab_size} tokens has no {name} token;"
                    f" {KEYS}{name}_token_id must name one"
                )
        return (
            [self.bos] if bos and self.bos is not None else [],
            [self.last] if eos and self.last is not None else [],
        )

    def _specials_in(self, text: str, special: bool) -> list[tuple[str, int]]:
        """The special tokens that may occur in a text, the longest first."""
        candidates = self._table.specials if special else self._always
        if self._few > 0 or not candidates:
            return candidates
        if special not in self._names:
            self._names[special] = Names([token for token, _ in candidates])
        return [candidates[i] for i in self._names[special].within(text)]

    def _split(self, text: str, specials: list[tuple[str, int]]) -> list[str | int]:
        """Split into text and special tokens; longer tokens are matched first."""
        parts: list[str | int] = [text] if text else []
        for token, id in specials:
            if token in text:
                previous, parts = parts, []
                for part in previous:
                    parts += [part] if isinstance(part, int) else self._cut(part, token, id)
        return parts

    def _cut(self, part: str, token: str, id: int) -> list[str | int]:
        """Split a piece of text at one special token."""
        at = 0
        parts: list[str | int] = []
        while (match_start := part.find(token, at)) >= 0:
            text = part[at:match_start]
            text = text.rstrip(WHITESPACE) if id in self._table.swallow_before else text
            parts += [text, id] if text else [id]
            at = match_start + len(token)
            while id in self._table.swallow and at < len(part) and part[at] in WHITESPACE:
                at += 1
        return [*parts, part[at:]] if at < len(part) else parts

    # ---- ids to text

    def piece(self, id: int) -> bytes:
        """The bytes of a token, perhaps part of a character; for control tokens their name."""
        if not 0 <= operator.index(id) < self.vocab_size:
            raise TokenizerError(f"token id {id} is not in 0 to {self.vocab_size - 1}")
        token, kind = self.tokens[id], self.kinds[id]
        if kind == NORMAL:
            return self._encoding.piece(token)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN):
            return token
        named = BYTE_NAME.fullmatch(token) if kind == BYTE else None
        return bytes([int(named[1], 16)]) if named else b""

    def decode(self, ids: Iterable[int], special: bool = False, clean: bool = False) -> str:
        """The text of ids; invalid UTF-8 becomes U+FFFD. See Stream for the rules.

        clean  without spaces before punctuation where llama.cpp's llama_detokenize removes them for this vocabulary
        """
        stream = Stream(self, special)
        text = "".join([stream.feed(id) for id in ids]) + stream.flush()
        return _cleaned(text) if clean and self._encoding.clean else text


def _cleaned(text: str) -> str:
    """Without spaces before punctuation, around single apostrophes, and before some contractions."""
    for pattern, replacement in CLEANED:
        text = pattern.sub(replacement, text)
    return text


def _listed(ids: list[int] | np.ndarray) -> list[int]:
    return ids if isinstance(ids, list) else ids.tolist()


def _sound(text: str) -> str:
    """The text; raises TokenizerError if UTF-8 cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise TokenizerError(
            f"character {e.start} of the text is {text[e.start]!r}, half of a surrogate pair"
        ) from None
    return text


class Stream:
    """Text from ids as they come, in whole characters.

    Control and unknown tokens give their names if `special`, else nothing. The space that encode put before the
    text is removed from the first token that is no control token. (In llama.cpp's detokenize the bos token counts
    as the first one, so that the space stays.)
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._leading = tokenizer.leads
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        """The text completed by this token; an incomplete character waits for its other bytes."""
        piece, kind = self._tokenizer.piece(id), self._tokenizer.kinds[id]
        if kind in (CONTROL, UNKNOWN) and not self._special:
            piece = b""
        if self._leading and kind != CONTROL:
            self._leading = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)
