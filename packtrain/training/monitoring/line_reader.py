"""Lines of a file that another process or thread writes, as they come."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

LONGEST = 1 << 16  # bytes; a longer line comes in parts, which are no records
HEAD = 256  # bytes by which a file is told from the one that replaced it


class Lines:
    """`new()` returns the whole lines since the last call; from the first again if the file was replaced or cut.

    anew  is called before lines come again
    """

    def __init__(self, path: Path, anew: Callable[[], None]) -> None:
        self.path, self.anew = path, anew
        self._at, self._same, self._head = 0, (0, 0), b""

    def new(self) -> Iterator[bytes]:
        """A file that cannot be read has no lines."""
        try:
            with open(self.path, "rb") as file:
                yield from self._rest(file)
        except FileNotFoundError:
            if self._at:
                self._forget()
        except OSError:
            return

    def _forget(self) -> None:
        self._at, self._head = 0, b""
        self.anew()

    def _rest(self, file: BinaryIO) -> Iterator[bytes]:
        about = os.fstat(file.fileno())
        file_key = about.st_dev, about.st_ino
        head = file.read(len(self._head))
        if self._at and (file_key != self._same or about.st_size < self._at or head != self._head):
            self._forget()
        self._same = file_key
        file.seek(self._at)
        while line := file.readline(LONGEST):
            if not line.endswith(b"\n") and len(line) < LONGEST:
                return  # it is being written
            if len(self._head) < HEAD and len(self._head) == self._at:
                self._head += line[: HEAD - len(self._head)]
            self._at += len(line)
            yield line
