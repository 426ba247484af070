"""Files as streams of JSON values: the lines of a .jsonl, the array of a .json, the rows of a table.

Memory is bounded by the longest record. A bad record goes to the ReadingReport; InputError names file and place."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.text import text_streams
from packtrain.data.text.columnar_files import column_rows
from packtrain.data.text.reading_report import ReadingReport, reading_position
from packtrain.data.text.spreadsheet_tables import table_rows

MAX_RECORD_LENGTH = 1 << 26  # characters of one record
TOO_LONG_FACT = f"has more than {MAX_RECORD_LENGTH:,} characters; a record may have as many"
NUL_FACT = ", and this is not a text file: it begins with NULs"
NON_SPACE = re.compile(r"[^ \t\r\n]")


def read_records(example: str, report: ReadingReport) -> Iterator[tuple[str, Any]]:
    """Yield (place in words, value) of each record of report.path; the report rejects bad ones, quoting `example`."""
    path = report.path
    suffix = text_streams.suffix_of(path)
    raw_records: Iterator[tuple[str, Any]]
    if suffix == text_streams.JSON_SUFFIX:
        raw_records = iter(_JsonArray(path, example))
    elif suffix in text_streams.TABLES:
        raw_records = table_rows(report)
    elif suffix in text_streams.COLUMNS:
        raw_records = column_rows(path)
    else:
        raw_records = _json_lines(example, report)
    for location, value in raw_records:
        try:
            record = report.rename_columns(report.normalize_value(value), location)
        except RecursionError:
            report.reject(InputError(f"{location} is nested too deep", example))
        except InputError as error:
            report.reject(error)
        else:
            yield location, record


def _json_lines(example: str, report: ReadingReport) -> Iterator[tuple[str, Any]]:
    """Yield (place in words, value) of each line of the JSON Lines file that `report` is of; errors quote `example`."""
    path = report.path
    with text_streams.open_decompressed(path) as file:
        for line_number, line in enumerate(
            iter(partial(file.readline, MAX_RECORD_LENGTH + 1), b""), 1
        ):
            location = reading_position["place"] = f"{path}: line {line_number}"
            if len(line) > MAX_RECORD_LENGTH:
                raise InputError(f"{location} {TOO_LONG_FACT}{NUL_FACT if 0 in line[:9] else ''}")
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                report.reject(InputError(f"{location} is not UTF-8", text_streams.as_utf_8(path)))
            except (ValueError, RecursionError):
                report.reject(InputError(f"{location} is not JSON", example))
            else:
                yield location, value


class _JsonArray:
    """Reads the values of a JSON array from chunks of text.

    buffer, at, line  buffered text, the position in it, and the line of the position in the file
    """

    def __init__(self, path: Path, example: str) -> None:
        self.path, self.example = path, example
        self.buffer, self.at, self.line = "", 0, 1
        self._chunks = text_streams.text_chunks(path)
        self._decode = json.JSONDecoder().raw_decode

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        if self._next_character() != "[":
            raise InputError(f"{self.path} must be an array; with one record a line it is a .jsonl")
        self._advance_to(self.at + 1)
        while self._next_character() != "]":
            location = reading_position["place"] = f"{self.path}: line {self.line}"
            yield location, self._read_value()
            if self._next_character() == ",":
                self._advance_to(self.at + 1)
        self._advance_to(self.at + 1)
        if self._next_character():
            fact = f"{self.path}: line {self.line}: text follows the end of the array"
            raise InputError(f"{fact}; {self.example}")

    def _read_value(self) -> Any:
        """Return the next value of the array, after reading as much of the file as it takes."""
        while True:
            try:
                value, end = self._decode(self.buffer, self.at)
            except (ValueError, RecursionError) as error:
                if len(self.buffer) - self.at >= MAX_RECORD_LENGTH:
                    raise InputError(f"{self.path}: line {self.line} {TOO_LONG_FACT}") from None
                if self._fill_buffer():
                    continue  # the rest may follow
                error_position = error.pos if isinstance(error, json.JSONDecodeError) else self.at
                line = self.line + self.buffer.count("\n", self.at, error_position)
                raise InputError(f"{self.path}: line {line} is not JSON; {self.example}") from None
            self._advance_to(end)
            return value

    def _next_character(self) -> str:
        """Move to the next non-whitespace character and return it; "" at the end."""
        while not (match := NON_SPACE.search(self.buffer, self.at)):
            self._advance_to(len(self.buffer))
            if not self._fill_buffer():
                return ""
        self._advance_to(match.start())
        return match[0]

    def _advance_to(self, position: int) -> None:
        self.line += self.buffer.count("\n", self.at, position)
        self.at = position

    def _fill_buffer(self) -> bool:
        """Double the buffer, so that a long record is parsed only a few times; False at the end."""
        self.buffer, self.at = self.buffer[self.at :], 0
        old_length = len(self.buffer)
        for chunk in self._chunks:
            self.buffer += chunk
            if len(self.buffer) > 2 * old_length:
                break
        return len(self.buffer) > old_length
