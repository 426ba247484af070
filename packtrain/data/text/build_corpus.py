"""The heavy part, run in a child process: read the text, train or load the vocabulary, write the token files.

Fills an empty folder from a Text; `prepare` then reads it. Text is streamed, two or three times.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from packtrain import gguf
from packtrain.common.errors import InputError
from packtrain.common.text import plural
from packtrain.data.text import documents as corpus_documents
from packtrain.data.text.documents import (
    TRAIN,
    VALID,
    Piece,
    Source,
    Survey,
    Text,
    divide,
    parts_of,
)
from packtrain.data.text.reading_report import Report
from packtrain.data.text.text_streams import is_packed
from packtrain.data.text.token_files import TokenFile, write_tokens
from packtrain.data.token_cache import Say
from packtrain.data.tokenizer import KEYS, Tokenizer, encode_all
from packtrain.data.train_vocabulary import train_vocabulary, vocabulary_of
from packtrain.gguf import Value

SPOKEN = {TRAIN: "training", VALID: "validation"}
VOCABULARY_FILE, NOTES_FILE = "vocabulary.gguf", "notes.txt"
SECONDS_BETWEEN_LINES = 3.0


def write_corpus(text: Text, folder: Path, report_progress: Say) -> None:
    """Fill the folder. Raises InputError for bad text."""
    sources = corpus_documents.find_sources(text.data)
    total = sum(source.path.stat().st_size for source in sources)
    packed = any(is_packed(source.path) for source in sources)

    def read(activity: str, reports: list[Report], nbytes: int) -> Iterator[Piece]:
        pieces = corpus_documents.read_documents(sources, text.separator, reports, text.kept)
        return _reported(pieces, activity, nbytes, report_progress)

    reports = _reports(text, sources)
    survey_result = corpus_documents.survey(read("reading", reports, 0 if packed else total))
    found_notes = [note for report in reports for note in report.notes]
    if not survey_result.documents:
        problem = "holds nothing but whitespace" if total else "is empty"
        if any(report.bad for report in reports):
            problem = "has no record that can be read"
        details = f" ({' '.join(found_notes)})" if found_notes else ""
        raise InputError(f"--data: {text.data} {problem}; it must hold text to train on{details}")

    split = 0.0 if any(source.part for source in sources) else text.val_split

    def divided(activity: str) -> Iterator[Piece]:
        return divide(
            read(activity, _reports(text, sources), survey_result.nbytes), survey_result, split
        )

    vocabulary, note = _vocabulary(text, survey_result, divided("sampling for the vocabulary"))
    tokenizer = _tokenizer(text, vocabulary)
    parts = parts_of(text, sources)
    with ExitStack() as stack:
        files = {part: stack.enter_context(write_tokens(folder, part, tokenizer)) for part in parts}
        nbytes = _write(divided("tokenizing"), tokenizer, files)
        _check_filled(text, files)
    if text.kept and survey_result.documents <= len(sources):
        found_notes.append(f"--sample-start {text.separator!r} divides no file: each is one sample")
    notes = [*found_notes, note, *(_note(part, file, nbytes[part]) for part, file in files.items())]
    metadata = {"general.architecture": Value("string", "llama"), **vocabulary}
    gguf.write(folder / VOCABULARY_FILE, metadata, {})
    (folder / NOTES_FILE).write_text("\n".join(notes), encoding="utf-8")


def _reports(text: Text, sources: Iterable[Source]) -> list[Report]:
    return [Report(source.path, text.skip_bad, columns=text.columns) for source in sources]


def _reported(pieces: Iterable[Piece], activity: str, nbytes: int, report: Say) -> Iterator[Piece]:
    """The same pieces; prints progress every few seconds. nbytes  of all, 0 if they are unknown."""
    done, printed = 0, time.monotonic()
    of = f" of {nbytes / 1e6:,.0f}" if nbytes else ""
    for piece in pieces:
        if time.monotonic() - printed > SECONDS_BETWEEN_LINES:
            printed = time.monotonic()
            report(f"{activity}: {done / 1e6:,.0f}{of} MB")
        yield piece
        done += len(piece.text.encode())


def _vocabulary(
    text: Text, survey_result: Survey, pieces: Iterable[Piece]
) -> tuple[dict[str, Value], str]:
    """The vocabulary, and a message about where it comes from."""
    if text.vocab is not None:
        loaded = vocabulary_of(text.vocab)
        return loaded, f"vocabulary: {_size(loaded):,} tokens of {text.vocab}"
    texts = (piece.text for piece in pieces if piece.part == TRAIN)
    first = next(filter(str.strip, texts), None)
    if first is None:
        raise InputError(
            f"--data: {text.data}: the part for training has no text; the data must be longer"
        )
    trained = train_vocabulary(
        chain([first], texts), text.vocab_size, text.auto, survey_result.nbytes
    )
    reason = "trained on this text"
    if _size(trained) < text.vocab_size:
        reason = f"as many as {survey_result.nbytes / 1e6:,.2f} MB of text support, of {text.vocab_size:,} at most"
    return trained, f"vocabulary: {_size(trained):,} tokens, {reason}"


def _size(vocabulary: dict[str, Value]) -> int:
    return len(vocabulary[f"{KEYS}tokens"].value)


def _tokenizer(text: Text, vocabulary: dict[str, Value]) -> Tokenizer:
    tokenizer = Tokenizer({key: value.value for key, value in vocabulary.items()})
    if tokenizer.bos is None or tokenizer.eos is None:
        raise InputError(f"{text.vocab}: documents need a bos and an eos token; one is missing")
    return tokenizer


def _write(
    pieces: Iterable[Piece], tokenizer: Tokenizer, files: Mapping[str, TokenFile]
) -> Counter[str]:
    """Write the token files; returns the bytes of text in each part."""
    nbytes: Counter[str] = Counter()
    parts: deque[str] = deque()  # of the documents that are being encoded

    def texts() -> Iterator[tuple[str, bool]]:
        begins = True
        for piece in pieces:
            if begins:
                parts.append(piece.part)
            nbytes[parts[-1]] += len(piece.text.encode())
            begins = piece.ends
            yield piece.text, piece.ends

    for ids, is_last in encode_all(tokenizer, texts()):
        files[parts[0]].add(ids, is_last)
        if is_last:
            parts.popleft()
    return nbytes


def _check_filled(text: Text, files: Mapping[str, TokenFile]) -> None:
    for part, file in files.items():
        if not file.starts:
            raise InputError(
                f"--data: {text.data} leaves no text for {SPOKEN[part]};"
                " it must be longer, or --val-split 0 and without a validation file"
            )


def _note(part: str, file: TokenFile, nbytes: int) -> str:
    documents = plural(len(file.starts), "document")
    density = f"{nbytes / file.count:.2f} bytes per token"
    return f"{SPOKEN[part]}: {documents}, {file.count:,} tokens, {density}"
