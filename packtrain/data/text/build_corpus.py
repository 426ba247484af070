"""The heavy part, run in a child process: read the text, train or load the vocabulary, write the token files.

`write_corpus` fills an empty folder by a CorpusRecipe; `prepare_corpus` reads it. Text is streamed, two or three times.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from packtrain import gguf
from packtrain.common.errors import InputError
from packtrain.common.text import plural
from packtrain.data.text import documents
from packtrain.data.text.documents import SPLIT_NAMES, TRAIN, CorpusRecipe, SourceFile, TextPiece
from packtrain.data.text.reading_report import ReadingReport
from packtrain.data.text.text_streams import is_packed
from packtrain.data.text.token_files import TokenFile, write_tokens
from packtrain.data.token_cache import ReportProgress, report_progress
from packtrain.data.tokenizer import KEYS, Tokenizer, encode_all
from packtrain.data.train_vocabulary import train_vocabulary, vocabulary_of

VOCABULARY_FILE, NOTES_FILE = "vocabulary.gguf", "notes.txt"


def write_corpus(text: CorpusRecipe, folder: Path, report: ReportProgress) -> None:
    """Fill a folder with the tokens of a corpus. Raises InputError for bad text."""
    sources = documents.find_sources(text.data)
    documents.check_separator(None if text.keep_separators else text.separator, sources)
    total = sum(source.path.stat().st_size for source in sources)
    has_packed = any(is_packed(source.path) for source in sources)

    def read(activity: str, reports: list[ReadingReport], nbytes: int) -> Iterator[TextPiece]:
        pieces = documents.read_documents(sources, text.separator, reports, text.keep_separators)
        return _report_pieces(pieces, activity, nbytes, report)

    reports = _reports_of(text, sources)
    survey_result = documents.survey(read("reading", reports, 0 if has_packed else total))
    found_notes = [note for report in reports for note in report.notes]
    if not survey_result.num_documents:
        problem = "holds nothing but whitespace" if total else "is empty"
        if any(report.num_bad for report in reports):
            problem = "has no record that can be read"
        details = f" ({' '.join(found_notes)})" if found_notes else ""
        raise InputError(f"--data: {text.data} {problem}; it must hold text to train on{details}")
    split = 0.0 if any(source.split for source in sources) else text.val_split

    def divided(activity: str) -> Iterator[TextPiece]:
        pieces = read(activity, _reports_of(text, sources), survey_result.nbytes)
        return documents.assign_splits(pieces, survey_result, split)

    vocabulary, note = _make_vocabulary(text, survey_result, divided("sampling for the vocabulary"))
    tokenizer = _make_tokenizer(text, vocabulary)
    parts = documents.splits_of(text.val_split, sources)
    with ExitStack() as stack:
        vocab_size = tokenizer.vocab_size
        files = {p: stack.enter_context(write_tokens(folder, p, vocab_size)) for p in parts}
        nbytes = _write_files(divided("tokenizing"), tokenizer, files)
        _check_not_empty(text, files)
    if text.keep_separators and survey_result.num_documents <= len(sources):
        found_notes.append(f"--sample-start {text.separator!r} divides no file: each is one sample")
    notes = [*found_notes, note, *(_note(part, file, nbytes[part]) for part, file in files.items())]
    metadata = {"general.architecture": gguf.MetadataValue("string", "llama"), **vocabulary}
    gguf.write_gguf(folder / VOCABULARY_FILE, metadata, {})
    (folder / NOTES_FILE).write_text("\n".join(notes), encoding="utf-8")


def _reports_of(text: CorpusRecipe, sources: Iterable[SourceFile]) -> list[ReadingReport]:
    return [ReadingReport(source.path, text.skip_bad, columns=text.columns) for source in sources]


def _report_pieces(
    pieces: Iterable[TextPiece], activity: str, total_nbytes: int, report: ReportProgress
) -> Iterator[TextPiece]:
    """Yield the pieces, and report `activity` with the bytes that are done, of `total_nbytes` in all (0: unknown)."""
    done_nbytes = 0
    total_text = f" of {total_nbytes / 1e6:,.0f}" if total_nbytes else ""

    def progress_text() -> str:
        return f"{activity}: {done_nbytes / 1e6:,.0f}{total_text} MB"

    for piece in report_progress(pieces, report, progress_text):
        yield piece
        done_nbytes += len(piece.text.encode())


def _make_vocabulary(
    text: CorpusRecipe, survey_result: documents.TextSurvey, pieces: Iterable[TextPiece]
) -> tuple[dict[str, gguf.MetadataValue], str]:
    """Load or train the vocabulary; returns (tokenizer.* metadata, message about the vocabulary's origin)."""
    if text.vocab is not None:
        model_vocabulary = vocabulary_of(text.vocab)
        return model_vocabulary, f"vocabulary: {_size(model_vocabulary):,} tokens of {text.vocab}"
    texts = (piece.text for piece in pieces if piece.split == TRAIN)
    first_text = next(filter(str.strip, texts), None)
    if first_text is None:
        fact = f"--data: {text.data}: the part for training has no text; the data must be longer"
        raise InputError(fact)
    trained_vocabulary = train_vocabulary(
        chain([first_text], texts), text.vocab_size, text.auto, survey_result.nbytes
    )
    reason = "trained on this text"
    if _size(trained_vocabulary) < text.vocab_size:
        reason = f"as many as {survey_result.nbytes / 1e6:,.2f} MB of text support, of {text.vocab_size:,} at most"
    return trained_vocabulary, f"vocabulary: {_size(trained_vocabulary):,} tokens, {reason}"


def _size(vocabulary: dict[str, gguf.MetadataValue]) -> int:
    return len(vocabulary[f"{KEYS}tokens"].value)


def _make_tokenizer(text: CorpusRecipe, vocabulary: dict[str, gguf.MetadataValue]) -> Tokenizer:
    tokenizer = Tokenizer({key: value.value for key, value in vocabulary.items()})
    if tokenizer.bos is None or tokenizer.eos is None:
        raise InputError(f"{text.vocab}: documents need a bos and an eos token; one is missing")
    return tokenizer


def _write_files(
    pieces: Iterable[TextPiece], tokenizer: Tokenizer, files: Mapping[str, TokenFile]
) -> Counter[str]:
    """Write the token files, by split; returns the bytes of text in each split."""
    split_nbytes: Counter[str] = Counter()
    document_splits: deque[str] = deque()  # splits of the documents that are being encoded

    def texts() -> Iterator[tuple[str, bool]]:
        is_first = True
        for piece in pieces:
            if is_first:
                document_splits.append(piece.split)
            split_nbytes[document_splits[-1]] += len(piece.text.encode())
            is_first = piece.is_last
            yield piece.text, piece.is_last

    is_open = False
    for ids, is_last in encode_all(tokenizer, texts()):
        file = files[document_splits[0]]
        if not is_open:
            file.begin_document()
            file.write([tokenizer.bos])
        file.write(ids)
        if is_last:
            file.write([tokenizer.eos])
            document_splits.popleft()
        is_open = not is_last
    return split_nbytes


def _check_not_empty(text: CorpusRecipe, files: Mapping[str, TokenFile]) -> None:
    for split, file in files.items():
        if not file.starts:
            raise InputError(
                f"--data: {text.data} leaves no text for {SPLIT_NAMES[split]};"
                " give longer text, or --val-split 0 and no validation file"
            )


def _note(split: str, file: TokenFile, nbytes: int) -> str:
    """Return a line on a split's file: documents, tokens and bytes a token."""
    count_text = plural(len(file.starts), "document")
    density = f"{nbytes / file.num_tokens:.2f} bytes per token"
    return f"{SPLIT_NAMES[split]}: {count_text}, {file.num_tokens:,} tokens, {density}"
