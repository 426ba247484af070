"""Files as streams of JSON values: the lines of a .jsonl, the array of a .json, the rows of a table.

Memory is bounded by the longest record. A bad record goes to the file's Report; InputError names file and place.
"""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.text.columnar_files import column_rows
from packtrain.data.text.reading_report import Report, reading
from packtrain.data.text.spreadsheet_tables import table_rows
from packtrain.data.text.text_streams import (
    ARRAY,
    COLUMNS,
    TABLES,
    as_utf_8,
    kind_of,
    opened,
    text_chunks,
)

LONGEST = 1 << 26  # characters of one record
TOO_LONG = f"has more than {LONGEST:,} characters; a record may have as many"
NULS = ", and this is not a text file: it begins with NULs"
SOMETHING = re.compile(r"[^ \t\r\n]")


def read_records(example: str, report: Report) -> Iterator[tuple[str, Any]]:
    """Each record of the report's file and its place; errors quote `example`, an example of a good record."""
    path = report.path
    kind = kind_of(path)
    values: Iterator[tuple[str, Any]]
    if kind == ARRAY:
        values = iter(_Array(path, example))
    elif kind in TABLES:
        values = table_rows(report)
    elif kind in COLUMNS:
        values = column_rows(path)
    else:
        values = _lines(example, report)
    for location, value in values:
        try:
            record = report.record(report.value(value), location)
        except RecursionError:
            report.reject(InputError(f"{location} is nested too deep", example))
        except InputError as error:
            report.reject(error)
        else:
            yield location, record


def _lines(example: str, report: Report) -> Iterator[tuple[str, Any]]:
    path = report.path
    with opened(path) as file:
        for number, line in enumerate(iter(partial(file.readline, LONGEST + 1), b""), 1):
            location = reading["place"] = f"{path}: line {number}"
            if len(line) > LONGEST:
                raise InputError(f"{location} {TOO_LONG}{NULS if 0 in line[:9] else ''}")
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                report.reject(InputError(f"{location} is not UTF-8", as_utf_8(path)))
            except (ValueError, RecursionError):
                report.reject(InputError(f"{location} is not JSON", example))
            else:
                yield location, value


class _Array:
    """The values of a JSON array that comes in chunks of text.

    text, at, line   buffered text, the position in it, and the line of the position in the file
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
            location = reading["place"] = f"{self.path}: line {self.line}"
            yield location, self._value()
            if self._next() == ",":
                self._move(self.at + 1)
        self._move(self.at + 1)
        if self._next():
            raise InputError(
                f"{self.path}: line {self.line}: text follows the end of the array; {self.wanted}"
            )

    def _value(self) -> Any:
        while True:
            try:
                value, end = self._decode(self.text, self.at)
            except (ValueError, RecursionError) as error:
                if len(self.text) - self.at >= LONGEST:
                    raise InputError(f"{self.path}: line {self.line} {TOO_LONG}") from None
                if self._read():
                    continue  # the rest may follow
                at = error.pos if isinstance(error, json.JSONDecodeError) else self.at
                line = self.line + self.text.count("\n", self.at, at)
                raise InputError(f"{self.path}: line {line} is not JSON; {self.wanted}") from None
            self._move(end)
            return value

    def _next(self) -> str:
        """Move to the next non-whitespace character and return it; "" at the end."""
        while not (match := SOMETHING.search(self.text, self.at)):
            self._move(len(self.text))
            if not self._read():
                return ""
        self._move(match.start())
        return match[0]

    def _move(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def _read(self) -> bool:
        """Double the buffer, so that a long record is parsed only a few times; False at the end."""
        self.text, self.at = self.text[self.at :], 0
        old_length = len(self.text)
        for chunk in self._chunks:
            self.text += chunk
            if len(self.text) > 2 * old_length:
                break
        return len(self.text) > old_length
