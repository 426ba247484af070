"""From files to tokens: what a document is, what is kept, what is for validation, and one line for bad input."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from packtrain import gguf, kernels
from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.memory import parse_size, private_nbytes, release_memory
from packtrain.data import token_cache
from packtrain.data.text import (
    Corpus,
    CorpusRecipe,
    DocumentTokens,
    documents,
    prepare_corpus,
    records,
    text_streams,
)
from packtrain.data.text.build_corpus import write_corpus
from packtrain.data.text.corpus_cache import _corpus_fingerprint, read_corpus
from packtrain.data.text.documents import split_documents
from packtrain.data.text.reading_report import ReadingReport
from packtrain.data.tokenizer import Tokenizer
from packtrain.data.train_vocabulary import train_vocabulary, vocabulary_of
from packtrain.kernels.runtime import kernel_cache, loader

SHARED = Path(__file__).parent.parent.parent / "shared/data"
needs_shared = pytest.mark.shared
ROOT = Path(__file__).parent.parent
PROSE = "Some words, größer and 12 more.\n" * 40


@pytest.fixture(scope="session")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocab") / "vocab.gguf"
    gguf.write_gguf(path, train_vocabulary([PROSE], 320, True, len(PROSE)), {})
    return path


def text_of(data: Path, vocab: Path | None = None, **overrides: object) -> CorpusRecipe:
    options = {"vocab_size": 512, "auto": True, "separator": None, "val_split": 0.0} | overrides
    return CorpusRecipe(data, vocab, **options)  # type: ignore[arg-type]


def silent(sentence: str) -> None:
    pass


def texts_of(tokens: DocumentTokens, corpus: Corpus) -> list[str]:
    """The documents, decoded, each of which must begin with BOS and end with EOS."""
    tokenizer = Tokenizer({key: value.value for key, value in corpus.vocabulary.items()})
    documents = []
    for ids in np.split(tokens.ids, tokens.starts[1:]):
        assert (ids[0], ids[-1]) == (tokenizer.bos, tokenizer.eos)
        assert not {tokenizer.bos, tokenizer.eos} & set(ids[1:-1].tolist())
        assert (
            tokenizer.encode(tokenizer.decode(ids), bos=True, eos=True, special=False)
            == ids.tolist()
        )
        documents.append(tokenizer.decode(ids))
    return documents


def parts_of(data: Path, vocab: Path, **overrides: object) -> tuple[list[str], list[str] | None]:
    """The documents for training and for validation, made in this process."""
    text = text_of(data, vocab, **overrides)
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(text, Path(folder), silent)
        corpus = read_corpus(
            Path(folder), documents.splits_of(text.val_split, documents.find_sources(data))
        )
        valid = corpus.valid and texts_of(corpus.valid, corpus)
        return texts_of(corpus.train, corpus), valid


def write_files(folder: Path, **files: str | bytes) -> Path:
    """A folder with these files; `_` stands for the dot of a name."""
    for name, content in files.items():
        path = folder / ".".join(name.rsplit("_", 1))
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def write_text(folder: Path, content: str | bytes) -> Path:
    return write_files(folder, data_txt=content) / "data.txt"


# ---- documents


@pytest.mark.parametrize(
    ("text", "separator", "expected"),
    [
        ("a\r\nb\rc\r\n", None, ["a\nb\nc\n"]),
        ("  a \ufeff\u2028", None, ["  a \ufeff\u2028"]),
        ("a\n<|endoftext|>\nb", None, ["a", "b"]),
        ("a\r\n<|endoftext|>\r\n\r\nb\n<|endoftext|>\n", None, ["a", "b"]),
        ("<|endoftext|>\n\n a\n\n\n<|endoftext|>", None, [" a"]),
        ("a<|endoftext|>\nb\n<|endoftext|> \nc", None, ["a<|endoftext|>\nb\n<|endoftext|> \nc"]),
        ("a\n<|endoftext|>\nb", "", ["a\n<|endoftext|>\nb"]),
        ("a<|endoftext|>b\n<|endoftext|>\nc", "<|endoftext|>", ["a", "b", "c"]),
        ("a\n\n\nb\nc\n", "\n\n", ["a", "b\nc\n"]),
        ("a" + "\n" * 40 + "<|endoftext|>\nb" + " " * 40, None, ["a", "b" + " " * 40]),
        ("emma\nolivia\n\nava", "\n", ["emma", "olivia", "ava"]),
        ("a.*b.*", ".*", ["a", "b"]),
        ("a---\n \n---b------c", "---", ["a", "b", "c"]),
    ],
)
@pytest.mark.parametrize("chunk", [1 << 20, 1, 3, 16])
def test_documents_of_a_text(
    tmp_path: Path, vocab: Path, text: str, separator: str | None, expected: list[str], chunk: int,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setattr(text_streams, "CHUNK_NBYTES", chunk)
    assert parts_of(write_text(tmp_path, text), vocab, separator=separator) == (expected, None)


def test_pieces_stay_small(monkeypatch: pytest.MonkeyPatch):
    chunks = ["some words and lines\n" * 5] * 1000
    pieces = list(split_documents(iter(chunks), None))
    assert "".join(piece.text for piece in pieces) == "".join(chunks)
    assert max(len(piece.text) for piece in pieces) < 2 * len(chunks[0])
    assert [piece.is_last for piece in pieces].count(True) == 1 and pieces[-1].is_last


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_borders_of_pieces_change_no_token(
    tmp_path: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
):
    text = PROSE + "größer  \n\n\U0001f600\u2581 \n x" * 9
    monkeypatch.setattr(text_streams, "CHUNK_NBYTES", chunk)
    documents, _ = parts_of(write_text(tmp_path, text), vocab)  # texts_of encodes it as a whole
    assert documents == [text.replace("\u2581", " ")]


@needs_shared
@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "gpt-2", "llama-bpe"])
def test_pieces_of_real_vocabularies(name: str):
    metadata = gguf.GGUF(SHARED / f"tokenizers/ggml-vocab/ggml-vocab-{name}.gguf").metadata
    text = (SHARED / "text/wikitext-2-raw/wiki.test.raw").read_bytes()[:20_000].decode()
    text += "".join(f"{i}</s> \n <|user|>\n\n</s>x" for i in range(50))
    for size in (1, 5, 1000):
        pieces = (text[i : i + size] for i in range(0, len(text), size))
        ids = [id for part in Tokenizer(metadata).encode_pieces(pieces) for id in part]
        assert ids == Tokenizer(metadata).encode(text, bos=False, special=False)


@needs_shared
def test_byte_level_vocabularies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    vocab = SHARED / "tokenizers/ggml-vocab/ggml-vocab-llama-bpe.gguf"
    texts = ["  It's 12345 o'clock\n\n\n\u4e2d\u6587\u3002\u2581 <|end_of_text|> x", "\U0001f600 a"]
    monkeypatch.setattr(text_streams, "CHUNK_NBYTES", 7)
    documents, _ = parts_of(write_text(tmp_path, "\n<|endoftext|>\n".join(texts)), vocab)
    assert documents == texts


def test_json_lines(tmp_path: Path, vocab: Path):
    lines = [{"text": "a\nb"}, {"id": 3, "text": " \n"}, {"text": "ü\n<|endoftext|>\n\0"}]
    content = "\n\n".join(map(json.dumps, lines)) + "\r\n" + '{"text": "ö"}'
    data = write_files(tmp_path, data_jsonl=content) / "data.jsonl"
    assert parts_of(data, vocab) == (["a\nb", "ü\n<|endoftext|>\n\0", "ö"], None)


def test_folders(tmp_path: Path, vocab: Path):
    folder = write_files(
        tmp_path, b_txt="b", a_txt="a\n<|endoftext|>\nc", notes_md="no", empty_txt=""
    )
    assert parts_of(folder, vocab) == (["a", "c", "b"], None)
    write_files(tmp_path, train_txt="t", test_txt="no")
    assert parts_of(folder, vocab) == (["t"], None)
    write_files(tmp_path, val_jsonl='{"text": "v"}')
    assert parts_of(folder, vocab) == (["t"], ["v"])
    assert parts_of(folder, vocab, val_split=0.5) == (["t"], ["v"])


# ---- validation


def test_every_kth_document_is_for_validation(tmp_path: Path, vocab: Path):
    names = [f"name {i}" for i in range(1, 41)]
    train, valid = parts_of(
        write_text(tmp_path, "\n".join(names)), vocab, separator="\n", val_split=0.1
    )
    assert valid == ["name 10", "name 20", "name 30", "name 40"]
    assert train == [name for name in names if name not in valid]


@pytest.mark.parametrize("count", [3, 19, 25])
def test_of_few_documents_the_end_is_for_validation(tmp_path: Path, vocab: Path, count: int):
    """Also of more documents than 20, if every k-th would be none of them."""
    lines = [f"{i}: one line\nand one more" for i in range(count)]
    train, valid = parts_of(
        write_text(tmp_path, "\n<|endoftext|>\n".join(lines)),
        vocab,
        val_split=0.03 if count > 20 else 0.2,
    )
    assert valid and len("".join(valid)) < len("".join(train)) / 2
    joined = "".join(train + valid)
    assert joined == "".join(lines)
    assert train[-1].endswith(("\n", "more")) and len(train) + len(valid) in (count, count + 1)


@pytest.mark.parametrize(
    ("text", "at", "expected"),
    [("aa\nbb\ncc", 4, 6), ("aa\nbbbb\n ", 4, 3), ("aaaa", 3, 3), ("aa\n", 2, 2), ("\na\nb", 1, 3)],
)
def test_where_a_text_is_cut(text: str, at: int, expected: int):
    assert documents._line_break(text, at) == expected


def test_a_cut_between_two_pieces(tmp_path: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch):
    for chunk in range(1, 12):
        monkeypatch.setattr(text_streams, "CHUNK_NBYTES", chunk)
        train, valid = parts_of(write_text(tmp_path, "abcdefghij" * 8), vocab, val_split=0.5)
        assert train + (valid or []) == ["abcdefghij" * 4] * 2


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", r"a\.txt is empty"),
        ("a.txt", b" \n\t\r\n", r"a\.txt holds nothing but whitespace"),
        ("a.txt", b"abc\0d", r"a\.txt: a NUL at byte 3; this is not a text file"),
        ("a.txt", b"ab\xffc", r"a\.txt: byte 2 is not UTF-8"),
        ("a.txt", b"ab\xc3\xa4\xe2\x82", r"a\.txt: byte 4 is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": ', r"a\.jsonl: line 3 is not JSON"),
        (
            "a.jsonl",
            b'{"text": "a"}\n["text"]',
            r"a\.jsonl: line 2 has no field text; it must be like",
        ),
        ("a.jsonl", b'{"content": "a"}', r"a\.jsonl: line 1 has no field text"),
        ("a.jsonl", b'{"text": 3}', r"a\.jsonl: line 1: text is int, not a string"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl: line 1: text has half a surrogate pair"),
        ("a.jsonl", b'{"text": "\xff"}', r"a\.jsonl: line 1 is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl: line 1 is not JSON"),
    ],
)
@pytest.mark.parametrize("chunk", [1 << 20, 1, 3])
def test_bad_files(
    tmp_path: Path, vocab: Path, name: str, content: bytes, said: str, chunk: int,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setattr(text_streams, "CHUNK_NBYTES", chunk)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said) as raised:
        parts_of(tmp_path / name, vocab)
    assert "\n" not in str(raised.value)


def test_bad_folders(tmp_path: Path):
    with pytest.raises(InputError, match=r"--data: .*nothing does not exist"):
        documents.find_sources(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"holds no text; it must have train\.txt"):
        documents.find_sources(tmp_path)
    write_files(tmp_path, valid_txt="a")
    with pytest.raises(InputError, match=r"has valid\.txt, but no train\.txt or train\.jsonl"):
        documents.find_sources(tmp_path)
    write_files(tmp_path, train_txt="a", train_jsonl="{}")
    with pytest.raises(InputError, match=r"has train\.txt and train\.jsonl; keep one"):
        documents.find_sources(tmp_path)


def test_a_separator_without_plain_text_is_refused(tmp_path: Path, vocab: Path):
    write_files(tmp_path, a_jsonl='{"text": "a b c"}', b_txt="a")
    recipe = text_of(tmp_path / "a.jsonl", vocab, separator="##")
    with pytest.raises(InputError, match=r"--separator: .*a\.jsonl is no plain text to divide"):
        write_corpus(recipe, tmp_path, silent)
    write_corpus(text_of(tmp_path, vocab, separator="##"), tmp_path, silent)


def test_texts_too_short_to_divide(tmp_path: Path, vocab: Path):
    with pytest.raises(InputError, match="leaves no text for training"):
        parts_of(write_text(tmp_path, "a"), vocab, val_split=0.1)
    folder = write_files(tmp_path, train_txt="a", valid_txt="\n")
    with pytest.raises(InputError, match="leaves no text for validation"):
        parts_of(folder, vocab, val_split=0.1)
    with pytest.raises(InputError, match=r"--val-split: 0\.9 must be from 0 to 0\.5"):
        prepare_corpus(text_of(folder, val_split=0.9), tmp_path, silent)


# ---- the cache and the child


def test_a_corpus_is_made_once_and_found_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    data, cache = write_text(tmp_path, PROSE * 20), tmp_path / "deep/cache"
    text = text_of(data, val_split=0.1)
    corpus = prepare_corpus(text, cache, silent)
    assert corpus.train.ids.dtype == np.uint16 and not corpus.train.ids.flags.writeable
    assert isinstance(corpus.train.ids, np.memmap) and isinstance(corpus.train.starts, np.memmap)
    assert (
        corpus.valid
        and "".join(texts_of(corpus.train, corpus) + texts_of(corpus.valid, corpus)) == PROSE * 20
    )
    assert [note.split(":")[0] for note in corpus.notes] == ["vocabulary", "training", "validation"]
    assert "320 tokens, as many as 0.03 MB of text support, of 512 at most" in corpus.notes[0]
    inside = {path: path.stat().st_mtime_ns for path in (cache / corpus.fingerprint).iterdir()}
    assert [path.name for path in cache.iterdir()] == [corpus.fingerprint]

    reloaded = prepare_corpus(text, cache, silent)
    assert (reloaded.fingerprint, reloaded.notes) == (corpus.fingerprint, corpus.notes)
    assert reloaded.vocabulary.keys() == corpus.vocabulary.keys()
    assert inside == {
        path: path.stat().st_mtime_ns for path in (cache / corpus.fingerprint).iterdir()
    }
    assert capfd.readouterr() == ("", "")


def test_damaged_caches_are_made_anew(tmp_path: Path, vocab: Path):
    text, cache = text_of(write_text(tmp_path, PROSE), vocab, val_split=0.1), tmp_path / "cache"
    corpus = prepare_corpus(text, cache, silent)
    ids, folder = corpus.train.ids.tolist(), cache / corpus.fingerprint
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 6
    for name in names:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-40] if name != "notes.txt" else b"\xff")
        assert prepare_corpus(text, cache, silent).train.ids.tolist() == ids
        assert (folder / name).read_bytes() == content
    for name in ("valid.npy", "notes.txt"):
        (folder / name).unlink()
        rebuilt = prepare_corpus(text, cache, silent)
        assert rebuilt.train.ids.tolist() == ids and rebuilt.valid
    assert sorted(path.name for path in folder.iterdir()) == names


def test_caches_with_impossible_numbers_are_made_anew(tmp_path: Path, vocab: Path):
    text, cache = text_of(write_text(tmp_path, PROSE), vocab, val_split=0.1), tmp_path / "cache"
    corpus = prepare_corpus(text, cache, silent)
    ids = corpus.train.ids.tolist()
    for name, value in (("train.npy", b"\xff\xff"), ("train.starts.npy", b"\xff" * 8)):
        path = cache / corpus.fingerprint / name
        content = path.read_bytes()
        path.write_bytes(content[: -len(value)] + value)
        assert prepare_corpus(text, cache, silent).train.ids.tolist() == ids
        assert path.read_bytes() == content


def test_what_a_fingerprint_depends_on(tmp_path: Path, vocab: Path):
    def fingerprint(content: str = PROSE, vocab: Path | None = None, **overrides: object) -> str:
        text = text_of(write_text(tmp_path, content), vocab, **overrides)
        vocab_tokens = vocabulary_of(vocab) if vocab else None
        return _corpus_fingerprint(text, documents.find_sources(text.data), vocab_tokens)

    prints = [
        fingerprint(), fingerprint(PROSE + "x"), fingerprint(vocab_size=513), fingerprint(auto=False),
        fingerprint(separator=""), fingerprint(val_split=0.1), fingerprint(vocab=vocab),
    ]  # fmt: skip
    assert len(set(prints)) == len(prints)
    assert fingerprint() == prints[0]
    assert fingerprint(vocab=vocab, vocab_size=513, auto=False) == prints[-1]


def test_errors_of_the_child_come_back(tmp_path: Path, vocab: Path):
    text = text_of(write_text(tmp_path, b"ab\xff"), vocab)
    with pytest.raises(InputError, match=r"data\.txt: byte 2 is not UTF-8; save it as UTF-8"):
        prepare_corpus(text, tmp_path / "cache", silent)
    assert list((tmp_path / "cache").iterdir()) == []
    text = text_of(write_text(tmp_path, PROSE), None, auto=False, vocab_size=9999)
    with pytest.raises(InputError, match="--vocab-size: the text is too small for 9999 tokens"):
        prepare_corpus(text, tmp_path / "cache", silent)
    with pytest.raises(InputError, match=r"data\.txt: tokens cannot be cached there: "):
        prepare_corpus(text, tmp_path / "data.txt", silent)


@pytest.mark.skipif(os.name == "nt", reason="process groups are POSIX's")
@pytest.mark.parametrize(
    ("send", "noted"), [(os.kill, False), (os.killpg, False), (os.killpg, True)]
)
def test_an_interrupt_ends_the_child_and_leaves_nothing(
    tmp_path: Path, vocab: Path, send: Callable[[int, int], None], noted: bool
):
    """Sent to the parent, or as a terminal does to both; also where it only sets a flag in the parent."""
    code = (
        "from pathlib import Path\nfrom contextlib import nullcontext\n"
        "from packtrain.data.text import CorpusRecipe, prepare_corpus\n"
        "from packtrain.common.signals import stop_on_signals\n"
        f"with stop_on_signals() if {noted} else nullcontext():\n"
        "    text = CorpusRecipe(Path('data.txt'), Path('vocab.gguf'), 320, True, None, 0.0)\n"
        "    prepare_corpus(text, Path('cache'), print)"
    )
    write_text(tmp_path, PROSE * 6_000)
    shutil.copy(vocab, tmp_path / "vocab.gguf")
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    with process:
        while not list(tmp_path.glob("cache/*/.train.npy*")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        send(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT and b"KeyboardInterrupt" in said
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_child_that_fails_says_why(tmp_path: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONHOME", "/nothing/there")
    with pytest.raises(RuntimeError, match="the child process that prepares the text failed: "):
        prepare_corpus(text_of(write_text(tmp_path, PROSE), vocab), tmp_path / "cache", silent)
    assert list((tmp_path / "cache").iterdir()) == []


def test_progress_is_said(tmp_path: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("packtrain.data.token_cache.SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(text_streams, "CHUNK_NBYTES", 1_000_000)
    said: list[str] = []
    folder = tmp_path / "made"
    folder.mkdir()
    write_corpus(text_of(write_text(tmp_path, PROSE * 2000), vocab), folder, said.append)
    assert said[:2] == ["reading: 0 of 3 MB", "reading: 1 of 3 MB"]
    assert "tokenizing: 2 of 3 MB" in said


def test_a_reader_stays_within_memory_or_names_the_row(tmp_path):
    """Whatever rows are: one that takes more than is left is refused by file and row."""
    row = json.dumps({"text": "ab " * 4_000_000})
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a b"}\n' + row + "\n", encoding="utf-8")
    kernels.prepare(("tokens", "splitting"))  # in no more than the rest
    release_memory()
    used = private_nbytes() + (72 << 20)
    with pytest.raises(InputError, match=r"rows.jsonl: line 2 needs more memory to be read than"):
        prepare_corpus(text_of(data), tmp_path / "cache", silent, f"{used}B")
    with pytest.raises(DoesNotFit, match="needs at least"):
        prepare_corpus(text_of(data), tmp_path / "cache", silent, "8MiB")


def test_the_least_memory_to_read_the_data_leaves_room_for_a_larger_process(tmp_path, monkeypatch):
    """The named limit is that of the next process, which may take some megabytes more before it reads."""
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a b"}\n', encoding="utf-8")
    monkeypatch.setattr(token_cache, "private_nbytes", lambda: 100 << 20)
    with pytest.raises(DoesNotFit, match="needs at least") as error:
        prepare_corpus(text_of(data), tmp_path / "cache", silent, "8MiB")
    assert error.value.__context__ is None  # not that the cache has no tokens yet
    named = parse_size(str(error.value).split()[-1], "--memory")
    monkeypatch.setattr(token_cache, "private_nbytes", lambda: 103 << 20)
    prepare_corpus(text_of(data), tmp_path / "cache", silent, f"{named}B")


def test_the_least_memory_counts_kernels_that_are_still_to_be_compiled(tmp_path, monkeypatch):
    """Else the size that is named would be refused again, after the data is read."""
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a b"}\n', encoding="utf-8")
    for missing, work in (([], "reading the data"), (["row_products"], "compiling kernels, once,")):
        monkeypatch.setattr(kernel_cache, "missing_modules", lambda names, missing=missing: missing)
        with pytest.raises(DoesNotFit, match=f"{work} needs at least") as error:
            prepare_corpus(text_of(data), tmp_path / "cache", silent, "8MiB")
    named_nbytes = parse_size(str(error.value).split()[-1], "--memory")
    loader.choose_mode(named_nbytes, private_nbytes(), ["row_products"])


def test_a_record_that_is_too_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORD_LENGTH", 1000)
    monkeypatch.setattr(text_streams, "CHUNK_NBYTES", 100)
    for name, text in (("a.jsonl.gz", '{"text": "a"}\n"%s"'), ("b.json.gz", '[\n"%s"]')):
        path = tmp_path / name
        path.write_bytes(gzip.compress((text % ("x" * 5000)).encode()))
        with pytest.raises(InputError, match=f"{name}: line 2 has more than"):
            list(records.read_records("", ReadingReport(path)))
