"""Text files as documents, in a stream of pieces, so that a document may be larger than memory.

A CorpusRecipe names the files and how to split them; TextPieces are for training or validation. This module knows no
tokens. InputError names file and place of what cannot be read."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.files import require_existing
from packtrain.common.text import shortlist
from packtrain.data.text import text_streams
from packtrain.data.text.field_names import unknown_header
from packtrain.data.text.reading_report import ReadingReport
from packtrain.data.text.records import read_records
from packtrain.data.text.text_streams import CHUNK_NBYTES, RECORDS, suffix_of, text_chunks

END_OF_TEXT = "<|endoftext|>"  # on a line of its own, separates documents by default
SPLIT_BY_DOCUMENTS = 20  # with fewer documents, the end of the text is used for validation
TRAIN, VALID = "train", "valid"
SPLIT_NAMES = {TRAIN: "training", VALID: "validation"}
RECORD_ADVICE = 'it must be like {"text": "…"}'
CHAT_FIELDS = {"messages"}, {"conversations"}, {"prompt", "completion"}
MAX_LISTED = 5  # most files listed in a message
# names of files that are not for training: test.jsonl, gsm8k_val.csv, validation-00000-of-00001.parquet
HELD_OUT_NAME = re.compile(
    r"(?i)(.*[-_. ])?(val(id(ation)?)?|dev|test|eval)([-_]?\d+)?(-of-\d+)?(\..*)?"
)


@dataclass(frozen=True, slots=True)
class CorpusRecipe:
    """Text to prepare: files, vocabulary (a GGUF file, or one to train), and how to split it.

    auto             vocab_size is an upper limit; fewer if the text supports fewer
    separator        text between documents; None: lines `<|endoftext|>`; "": a file is one document
    val_split        share used for validation if there is no validation file
    skip_bad         skip records that cannot be read
    keep_separators  documents keep the separator at their end, and begin right after it
    columns          --columns: renames columns of records to fields
    """

    data: Path
    vocab: Path | None
    vocab_size: int
    auto: bool
    separator: str | None
    val_split: float
    skip_bad: bool = False
    keep_separators: bool = False
    columns: str | None = None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file and the split to which it belongs; "" if val_split decides."""

    path: Path
    split: str = ""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of a document's text; `is_last` marks the document's last part; a split of "" is not yet assigned."""

    text: str
    is_last: bool
    split: str = ""


@dataclass(frozen=True, slots=True)
class TextSurvey:
    """Size of the text, without the validation file's."""

    num_documents: int
    num_characters: int
    nbytes: int


# ---- files


def find_sources(
    data: Path, suffixes: Sequence[str] = text_streams.TEXT_SUFFIXES
) -> tuple[SourceFile, ...]:
    """Return as sources the file `data`, or a folder's train and valid files, or all with suffixes. InputError."""
    require_existing(data, "--data")
    if not data.is_dir():
        return (SourceFile(data),)
    train_file, valid_file = _train_and_valid(data)
    if train_file and valid_file:
        return SourceFile(train_file, TRAIN), SourceFile(valid_file, VALID)
    if train_file:
        return (SourceFile(train_file),)
    expected = "train.txt or train.jsonl"
    if valid_file:
        raise InputError(f"--data: {data} has {valid_file.name}, but no {expected}")
    files = [path for path in sorted(data.iterdir()) if path.is_file()]
    text_files = [path for path in files if path.name.lower().endswith(tuple(suffixes))]
    if not text_files:
        available = _names([path for path in sorted(data.iterdir()) if suffix_of(path) in RECORDS])
        raise InputError(
            f"--data: {data} holds no text; it must have {expected}, or other {suffixes[0]} files"
            + (f"; of {available} give one by name" if available else "")
        )
    held_out_files = [path for path in text_files if HELD_OUT_NAME.fullmatch(path.name)]
    if 0 < len(held_out_files) < len(text_files):
        fact = f"--data: {data} has {_names(held_out_files)} beside files to train on"
        raise InputError(fact, f"it must have {expected}, or only files to train on")
    return tuple(SourceFile(require_existing(path, "--data")) for path in text_files)


def _train_and_valid(folder: Path) -> tuple[Path | None, Path | None]:
    return find_file(folder, "train"), find_file(folder, "valid", "val")


def has_valid_file(data: Path) -> bool:
    """Whether the data is a folder with a file for training and one for validation."""
    return data.is_dir() and all(_train_and_valid(data))


def check_separator(separator: str | None, sources: Sequence[SourceFile]) -> None:
    """Raise InputError for a separator if no source is plain text, the only format that --separator divides."""
    if separator is not None and all(suffix_of(source.path) in RECORDS for source in sources):
        raise InputError(f"--separator: {sources[0].path} is no plain text to divide; leave it out")


def unread_notes(data: Path, sources: Iterable[SourceFile]) -> tuple[str, ...]:
    """Return a message naming the other files in a data folder; empty if there are none."""
    if not data.is_dir():
        return ()
    used_paths = {source.path for source in sources}
    paths = (path for path in sorted(data.iterdir()) if not path.name.startswith("."))
    unused_paths = [path for path in paths if path not in used_paths]
    return (f"{data}: not read: {_names(unused_paths)}",) if unused_paths else ()


def _names(paths: Sequence[Path]) -> str:
    return shortlist([f"{p.name}/" if p.is_dir() else p.name for p in paths], MAX_LISTED)


def splits_of(val_split: float, sources: Iterable[SourceFile]) -> tuple[str, ...]:
    """Return ("train", "valid") if the data has a validation file or a share is held out, else ("train",)."""
    return (TRAIN, VALID) if val_split or any(s.split for s in sources) else (TRAIN,)


def find_file(folder: Path, *names: str) -> Path | None:
    """Return the only file of a folder with one of these names. Raises InputError if there are several."""
    paths = [folder / f"{name}{suffix}" for name in names for suffix in text_streams.DATA_SUFFIXES]
    existing_paths = [path for path in paths if path.is_file()]
    if len(existing_paths) > 1:
        fact = f"--data: {folder} has {existing_paths[0].name} and {existing_paths[1].name}"
        raise InputError(f"{fact}; keep one")
    return require_existing(existing_paths[0], "--data") if existing_paths else None


def read_documents(
    sources: Iterable[SourceFile], separator: str | None, reports: Iterable[ReadingReport],
    keep_separators: bool = False,
) -> Iterator[TextPiece]:  # fmt: skip
    """Yield the pieces of non-blank documents with their source's split; adds findings to each source's report."""
    for source, report in zip(sources, reports, strict=True):
        for piece in _skip_blank(_document_pieces(separator, report, keep_separators)):
            yield replace(piece, split=source.split)


def _document_pieces(
    separator: str | None, report: ReadingReport, keep_separators: bool
) -> Iterator[TextPiece]:
    if suffix_of(report.path) in RECORDS:
        return (TextPiece(text, True) for text in _record_texts(report))
    if report.columns is not None:
        raise InputError(f"--columns: {report.path} is plain text and has none; leave it out")
    return split_documents(report.chunks(text_chunks(report.path)), separator, keep_separators)


def _record_texts(report: ReadingReport) -> Iterator[str]:
    """Yield the texts of records. Raises InputError for a header without text, or a bad record not skipped."""
    has_started = report.skip_bad
    for location, record in read_records(RECORD_ADVICE, report):
        if report.header and "text" not in record:
            error = unknown_header(report.header, report.column_names, ["text"], record)
            raise InputError(f"{error}{_finetune_advice(record)}")
        try:
            if not isinstance(record, dict) or "text" not in record:
                fact, advice = f"{location} has no field text", _finetune_advice(record)
                raise InputError(fact, RECORD_ADVICE + advice)
            text = valid_text(record["text"], f"{location}: text", RECORD_ADVICE)
        except InputError as error:
            if not has_started:  # the whole file is bad, not just one record
                raise
            report.reject(error)
        else:
            has_started = True
            yield text


def _finetune_advice(record: Any) -> str:
    """Return the advice to use finetune, if the record is a conversation, else ""."""
    is_chat = isinstance(record, dict) and any(fields <= set(record) for fields in CHAT_FIELDS)
    advice = "; conversations are for packtrain finetune, which tunes an existing model"
    return advice if is_chat else ""


def valid_text(text: Any, location: str, example: str) -> str:
    """Return `text` if it is a string that UTF-8 can encode. Raises InputError, with `example` as its advice."""
    if not isinstance(text, str):
        raise InputError(f"{location} is {type(text).__name__}, not a string", example)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{location} has half a surrogate pair", "it needs both halves") from None
    return text


# ---- documents


def split_documents(
    chunks: Iterable[str], separator: str | None, keep_separators: bool = False
) -> Iterator[TextPiece]:
    """Split a text into documents; drops separators, and line breaks beside them, unless `keep_separators`."""
    separator = separator and re.sub("\r\n?", "\n", separator)  # line ends as in the text
    pattern = _separator_pattern(separator, keep_separators)
    max_match_length = len(END_OF_TEXT if separator is None else separator) + 2
    # separators begin at `search_start` or later; the character before stays in the buffer for `^`
    buffer, search_start = "", 0
    for chunk in chain(chunks, (None,)):
        buffer += chunk or ""
        at, safe_end = 0, len(buffer) - max_match_length
        for match in pattern.finditer(buffer, search_start):
            # the next chunk may lengthen the match or undo it
            if chunk is not None and match.end() == len(buffer):
                safe_end = match.start()
                break
            yield TextPiece(buffer[at : match.end() if keep_separators else match.start()], True)
            at, search_start = match.end(), 0
        piece_length = len(buffer[at : max(at, safe_end)].rstrip("\n")) - 1
        if piece_length > 0:
            yield TextPiece(buffer[at : at + piece_length], False)
            at, search_start = at + piece_length, 1
        buffer = buffer[at:]
    yield TextPiece(buffer, True)


def _separator_pattern(separator: str | None, keep_separators: bool) -> re.Pattern[str]:
    """Return the pattern that matches separators; None stands for lines `<|endoftext|>`, "" for no separator."""
    if separator == "":
        return re.compile(r"(?!)")  # matches nowhere
    if separator is None:
        return re.compile(rf"(?m)\n*^{re.escape(END_OF_TEXT)}$\n*")
    return re.compile(re.escape(separator) if keep_separators else rf"\n*{re.escape(separator)}\n*")


def _skip_blank(pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
    """Drop documents of only whitespace; holds back leading whitespace until text follows."""
    pending, has_started = "", False
    for piece in pieces:
        pending += piece.text
        if has_started or (pending and not pending.isspace()):
            yield TextPiece(pending, piece.is_last)
            has_started = not piece.is_last
            pending = ""
        elif piece.is_last:
            pending = ""


# ---- training and validation


def survey(pieces: Iterable[TextPiece]) -> TextSurvey:
    """Count documents, characters and bytes outside the validation file."""
    num_documents = num_characters = nbytes = 0
    for piece in pieces:
        if piece.split != VALID:
            num_documents += piece.is_last
            num_characters += len(piece.text)
            nbytes += len(piece.text.encode())
    return TextSurvey(num_documents, num_characters, nbytes)


def assign_splits(
    pieces: Iterable[TextPiece], survey_result: TextSurvey, val_split: float
) -> Iterator[TextPiece]:
    """Yield pieces with a split: for validation is every k-th document, k = 1 / val_split, or of few documents the end
    of the text. If val_split is 0, pieces keep their split; those without are for training."""
    interval = round(1 / val_split) if val_split else 0
    if not interval:
        return (replace(piece, split=piece.split or TRAIN) for piece in pieces)
    if survey_result.num_documents >= max(SPLIT_BY_DOCUMENTS, interval):
        return _assign_every_kth(pieces, interval)
    return _split_by_position(pieces, int(survey_result.num_characters * (1 - val_split)))


def _assign_every_kth(pieces: Iterable[TextPiece], interval: int) -> Iterator[TextPiece]:
    document_number = 1
    for piece in pieces:
        yield replace(piece, split=TRAIN if document_number % interval else VALID)
        document_number += piece.is_last


def _split_by_position(pieces: Iterable[TextPiece], place: int) -> Iterator[TextPiece]:
    """Assign text before character number `place` to training, the rest to validation; may cut a document in two."""
    # characters before `pending`; text around the place, until it contains a line end
    num_seen, pending = 0, ""
    for piece in pieces:
        text = pending + piece.text
        if num_seen >= place:
            yield replace(piece, split=VALID)
        elif num_seen + len(text) < place:
            yield replace(piece, split=TRAIN)
            num_seen += len(text)
        elif piece.is_last or "\n" in text[place - num_seen :] or len(text) > 2 * CHUNK_NBYTES:
            cut = _line_break(text, place - num_seen)
            yield TextPiece(text[:cut], True, TRAIN)
            if text[cut:]:
                yield TextPiece(text[cut:], piece.is_last, VALID)
            num_seen, pending = place, ""
        else:
            pending = text


def _line_break(text: str, at: int) -> int:
    """Return the index to cut a text near `at`: after the next line break, else the last one before it, else `at`."""
    for cut in (text.find("\n", at) + 1, text.rfind("\n", 0, at) + 1):
        if text[:cut].strip() and text[cut:].strip():
            return cut
    return at
