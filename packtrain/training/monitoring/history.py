"""The history of a run, read again and again while it goes on: its curves, samples, settings and figures.

Input: the run's folder. Damaged lines are counted and skipped; missing or damaged files are left out."""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from packtrain.common.files import is_locked
from packtrain.common.options import yaml
from packtrain.training.monitoring import METRICS_FILE, RUN_LOCK, SAMPLES_FILE
from packtrain.training.monitoring.metrics_file import parse_record

MAX_ROWS = 1000  # even, because they are joined in pairs

# functions that join a value and a later one, by name: (value, its count, later value, its count) -> the joined value
JOINS: dict[str, Callable[[float, int, float, int], float]] = {
    "mean": lambda a, count, b, new_count: (a * count + b * new_count) / (count + new_count),
    "last": lambda a, count, b, new_count: b, "sum": lambda a, count, b, new_count: a + b,
    "min": lambda a, count, b, new_count: min(a, b), "max": lambda a, count, b, new_count: max(a, b),
}  # fmt: skip


class MetricSeries:
    """Rows of named columns, each with a name in JOINS of how neighbours are joined. Skips values that are not finite.

    A run of any length needs the same few hundred kilobytes, as neighbours are joined where MAX_ROWS rows are full.

    records_per_row    records in a row
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.column_names = tuple(columns)
        self._join_functions = [JOINS[name] for name in columns.values()]
        self.records_per_row = 1
        self._last_row_records = 0  # records in the last row
        self._rows: list[list[float]] = []
        self._value_counts: list[list[int]] = []
        self._row_versions: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, record: Mapping[str, float], version: int) -> None:
        """Add a record to the last row, or as a new row, which then counts as changed in `version`."""
        values = [record.get(name, math.nan) for name in self.column_names]
        counts = [int(math.isfinite(value)) for value in values]
        if self._rows and self._last_row_records < self.records_per_row:
            self._merge_into_row(-1, values, counts)
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
        """Join rows in pairs, which halves their number, and mark all of them as changed with `version`."""
        later_rows = list(zip(self._rows[1::2], self._value_counts[1::2], strict=True))
        self._rows, self._value_counts = self._rows[::2], self._value_counts[::2]
        for row_index, (values, counts) in enumerate(later_rows):
            self._merge_into_row(row_index, values, counts)
        self._row_versions = [version] * len(self._rows)
        self.records_per_row *= 2

    def _merge_into_row(self, at: int, values: list[float], counts: list[int]) -> None:
        """Join a record's values (one a column, with counts) into row `at` by the columns' JOINS; add the counts."""
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
        """Return (index of the first row changed after `version`, columns from there on, None where not finite)."""
        first_row = len(self._row_versions)
        while first_row and self._row_versions[first_row - 1] > version:
            first_row -= 1
        new_rows = self._rows[first_row:]
        columns = {
            name: [row[k] if math.isfinite(row[k]) else None for row in new_rows]
            for k, name in enumerate(self.column_names)
        }
        return first_row, columns


ABOUT, SETTINGS = "run.json", "run.yaml"
MAX_FILE_NBYTES = 1 << 20  # most bytes that are read of a settings file
MAX_SAMPLES = 50  # newest samples that are shown
MAX_TEXT_CHARS = 4_000  # most characters of a sample or a setting
QUIET_SECONDS = 60.0  # seconds without a record, or the time of so many steps, after which a run counts as stopped
QUIET_STEPS = 30
QUIET_MERGE = 1800.0  # seconds after which a run whose merge has written nothing counts as unmerged
MODELFILE = "Modelfile"  # in the run folder
HIDDEN = {"resume", "overwrite", "force_reshuffle", "watch"}  # settings that say nothing of a run
TRAIN_COLUMNS = {
    "step": "last", "tokens": "last", "seconds": "last", "loss": "mean", "low": "min", "high": "max", "bad": "sum",
    "lr": "mean", "grad_norm": "mean", "tokens_per_second": "mean", "positions_per_second": "mean",
}  # fmt: skip
VALID_COLUMNS = {
    "step": "last", "tokens": "last", "seconds": "last", "val_loss": "mean", "val_error": "mean",
    "val_accuracy": "mean",
}  # fmt: skip
MAX_LINE_NBYTES = 1 << 16  # a longer line comes in parts, which are no records
HEAD_NBYTES = 256  # first bytes, by which a replaced file is recognized


class LineReader:
    """Lines of a file that another process writes: `new_lines()` yields complete ones since the last call, or all of a
    file replaced or cut.

    on_reset  called before all lines come again
    """

    def __init__(self, path: Path, on_reset: Callable[[], None]) -> None:
        self.path, self.on_reset = path, on_reset
        self._offset, self._file_key, self._head_bytes = 0, (0, 0), b""

    def new_lines(self) -> Iterator[bytes]:
        """Yield the complete lines since the last call; none if the file cannot be read."""
        try:
            with open(self.path, "rb") as file:
                yield from self._remaining_lines(file)
        except FileNotFoundError:
            if self._offset:
                self._start_over()
        except OSError:
            return

    def _start_over(self) -> None:
        self._offset, self._head_bytes = 0, b""
        self.on_reset()

    def _remaining_lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the lines from where the last call stopped; from the start if the file was replaced or cut."""
        file_stat = os.fstat(file.fileno())
        file_key = file_stat.st_dev, file_stat.st_ino
        read_head = file.read(len(self._head_bytes))
        is_same_file = file_key == self._file_key and read_head == self._head_bytes
        if self._offset and (not is_same_file or file_stat.st_size < self._offset):
            self._start_over()
        self._file_key = file_key
        file.seek(self._offset)
        while line := file.readline(MAX_LINE_NBYTES):
            if not line.endswith(b"\n") and len(line) < MAX_LINE_NBYTES:
                return  # the line is being written
            if len(self._head_bytes) < HEAD_NBYTES and len(self._head_bytes) == self._offset:
                self._head_bytes += line[: HEAD_NBYTES - len(self._head_bytes)]
            self._offset += len(line)
            yield line


class RunHistory:
    """A run in a folder: `refresh` reads new lines and files, and marks changes with the given version.

    train, valid              the curves
    now                       the last value of each number
    computed                  tokens, with prompts and padding
    best_loss, best_val_loss  the lowest training and validation loss, each with its step
    end_record                the last line of a finished run; None before
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._metrics_reader = LineReader(folder / METRICS_FILE, self._start_over)
        self._samples_reader = LineReader(folder / SAMPLES_FILE, self._reset_samples)
        self.about, self.settings = dict[str, Any](), dict[str, Any]()
        self._file_times, self.settings_version, self._version = (0, 0), 0, 0
        self._reset_samples()
        self._start_over()

    def _start_over(self) -> None:
        self.train, self.valid = MetricSeries(TRAIN_COLUMNS), MetricSeries(VALID_COLUMNS)
        self.step = self.num_damaged = 0
        self.now = dict[str, float]()
        self.computed = 0.0
        self.best_loss, self.best_val_loss = (math.nan, 0), (math.nan, 0)  # loss and its step
        self.end_record: dict[str, float] | None = None

    def _reset_samples(self) -> None:
        self.samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self.samples_version = self._version

    def refresh(self, version: int) -> None:
        """Read what the run has written since the last call; `version`, a growing number, marks what changed."""
        self._version = version
        for line in self._metrics_reader.new_lines():
            self._add_record(parse_record(line), version)
        for line in self._samples_reader.new_lines():
            record = parse_record(line)
            if record is not None and isinstance(record.get("text"), str):
                step = numeric_fields(record).get("step", math.nan)
                text = clipped_text(record["text"])
                self.samples.append({"step": step if math.isfinite(step) else None, "text": text})
                self.samples_version = version
        file_times = modified(self.folder / ABOUT), modified(self.folder / SETTINGS)
        if file_times != self._file_times:
            self._file_times, self.settings_version = file_times, version
            self.about = read_run_info(self.folder / ABOUT)
            self.settings = read_settings(self.folder / SETTINGS)

    def _add_record(self, record: Mapping[str, Any] | None, version: int) -> None:
        if record is None:
            self.num_damaged += 1
            return
        values = numeric_fields(record)
        if record.get("event") == "end":
            self.end_record = values
            return
        step = values.get("step", math.nan)
        if not math.isfinite(step):
            self.num_damaged += 1
            return
        self.step, self.end_record = int(step), None
        if "loss" in values:
            loss = values["loss"]
            values |= {"low": loss, "high": loss, "bad": 0.0 if math.isfinite(loss) else 1.0}
            self.train.add(values, version)
            self.best_loss = lower_loss(self.best_loss, loss, self.step)
            speed = values.get("positions_per_second", 0.0)  # 0 in a fit of datapoints
            self.computed += speed * (values.get("seconds", 0.0) - self.now.get("seconds", 0.0))
        if "val_loss" in values:
            self.valid.add(values, version)
            self.best_val_loss = lower_loss(self.best_val_loss, values["val_loss"], self.step)
        self.now = self.now | values

    # ---- figures

    @property
    def changed_at(self) -> float:
        """When the run last wrote a record or began, in seconds since 1970; 0: unknown."""
        return max(modified(self.folder / name) for name in (METRICS_FILE, SETTINGS, ABOUT)) / 1e9

    def state(self) -> str:
        """Return running, done, unmerged, failed or stopped: by the run's lock, else by the last record's age."""
        each = self.now.get("seconds", 0.0) / max(self.step, 1)
        has_ended, is_running = self.end_record is not None, is_locked(self.folder / RUN_LOCK)
        if is_running is None:
            max_age = QUIET_MERGE if has_ended else max(QUIET_SECONDS, QUIET_STEPS * each)
            is_running = time.time() - self.changed_at < max_age
        # after its last step, finetune merges, and then writes the Modelfile
        started_at, merged_at = (modified(self.folder / name) for name in (SETTINGS, MODELFILE))
        if has_ended and ("merge" not in self.settings or merged_at >= started_at):
            return "done"
        if not has_ended and not math.isfinite(self.now.get("loss", 0.0)):
            return "failed"
        return "running" if is_running else "unmerged" if has_ended else "stopped"

    def table_row(self) -> dict[str, Any]:
        """Return the run's row in the table of runs: plain data, None where unknown."""
        last_values, end_values, run_info_get = self.now, self.end_record or {}, self.about.get
        seconds, steps = last_values.get("seconds"), run_info_get("steps")
        tokens = self.computed or last_values.get("tokens")
        row = {
            "name": self.name, "state": self.state(), "step": self.step, "steps": steps,
            "tokens": last_values.get("tokens"), "loss": last_values.get("loss"), "best_loss": self.best_loss[0],
            "best_step": self.best_loss[1], "val_loss": last_values.get("val_loss"),
            "best_val_loss": self.best_val_loss[0], "best_val_step": self.best_val_loss[1],
            "tokens_per_second": tokens / seconds if seconds and tokens else None, "seconds": seconds,
            "left": seconds / self.step * (steps - self.step) if seconds and steps and self.step else None,
            "changed": self.changed_at, "planned_bytes": end_values.get("planned_bytes", run_info_get("planned_bytes")),
            "peak_bytes": end_values.get("peak_bytes"), "damaged": self.num_damaged,
        }  # fmt: skip
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }


def lower_loss(best_loss: tuple[float, int], loss: float, step: int) -> tuple[float, int]:
    """Return the better of `best_loss`, (loss, step), and (loss, step); a loss that is not finite does not count."""
    return best_loss if not math.isfinite(loss) or best_loss[0] <= loss else (loss, step)


def numeric_fields(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record as floats; `datapoints` of a fit become `tokens`."""
    values = {
        key.replace("datapoints", "tokens"): float(value)
        for key, value in record.items()
        if isinstance(value, int | float) and not (isinstance(value, int) and abs(value) >> 62)
    }
    step = values.get("step", math.nan)
    if not 0 <= step < 1 << 62:
        values.pop("step", None)
    return values


def modified(path: Path) -> int:
    """Return when a file was last changed, in nanoseconds since 1970; 0 if it is missing."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def read_run_info(path: Path) -> dict[str, Any]:
    """Read the summary that a run writes when it begins; {} if the file is missing or damaged."""
    try:
        record = parse_record(read_text(path).encode() + b"\n") or {}
    except OSError:
        return {}
    int_fields = ("steps", "planned_bytes", "budget_bytes")
    int_values = {name: record[name] for name in int_fields if isinstance(record.get(name), int)}
    rows = record.get("rows")
    listed = [
        [clipped_text(str(row[0])), int(row[1]), clipped_text(str(row[2]))]
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, list) and len(row) == 3 and isinstance(row[1], int)
    ]
    return {**int_values, "title": clipped_text(str(record.get("title", ""))), "rows": listed}


def read_settings(path: Path) -> dict[str, str]:
    """Read the settings of a run as texts by name; {} if the file is missing or damaged."""
    try:
        loaded = yaml().safe_load(read_text(path))
    except (OSError, ValueError, RecursionError, yaml().YAMLError):
        return {}
    if not isinstance(loaded, dict):
        return {}
    return {clipped_text(str(k)): setting_text(v) for k, v in loaded.items() if k not in HIDDEN}


def read_text(path: Path) -> str:
    with open(path, "rb") as file:
        return file.read(MAX_FILE_NBYTES).decode(errors="replace")


def setting_text(value: Any) -> str:
    """Format a setting as text; None is empty."""
    if isinstance(value, list):
        return ", ".join(map(setting_text, value))
    if value is None:
        return ""
    return clipped_text(value if isinstance(value, str) else json.dumps(value, default=str))


def clipped_text(text: str) -> str:
    """Cut text to MAX_TEXT_CHARS characters that UTF-8 can encode."""
    return text[:MAX_TEXT_CHARS].encode(errors="replace").decode()
