"""Files as streams: UTF-8 text in chunks, JSON records one at a time, from .jsonl or from the array of a .json.

Each may be packed as .gz. Memory is bounded by the longest record; InputError names file and place.
"""

import gzip
import json
import re
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from packtrain.errors import InputError

CHUNK_NBYTES = 1 << 20
LONGEST = 1 << 26  # characters of one record
SOMETHING = re.compile(r"[^ \t\r\n]")
MARK = "\ufeff"


def kind_of(path: Path) -> str:
    """The suffix that says what is in a file, without .gz: `.jsonl`."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file to read, unpacked. Raises InputError if it is no sound .gz."""
    if path.suffix != ".gz":
        with open(path, "rb") as file:
            yield file
        return
    try:
        with gzip.open(path) as file:
            yield cast(BinaryIO, file)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise InputError(f"{path} is damaged, or no gzip file; pack it again") from None


def text_chunks(path: Path) -> Iterator[str]:
    """A file's text as it is, line ends included, without the mark that some editors begin UTF-8 with."""
    decoder = getincrementaldecoder("utf-8")()
    at, begun, last = 0, False, False
    with opened(path) as file:
        while not last:
            chunk = file.read(CHUNK_NBYTES)
            last = not chunk
            if 0 in chunk:
                raise InputError(
                    f"{path}: a NUL at byte {at + chunk.index(0)}; this is no text file"
                )
            waiting = len(decoder.getstate()[0])  # bytes of a character that is not whole yet
            try:
                text = decoder.decode(chunk, final=last)
            except UnicodeDecodeError as error:
                place = at - waiting + error.start
                raise InputError(f"{path}: byte {place} is not UTF-8; save it as UTF-8") from None
            yield text if begun else text.removeprefix(MARK)
            begun = begun or bool(text)
            at += len(chunk)


def read_records(path: Path, wanted: str) -> Iterator[tuple[str, Any]]:
    """Each record and where it is; `wanted` is what an error says that a record must be like."""
    return iter(_Array(path, wanted)) if kind_of(path) == ".json" else _lines(path, wanted)


def _lines(path: Path, wanted: str) -> Iterator[tuple[str, Any]]:
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}: line {number}"
            try:
                yield where, json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                raise InputError(f"{where} is not UTF-8; save it as UTF-8") from None
            except (ValueError, RecursionError):
                raise InputError(f"{where} is not JSON; {wanted}") from None


class _Array:
    """The values of a JSON array that comes in chunks of text.

    text, at, line   what has been read and not been passed yet; the place in it, and this place's line in the file
    """

    def __init__(self, path: Path, wanted: str) -> None:
        self.path, self.wanted = path, wanted
        self.text, self.at, self.line = "", 0, 1
        self._chunks = text_chunks(path)
        self._decode = json.JSONDecoder().raw_decode

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        if self._next() != "[":
            raise InputError(f"{self.path} must be an array; with one record a line it is a .jsonl")
        self._move(self.at + 1)
        while self._next() != "]":
            where = f"{self.path}: line {self.line}"
            yield where, self._value()
            if self._next() == ",":
                self._move(self.at + 1)
        self._move(self.at + 1)
        if self._next():
            raise InputError(
                f"{self.path}: line {self.line}: the array has ended before; {self.wanted}"
            )

    def _value(self) -> Any:
        while True:
            try:
                value, end = self._decode(self.text, self.at)
            except (ValueError, RecursionError) as error:
                if len(self.text) - self.at < LONGEST and self._read():
                    continue  # what is missing may follow
                at = error.pos if isinstance(error, json.JSONDecodeError) else self.at
                line = self.line + self.text.count("\n", self.at, at)
                raise InputError(f"{self.path}: line {line} is not JSON; {self.wanted}") from None
            self._move(end)
            return value

    def _next(self) -> str:
        """The next character that is no whitespace, where the place then is; "" at the end."""
        while not (found := SOMETHING.search(self.text, self.at)):
            self._move(len(self.text))
            if not self._read():
                return ""
        self._move(found.start())
        return found[0]

    def _move(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def _read(self) -> bool:
        """Read on, as much again as is waiting, so that a long record is tried a few times only; false at the end."""
        self.text, self.at = self.text[self.at :], 0
        before = len(self.text)
        for chunk in self._chunks:
            self.text += chunk
            if len(self.text) > 2 * before:
                break
        return len(self.text) > before
