"""Findings while reading a file: changed line ends, and bad records.

A bad record is an error, or is skipped and counted with --skip-bad. Line ends become `\\n` in all texts, because a
model trained on `\\r` writes it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packtrain.errors import InputError
from packtrain.words import plural

FEW = 5  # bad records listed
NAMES, WIDTH = 8, 40  # names listed, and characters of each


def shortlist(names: Collection[str]) -> str:
    """The first few names, each shortened, and how many more there are."""
    first = [name if len(name) <= WIDTH else f"{name[:WIDTH]}…" for name in [*names][:NAMES]]
    more = f" and {len(names) - NAMES:,} more" if len(names) > NAMES else ""
    return f"{', '.join(first)}{more}"


def header_names(names: Collection[str]) -> str:
    """Describes the columns of a header that lacks the expected ones."""
    return f"the header names {f'the columns {shortlist(names)}' if names else 'no columns'}"


@dataclass(slots=True)
class Report:
    """Findings in a file.

    skip   skip bad records
    exact  keep line ends
    header place of a table's header, whose names are those of all records
    """

    path: Path
    skip: bool = False
    exact: bool = False
    header: str = ""
    bad: int = 0
    reasons: list[str] = field(default_factory=list)
    line_ends: int = 0

    def reject(self, error: InputError) -> None:
        """Count a bad record, or raise the error, which names --skip-bad."""
        if not self.skip:
            raise InputError(str(error), "--skip-bad skips bad records") from None
        self.bad += 1
        if len(self.reasons) < FEW:
            self.reasons.append(error.fact.removeprefix(f"{self.path}: "))

    @property
    def notes(self) -> list[str]:
        """Messages to print."""
        name, found = self.path.name, list[str]()
        if self.line_ends:
            found.append(f"{name}: {self.line_ends:,} line ends changed from \\r\\n or \\r to \\n")
        if self.bad:
            first = f"; the first {FEW}" if self.bad > FEW else ""
            found.append(f"{name}: {plural(self.bad, 'bad record')} skipped{first}:")
            found += [f"  {reason}" for reason in self.reasons]
        return found

    def text(self, text: str) -> str:
        """The text with line ends as `\
`."""
        if self.exact or "\r" not in text:
            return text
        self.line_ends += text.count("\r")
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def chunks(self, chunks: Iterable[str]) -> Iterator[str]:
        """The same for a text in chunks, which may split a `\\r\\n`."""
        held = ""
        for chunk in chunks:
            text = held + chunk
            held = "\r" if text.endswith("\r") else ""
            yield self.text(text.removesuffix(held))
        yield self.text(held)

    def value(self, value: Any) -> Any:
        """The same for all texts in a JSON value."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self.value(item) for key, item in value.items()}
        return value
