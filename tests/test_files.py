"""Files that are replaced whole: what stays of the old one, and what their errors say."""

import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.common.files import atomic_file, check_not_read, check_writable, write_text
from packtrain.data.text.text_streams import data_files
from packtrain.dtypes import f32
from packtrain.gguf import GGUF, DeferredTensor, GGUFError, MetadataValue, write_gguf
from packtrain.gguf.gguf_writer import _write_pieces

FULL = """
import resource, signal, sys, numpy as np
from packtrain.gguf import write_gguf
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_gguf(sys.argv[1], {}, {"a": np.zeros(int(sys.argv[2]), np.float32)})
except OSError as error:
    print(error.filename)
"""
needs_rights = pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")


@needs_rights
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_who_may_read_a_file_stays_the_same(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("old")
    path.chmod(mode)
    with atomic_file(path) as file:
        (part,) = tmp_path.glob(".*.part")
        assert part.stat().st_mode & 0o077 == 0
        file.write(b"new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == mode


@needs_rights
@pytest.mark.parametrize("count", [30_000, 20_000_000])
def test_errors_of_writing_name_the_file(tmp_path: Path, count: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("old")
    completed = subprocess.run(
        [sys.executable, "-c", FULL, str(path), str(count)], capture_output=True, text=True
    )
    assert completed.stdout == f"{path}\n", completed.stderr
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_an_error_from_elsewhere_does_not_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, atomic_file(tmp_path / "m.gguf"):
        raise OSError(28, "No space left on device")  # such as of standard output
    assert caught.value.filename is None


def test_a_file_that_threads_write_is_of_one_of_them(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def parts(number: int) -> list[np.ndarray]:
        time.sleep(0.01)
        return [np.full(1000, number, np.float32)] * 50

    def write_one(number: int) -> None:
        write_gguf(path, {}, {"a": DeferredTensor(f32, (50_000,), lambda: parts(number))})

    threads = [threading.Thread(target=write_one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = GGUF(path).array("a")
    assert (values == values[0]).all() and [*tmp_path.iterdir()] == [path]


def test_after_an_error_what_waits_is_not_written() -> None:
    class Slow(io.BytesIO):
        def write(self, data: object, /) -> int:
            time.sleep(0.05)
            return super().write(data)  # type: ignore[arg-type]

    def pieces() -> object:
        yield from [memoryview(bytes(10))] * 20
        raise ValueError("a part cannot be made")

    file = Slow()
    with pytest.raises(ValueError, match="a part cannot be made"):
        _write_pieces(file, pieces(), 1000)  # type: ignore[arg-type]
    assert len(file.getvalue()) < 50


@needs_rights
def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(InputError, match=r"-o: .*a is a link that leads back to itself"):
        check_writable(tmp_path / "a", "-o")


@pytest.mark.parametrize("value", [0, 3, 1 << 21])
def test_an_alignment_that_cannot_be_read_is_not_written(tmp_path: Path, value: int) -> None:
    values = {"general.alignment": MetadataValue("u32", value)}
    with pytest.raises(GGUFError, match=f"alignment is {value}; it must be a power of two"):
        write_gguf(tmp_path / "m.gguf", values, {"a": np.zeros(4, np.float32)})
    assert not [*tmp_path.iterdir()]


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not a regular file") as caught:
        write_gguf(tmp_path, {}, {"a": np.zeros(4, np.float32)})
    assert caught.value.filename == str(tmp_path)


def test_a_missing_folder_is_named_and_not_the_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "none" / "m.gguf"
    with pytest.raises(FileNotFoundError) as caught:
        write_gguf(path, {}, {"a": np.zeros(4, np.float32)})
    assert caught.value.filename == str(path)


@needs_rights
def test_the_old_file_is_closed_where_no_thread_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("packtrain.common.files.start_new_thread", refused)
    path, opened = tmp_path / "m.txt", len(os.listdir("/dev/fd"))
    for text in ("old", "new"):
        write_text(path, text)
    assert path.read_text() == "new" and len(os.listdir("/dev/fd")) == opened


@needs_rights
def test_data_are_known_through_links(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "own.data").write_text("a text")
    (tmp_path / "data" / "b.txt").symlink_to(tmp_path / "own.data")
    (tmp_path / "data" / "plan.html").write_text("of an earlier run")
    read = data_files(tmp_path / "data")
    check_not_read(tmp_path / "data" / "plan.html", "--html", read)
    with pytest.raises(InputError, match=r"own\.data is one of the files that are read"):
        check_not_read(tmp_path / "own.data", "-o", read)
