"""Reads SentencePiece's models (tokenizer.model): a protocol buffer of pieces and of the normalization of texts."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import BYTE, NORMAL

UNIGRAM, BPE = 1, 2
# keys of fields in sentencepiece_model.proto: 8 * number + type
PIECE, TRAINER, NORMALIZER = 10, 18, 26
TEXT, SCORE, KIND, ALGORITHM, SPACE_BEHIND, REPLACEMENTS, LEADS, JOINS_SPACES, ESCAPES = (
    10, 21, 24, 24, 192, 18, 24, 32, 40,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PieceModel:
    """A tokenizer.model: its pieces, its normalization of texts, and how it divides them into pieces."""

    raw: bytes
    pieces: list[tuple[str, int, float]]  # text, type (as in GGUF) and score
    unigram: bool  # the best division of a text counts, as in T5; else pairs are merged by score
    leads: bool  # a space is put before a text
    joins_spaces: bool  # runs of spaces become one, and those at the ends are dropped
    character_map: bytes  # replacements of characters, in SentencePiece's encoding
    special_ids: dict[str, int]  # ids of bos, eos, unk and pad

    def encoder(self, leads: bool) -> Callable[[str], list[int]]:
        """Return an encoder by the sentencepiece package; `leads`: it puts a space before a text."""
        proto = self.raw + bytes([NORMALIZER, 2, LEADS, leads])  # the last value of a field counts
        processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
        return lambda text: list(processor.encode(text))


def read_pieces(path: Path) -> PieceModel:
    """Read a tokenizer.model. Raises InputError for another file, or features that no GGUF vocabulary has."""
    try:
        raw = path.read_bytes()
        processor = sentencepiece.SentencePieceProcessor(model_proto=raw)
        model_fields = _fields(raw)
        piece_fields = [dict(_fields(value)) for key, value in model_fields if key == PIECE]
        pieces = [
            (p[TEXT].decode(), p.get(KIND, NORMAL), *struct.unpack("<f", p.get(SCORE, bytes(4)))) for p in piece_fields
        ]  # fmt: skip
        trainer, normalizer = (
            dict(_fields(b"".join(value for key, value in model_fields if key == message_key)))
            for message_key in (TRAINER, NORMALIZER)
        )
    except (OSError, RuntimeError, ValueError, LookupError, struct.error):
        raise InputError(f"{path}: this is not a SentencePiece model") from None
    algorithm, character_map = trainer.get(ALGORITHM, UNIGRAM), normalizer.get(REPLACEMENTS, b"")
    joins, is_unigram = bool(normalizer.get(JOINS_SPACES, 1)), algorithm == UNIGRAM
    for is_unsupported, requirement in (
        (algorithm not in (UNIGRAM, BPE), "model_type must be BPE or UNIGRAM"),
        (trainer.get(SPACE_BEHIND), "treat_whitespace_as_suffix must be false"),
        (not normalizer.get(ESCAPES, 1), "escape_whitespaces must be true"),
        (is_unigram and any(piece[1] == BYTE for piece in pieces), "byte_fallback must be false for UNIGRAM"),
        (not is_unigram and character_map, "normalization_rule_name must be identity for BPE"),
    ):  # fmt: skip
        if is_unsupported:
            raise InputError(f"{path}: {requirement}, as vocabularies of GGUF files have no other")
    ids = {name: getattr(processor, f"{name}_id")() for name in ("bos", "eos", "unk", "pad")}
    special_ids = {name: id for name, id in ids.items() if id >= 0}
    return PieceModel(
        raw, pieces, is_unigram, bool(normalizer.get(LEADS, 1)), joins, character_map, special_ids
    )


def _fields(raw: bytes) -> list[tuple[int, Any]]:
    """Return (key, value) of each field of a protobuf message; a key is 8 * the field's number + its wire type."""
    fields, offset = [], 0
    while offset < len(raw):
        key, offset = _varint(raw, offset)
        value, value_start = _varint(raw, offset) if key % 8 in (0, 2) else (0, offset)
        num_bytes = {0: 0, 1: 8, 2: value, 5: 4}[key % 8]
        fields.append((key, raw[value_start : value_start + num_bytes] if key % 8 else value))
        offset = value_start + num_bytes
    return fields


def _varint(raw: bytes, offset: int) -> tuple[int, int]:
    """Return (number, offset of its end) of a number in base 128 at `offset`, the lowest digits first."""
    end_offset = next(i for i in range(offset, len(raw) + 1) if raw[i] < 128) + 1
    return sum((byte & 127) << 7 * i for i, byte in enumerate(raw[offset:end_offset])), end_offset
