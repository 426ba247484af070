"""Rows of .csv and .tsv files and of spreadsheets as records: the header names the fields, empty rows are skipped.

The delimiter is comma, semicolon or tab, whichever is most frequent in the header; quoted cells may contain line
breaks. A row with more or fewer cells than the header is a bad record. Rows count as in a spreadsheet: the header is
row 1, and line breaks in cells do not count.
"""

import csv
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from packtrain.common.errors import InputError
from packtrain.common.text import plural, shortlist
from packtrain.data.text.columnar_files import sheet_rows
from packtrain.data.text.field_names import fields_of, renaming
from packtrain.data.text.reading_report import Report
from packtrain.data.text.text_streams import SHEETS, kind_of, text_chunks

LONGEST_CELL = 1 << 24  # characters; csv takes four bytes for each
LONGEST_LINE = 1 << 26
END = re.compile(r"\r\n|\n|\r(?=.)", re.DOTALL)  # a `\n` may follow a last `\r`
QUOTED = re.compile(r'"[^"]*"')
TOLD = re.compile(r"sep=([,;\t])\s*", re.IGNORECASE)  # a first line that Excel reads and writes


def table_rows(report: Report) -> Iterator[tuple[str, dict[str, str]]]:
    """Each row as a dict, and its place; columns named by number in --columns have no header. Raises InputError."""
    rows = sheet_rows(report) if kind_of(report.path) in SHEETS else _rows(report)
    location, header = next(rows, ("", []))
    report.header = location
    if header and report.given and all(column.isdecimal() for column in report.given):
        if renamed := renaming(header, fields_of([name.strip().lower() for name in header], {})):
            raise InputError(
                f"--columns: {location} is a header: {renamed}; leave --columns out, or name its columns"
            )
        rows = chain([(location, header)], rows)
        header = [str(number) for number in range(1, len(header) + 1)]
        report.remarks.append("row 1 is a record, as --columns has numbers")
    names = [name.strip() for name in header]
    report.names = [name for name in names if name]
    lower = [name.lower() for name in names]  # spreadsheets capitalize names
    duplicate = next((name for name in lower if name and lower.count(name) > 1), None)
    if duplicate is not None:
        raise InputError(
            f"{location} names the field {duplicate} twice; each column needs its own name"
        )
    absent = next((column for column in report.given if column not in lower), None)
    if header and absent is not None:
        available = shortlist(report.names)
        raise InputError(f"--columns: {location} has no column {absent}; there are {available}")
    for location, cells in rows:
        while len(cells) > len(names) and not cells[-1]:
            cells.pop()
        if len(cells) == len(names):  # columns without a name are row numbers of tools
            yield location, {name: cell for name, cell in zip(names, cells, strict=True) if name}
            continue
        num_cells, num_columns = plural(len(cells), "cell"), plural(len(names), "column")
        report.reject(
            InputError(
                f"{location} has {num_cells} where the header has {num_columns}",
                "a cell that contains the delimiter or a line break must be in double quotes",
            )
        )


def _rows(report: Report) -> Iterator[tuple[str, list[str]]]:
    """The non-empty rows, including the header, and the place of each."""
    path = report.path
    lines = _lines(path)
    first, delimiter, num_skipped, row = "", "", 0, 0
    for first in lines:
        num_skipped += 1
        if declaration := TOLD.fullmatch(first):
            delimiter = declaration[1]
        elif first.strip():
            break
        else:
            row += 1
    csv.field_size_limit(LONGEST_CELL)
    delimiter = delimiter or _delimiter(first, kind_of(path))
    line_feed = Fed(chain([first], lines))
    reader = csv.reader(line_feed, delimiter=delimiter, strict=True)
    while True:
        line, row, line_feed.characters = num_skipped + reader.line_num, row + 1, 0
        try:
            cells = next(reader, None)
        except csv.Error:
            report.reject(InputError(f"{path}: line {line}: {line_feed.fact}", line_feed.advice))
            continue
        if cells is None:
            return
        if any(cells):
            yield f"{path}: row {row}", cells


class Fed:
    """Lines on their way to csv.

    characters  since the last row
    ended       whether the last line has been read
    """

    def __init__(self, lines: Iterator[str]) -> None:
        self.lines, self.characters, self.ended = lines, 0, False

    def __iter__(self) -> Iterator[str]:
        for line in self.lines:
            self.characters += len(line)
            yield line
        self.ended = True

    @property
    def fact(self) -> str:
        """What is wrong with a row that csv refuses."""
        if self.ended:
            return "a quoted cell begins here and never ends"
        if self.characters > LONGEST_CELL:
            return f"a cell has more than {LONGEST_CELL:,} characters"
        return "text follows a quoted cell"

    @property
    def advice(self) -> str:
        if self.ended:
            return "its last quote is missing"
        if self.characters > LONGEST_CELL:
            return "a quote may be missing"
        return "a quote within quotes must be doubled"


def _delimiter(first: str, kind: str) -> str:
    """The most frequent delimiter in the header, outside quotes."""
    unquoted = QUOTED.sub("", first)
    default = "\t" if kind == ".tsv" else ","
    return max((default, ",", ";", "\t"), key=unquoted.count)


def _lines(path: Path) -> Iterator[str]:
    """Lines with their line ends, of any kind."""
    rest, number = "", 1
    for chunk in text_chunks(path):
        rest += chunk
        at = 0
        for match in END.finditer(rest):
            yield rest[at : match.end()]
            at, number = match.end(), number + 1
        rest = rest[at:]
        if len(rest) > LONGEST_LINE:
            raise InputError(
                f"{path}: line {number} is longer than {LONGEST_LINE:,} characters; this is not a CSV file"
            )
    if rest:
        yield rest
