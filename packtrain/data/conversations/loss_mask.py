"""The loss mask: texts as token ids with a weight for each, 1 where the token is trained on.

The whole rendered text is tokenized at once, as in llama.cpp's server: words of a message that spell a control token
become that token. A token is trained on if it begins in the reply, or begins before it and contains words of it; a
token that shares only whitespace with the prompt is not.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.conversations.conversation_renderer import Rendered
from packtrain.data.tokenizer import CONTROL, Tokenizer

SPACE = "\u2581".encode()
WHITESPACE = re.compile(rb"[ \t\n\v\f\r]*")
CHARACTER = re.compile(rb"[^\x80-\xbf][\x80-\xbf]*")  # of valid UTF-8


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids and, for each, 1 or 0: whether it is a target in the loss."""

    ids: list[int]
    weights: list[int]

    @property
    def trained(self) -> int:
        return sum(self.weights[1:])


class Masker:
    """Tokenizes and masks samples; `everything` trains on prompts, too."""

    def __init__(self, tokenizer: Tokenizer, everything: bool = False) -> None:
        self.tokenizer, self.everything = tokenizer, everything
        kinds = zip(tokenizer.tokens, tokenizer.kinds, strict=True)
        self._controls = [text.decode(errors="replace") for text, kind in kinds if kind == CONTROL]
        self._bos = "" if tokenizer.bos is None else tokenizer.piece(tokenizer.bos).decode()

    @property
    def first(self) -> int | None:
        """The BOS id that a text begins with, if the model's file asks for one."""
        return self.tokenizer.bos if self.tokenizer.add_bos else None

    @property
    def ends(self) -> list[str]:
        """Texts of the tokens that end generation."""
        return [self.tokenizer.piece(id).decode(errors="replace") for id in self.tokenizer.ends]

    def spells_control(self, words: str) -> bool:
        """Whether words of a message spell control tokens."""
        return any(text in words for text in self._controls)

    def conversation(self, rendered: Rendered) -> Sample:
        """The tokens of a rendered conversation, with one BOS if the model's file or the template asks for it."""
        text, dropped = rendered.text, 0
        if self.tokenizer.add_bos and text.startswith(self._bos):  # otherwise there would be two
            text, dropped = text[len(self._bos) :], len(self._bos)
        ids = self.tokenizer.encode(text, eos=False)
        added = 1 if self.tokenizer.add_bos else 0
        if self.everything:
            return Sample(ids, [1] * len(ids))
        spans = [
            (_nbytes(text, a - dropped), _nbytes(text, b - dropped)) for a, b in rendered.spans
        ]
        places = chain.from_iterable(places_of(self.tokenizer, ids[added:], text.encode()))
        begins, end_offsets = np.fromiter(places, np.int64).reshape(-1, 2).T
        weights = np.zeros(len(ids), np.uint8)
        loss_mask, raw = weights[added:], text.encode()
        for begin, end in spans:
            first = int(np.searchsorted(begins, begin))
            loss_mask[first : np.searchsorted(begins, end)] = 1
            if first and raw[begin : end_offsets[first - 1]].strip():
                loss_mask[first - 1] = 1
        return Sample(ids, weights.tolist())

    def text(self, pieces: Iterable[str], checked: bool) -> Iterator[list[int]]:
        """The ids of a text in parts, all trained on, with BOS if the model's file asks for it, and an end token.

        checked  text that spells a control token becomes that token
        """
        tokenizer = self.tokenizer
        first = [] if self.first is None else [self.first]
        if checked:
            text = "".join(pieces)
            parts = iter([tokenizer.encode(text.removeprefix(self._bos), bos=False, eos=False)])
        else:
            parts = tokenizer.encode_pieces(pieces)
        last = None
        for part in chain([first], parts):
            last = part[-1] if part else last
            yield part
        if tokenizer.eos is not None and last not in tokenizer.ends:
            yield [tokenizer.eos]


def _nbytes(text: str, count: int) -> int:
    return len(text[:count].encode())


# ---- where tokens are


def places_of(tokenizer: Tokenizer, ids: Iterable[int], text: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each token in the encoded text, in bytes."""
    at = 0
    for id in ids:
        token_span = _place(tokenizer, id, text, at)
        yield token_span
        at = token_span[1]


def _place(tokenizer: Tokenizer, id: int, text: bytes, at: int) -> tuple[int, int]:
    """Start and end of a token at `at`, or after whitespace there that the previous token swallowed."""
    piece = tokenizer.piece(id)
    if text.startswith(piece, at):
        return at, at + len(piece)
    stripped = piece.removeprefix(b" ") if tokenizer.add_space_prefix else piece
    space_match = WHITESPACE.match(text, at)
    for begin in (at, space_match.end() if space_match else at):
        for candidate in (piece, stripped):  # the tokenizer's leading space is not in the text
            width = _width(candidate, text, begin)
            if width is not None:
                return begin, begin + width
    if id == tokenizer.unk and (char_match := CHARACTER.match(text, at)):
        return at, char_match.end()
    raise InputError(
        f"token {id}, {piece!r}, is not at byte {at} of the text that was tokenized",
        "with this vocabulary the assistant's tokens cannot be found",
    )


def _width(piece: bytes, text: bytes, at: int) -> int | None:
    """Bytes of the text that a piece covers; None if it is not there. A vocabulary may write spaces as U+2581."""
    if text.startswith(piece, at):
        return len(piece)
    end = at
    for byte in piece:
        if text[end : end + 1] == bytes([byte]):
            end += 1
        elif byte == 32 and text.startswith(SPACE, end):
            end += len(SPACE)
        else:
            return None
    return end - at


# ---- splitting


def windows(parts: Iterable[list[int]], length: int, bos: int | None = None) -> Iterator[list[int]]:
    """Ids cut so that each window has at most `length` targets.

    A window begins with the last id of the previous one, or with bos instead.
    """
    rest: list[int] = []
    for part in parts:
        rest += part
        while len(rest) > length + 1:
            yield rest[: length + 1]
            rest = rest[length:]
            if bos is not None:
                rest[0] = bos
    if len(rest) > 1:
        yield rest
