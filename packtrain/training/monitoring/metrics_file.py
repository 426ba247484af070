"""metrics.jsonl: one JSON object per step, appended as it comes and truncated when a run is resumed.

Floats are written as the shortest text that reads back equal, and as null if they are not finite (read back as
NaN). An unfinished last line of an interrupted run is skipped."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.files import atomic_file

SPEED_KEYS = "tokens_per_second", "positions_per_second"
FIRST_KEYS = "step", "tokens", "loss", "lr", "grad_norm", *SPEED_KEYS, "seconds"


class MetricsFile:
    """The metrics file of a run: a new file, or one that continues after step `after_step`."""

    def __init__(self, path: Path, after_step: int | None) -> None:
        if after_step is not None and path.exists():
            # drop records of later steps, and of an earlier end
            with atomic_file(path) as file:
                for record in iter_records(path):
                    if record.get("event") != "end" and record.get("step", 0) <= after_step:
                        file.write(record_line(record).encode())
        mode = "w" if after_step is None else "a"
        self.file = open(path, mode, buffering=1, encoding="utf-8", newline="\n")  # noqa: SIM115 — RunMonitor closes it

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record as a line of JSON, flushed to the system."""
        self.file.write(record_line(record))


def record_line(record: Mapping[str, Any]) -> str:
    """Return a record as a line of JSON, with null for what is not finite."""
    ordered_record = {key: record[key] for key in FIRST_KEYS if key in record} | dict(record)
    json_record = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in ordered_record.items()
    }
    return json.dumps(json_record, allow_nan=False) + "\n"


def iter_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file. Raises InputError for a bad line that is not the last."""
    torn = 0
    with open(path, "rb") as file:
        for line_number, line in enumerate(file, 1):
            record = parse_record(line)
            if record is None:
                torn = torn or line_number
            elif torn:
                raise InputError(f"{path}: line {torn} is not a JSON object; each line must be one")
            else:
                yield record


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Parse a line into its record; None if the line is invalid or incomplete."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not line.endswith(b"\n"):
        return None
    return {key: math.nan if value is None else value for key, value in record.items()}


def read(path: Path) -> list[dict[str, Any]]:
    """Return all records of a metrics file."""
    return list(iter_records(path))
