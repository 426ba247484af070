"""Findings while reading a file: changed line ends, and bad records.

A bad record is an error, or is skipped and counted with --skip-bad. Line ends become `\\n` in all texts, because a
model trained on `\\r` writes it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.text import plural, shortlist
from packtrain.data.text.field_names import FIELDS, fields_of, parse_columns, renaming

MAX_REASONS = 5  # bad records listed
reading_position = {"place": "the data"}  # file and row that this process reads


@dataclass(slots=True)
class ReadingReport:
    """Findings in a file.

    skip_bad        skip bad records
    keep_line_ends  keep line ends as they are
    columns         --columns: renames columns to fields
    header          place of a table's header, whose names apply to all records
    column_names    names of the first record's columns
    unused_columns  columns that are not read
    remarks         more messages to print
    """

    path: Path
    skip_bad: bool = False
    keep_line_ends: bool = False
    columns: str | None = None
    header: str = ""
    column_names: list[str] = field(default_factory=list)
    unused_columns: set[str] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)
    num_bad: int = 0
    reasons: list[str] = field(default_factory=list)
    num_line_ends: int = 0
    requested_fields: dict[str, str] = field(init=False)  # fields by column, from --columns
    fields: dict[str, str] = field(init=False, default_factory=dict)
    has_fields: bool = False  # whether the fields are known, from the first record that has some

    def __post_init__(self) -> None:
        reading_position["place"] = str(self.path)
        self.requested_fields = parse_columns(self.columns)

    def reject(self, error: InputError) -> None:
        """Count a bad record, or, without --skip-bad, raise the error, which then names that flag."""
        fact = error.fact
        for name in reversed(self.column_names):  # name columns instead of fields
            fact = fact.replace(f": {self.fields.get(name.strip().lower())}: ", f": {name}: ", 1)
        if not self.skip_bad:
            advice = f"{error.advice}; " if error.advice else ""
            raise InputError(fact, f"{advice}--skip-bad skips bad records") from None
        self.num_bad += 1
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(fact.removeprefix(f"{self.path}: "))

    @property
    def notes(self) -> list[str]:
        """Return messages to print about the file."""
        name = self.path.name
        messages = [f"{name}: {remark}" for remark in self.remarks]
        if renaming_text := renaming(self.column_names, self.fields):
            messages.append(f"{name}: columns: {renaming_text}")
        if self.num_line_ends:
            message = f"{name}: {self.num_line_ends:,} line ends changed from \\r\\n or \\r to \\n"
            messages.append(message)
        if self.num_bad:
            limit_note = f"; the first {MAX_REASONS}" if self.num_bad > MAX_REASONS else ""
            messages.append(f"{name}: {plural(self.num_bad, 'bad record')} skipped{limit_note}:")
            messages += [f"  {reason}" for reason in self.reasons]
        return messages

    def rename_columns(self, value: Any, location: str) -> Any:
        """Rename a record's columns to fields, as its file's first record determines; InputError names `location`."""
        reading_position["place"] = location
        if not isinstance(value, dict):
            return value
        if not self.has_fields:
            self.column_names, lower_names = [*value], {name.strip().lower() for name in value}
            if self.requested_fields and lower_names.isdisjoint(self.requested_fields):
                advice = f"there are {shortlist(value)}"
                raise InputError(f"--columns: {location} has none of them", advice)
            self.fields = fields_of(lower_names, self.requested_fields)
            self.has_fields = bool(lower_names & {*self.fields, *FIELDS})
        record: dict[str, Any] = {}
        for name, cell in value.items():
            column = name.strip().lower()
            field_name = self.fields.get(column, column)
            if column not in self.requested_fields and field_name in self.requested_fields.values():
                self.unused_columns.add(column)
            elif not cell or not record.get(field_name):
                record[field_name] = cell or record.get(field_name, cell)
            elif isinstance(cell, str) and isinstance(record[field_name], str):
                record[field_name] += f"\n{cell}"
            else:
                fact = f"{location}: {name} is no text; it must be to be joined to {field_name}"
                raise InputError(fact)
        return record

    def normalize_text(self, text: str) -> str:
        r"""Change line ends of a text to `\n`, and count them."""
        if self.keep_line_ends or "\r" not in text:
            return text
        self.num_line_ends += text.count("\r")
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def chunks(self, chunks: Iterable[str]) -> Iterator[str]:
        r"""Change line ends of a text in chunks, which may split a `\r\n`."""
        pending = ""
        for chunk in chunks:
            text = pending + chunk
            pending = "\r" if text.endswith("\r") else ""
            yield self.normalize_text(text.removesuffix(pending))
        yield self.normalize_text(pending)

    def normalize_value(self, value: Any) -> Any:
        """Return a JSON value whose texts have line feeds for other line ends; counts the changed ones."""
        if isinstance(value, str):
            return self.normalize_text(value)
        if isinstance(value, list):
            return [self.normalize_value(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self.normalize_value(item) for key, item in value.items()}
        return value
