"""What reading a file finds beside its records: line ends that were made one kind, and bad records.

A bad record is an error, or is skipped and counted where that is allowed; line ends become `\\n` in all texts,
for a model that has learnt `\\r` writes it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packtrain.errors import InputError
from packtrain.words import plural

FEW = 5  # bad records that are listed
NAMES, WIDTH = 8, 40  # that are listed of a record, and characters of each


def shortlist(names: Collection[str]) -> str:
    """The first few names, each cut if it is long, and how many more there are."""
    first = [name if len(name) <= WIDTH else f"{name[:WIDTH]}…" for name in [*names][:NAMES]]
    more = f" and {len(names) - NAMES:,} more" if len(names) > NAMES else ""
    return f"{', '.join(first)}{more}"


def header_names(names: Collection[str]) -> str:
    """What is found where a table's header should name other columns."""
    return f"the header names {f'the columns {shortlist(names)}' if names else 'no columns'}"


@dataclass(slots=True)
class Report:
    """What was found in a file.

    skip   bad records are skipped
    exact  line ends stay as they are
    header where the header of a table is: its names are those of all records
    """

    path: Path
    skip: bool = False
    exact: bool = False
    header: str = ""
    bad: int = 0
    reasons: list[str] = field(default_factory=list)
    line_ends: int = 0

    def reject(self, error: InputError) -> None:
        """Count a bad record, or raise the error with the flag that would do so."""
        if not self.skip:
            raise InputError(f"{error}; --skip-bad skips bad records") from None
        self.bad += 1
        if len(self.reasons) < FEW:  # what follows the first semicolon is advice
            self.reasons.append(str(error).removeprefix(f"{self.path}: ").partition("; ")[0])

    @property
    def notes(self) -> list[str]:
        """Lines worth printing."""
        name, found = self.path.name, list[str]()
        if self.line_ends:
            found.append(f"{name}: {self.line_ends:,} line ends changed from \\r\\n or \\r to \\n")
        if self.bad:
            first = f"; the first {FEW}" if self.bad > FEW else ""
            found.append(f"{name}: {plural(self.bad, 'bad record')} skipped{first}:")
            found += [f"  {reason}" for reason in self.reasons]
        return found

    def text(self, text: str) -> str:
        """The text with line ends of one kind."""
        if self.exact or "\r" not in text:
            return text
        self.line_ends += text.count("\r")
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def chunks(self, chunks: Iterable[str]) -> Iterator[str]:
        """The same for a text in chunks, between which a `\\r\\n` may be cut."""
        held = ""
        for chunk in chunks:
            text = held + chunk
            held = "\r" if text.endswith("\r") else ""
            yield self.text(text.removesuffix(held))
        yield self.text(held)

    def value(self, value: Any) -> Any:
        """The same for all texts in a value as JSON has them."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self.value(item) for key, item in value.items()}
        return value
