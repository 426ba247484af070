"""Rows of .csv and .tsv files and of spreadsheets as records: the header names the fields, empty rows are skipped.

The delimiter is comma, semicolon or tab, whichever is most frequent in the header; quoted cells may contain line
breaks. A row with more or fewer cells than the header is a bad record, not a guess: an unquoted comma would silently
cut an answer. Rows count as in a spreadsheet: the header is row 1, and line breaks in cells do not count."""

import csv
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from packtrain.common.errors import InputError
from packtrain.common.text import plural, shortlist
from packtrain.data.text.columnar_files import sheet_rows
from packtrain.data.text.field_names import fields_of, renaming
from packtrain.data.text.reading_report import ReadingReport
from packtrain.data.text.text_streams import SHEET_SUFFIXES, suffix_of, text_chunks

MAX_CELL_LENGTH = 1 << 24  # characters; csv takes four bytes for each
MAX_LINE_LENGTH = 1 << 26
LINE_END = re.compile(r"\r\n|\n|\r(?=.)", re.DOTALL)  # a `\n` may follow a last `\r`
QUOTED_CELL = re.compile(r'"[^"]*"')
DELIMITER_LINE = re.compile(r"sep=([,;\t])\s*", re.IGNORECASE)  # Excel's first line


def table_rows(report: ReadingReport) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (place in words, row as a dict) of each row; --columns by numbers means no header. Raises InputError."""
    rows = sheet_rows(report) if suffix_of(report.path) in SHEET_SUFFIXES else _csv_rows(report)
    location, header = next(rows, ("", []))
    report.header = location
    if header and report.requested_fields and all(c.isdecimal() for c in report.requested_fields):
        if renamed := renaming(header, fields_of([name.strip().lower() for name in header], {})):
            fact = f"--columns: {location} is a header: {renamed}"
            raise InputError(f"{fact}; leave --columns out, or name its columns")
        rows = chain([(location, header)], rows)
        header = [str(column_number) for column_number in range(1, len(header) + 1)]
        report.remarks.append("row 1 is a record, as --columns has numbers")
    names = [name.strip() for name in header]
    report.column_names = [name for name in names if name]
    lower_names = [name.lower() for name in names]  # spreadsheets capitalize names
    duplicate = next((name for name in lower_names if name and lower_names.count(name) > 1), None)
    if duplicate is not None:
        fact = f"{location} names the field {duplicate} twice"
        raise InputError(f"{fact}; each column needs its own name")
    absent = next((column for column in report.requested_fields if column not in lower_names), None)
    if header and absent is not None:
        available = shortlist(report.column_names)
        raise InputError(f"--columns: {location} has no column {absent}; there are {available}")
    for location, cells in rows:
        while len(cells) > len(names) and not cells[-1]:
            cells.pop()
        if len(cells) == len(names):  # columns without a name are row numbers that tools write
            yield location, {name: cell for name, cell in zip(names, cells, strict=True) if name}
            continue
        num_cells, num_columns = plural(len(cells), "cell"), plural(len(names), "column")
        fact = f"{location} has {num_cells} where the header has {num_columns}"
        advice = "a cell that contains the delimiter or a line break must be in double quotes"
        report.reject(InputError(fact, advice))


def _csv_rows(report: ReadingReport) -> Iterator[tuple[str, list[str]]]:
    """Yield (place in words, cells) of each non-empty row, the header included."""
    path = report.path
    lines = _split_lines(path)
    first_line, delimiter, num_skipped, row = "", "", 0, 0
    for first_line in lines:
        num_skipped += 1
        if declaration := DELIMITER_LINE.fullmatch(first_line):
            delimiter = declaration[1]
        elif first_line.strip():
            break
        else:
            row += 1
    csv.field_size_limit(MAX_CELL_LENGTH)
    delimiter = delimiter or _find_delimiter(first_line, suffix_of(path))
    csv_lines = CsvLines(chain([first_line], lines))
    reader = csv.reader(csv_lines, delimiter=delimiter, strict=True)
    while True:
        line, row, csv_lines.num_characters = num_skipped + reader.line_num, row + 1, 0
        try:
            cells = next(reader, None)
        except csv.Error:
            fact, advice = csv_lines.error
            report.reject(InputError(f"{path}: line {line}: {fact}", advice))
            continue
        if cells is None:
            return
        if any(cells):
            yield f"{path}: row {row}", cells


class CsvLines:
    """Yields lines to csv.reader; `error` then says why csv refused a row.

    num_characters  characters since the last row
    has_ended       whether the last line has been read
    """

    def __init__(self, lines: Iterator[str]) -> None:
        self.lines, self.num_characters, self.has_ended = lines, 0, False

    def __iter__(self) -> Iterator[str]:
        for line in self.lines:
            self.num_characters += len(line)
            yield line
        self.has_ended = True

    @property
    def error(self) -> tuple[str, str]:
        """Return (what is wrong with a row that csv refuses, what to do)."""
        if self.has_ended:
            return "a quoted cell begins here and never ends", "its last quote is missing"
        if self.num_characters > MAX_CELL_LENGTH:
            return f"a cell has more than {MAX_CELL_LENGTH:,} characters", "a quote may be missing"
        return "text follows a quoted cell", "a quote within quotes must be doubled"


def _find_delimiter(header_line: str, suffix: str) -> str:
    """Return the most frequent of comma, semicolon and tab in the header, outside quotes; of equals, the suffix's."""
    unquoted = QUOTED_CELL.sub("", header_line)
    default = "\t" if suffix == ".tsv" else ","
    return max((default, ",", ";", "\t"), key=unquoted.count)


def _split_lines(path: Path) -> Iterator[str]:
    """Yield lines with their line ends, of any kind."""
    buffer, line_number = "", 1
    for chunk in text_chunks(path):
        buffer += chunk
        line_start = 0
        for match in LINE_END.finditer(buffer):
            yield buffer[line_start : match.end()]
            line_start, line_number = match.end(), line_number + 1
        buffer = buffer[line_start:]
        if len(buffer) > MAX_LINE_LENGTH:
            fact = f"{path}: line {line_number} is longer than {MAX_LINE_LENGTH:,} characters"
            raise InputError(f"{fact}; this is not a CSV file")
    if buffer:
        yield buffer
