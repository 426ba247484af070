"""From a CorpusRecipe to a Corpus: read from the cache, or built there by a child process."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.text import documents
from packtrain.data.text.build_corpus import NOTES_FILE, VOCABULARY_FILE
from packtrain.data.text.text_streams import RECORDS, suffix_of
from packtrain.data.text.token_files import DocumentTokens, read_tokens
from packtrain.data.token_cache import ReportProgress, read_or_build
from packtrain.data.tokenizer import KEYS
from packtrain.data.train_vocabulary import vocabulary_of
from packtrain.gguf import MetadataValue

FORMAT = 3  # increase it to rebuild all caches


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as tokens, `valid` None if none are held out; `fingerprint` hashes its sources, `notes` are to print."""

    vocabulary: dict[str, MetadataValue]
    train: DocumentTokens
    valid: DocumentTokens | None
    fingerprint: str
    notes: tuple[str, ...]


def prepare_corpus(
    text: documents.CorpusRecipe, cache: Path, report: ReportProgress, memory: str | None = None
) -> Corpus:
    """Return the tokens of documents of recipe `text`, cached in `cache/<fingerprint>/`. Raises as `build_folder`."""
    if not 0 <= text.val_split <= 0.5:
        raise InputError(f"--val-split: {text.val_split:g} must be from 0 to 0.5")
    sources = documents.find_sources(text.data)
    vocabulary = vocabulary_of(text.vocab) if text.vocab else None
    fingerprint = _corpus_fingerprint(text, sources, vocabulary)
    splits = documents.splits_of(text.val_split, sources)
    vocab_size = len(vocabulary[f"{KEYS}tokens"].value) if vocabulary else 0
    corpus = read_or_build(
        lambda folder: read_corpus(folder, splits), cache / fingerprint, __package__, text, report, memory, vocab_size,
    )  # fmt: skip
    return replace(corpus, notes=(*documents.unread_notes(text.data, sources), *corpus.notes))


def _corpus_fingerprint(
    text: documents.CorpusRecipe, sources: Sequence[documents.SourceFile],
    vocabulary: Mapping[str, MetadataValue] | None,
) -> str:  # fmt: skip
    vocab = (text.vocab_size, text.auto) if vocabulary is None else plain_metadata(vocabulary)
    # only if they are set, so that older caches are still found
    extra_options = ["kept"] if text.keep_separators else []
    extra_options += [text.columns] if text.columns else []
    options = FORMAT, text.separator, text.val_split, text.skip_bad, vocab, *extra_options
    return checksum(options, sources)


def checksum(options: object, sources: Sequence[documents.SourceFile]) -> str:
    """Return a hash, 16 hex digits, of `options` (by its repr) and of each source's split, format and content."""
    digest = hashlib.sha256(repr(options).encode())
    for source in sources:
        with open(source.path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        suffix = suffix_of(source.path)
        kind = suffix if suffix in RECORDS else "text"
        digest.update(f"{source.split} {kind} {content}\n".encode())
    return digest.hexdigest()[:16]


def plain_metadata(vocabulary: Mapping[str, MetadataValue]) -> list[tuple[str, object]]:
    """Return GGUF metadata as sorted (key, plain value) pairs, whose repr can be hashed."""
    return [
        (key, v.value.tolist() if isinstance(v.value, np.ndarray) else v.value)
        for key, v in sorted(vocabulary.items())
    ]


def read_corpus(folder: Path, splits: Sequence[str]) -> Corpus:
    """Read a folder of the cache. Raises OSError or ValueError (InputError is one) if it is incomplete."""
    notes = (folder / NOTES_FILE).read_text(encoding="utf-8").splitlines()
    vocabulary = vocabulary_of(folder / VOCABULARY_FILE)
    vocab_size = len(vocabulary["tokenizer.ggml.tokens"].value)
    train, valid = read_tokens(folder, documents.TRAIN, vocab_size), None
    if documents.VALID in splits:
        valid = read_tokens(folder, documents.VALID, vocab_size)
    return Corpus(vocabulary, train, valid, folder.name, tuple(notes))
