"""SentencePiece's models (tokenizer.model): a protocol buffer of pieces, and of what is done to a text before."""

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
TEXT, SCORE, KIND, ALGORITHM, SPACE_BEHIND, REPLACEMENTS, LEADS, JOINS, ESCAPES = (
    10, 21, 24, 24, 192, 18, 24, 32, 40,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PieceModel:
    """A tokenizer.model: its pieces, and what it does to texts and how it divides them."""

    raw: bytes
    pieces: list[tuple[str, int, float]]  # text, type (as in GGUF) and score
    unigram: bool  # the best division of a text counts, as in T5; else pairs are merged by score
    leads: bool  # a space is put before a text
    joins: bool  # runs of spaces are one, and none are at the ends
    replacements: bytes  # a map of characters
    special: dict[str, int]  # ids of bos, eos, unk and pad

    def encoder(self, leads: bool) -> Callable[[str], list[int]]:
        """Encodes as the sentencepiece package does, with or without a space before a text."""
        proto = self.raw + bytes([NORMALIZER, 2, LEADS, leads])  # the last one counts
        processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
        return lambda text: list(processor.encode(text))


def read_pieces(path: Path) -> PieceModel:
    """A tokenizer.model. Raises InputError for another file, and for what a GGUF vocabulary does not do."""
    try:
        raw = path.read_bytes()
        processor = sentencepiece.SentencePieceProcessor(model_proto=raw)
        listed = _fields(raw)
        piece_fields = [dict(_fields(value)) for key, value in listed if key == PIECE]
        pieces = [
            (p[TEXT].decode(), p.get(KIND, NORMAL), *struct.unpack("<f", p.get(SCORE, bytes(4)))) for p in piece_fields
        ]  # fmt: skip
        trainer, normalizer = (
            dict(_fields(b"".join(value for key, value in listed if key == part)))
            for part in (TRAINER, NORMALIZER)
        )
    except (OSError, RuntimeError, ValueError, LookupError, struct.error):
        raise InputError(f"{path}: this is not a SentencePiece model") from None
    kind, replacements = trainer.get(ALGORITHM, UNIGRAM), normalizer.get(REPLACEMENTS, b"")
    joins, unigram = bool(normalizer.get(JOINS, 1)), kind == UNIGRAM
    for wrong, text in (
        (kind not in (UNIGRAM, BPE), "model_type must be BPE or UNIGRAM"),
        (trainer.get(SPACE_BEHIND), "treat_whitespace_as_suffix must be false"),
        (not normalizer.get(ESCAPES, 1), "escape_whitespaces must be true"),
        (unigram and any(piece[1] == BYTE for piece in pieces), "byte_fallback must be false for UNIGRAM"),
        (not unigram and replacements, "normalization_rule_name must be identity for BPE"),
    ):  # fmt: skip
        if wrong:
            raise InputError(f"{path}: {text}, as vocabularies of GGUF files have no other")
    ids = {name: getattr(processor, f"{name}_id")() for name in ("bos", "eos", "unk", "pad")}
    special = {name: id for name, id in ids.items() if id >= 0}
    return PieceModel(
        raw, pieces, unigram, bool(normalizer.get(LEADS, 1)), joins, replacements, special
    )


def _fields(raw: bytes) -> list[tuple[int, Any]]:
    """Keys and values of the fields of a message."""
    fields, at = [], 0
    while at < len(raw):
        key, at = _number(raw, at)
        value, value_start = _number(raw, at) if key % 8 in (0, 2) else (0, at)
        size = {0: 0, 1: 8, 2: value, 5: 4}[key % 8]
        fields.append((key, raw[value_start : value_start + size] if key % 8 else value))
        at = value_start + size
    return fields


def _number(raw: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    end = next(i for i in range(at, len(raw) + 1) if raw[i] < 128) + 1
    return sum((byte & 127) << 7 * i for i, byte in enumerate(raw[at:end])), end
