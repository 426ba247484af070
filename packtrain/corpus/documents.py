"""Text files as documents: a stream of pieces, so that a document may be larger than memory.

A Text says which files and how they are cut; out come Pieces, each for training or for validation. It knows no
tokens. InputError names file and place of what cannot be read.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from packtrain.corpus.records import CHUNK_NBYTES, kind_of, read_records, text_chunks
from packtrain.errors import InputError
from packtrain.files import existing

END_OF_TEXT = "<|endoftext|>"  # on a line of its own, it separates documents unless another separator is given
SPLIT_BY_DOCUMENTS = 20  # with fewer, the end of the text is the validation part
TRAIN, VALID = "train", "valid"
RECORDS = (".jsonl", ".json")
WANTED = 'it must be like {"text": "…"}'
PLAIN = (".txt", ".jsonl")


@dataclass(frozen=True, slots=True)
class Text:
    """What to prepare: files, vocabulary (a GGUF file, or one to train), and how to cut.

    auto       vocab_size is the most there may be; less where the text supports less
    separator  text between documents; None finds lines `<|endoftext|>`, "" makes a file one document
    val_split  the share kept for validation where the files do not say
    """

    data: Path
    vocab: Path | None
    vocab_size: int
    auto: bool
    separator: str | None
    val_split: float


@dataclass(frozen=True, slots=True)
class Source:
    """A file and the part that all of it goes to; "" where val_split decides."""

    path: Path
    part: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a document; `ends` on its last one."""

    text: str
    ends: bool
    part: str = ""


@dataclass(frozen=True, slots=True)
class Survey:
    """What there is, besides a validation part that the files give."""

    documents: int
    characters: int
    nbytes: int


# ---- files


def find_sources(
    data: Path, named: Sequence[str] = PLAIN, others: Sequence[str] = PLAIN[:1]
) -> tuple[Source, ...]:
    """A file; or a folder's train and valid files; or all other files of a folder, sorted. Raises InputError.

    named, others  suffixes that train and valid files may have, and the files of a folder without them
    """
    existing(data, "--data")
    if not data.is_dir():
        return (Source(data),)
    train, valid = file_called(data, named, "train"), file_called(data, named, "valid", "val")
    if train and valid:
        return Source(train, TRAIN), Source(valid, VALID)
    if train:
        return (Source(train),)
    wanted = f"train{named[0]}", f"train{named[1]}"
    if valid:
        raise InputError(f"--data: {data} has {valid.name}, but no {' or '.join(wanted)}")
    found = [p for p in sorted(data.iterdir()) if p.name.endswith(tuple(others)) and p.is_file()]
    if not found:
        raise InputError(
            f"--data: {data} holds no text; it must have {', '.join(wanted)} or other {others[0]} files"
        )
    return tuple(Source(existing(path, "--data")) for path in found)


def parts_of(text: Text, sources: Iterable[Source]) -> tuple[str, ...]:
    """The parts that the corpus of a text has."""
    return (TRAIN, VALID) if text.val_split or any(s.part for s in sources) else (TRAIN,)


def file_called(folder: Path, suffixes: Sequence[str], *names: str) -> Path | None:
    """The one file of a folder with one of these names and suffixes. Raises InputError if there are several."""
    paths = [folder / f"{name}{suffix}" for name in names for suffix in suffixes]
    found = [path for path in paths if path.is_file()]
    if len(found) > 1:
        raise InputError(f"--data: {folder} has {found[0].name} and {found[1].name}; keep one")
    return existing(found[0], "--data") if found else None


def read_documents(sources: Iterable[Source], separator: str | None) -> Iterator[Piece]:
    """The pieces of all documents that are not blank, each with its source's part."""
    for source in sources:
        for piece in _without_blank(_pieces(source.path, separator)):
            yield replace(piece, part=source.part)


def _pieces(path: Path, separator: str | None) -> Iterator[Piece]:
    if kind_of(path) in RECORDS:
        return (Piece(_text_of(found, where), True) for where, found in read_records(path, WANTED))
    return split(text_chunks(path), separator)


def _text_of(found: Any, where: str) -> str:
    if not isinstance(found, dict) or "text" not in found:
        raise InputError(f"{where} has no field text; {WANTED}")
    return sound(found["text"], f"{where}: text", WANTED)


def sound(text: Any, where: str, wanted: str) -> str:
    """A text that UTF-8 can hold. Raises InputError."""
    if not isinstance(text, str):
        raise InputError(f"{where} is {type(text).__name__}, not a string; {wanted}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} has half a surrogate pair; it needs both halves") from None
    return text


# ---- documents


def split(chunks: Iterable[str], separator: str | None) -> Iterator[Piece]:
    """Cut a text into documents at its separators; these and line breaks next to them are left out."""
    pattern = _pattern(separator)
    reach = len(END_OF_TEXT if separator is None else separator) + 2
    # separators begin at `since` or later; the character before is kept for `^` to look at
    rest, since = "", 0
    for chunk in chain(chunks, (None,)):
        rest += chunk or ""
        at, limit = 0, len(rest) - reach
        for found in pattern.finditer(rest, since):
            # what follows may lengthen or undo it
            if chunk is not None and found.end() == len(rest):
                limit = found.start()
                break
            yield Piece(rest[at : found.start()], True)
            at, since = found.end(), 0
        count = len(rest[at : max(at, limit)].rstrip("\r\n")) - 1
        if count > 0:
            yield Piece(rest[at : at + count], False)
            at, since = at + count, 1
        rest = rest[at:]
    yield Piece(rest, True)


def _pattern(separator: str | None) -> re.Pattern[str]:
    if separator == "":
        return re.compile(r"(?!)")  # matches nowhere
    if separator is None:
        return re.compile(rf"(?m)[\r\n]*^{re.escape(END_OF_TEXT)}\r?$[\r\n]*")
    return re.compile(rf"[\r\n]*{re.escape(separator)}[\r\n]*")


def _without_blank(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Leave out documents of nothing but whitespace; what a document begins with waits until it has more."""
    held, begun = "", False
    for piece in pieces:
        held += piece.text
        if begun or (held and not held.isspace()):
            yield Piece(held, piece.ends)
            begun = not piece.ends
            held = ""
        elif piece.ends:
            held = ""


# ---- training and validation


def survey(pieces: Iterable[Piece]) -> Survey:
    documents = characters = nbytes = 0
    for piece in pieces:
        if piece.part != VALID:
            documents += piece.ends
            characters += len(piece.text)
            nbytes += len(piece.text.encode())
    return Survey(documents, characters, nbytes)


def divide(pieces: Iterable[Piece], found: Survey, val_split: float) -> Iterator[Piece]:
    """Give pieces their part: every k-th document is for validation, or the end of a text of few documents.

    Without val_split, parts stay as they are and what has none is for training.
    """
    every = round(1 / val_split) if val_split else 0
    if not every:
        return (replace(piece, part=piece.part or TRAIN) for piece in pieces)
    if found.documents >= max(SPLIT_BY_DOCUMENTS, every):
        return _by_documents(pieces, every)
    return _by_place(pieces, int(found.characters * (1 - val_split)))


def _by_documents(pieces: Iterable[Piece], every: int) -> Iterator[Piece]:
    document = 1
    for piece in pieces:
        yield replace(piece, part=TRAIN if document % every else VALID)
        document += piece.ends


def _by_place(pieces: Iterable[Piece], place: int) -> Iterator[Piece]:
    """What comes before the place is for training, the rest for validation; a document may be cut in two."""
    seen, held = 0, ""  # characters before `held`; text around the place, until a line ends in it
    for piece in pieces:
        text = held + piece.text
        if seen >= place:
            yield replace(piece, part=VALID)
        elif seen + len(text) < place:
            yield replace(piece, part=TRAIN)
            seen += len(text)
        elif piece.ends or "\n" in text[place - seen :] or len(text) > 2 * CHUNK_NBYTES:
            cut = _line_break(text, place - seen)
            yield Piece(text[:cut], True, TRAIN)
            if text[cut:]:
                yield Piece(text[cut:], piece.ends, VALID)
            seen, held = place, ""
        else:
            held = text


def _line_break(text: str, at: int) -> int:
    """The place after the next line break, or else after the last one, that leaves text on both sides; else `at`."""
    for cut in (text.find("\n", at) + 1, text.rfind("\n", 0, at) + 1):
        if text[:cut].strip() and text[cut:].strip():
            return cut
    return at
