"""GGUF files: what is written is read again, real files come out byte for byte, bad ones get their line."""

import importlib
import shutil
import struct
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from packtrain.dtypes import BLOCK_TYPES, bf16, f32
from packtrain.gguf import GGUF, DeferredTensor, GGUFError, MetadataValue, write_gguf

SHARED = Path(__file__).parent.parent.parent / "shared/data"
STORIES = SHARED / "models/stories260K/stories260K.gguf"
needs_shared = pytest.mark.shared

METADATA = {
    "general.architecture": MetadataValue("string", "llama"),
    "llama.block_count": MetadataValue("u32", 5),
    "llama.attention.layer_norm_rms_epsilon": MetadataValue("f32", 1e-5),
    "tokenizer.ggml.add_bos_token": MetadataValue("bool", True),
    "tokenizer.ggml.tokens": MetadataValue("string", [b"a", "\u2581", b"\xff"]),
    "tokenizer.ggml.scores": MetadataValue("f32", [0.5, -1.0]),
    "big": MetadataValue("u64", 1 << 60),
}
TENSORS = {
    "token_embd.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.arange(6, dtype=np.float16).reshape(1, 2, 3),
    "brain": np.arange(12, dtype=np.uint8).reshape(2, 6).view(bf16.numpy),
    "packed": np.arange(136, dtype=np.uint8).reshape(2, 68).view(BLOCK_TYPES["q8_0"].numpy),
    "empty": np.zeros((0, 4), np.float32),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "m.gguf", METADATA, TENSORS)
    return tmp_path / "m.gguf"


def test_what_is_written_is_read(path: Path) -> None:
    file = GGUF(path)
    metadata = file.metadata
    assert metadata["general.architecture"] == "llama" and metadata["llama.block_count"] == 5
    assert metadata["tokenizer.ggml.tokens"] == [b"a", "\u2581".encode(), b"\xff"]
    assert metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0]
    assert metadata["big"] == 1 << 60 and metadata["tokenizer.ggml.add_bos_token"] is True
    assert {name: e.shape for name, e in file.entries.items()} == {
        "token_embd.weight": (3, 4), "half": (1, 2, 3), "brain": (2, 3), "packed": (2, 64), "empty": (0, 4),
    }  # fmt: skip
    for name, expected in TENSORS.items():
        array = file.array(name)
        assert array.dtype == expected.dtype and np.array_equal(array, expected)
        assert not array.flags.writeable
        assert file.entries[name].offset % 32 == 0


@needs_shared
def test_a_real_file_comes_out_byte_for_byte(tmp_path: Path) -> None:
    file = GGUF(STORIES)
    write_gguf(
        tmp_path / "again.gguf", file.values, {name: file.array(name) for name in file.entries}
    )
    assert (tmp_path / "again.gguf").read_bytes() == STORIES.read_bytes()
    legacy = np.fromfile(STORIES.with_suffix(".bin"), np.float32, 512 * 64, offset=28)
    assert np.array_equal(file.array("token_embd.weight").ravel(), legacy)


@needs_shared
def test_a_large_vocabulary_opens_quickly() -> None:
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        file = GGUF(SHARED / "tokenizers/ggml-vocab/ggml-vocab-llama-bpe.gguf")
        seconds.append(time.thread_time() - start)
    assert len(file.metadata["tokenizer.ggml.merges"]) == 280_147
    assert min(seconds) <= 0.3, seconds


def test_a_failed_write_leaves_what_was_there(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(GGUFError, match="big: kind u128 is none of u8, "):
        write_gguf(path, METADATA | {"big": MetadataValue("u128", 1)}, TENSORS)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("name", ["x" * 64, "\u00e9" * 32])
def test_a_name_too_long_is_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(GGUFError, match="more than 63 bytes"):
        write_gguf(tmp_path / "m.gguf", {}, {name: np.zeros(1, np.float32)})


def head(version: int = 3, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def string_bytes(s: bytes) -> bytes:
    return struct.pack("<Q", len(s)) + s


def tensor_bytes(name: bytes, shape: list[int], number: int, offset: int) -> bytes:
    return string_bytes(name) + struct.pack(
        f"<I{len(shape)}QIQ", len(shape), *shape, number, offset
    )


BAD = {
    "this is not a GGUF file: it has 21 bytes, fewer than 24": head()[:21],
    r"this is not a GGUF file: it begins with 'GGML'": b"GGML" + head()[4:],
    "version 9; versions 2 and 3 can be read": head(9),
    "tensor count 1152921504606846976 needs": head(tensors=1 << 60),
    "metadata count 99 needs 1287 bytes": head(pairs=99),
    "length of a metadata key 5000 needs": head(pairs=1) + struct.pack("<QQ", 5000, 0),
    "a metadata key at 32 is not UTF-8": head(pairs=1) + string_bytes(b"\xff\xfe") + bytes(8),
    "x has type 77; types go from 0 to 12": head(pairs=1) + string_bytes(b"x") + struct.pack("<I", 77),
    "metadata key x occurs twice": head(pairs=2) + 2 * (string_bytes(b"x") + struct.pack("<IB", 0, 1)),
    "x is an array of arrays": head(pairs=1) + string_bytes(b"x") + struct.pack("<IIQ", 9, 9, 0),
    "length of x 4611686018427387904 needs": head(pairs=1) + string_bytes(b"x") + struct.pack("<IIQ", 9, 4, 1 << 62),
    "string 1 of x at 57 does not end within": head(pairs=1)
    + string_bytes(b"x") + struct.pack("<IIQ", 9, 8, 2) + string_bytes(b"") + struct.pack("<Q", 9),
    "general.alignment is 3; it must be a power of two": head(pairs=1)
    + string_bytes(b"general.alignment") + struct.pack("<II", 4, 3),
    "is longer than 63 bytes": head(tensors=1) + tensor_bytes(b"n" * 64, [1], 0, 0),
    "t has 9 axes; at most 4": head(tensors=1) + tensor_bytes(b"t", [1] * 9, 0, 0),
    "t has unknown tensor type 31": head(tensors=1) + tensor_bytes(b"t", [1], 31, 0),
    "rows of t have 33 elements; q8_0 packs 32 each": head(tensors=1) + tensor_bytes(b"t", [33], 8, 0),
    "t is at offset 7, no multiple of the alignment 32": head(tensors=1) + tensor_bytes(b"t", [1], 0, 7) + bytes(99),
    "t needs 4000 bytes at offset 0, the file has 0; download": head(tensors=1) + tensor_bytes(b"t", [1000], 0, 0),
    "t has shape [2, 4611686018427387904, 4611686018427387904]; nothing": head(tensors=1)
    + tensor_bytes(b"t", [1 << 62, 1 << 62, 2], 0, 0),
    "t has shape [0, 9223372036854775807]; nothing": head(tensors=1)
    + tensor_bytes(b"t", [(1 << 63) - 1, 0], 0, 0) + bytes(99),
    "rows of t have 1 elements; q8_0 packs 32 each": head(tensors=1) + tensor_bytes(b"t", [], 8, 0),
    "u at offset 64 shares bytes with t; it must begin at 128": head(tensors=2)
    + tensor_bytes(b"t", [32], 0, 0) + tensor_bytes(b"u", [32], 0, 64) + bytes(999),
    "general.alignment is of kind i32; it must be one u32": head(pairs=1)
    + string_bytes(b"general.alignment") + struct.pack("<II", 5, 32),
    "tensor count 20000; at most 16384": head(tensors=20000) + bytes(24 * 20000),
    "x has 2097153 strings; at most 2097152": head(pairs=1) + string_bytes(b"x")
    + struct.pack("<IIQ", 9, 8, (1 << 21) + 1) + bytes(8 << 21) + bytes(8),
    r"metadata key \x1b[2J\n occurs twice": head(pairs=2) + 2 * (string_bytes(b"\x1b[2J\n") + struct.pack("<IB", 0, 1)),
    "'t' is longer than 63 bytes or occurs twice": head(tensors=2) + 2 * tensor_bytes(b"t", [0], 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("line", BAD)
def test_a_bad_file_gets_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(BAD[line])
    with pytest.raises(GGUFError) as error:
        GGUF(path)
    assert line in str(error.value) and str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def split_keys(no: int, count: int = 3) -> dict[str, MetadataValue]:
    return {"split.no": MetadataValue("u16", no), "split.count": MetadataValue("u16", count)}


def write_split(folder: Path, count: int = 3) -> list[Path]:
    """The five tensors in so many parts, the metadata in the first, as gguf-split writes them."""
    paths = [folder / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        first = (
            {"split.tensors.count": MetadataValue("i32", len(TENSORS)), **METADATA}
            if i == 0
            else {}
        )
        write_gguf(path, split_keys(i, count) | first, dict(list(TENSORS.items())[i::count]))
    return paths


@pytest.mark.parametrize("part_index", range(3))
def test_all_parts_of_a_split_file_are_opened(tmp_path: Path, part_index: int) -> None:
    paths = write_split(tmp_path)
    file = GGUF(paths[part_index])
    assert file.paths == tuple(paths) and file.path == paths[0]
    assert file.metadata["llama.block_count"] == 5 and file.entries.keys() == TENSORS.keys()
    assert file.nbytes == sum(path.stat().st_size for path in paths)
    for name, expected in TENSORS.items():
        assert np.array_equal(
            file.array(name), expected[1] if isinstance(expected, tuple) else expected
        )


BAD_PARTS: dict[str, Callable[[list[Path]], object]] = {
    "m-00002-of-00003.gguf: cannot be read: no such file": lambda p: p[1].unlink(),
    "m-00003-of-00003.gguf: this is not a GGUF file: it begins with 'xxxx'": lambda p: p[
        2
    ].write_bytes(b"x" * 99),
    "m-00003-of-00003.gguf: split.no is 1; in part 3 of 3 it must be 2": lambda p: shutil.copy(
        p[1], p[2]
    ),
    "m-00002-of-00003.gguf: split.count is missing; in part 2 of 3 it must be 3": (
        lambda p: write_gguf(p[1], {}, {})
    ),
    "m-00002-of-00003.gguf: split.count is 4; in part 2 of 3 it must be 3": (
        lambda p: write_gguf(p[1], split_keys(1, 4), {})
    ),
    "split.tensors.count is 5, and the parts have 4 tensors": lambda p: write_gguf(
        p[2], split_keys(2), {}
    ),
    "m-00003-of-00003.gguf: tensor half is also in an earlier part": (
        lambda p: write_gguf(p[2], split_keys(2), {"half": np.zeros(3, np.float32)})
    ),
    "m-00001-of-00003.gguf: split.count is not a whole number": (
        lambda p: write_gguf(p[0], split_keys(0) | {"split.count": MetadataValue("f32", 3.0)}, {})
    ),
}


@pytest.mark.parametrize("line", BAD_PARTS)
def test_bad_parts_get_their_line(tmp_path: Path, line: str) -> None:
    paths = write_split(tmp_path)
    BAD_PARTS[line](paths)
    with pytest.raises(GGUFError) as error:
        GGUF(paths[0])
    assert line in str(error.value) and str(error.value).startswith(str(tmp_path))


def test_a_part_must_be_called_as_one(tmp_path: Path) -> None:
    renamed = write_split(tmp_path)[0].rename(tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match=r"must be called NAME-00001-of-00003\.gguf and so on"):
        GGUF(renamed)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_closed_file_is_unmapped_when_no_array_of_it_is_left(path: Path) -> None:
    def is_mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    write_gguf(path, {"general.architecture": MetadataValue("string", "llama")}, TENSORS)
    file = GGUF(path)
    array = file.array("half")
    file.close()
    assert is_mapped() and (array == TENSORS["half"]).all()
    with pytest.raises(TypeError):
        file.array("half")
    del array
    assert not is_mapped()


def test_every_truncation_is_refused(path: Path) -> None:
    content = path.read_bytes()
    end = max(e.offset + e.nbytes for e in GGUF(path).entries.values())
    for size in range(0, end, 7):
        path.write_bytes(content[:size])
        with pytest.raises(GGUFError):
            GGUF(path)


def test_what_is_written_is_handed_to_the_disk_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written_ranges: list[tuple[int, int]] = []
    module = importlib.import_module("packtrain.gguf.gguf_writer")
    monkeypatch.setattr(module, "WRITE_AHEAD_NBYTES", 1000)
    monkeypatch.setattr(
        module, "write_ahead", lambda file, at, count: written_ranges.append((at, count))
    )
    x = np.arange(3000, dtype=np.float32)
    write_gguf(
        tmp_path / "m.gguf",
        {},
        {"a": x, "b": x[:7], "c": DeferredTensor(f32, (3000,), lambda: np.split(x, 30))},
    )
    assert (GGUF(tmp_path / "m.gguf").array("c") == x).all()
    assert written_ranges[0][0] == 0 and all(count % 1000 == 0 for _, count in written_ranges)
    assert [at for at, _ in written_ranges[1:]] == [at + count for at, count in written_ranges[:-1]]
    assert sum(count for _, count in written_ranges) > (tmp_path / "m.gguf").stat().st_size - 1000


@pytest.mark.parametrize("waiting", [0, 100_000])
def test_where_nothing_may_wait_a_tensor_is_written_before_the_next_is_made(tmp_path, waiting):
    array_refs, alive = list["weakref.ref[np.ndarray]"](), list[int]()

    def values() -> list[np.ndarray]:
        until = time.monotonic() + 5
        while (
            waiting == 0
            and time.monotonic() < until
            and any(ref() is not None for ref in array_refs)
        ):
            time.sleep(0.001)  # the thread lets go of a part just after it is written
        alive.append(sum(ref() is not None for ref in array_refs))
        new = np.full(1000, len(array_refs), np.float32)
        array_refs.append(weakref.ref(new))
        return [new]

    tensors = {f"t{i}": DeferredTensor(f32, (1000,), values) for i in range(8)}
    write_gguf(tmp_path / "m.gguf", {}, tensors, waiting)
    assert waiting or alive == [0] * 8
    read = GGUF(tmp_path / "m.gguf")
    assert all((read.array(f"t{i}") == i).all() for i in range(8))
