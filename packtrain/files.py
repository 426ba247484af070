"""Files that are whole or not there: written beside their place, synced, then renamed over it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from packtrain.errors import InputError

# Windows has none: no lock there
fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None


@contextmanager
def beside(path: str | Path) -> Iterator[Path]:
    """`with beside(path) as part:` a name for a file that takes the place of `path` once the block has ended well.

    Until then, and for ever if the block raises or the process dies, what was there stays as it was. A link stays a
    link: what it points to is replaced. The file must be on the disk when the block ends.
    """
    path = Path(path).resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say whose write it was
        raise
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """`with replacing(path) as file:` a file that takes the place of `path`, see beside."""
    with beside(path) as part, open(part, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames within a folder last."""
    if os.name == "nt":  # folders cannot be opened there
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_text(path: str | Path, text: str) -> None:
    """The whole file at once, see replacing."""
    with replacing(path) as file:
        file.write(text.encode())


def check_writable(path: str | Path, field: str) -> None:
    """Raise InputError unless a file can be made at `path`: found before the work, not after it."""
    path = Path(path)
    if path.is_dir() or not path.name:
        raise InputError(f"{field}: {path} is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        raise InputError(f"{field}: {path} is not a regular file; give the name of a new file")
    if not path.resolve().parent.exists():
        raise InputError(
            f"{field}: {path} cannot be written: the folder {path.parent} does not exist; make it first"
        )
    trial = path.resolve().with_name(f".{path.resolve().name}.{os.getpid()}.part")
    try:
        trial.touch()
        trial.unlink()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"{field}: {path} cannot be written: {reason}") from None


def existing(path: str | Path, field: str) -> Path:
    """The path of a file or folder that must be there. Raises InputError if it is not, or cannot be read."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{field}: {path} does not exist")
    if not path.is_file() and not path.is_dir():
        raise InputError(f"{field}: {path} is not a regular file; save its contents to one first")
    if not os.access(path, os.R_OK):
        raise InputError(f"{field}: {path} cannot be read: permission denied")
    return path


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold `path` against other processes. Raises InputError if one has it; the system lets go of it at any end."""
    with open(path, "wb") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"{what} is in use by another process; wait for it, or end it"
                ) from None
        yield
