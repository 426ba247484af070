"""Columns of numbers over a run, in at most MAX_ROWS rows: when these are full, neighbours are joined.

So a run of any length needs the same few hundred kilobytes, and a page the same few points.
"""

import math
from collections.abc import Callable, Mapping

MAX_ROWS = 1000  # even, because they are joined in pairs

# (value, its count, later value, its count) -> the joined value
JoinFunction = Callable[[float, int, float, int], float]


def mean(a: float, count: int, b: float, new_count: int) -> float:
    return (a * count + b * new_count) / (count + new_count)


def last(a: float, count: int, b: float, new_count: int) -> float:
    return b


def minimum(a: float, count: int, b: float, new_count: int) -> float:
    return min(a, b)


def maximum(a: float, count: int, b: float, new_count: int) -> float:
    return max(a, b)


def value_sum(a: float, count: int, b: float, new_count: int) -> float:
    return a + b


class MetricSeries:
    """Rows of named columns, each with a function that joins neighbouring values. Skips values that are not finite.

    records_per_row    records in a row
    """

    def __init__(self, columns: Mapping[str, JoinFunction]) -> None:
        self.column_names, self._join_functions = tuple(columns), tuple(columns.values())
        self.records_per_row = 1
        self._last_row_records = 0  # records in the last row
        self._rows: list[list[float]] = []
        self._value_counts: list[list[int]] = []
        self._row_versions: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, record: Mapping[str, float], version: int) -> None:
        """Add a record; `version` marks the row that changes, see `columns_since`."""
        values = [record.get(name, math.nan) for name in self.column_names]
        counts = [int(math.isfinite(value)) for value in values]
        if self._rows and self._last_row_records < self.records_per_row:
            self._join_row(-1, values, counts)
            self._row_versions[-1] = version
            self._last_row_records += 1
            return
        if len(self._rows) == MAX_ROWS:
            self._join_neighbours(version)
        self._rows.append(values)
        self._value_counts.append(counts)
        self._row_versions.append(version)
        self._last_row_records = 1

    def _join_neighbours(self, version: int) -> None:
        """Join rows in pairs, which halves their number."""
        later_rows = list(zip(self._rows[1::2], self._value_counts[1::2], strict=True))
        self._rows, self._value_counts = self._rows[::2], self._value_counts[::2]
        for row_index, (values, counts) in enumerate(later_rows):
            self._join_row(row_index, values, counts)
        self._row_versions = [version] * len(self._rows)
        self.records_per_row *= 2

    def _join_row(self, at: int, values: list[float], counts: list[int]) -> None:
        row, value_counts = self._rows[at], self._value_counts[at]
        for k, join in enumerate(self._join_functions):
            if counts[k]:
                row[k] = (
                    join(row[k], value_counts[k], values[k], counts[k])
                    if value_counts[k]
                    else values[k]
                )
                value_counts[k] += counts[k]

    def columns_since(self, version: int) -> tuple[int, dict[str, list[float | None]]]:
        """Return the first row changed after `version` and the columns from there on, None where not finite."""
        first_row = len(self._row_versions)
        while first_row and self._row_versions[first_row - 1] > version:
            first_row -= 1
        new_rows = self._rows[first_row:]
        columns = {
            name: [row[k] if math.isfinite(row[k]) else None for row in new_rows]
            for k, name in enumerate(self.column_names)
        }
        return first_row, columns
