"""Atomic writes: a file is written under a temporary name in the same folder, synced, then renamed."""

import ctypes
import errno
import io
import os
import re
import stat
import sys
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from packtrain.common.errors import InputError
from packtrain.common.mapped_file import page_budget
from packtrain.common.text import did_you_mean

HUB_DATASET = re.compile(r"(?:https?:/+huggingface\.co/datasets/)?([\w.-]+/[\w-]+)")
Check = Callable[[Path], object]  # checks a complete file before its renaming; `bool` accepts all
NUMBERS = count()  # of temporary files: if several threads write one file, the last rename wins
SYNC_WRITE, SYNC_ALL = 2, 7  # SYNC_FILE_RANGE_…: start writing, without waiting; and wait for it
# Windows has no fcntl, hence no lock
fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """`with atomic_path(path) as temp_path:` temp_path replaces `path` when the block succeeds. If the block raises or
    the process dies, the old file stays. The new file keeps the old one's owner and permissions. A symlink stays a
    symlink: its target is replaced. The block must sync the file."""
    path = Path(path).resolve()
    temp_path, old_stat = _temp_path_of(path), path.stat() if path.exists() else None
    if old_stat is not None and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    try:
        if old_stat is not None:
            temp_path.touch(0o600)
        yield temp_path
        if old_stat is not None:
            if sys.platform != "win32":
                with suppress(OSError):  # only some users may give files away
                    os.chown(temp_path, old_stat.st_uid, old_stat.st_gid)
            temp_path.chmod(old_stat.st_mode & 0o777)
        with _freed_in_background(path):
            os.replace(temp_path, path)
    except OSError as error:
        if str(error.filename) == str(temp_path):
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            temp_path.unlink()
    sync_folder(path.parent)


@contextmanager
def _freed_in_background(path: Path) -> Iterator[None]:
    """If the block replaces `path`, free the old file's blocks and pages in a thread: it takes 0.2 s a gigabyte."""
    old_descriptor = None
    if sys.platform != "win32":  # Windows cannot replace an open file
        with suppress(OSError):
            old_descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield
    finally:
        if old_descriptor is not None:
            try:
                start_new_thread(os.close, (old_descriptor,))
            except RuntimeError:  # there are too many threads
                os.close(old_descriptor)


def _temp_path_of(path: Path) -> Path:
    """Return a temporary name beside `path`, from which `remove_temp_files` reads the process id."""
    return path.with_name(f".{path.name}.{next(NUMBERS)}.{os.getpid()}.part")


def remove_temp_files(folder: Path, name: str = "*") -> None:
    """Remove temporary files that killed processes left in `folder` while writing files of this name (a pattern)."""
    for path in folder.glob(f".{name}.*.part"):
        pid = path.suffixes[-2][1:] if len(path.suffixes) > 1 else ""
        if (
            sys.platform != "win32"
            and pid.isdecimal()
            and len(pid) < 10
            and not _is_running(int(pid))
        ):
            path.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:  # another user's process is running, too
        return not isinstance(error, ProcessLookupError)
    return True


@contextmanager
def atomic_file(path: str | Path, check: Check = bool) -> Iterator[BinaryIO]:
    """`with atomic_file(path) as file:` the open file replaces `path` when the block and `check` succeed."""
    with atomic_path(path) as temp_path:
        with io.BufferedWriter(_TempFile(temp_path, path)) as file:
            yield file
            file.flush()
            with _errors_named(path):
                os.fsync(file.fileno())
        check(temp_path)


@contextmanager
def _errors_named(path: str | Path) -> Iterator[None]:
    """Give OSErrors of the block the file's name, which those of writing lack."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


class _TempFile(io.FileIO):
    """A temporary file whose errors name the final file."""

    def __init__(self, temp_path: Path, path: str | Path) -> None:
        super().__init__(temp_path, "w")
        self._path = path

    def write(self, data: Any) -> int:
        with _errors_named(self._path):
            return super().write(data)


def write_ahead(file: BinaryIO, start: int, nbytes: int) -> None:
    """Start writing a range of a file to the disk while more is produced, so that syncing is quick at the end. Where
    pages are limited, those before the range leave memory, once they are on the disk."""
    if sys.platform == "linux":
        sync = getattr(ctypes.CDLL(None), "sync_file_range", lambda *args: 0)
        descriptor = file.fileno()
        sync(descriptor, ctypes.c_int64(start), ctypes.c_int64(nbytes), SYNC_WRITE)
        if page_budget.get() and start:
            sync(descriptor, ctypes.c_int64(0), ctypes.c_int64(start), SYNC_ALL)
            os.posix_fadvise(descriptor, 0, start, os.POSIX_FADV_DONTNEED)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that renames in it survive a crash."""
    if sys.platform == "win32":  # Windows cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically, see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(text.encode())


def check_writable(path: str | Path | None, field: str) -> None:
    """Raise InputError on setting `field` if `path`, unless None, is not writable; removes its old temporary files."""
    if path is None:
        return
    path = Path(path)
    if path.is_dir() or not path.name:
        raise InputError(f"{field}: {path} is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        raise InputError(f"{field}: {path} is not a regular file; give the name of a new file")
    try:
        resolved_path = path.resolve()
    except (RuntimeError, OSError):  # the latter since Python 3.13
        problem = "is a link that leads back to itself; give another name"
        raise InputError(f"{field}: {path} {problem}") from None
    if not resolved_path.parent.exists():
        fact = f"{field}: {path} cannot be written: the folder {path.parent} does not exist"
        raise InputError(f"{fact}; create it first")
    if path.exists() and not _can_replace(resolved_path):
        raise InputError(f"{field}: {path} cannot be replaced: it is another user's")
    remove_temp_files(resolved_path.parent, escape(resolved_path.name))
    probe_path = _temp_path_of(resolved_path)
    try:
        probe_path.touch()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"{field}: {path} cannot be written: {reason}") from None
    finally:
        with suppress(OSError):
            probe_path.unlink()


def _can_replace(path: Path) -> bool:
    """Return whether this user may replace the file: in a folder such as /tmp only the file's or folder's owner may."""
    folder_stat = path.parent.stat()
    if sys.platform == "win32" or not folder_stat.st_mode & stat.S_ISVTX:
        return True
    return os.geteuid() in (0, folder_stat.st_uid, path.stat().st_uid)


def check_not_read(path: Path, field: str, read: Iterable[Path | None]) -> None:
    """Raise InputError if the output `path` is one of the files `read`; `field`: the setting that the message names."""
    if path.exists() and any(
        source.exists() and path.samefile(source) for source in filter(None, read)
    ):
        raise InputError(f"{field}: {path} is one of the files that are read; give another name")


def check_output(output: Path, field: str, read: Iterable[Path | None], overwrite: bool) -> None:
    """Raise InputError on setting `field` if `output` cannot be written, is in `read`, or exists (no --overwrite)."""
    check_writable(output, field)
    check_not_read(output, field, read)
    if output.exists() and not overwrite:
        fact = f"{field}: {output} exists; give another name, or --overwrite to replace it"
        raise InputError(fact)


def require_existing(path: str | Path, field: str) -> Path:
    """Return the path of an existing file or folder. Raises InputError on setting `field` if it cannot be read."""
    path = Path(path)
    if not path.exists():
        peers = os.listdir(path.parent) if path.parent.is_dir() else ()
        advice = did_you_mean(path.name, peers)
        hub_match = HUB_DATASET.fullmatch(path.as_posix()) if field == "--data" else None
        if hub_match and not peers:
            command = f"hf download --repo-type dataset {hub_match[1]} --local-dir {path.name}"
            advice = f"; if it is a data set on Hugging Face, download it first: {command}"
        raise InputError(f"{field}: {path} does not exist{advice}")
    if not path.is_file() and not path.is_dir():
        raise InputError(f"{field}: {path} is not a regular file; save its contents to one first")
    if not os.access(path, os.R_OK):
        raise InputError(f"{field}: {path} cannot be read: permission denied")
    return path


def read_text(path: Path, field: str) -> str:
    """Return the text of a UTF-8 file. Raises InputError, which names the setting `field`."""
    if require_existing(path, field).is_dir():
        raise InputError(f"{field}: {path} is a folder; give a text file")
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{field}: {path} is not UTF-8 text: {error}") from None


@contextmanager
def file_lock(path: Path, description: str) -> Iterator[None]:
    """Lock `path` while the block runs; InputError says that `description` is in use if another process holds it."""
    with open(path, "wb") as file:
        if fcntl is not None and not _try_lock(file, fcntl.LOCK_EX):
            time.sleep(0.05)  # is_locked holds a lock for microseconds
            if not _try_lock(file, fcntl.LOCK_EX):
                fact = f"{description} is in use by another process; wait for it, or end it"
                raise InputError(fact)
        yield


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds `file_lock` on `path`; None if that cannot be known."""
    if fcntl is not None:
        with suppress(OSError), open(path, "rb") as file:  # it may be missing, or another user's
            return not _try_lock(file, fcntl.LOCK_SH)
    return None


def _try_lock(file: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
