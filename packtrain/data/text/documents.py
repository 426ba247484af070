"""Text files as documents, in a stream of pieces, so that a document may be larger than memory.

A Text names the files and how to split them; yields Pieces, each for training or validation. It knows no tokens.
InputError names file and place of what cannot be read.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.files import existing
from packtrain.common.text import shortlist
from packtrain.data.text.field_names import unknown_header
from packtrain.data.text.reading_report import Report
from packtrain.data.text.records import read_records
from packtrain.data.text.text_streams import (
    CHUNK_NBYTES,
    RECORDS,
    SUFFIXES,
    TEXTS,
    kind_of,
    text_chunks,
)

END_OF_TEXT = (
    "<|endoftext|>"  # on its own line, separates documents unless another separator is given
)
SPLIT_BY_DOCUMENTS = 20  # with fewer documents, the end of the text is used for validation
TRAIN, VALID = "train", "valid"
WANTED = 'it must be like {"text": "…"}'
CHATS = {"messages"}, {"conversations"}, {"prompt", "completion"}
FEW = 5  # files that are listed


@dataclass(frozen=True, slots=True)
class Text:
    """What to prepare: files, vocabulary (a GGUF file, or one to train), and how to cut.

    auto       vocab_size is an upper limit; fewer if the text supports fewer
    separator  text between documents; None: lines `<|endoftext|>`; "": a file is one document
    val_split  share used for validation if there is no validation file
    skip_bad   skip records that cannot be read
    kept       documents keep the separator at their end, and begin right after it
    columns    how columns of records are named as fields
    """

    data: Path
    vocab: Path | None
    vocab_size: int
    auto: bool
    separator: str | None
    val_split: float
    skip_bad: bool = False
    kept: bool = False
    columns: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A file and the split that it belongs to; "" if val_split decides."""

    path: Path
    part: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document's text; `ends` on the last one."""

    text: str
    ends: bool
    part: str = ""


@dataclass(frozen=True, slots=True)
class Survey:
    """Size of the text, without a validation file."""

    documents: int
    characters: int
    nbytes: int


# ---- files


def find_sources(data: Path, suffixes: Sequence[str] = TEXTS) -> tuple[Source, ...]:
    """A file; or a folder's train and valid files; or its files with suffixes `suffixes`. Raises InputError."""
    existing(data, "--data")
    if not data.is_dir():
        return (Source(data),)
    train, valid = _parts(data)
    if train and valid:
        return Source(train, TRAIN), Source(valid, VALID)
    if train:
        return (Source(train),)
    expected = "train.txt or train.jsonl"
    if valid:
        raise InputError(f"--data: {data} has {valid.name}, but no {expected}")
    text_files = [p for p in sorted(data.iterdir()) if _named(p, suffixes) and p.is_file()]
    if not text_files:
        available = _listed([path for path in sorted(data.iterdir()) if kind_of(path) in RECORDS])
        raise InputError(
            f"--data: {data} holds no text; it must have {expected}, or other {suffixes[0]} files"
            + (f"; of {available} give one by name" if available else "")
        )
    return tuple(Source(existing(path, "--data")) for path in text_files)


def _parts(folder: Path) -> tuple[Path | None, Path | None]:
    return file_called(folder, "train"), file_called(folder, "valid", "val")


def has_valid_file(data: Path) -> bool:
    """Whether the data has a validation file."""
    return data.is_dir() and all(_parts(data))


def left_out(data: Path, sources: Iterable[Source]) -> tuple[str, ...]:
    """A message naming the other files in a data folder; empty if there are none."""
    if not data.is_dir():
        return ()
    used_paths = {source.path for source in sources}
    unused_paths = [
        p for p in sorted(data.iterdir()) if p not in used_paths and not p.name.startswith(".")
    ]
    return (f"{data}: not read: {_listed(unused_paths)}",) if unused_paths else ()


def _listed(paths: Sequence[Path]) -> str:
    return shortlist([f"{path.name}/" if path.is_dir() else path.name for path in paths], FEW)


def _named(path: Path, suffixes: Sequence[str]) -> bool:
    return path.name.lower().endswith(tuple(suffixes))


def parts_of(text: Text, sources: Iterable[Source]) -> tuple[str, ...]:
    """The splits of the corpus."""
    return (TRAIN, VALID) if text.val_split or any(s.part for s in sources) else (TRAIN,)


def file_called(folder: Path, *names: str) -> Path | None:
    """The only file of a folder with one of these names. Raises InputError if there are several."""
    paths = [folder / f"{name}{suffix}" for name in names for suffix in SUFFIXES]
    existing_paths = [path for path in paths if path.is_file()]
    if len(existing_paths) > 1:
        raise InputError(
            f"--data: {folder} has {existing_paths[0].name} and {existing_paths[1].name}; keep one"
        )
    return existing(existing_paths[0], "--data") if existing_paths else None


def read_documents(
    sources: Iterable[Source],
    separator: str | None,
    reports: Iterable[Report],
    keep_separators: bool = False,
) -> Iterator[Piece]:
    """The pieces of all non-blank documents, each with its source's split; fills a report for each source."""
    for source, report in zip(sources, reports, strict=True):
        for piece in _without_blank(_pieces(separator, report, keep_separators)):
            yield replace(piece, part=source.part)


def _pieces(separator: str | None, report: Report, keep_separators: bool) -> Iterator[Piece]:
    if kind_of(report.path) in RECORDS:
        return (Piece(text, True) for text in _texts(report))
    if report.columns is not None:
        raise InputError(f"--columns: {report.path} is plain text and has none; leave it out")
    return split(report.chunks(text_chunks(report.path)), separator, keep_separators)


def _texts(report: Report) -> Iterator[str]:
    has_started = report.skip
    for location, record in read_records(WANTED, report):
        if report.header and "text" not in record:
            error = unknown_header(report.header, report.names, ["text"], record)
            raise InputError(f"{error}{_advice(record)}")
        try:
            text = _text_of(record, location)
        except InputError as error:
            if not has_started:  # the whole file is bad, not one record
                raise
            report.reject(error)
        else:
            has_started = True
            yield text


def _text_of(record: Any, location: str) -> str:
    if not isinstance(record, dict) or "text" not in record:
        raise InputError(f"{location} has no field text", WANTED + _advice(record))
    return sound(record["text"], f"{location}: text", WANTED)


def _advice(record: Any) -> str:
    """Advice to use finetune, if the record is a conversation."""
    chat = isinstance(record, dict) and any(fields <= set(record) for fields in CHATS)
    tune = "; conversations are for packtrain finetune, which tunes an existing model"
    return tune if chat else ""


def sound(text: Any, location: str, example: str) -> str:
    """Check that this is a string that UTF-8 can encode. Raises InputError."""
    if not isinstance(text, str):
        raise InputError(f"{location} is {type(text).__name__}, not a string", example)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{location} has half a surrogate pair", "it needs both halves") from None
    return text


# ---- documents


def split(
    chunks: Iterable[str], separator: str | None, keep_separators: bool = False
) -> Iterator[Piece]:
    """Split a text into documents, without separators and line breaks next to them unless `keep_separators`."""
    separator = separator and re.sub("\r\n?", "\n", separator)  # as in the text
    pattern = _pattern(separator, keep_separators)
    reach = len(END_OF_TEXT if separator is None else separator) + 2
    # separators begin at `since` or later; the character before it is kept for `^`
    rest, since = "", 0
    for chunk in chain(chunks, (None,)):
        rest += chunk or ""
        at, limit = 0, len(rest) - reach
        for match in pattern.finditer(rest, since):
            # the next text may lengthen the match or undo it
            if chunk is not None and match.end() == len(rest):
                limit = match.start()
                break
            yield Piece(rest[at : match.end() if keep_separators else match.start()], True)
            at, since = match.end(), 0
        count = len(rest[at : max(at, limit)].rstrip("\n")) - 1
        if count > 0:
            yield Piece(rest[at : at + count], False)
            at, since = at + count, 1
        rest = rest[at:]
    yield Piece(rest, True)


def _pattern(separator: str | None, keep_separators: bool) -> re.Pattern[str]:
    if separator == "":
        return re.compile(r"(?!)")  # matches nowhere
    if separator is None:
        return re.compile(rf"(?m)\n*^{re.escape(END_OF_TEXT)}$\n*")
    return re.compile(re.escape(separator) if keep_separators else rf"\n*{re.escape(separator)}\n*")


def _without_blank(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Drop documents of only whitespace; holds back leading whitespace until text follows."""
    pending, has_started = "", False
    for piece in pieces:
        pending += piece.text
        if has_started or (pending and not pending.isspace()):
            yield Piece(pending, piece.ends)
            has_started = not piece.ends
            pending = ""
        elif piece.ends:
            pending = ""


# ---- training and validation


def survey(pieces: Iterable[Piece]) -> Survey:
    documents = characters = nbytes = 0
    for piece in pieces:
        if piece.part != VALID:
            documents += piece.ends
            characters += len(piece.text)
            nbytes += len(piece.text.encode())
    return Survey(documents, characters, nbytes)


def divide(pieces: Iterable[Piece], survey_result: Survey, val_split: float) -> Iterator[Piece]:
    """Assign splits: every k-th document is for validation, or the end of a text with few documents.

    Without val_split, pieces without a split are for training.
    """
    interval = round(1 / val_split) if val_split else 0
    if not interval:
        return (replace(piece, part=piece.part or TRAIN) for piece in pieces)
    if survey_result.documents >= max(SPLIT_BY_DOCUMENTS, interval):
        return _by_documents(pieces, interval)
    return _by_place(pieces, int(survey_result.characters * (1 - val_split)))


def _by_documents(pieces: Iterable[Piece], interval: int) -> Iterator[Piece]:
    document = 1
    for piece in pieces:
        yield replace(piece, part=TRAIN if document % interval else VALID)
        document += piece.ends


def _by_place(pieces: Iterable[Piece], place: int) -> Iterator[Piece]:
    """Text before the place is for training, the rest for validation; may cut a document in two."""
    # characters before `held`; text around the place, until it contains a line end
    seen, pending = 0, ""
    for piece in pieces:
        text = pending + piece.text
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
            seen, pending = place, ""
        else:
            pending = text


def _line_break(text: str, at: int) -> int:
    """The place after the next line break, else after the last one, with text on both sides; else `at`."""
    for cut in (text.find("\n", at) + 1, text.rfind("\n", 0, at) + 1):
        if text[:cut].strip() and text[cut:].strip():
            return cut
    return at
