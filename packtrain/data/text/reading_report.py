"""Findings while reading a file: changed line ends, and bad records.

A bad record is an error, or is skipped and counted with --skip-bad. Line ends become `\\n` in all texts, because a
model trained on `\\r` writes it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.text import plural, shortlist
from packtrain.data.text.field_names import FIELDS, fields_of, read_columns, renaming

FEW = 5  # bad records listed
reading = {"place": "the data"}  # in this process: file and row


@dataclass(slots=True)
class Report:
    """Findings in a file.

    skip   skip bad records
    exact  keep line ends
    columns  --columns: how columns are named as fields
    header   place of a table's header, whose names are those of all records
    names    of the first record's columns
    unused   columns that are not read
    remarks  more messages to print
    """

    path: Path
    skip: bool = False
    exact: bool = False
    columns: str | None = None
    header: str = ""
    names: list[str] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)
    bad: int = 0
    reasons: list[str] = field(default_factory=list)
    line_ends: int = 0
    given: dict[str, str] = field(init=False)  # fields by column, of --columns
    fields: dict[str, str] = field(init=False, default_factory=dict)
    named: bool = False  # whether the fields are known, from the first record that has some

    def __post_init__(self) -> None:
        reading["place"] = str(self.path)
        self.given = read_columns(self.columns)

    def reject(self, error: InputError) -> None:
        """Count a bad record, or raise the error, which names --skip-bad."""
        fact = error.fact
        for name in reversed(self.names):  # a field by the name of its column
            fact = fact.replace(f": {self.fields.get(name.strip().lower())}: ", f": {name}: ", 1)
        if not self.skip:
            advice = f"{error.advice}; " if error.advice else ""
            raise InputError(fact, f"{advice}--skip-bad skips bad records") from None
        self.bad += 1
        if len(self.reasons) < FEW:
            self.reasons.append(fact.removeprefix(f"{self.path}: "))

    @property
    def notes(self) -> list[str]:
        """Messages to print."""
        name = self.path.name
        messages = [f"{name}: {remark}" for remark in self.remarks]
        if renamed := renaming(self.names, self.fields):
            messages.append(f"{name}: columns: {renamed}")
        if self.line_ends:
            messages.append(
                f"{name}: {self.line_ends:,} line ends changed from \\r\\n or \\r to \\n"
            )
        if self.bad:
            first = f"; the first {FEW}" if self.bad > FEW else ""
            messages.append(f"{name}: {plural(self.bad, 'bad record')} skipped{first}:")
            messages += [f"  {reason}" for reason in self.reasons]
        return messages

    def record(self, value: Any, location: str) -> Any:
        """The record with its columns named as fields. Raises InputError."""
        reading["place"] = location
        if not isinstance(value, dict):
            return value
        if not self.named:
            self.names, names = [*value], {name.strip().lower() for name in value}
            if self.given and names.isdisjoint(self.given):
                raise InputError(
                    f"--columns: {location} has none of them", f"there are {shortlist(value)}"
                )
            self.fields = fields_of(names, self.given)
            self.named = bool(names & {*self.fields, *FIELDS})
        renamed: dict[str, Any] = {}
        for name, cell in value.items():
            column = name.strip().lower()
            field = self.fields.get(column, column)
            if column not in self.given and field in self.given.values():
                self.unused.add(column)
            elif not cell or not renamed.get(field):
                renamed[field] = cell or renamed.get(field, cell)
            elif isinstance(cell, str) and isinstance(renamed[field], str):
                renamed[field] += f"\n{cell}"
            else:
                raise InputError(
                    f"{location}: {name} is no text; it must be to be joined to {field}"
                )
        return renamed

    def text(self, text: str) -> str:
        """The text with line ends as `\
`."""
        if self.exact or "\r" not in text:
            return text
        self.line_ends += text.count("\r")
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def chunks(self, chunks: Iterable[str]) -> Iterator[str]:
        """The same for a text in chunks, which may split a `\\r\\n`."""
        pending = ""
        for chunk in chunks:
            text = pending + chunk
            pending = "\r" if text.endswith("\r") else ""
            yield self.text(text.removesuffix(pending))
        yield self.text(pending)

    def value(self, value: Any) -> Any:
        """The same for all texts in a JSON value."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self.value(item) for key, item in value.items()}
        return value
