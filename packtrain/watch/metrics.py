"""metrics.jsonl: one JSON object per step, appended as it comes and cut back when a run is resumed.

In go records of numbers; floats are written as the shortest text that reads back equal, and as null where they
are not finite, which JSON cannot say and which is read as NaN. A last line that an interrupted run left
unfinished is passed over.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packtrain.errors import InputError
from packtrain.files import replacing

FIRST_KEYS = (
    "step",
    "tokens",
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "positions_per_second",
    "seconds",
)


class Metrics:
    """The file of one run: a new one, or continued `after` the step that is resumed from."""

    def __init__(self, path: Path, after: int | None) -> None:
        if after is not None and path.exists():
            _cut(path, after)
        mode = "w" if after is None else "a"
        self.file = open(path, mode, buffering=1, encoding="utf-8", newline="\n")  # noqa: SIM115 — see close

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a line; it has left the process when this returns."""
        self.file.write(_line(record))

    def sync(self) -> None:
        """Return once all lines are on the disk."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def _line(record: Mapping[str, Any]) -> str:
    ordered = {key: record[key] for key in FIRST_KEYS if key in record} | dict(record)
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in ordered.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def _cut(path: Path, after: int) -> None:
    """Drop the records of later steps and the event of an earlier end."""
    with replacing(path) as file:
        for record in records(path):
            if record.get("event") != "end" and record.get("step", 0) <= after:
                file.write(_line(record).encode())


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file one by one. Raises InputError for a bad line that others follow."""
    torn = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            record = _parsed(line)
            if record is None:
                torn = torn or number
            elif torn:
                raise InputError(f"{path}: line {torn} is not a JSON object; each line must be one")
            else:
                yield record


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None where it is none or not complete."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not line.endswith(b"\n"):
        return None
    return {key: math.nan if value is None else value for key, value in record.items()}


def read(path: Path) -> list[dict[str, Any]]:
    """All records of a file."""
    return list(records(path))
