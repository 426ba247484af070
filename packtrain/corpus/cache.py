"""From a Text to a Corpus: found in the cache by what it was made from, else made there by a child process.

The child's memory is gone before training starts. A folder of the cache is filled under another name and renamed,
so that it is complete whenever it exists.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from packtrain.corpus.build import NOTES_FILE, VOCABULARY_FILE
from packtrain.corpus.documents import TRAIN, VALID, Source, Text, find_sources, parts_of
from packtrain.corpus.tokens import Tokens, read_tokens
from packtrain.errors import InputError
from packtrain.gguf import Value
from packtrain.vocabulary import vocabulary_of

DAY = 24 * 3600.0
FORMAT = 1  # another number makes all caches anew
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as tokens. `fingerprint` says what it was made from; `notes` are lines worth printing."""

    vocabulary: dict[str, Value]
    train: Tokens
    valid: Tokens | None
    fingerprint: str
    notes: tuple[str, ...]


def prepare(text: Text, cache: Path, say: Say) -> Corpus:
    """The corpus of a text, kept in `cache/<fingerprint>/`. Raises InputError for whatever is wrong with the text."""
    if not 0 <= text.val_split <= 0.5:
        raise InputError(f"--val-split: {text.val_split:g} must be from 0 to 0.5")
    sources = find_sources(text.data)
    vocabulary = vocabulary_of(text.vocab) if text.vocab else None
    fingerprint = _fingerprint(text, sources, vocabulary)
    folder = cache / fingerprint
    parts = parts_of(text, sources)
    try:
        return read_corpus(folder, parts)
    except (OSError, ValueError):  # not there, or damaged
        _make(text, folder, say)
    return read_corpus(folder, parts)


def _fingerprint(
    text: Text, sources: Sequence[Source], vocabulary: Mapping[str, Value] | None
) -> str:
    """A hash of all that the result depends on: contents, options, vocabulary, format."""
    wanted = (text.vocab_size, text.auto) if vocabulary is None else _plain(vocabulary)
    options = FORMAT, text.separator, text.val_split, wanted
    made_from = hashlib.sha256(repr(options).encode())
    for source in sources:
        with open(source.path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        made_from.update(f"{source.part} {source.path.suffix == '.jsonl'} {content}\n".encode())
    return made_from.hexdigest()[:16]


def _plain(vocabulary: Mapping[str, Value]) -> list[tuple[str, object]]:
    return [
        (key, v.value.tolist() if isinstance(v.value, np.ndarray) else v.value)
        for key, v in sorted(vocabulary.items())
    ]


def read_corpus(folder: Path, parts: Sequence[str]) -> Corpus:
    """What a folder of the cache holds. Raises OSError or ValueError, as InputError is one, if it is not whole."""
    notes = (folder / NOTES_FILE).read_text(encoding="utf-8").splitlines()
    vocabulary = vocabulary_of(folder / VOCABULARY_FILE)
    size = len(vocabulary["tokenizer.ggml.tokens"].value)
    return Corpus(
        vocabulary,
        read_tokens(folder, TRAIN, size),
        read_tokens(folder, VALID, size) if VALID in parts else None,
        folder.name,
        tuple(notes),
    )


def _make(text: Text, folder: Path, say: Say) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"{folder.parent}: tokens cannot be kept there: {reason}") from None
    try:
        _build_in_child(text, partial, say)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        with suppress(OSError):  # another process was faster
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Remove what processes that were killed a day ago or earlier left unfinished."""
    for left in cache.glob("*-*"):
        if time.time() - left.stat().st_mtime > DAY:
            shutil.rmtree(left, ignore_errors=True)


def _build_in_child(text: Text, folder: Path, say: Say) -> None:
    """Run build in a process of its own; its errors are raised here, its lines go to `say`."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    request = asdict(text) | {"folder": str(folder), "data": str(text.data)}
    request["vocab"] = str(text.vocab) if text.vocab else None
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-m", __package__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as child,
    ):
        assert child.stdin and child.stdout
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            for line in child.stdout:
                kind, sentence = json.loads(line)
                if kind == "error":
                    raise InputError(sentence)
                say(sentence)
            child.wait()
        except BaseException:
            child.kill()
            raise
        if child.returncode == -signal.SIGINT:
            raise KeyboardInterrupt
        if child.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            why = said[-1] if said else f"it ended with {child.returncode}"
            raise RuntimeError(f"the child process that prepares the text failed: {why}")
