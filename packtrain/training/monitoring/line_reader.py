"""Lines of a file that another process or thread writes, as they come."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

MAX_LINE_NBYTES = 1 << 16  # a longer line comes in parts, which are no records
HEAD_NBYTES = 256  # first bytes, by which a replaced file is recognized


class LineReader:
    """`new_lines()` yields complete lines since the last call, or all lines if the file was replaced or cut.

    on_reset  called before all lines come again
    """

    def __init__(self, path: Path, on_reset: Callable[[], None]) -> None:
        self.path, self.on_reset = path, on_reset
        self._offset, self._file_key, self._head_bytes = 0, (0, 0), b""

    def new_lines(self) -> Iterator[bytes]:
        """Yield the complete lines since the last call; none if the file cannot be read."""
        try:
            with open(self.path, "rb") as file:
                yield from self._remaining_lines(file)
        except FileNotFoundError:
            if self._offset:
                self._reset()
        except OSError:
            return

    def _reset(self) -> None:
        self._offset, self._head_bytes = 0, b""
        self.on_reset()

    def _remaining_lines(self, file: BinaryIO) -> Iterator[bytes]:
        file_stat = os.fstat(file.fileno())
        file_key = file_stat.st_dev, file_stat.st_ino
        read_head = file.read(len(self._head_bytes))
        is_same_file = file_key == self._file_key and read_head == self._head_bytes
        if self._offset and (not is_same_file or file_stat.st_size < self._offset):
            self._reset()
        self._file_key = file_key
        file.seek(self._offset)
        while line := file.readline(MAX_LINE_NBYTES):
            if not line.endswith(b"\n") and len(line) < MAX_LINE_NBYTES:
                return  # the line is being written
            if len(self._head_bytes) < HEAD_NBYTES and len(self._head_bytes) == self._offset:
                self._head_bytes += line[: HEAD_NBYTES - len(self._head_bytes)]
            self._offset += len(line)
            yield line
