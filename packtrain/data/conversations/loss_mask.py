"""The loss mask: texts as token ids with a weight for each, 1 where the loss counts the token.

The whole rendered text is tokenized at once, as in llama.cpp's server: words of a message that spell a control token
become that token. A token is trained on if it begins in the reply, or if it begins earlier and contains words of the
reply; a token that shares only whitespace with the prompt is not."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.conversations.conversation_renderer import RenderedConversation
from packtrain.data.tokenizer import CONTROL, Tokenizer

SPACE = "\u2581".encode()
WHITESPACE = re.compile(rb"[ \t\n\v\f\r]*")
CHARACTER = re.compile(rb"[^\x80-\xbf][\x80-\xbf]*")  # of valid UTF-8


@dataclass(frozen=True, slots=True)
class MaskedSample:
    """Token ids, and for each a weight: 1 if it is a target in the loss, else 0."""

    ids: list[int]
    weights: list[int]

    @property
    def num_trained(self) -> int:
        return sum(self.weights[1:])


class LossMasker:
    """Tokenizes and masks samples; `everything` trains on prompts, too."""

    def __init__(self, tokenizer: Tokenizer, everything: bool = False) -> None:
        """everything: the loss counts all tokens of a conversation, not only answers."""
        self.tokenizer, self.everything = tokenizer, everything
        kinds = zip(tokenizer.tokens, tokenizer.token_types, strict=True)
        self.control_texts = [
            text.decode(errors="replace") for text, kind in kinds if kind == CONTROL
        ]
        self._bos = "" if tokenizer.bos is None else tokenizer.piece(tokenizer.bos).decode()

    @property
    def bos_id(self) -> int | None:
        """Return the BOS id with which a text begins, if the model's file asks for one."""
        return self.tokenizer.bos if self.tokenizer.add_bos else None

    @property
    def eog_texts(self) -> list[str]:
        """Return the texts of the tokens that end generation."""
        return [self.tokenizer.piece(id).decode(errors="replace") for id in self.tokenizer.eog_ids]

    def mask_conversation(self, rendered: RenderedConversation) -> MaskedSample:
        """Tokenize and mask a rendered conversation, with one BOS if the model's file or the template asks for it."""
        text, dropped = rendered.text, 0
        if self.tokenizer.add_bos and text.startswith(self._bos):  # otherwise there would be two
            text, dropped = text[len(self._bos) :], len(self._bos)
        ids = self.tokenizer.encode(text, eos=False)
        num_added = 1 if self.tokenizer.add_bos else 0
        if self.everything:
            return MaskedSample(ids, [1] * len(ids))
        text_spans = ((start - dropped, end - dropped) for start, end in rendered.spans)
        spans = [(_nbytes(text, start), _nbytes(text, end)) for start, end in text_spans]
        token_spans = chain.from_iterable(places_of(self.tokenizer, ids[num_added:], text.encode()))
        token_starts, token_ends = np.fromiter(token_spans, np.int64).reshape(-1, 2).T
        weights = np.zeros(len(ids), np.uint8)
        loss_mask, raw = weights[num_added:], text.encode()
        for begin, end in spans:
            first_index = int(np.searchsorted(token_starts, begin))
            loss_mask[first_index : np.searchsorted(token_starts, end)] = 1
            if first_index and raw[begin : min(end, token_ends[first_index - 1])].strip():
                loss_mask[first_index - 1] = 1
        return MaskedSample(ids, weights.tolist())

    def encode_text(self, pieces: Iterable[str], parse_special: bool) -> Iterator[list[int]]:
        """Yield the ids of a text in chunks, with BOS if the model's file asks for it, and EOS if no EOG ends it. With
        `parse_special`, text that spells a control token becomes that token."""
        tokenizer = self.tokenizer
        bos_ids = [] if self.bos_id is None else [self.bos_id]
        if parse_special:
            text = "".join(pieces)
            id_chunks = iter([tokenizer.encode(text.removeprefix(self._bos), bos=False, eos=False)])
        else:
            id_chunks = tokenizer.encode_pieces(pieces)
        last_id = None
        for chunk in chain([bos_ids], id_chunks):
            last_id = chunk[-1] if chunk else last_id
            yield chunk
        if tokenizer.eos is not None and last_id not in tokenizer.eog_ids:
            yield [tokenizer.eos]


def _nbytes(text: str, num_characters: int) -> int:
    """Return how many UTF-8 bytes the first characters of a text take."""
    return len(text[:num_characters].encode())


# ---- where tokens are


def places_of(tokenizer: Tokenizer, ids: Iterable[int], text: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each token, in bytes of the UTF-8 `text`. Raises InputError if a token is not there."""
    offset = 0
    for id in ids:
        token_span = _find_token(tokenizer, id, text, offset)
        yield token_span
        offset = token_span[1]


def _find_token(tokenizer: Tokenizer, id: int, text: bytes, offset: int) -> tuple[int, int]:
    """Return (start, end), in bytes, of token `id` at `offset`, or after whitespace there. Raises InputError."""
    piece = tokenizer.piece(id)
    if text.startswith(piece, offset):
        return offset, offset + len(piece)
    stripped = piece.removeprefix(b" ") if tokenizer.add_space_prefix else piece
    space_match = WHITESPACE.match(text, offset)
    for begin in (offset, space_match.end() if space_match else offset):
        for candidate in (piece, stripped):  # the tokenizer's leading space is not in the text
            width = _covered_nbytes(candidate, text, begin)
            if width is not None:
                return begin, begin + width
    if id == tokenizer.unk and (char_match := CHARACTER.match(text, offset)):
        return offset, char_match.end()
    raise InputError(
        f"token {id}, {piece!r}, is not at byte {offset} of the text that was tokenized",
        "with this vocabulary the assistant's tokens cannot be found",
    )


def _covered_nbytes(piece: bytes, text: bytes, offset: int) -> int | None:
    """Return how many bytes of text at `offset` a token covers, whose spaces may be U+2581; None if text differs."""
    if text.startswith(piece, offset):
        return len(piece)
    end = offset
    for byte in piece:
        if text[end : end + 1] == bytes([byte]):
            end += 1
        elif byte == 32 and text.startswith(SPACE, end):
            end += len(SPACE)
        else:
            return None
    return end - offset


# ---- splitting


def windows(parts: Iterable[list[int]], length: int, bos: int | None = None) -> Iterator[list[int]]:
    """Cut ids into windows of up to `length` + 1; from the second on each begins with the last id before, or `bos`."""
    pending: list[int] = []
    for chunk in parts:
        pending += chunk
        while len(pending) > length + 1:
            yield pending[: length + 1]
            pending = pending[length:]
            if bos is not None:
                pending[0] = bos
    if len(pending) > 1:
        yield pending
