"""Columns of numbers over a run, in at most ROWS rows: when these are full, neighbours are joined.

So a run of any length needs the same few hundred kilobytes, and a page the same few points.
"""

import math
from collections.abc import Callable, Mapping

ROWS = 1000  # even, because they are joined in pairs

Join = Callable[
    [float, int, float, int], float
]  # a value with its count, and the later one with its own


def mean(a: float, count: int, b: float, new_count: int) -> float:
    return (a * count + b * new_count) / (count + new_count)


def last(a: float, count: int, b: float, new_count: int) -> float:
    return b


def least(a: float, count: int, b: float, new_count: int) -> float:
    return min(a, b)


def most(a: float, count: int, b: float, new_count: int) -> float:
    return max(a, b)


def total(a: float, count: int, b: float, new_count: int) -> float:
    return a + b


class Series:
    """Rows of named columns; each says how the values of a row become one. What is not finite is left out.

    width    records in a row
    """

    def __init__(self, columns: Mapping[str, Join]) -> None:
        self.names, self._joins = tuple(columns), tuple(columns.values())
        self.width = 1
        self._filled = 0  # records in the last row
        self._rows: list[list[float]] = []
        self._counts: list[list[int]] = []
        self._stamps: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, record: Mapping[str, float], version: int) -> None:
        """Add a record; `version` marks the rows that it changes, see `since`."""
        values = [record.get(name, math.nan) for name in self.names]
        counts = [int(math.isfinite(value)) for value in values]
        if self._rows and self._filled < self.width:
            self._join(-1, values, counts)
            self._stamps[-1] = version
            self._filled += 1
            return
        if len(self._rows) == ROWS:
            self._halve(version)
        self._rows.append(values)
        self._counts.append(counts)
        self._stamps.append(version)
        self._filled = 1

    def _halve(self, version: int) -> None:
        """Join neighbouring rows."""
        later = list(zip(self._rows[1::2], self._counts[1::2], strict=True))
        self._rows, self._counts = self._rows[::2], self._counts[::2]
        for at, (values, counts) in enumerate(later):
            self._join(at, values, counts)
        self._stamps = [version] * len(self._rows)
        self.width *= 2

    def _join(self, at: int, values: list[float], counts: list[int]) -> None:
        row, row_counts = self._rows[at], self._counts[at]
        for k, join in enumerate(self._joins):
            if counts[k]:
                row[k] = (
                    join(row[k], row_counts[k], values[k], counts[k])
                    if row_counts[k]
                    else values[k]
                )
                row_counts[k] += counts[k]

    def since(self, version: int) -> tuple[int, dict[str, list[float | None]]]:
        """The first row that is later than a version, and the columns from there on; None is not finite."""
        first = len(self._stamps)
        while first and self._stamps[first - 1] > version:
            first -= 1
        rows = self._rows[first:]
        columns = {
            name: [row[k] if math.isfinite(row[k]) else None for row in rows]
            for k, name in enumerate(self.names)
        }
        return first, columns
