"""A table of figures: as text, as Markdown, and as plain data for JSON."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packtrain.common.text import aligned

CellValue = str | int | float | None


@dataclass(frozen=True, slots=True)
class BenchTable:
    """Rows of figures.

    name          a word for JSON
    columns       names of columns, and the format of their numbers; "" for text
    notes         sentences below the table
    waited_share  the largest share of the time in which threads of a peer waited for the processor
    """

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[CellValue]]
    notes: Sequence[str] = field(default=())
    waited_share: float = 0.0

    def cells(self) -> Iterator[list[str]]:
        for row in self.rows:
            yield [format_cell(v, f) for v, f in zip(row, self.columns.values(), strict=True)]

    def text(self) -> str:
        number_columns = [i for i, form in enumerate(self.columns.values()) if form]
        lines = aligned([[*self.columns], *self.cells()], number_columns)
        return "\n".join([self.title, *lines, *self.notes])

    def markdown(self) -> str:
        divider = ["---" if not form else "---:" for form in self.columns.values()]
        rows = [[*self.columns], divider, *self.cells()]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        notes = [line for note in self.notes for line in ("", note)]
        return "\n".join([f"## {self.title}", "", *lines, *notes, ""])

    def to_json(self) -> dict[str, Any]:
        """Return the plain data that --json writes."""
        keys = [key_of(name) for name in self.columns]
        rows = [dict(zip(keys, row, strict=True)) for row in self.rows]
        return {"name": self.name, "title": self.title, "rows": rows, "notes": [*self.notes]}


def format_cell(value: CellValue, number_format: str) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, number_format)


def key_of(name: str) -> str:
    """Return a column's name as a JSON key: `× floor` is times_floor, `GFLOP/s` gflop_per_s."""
    words = name.replace("×", " times ").replace("/", " per ").lower()
    return "_".join(re.findall(r"[a-z0-9]+", words))
