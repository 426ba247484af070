"""Finding the runs below a folder, and comparing them as a table."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from packtrain.common.errors import printable
from packtrain.common.text import aligned, clock
from packtrain.training.monitoring import METRICS_FILE
from packtrain.training.monitoring.history import SETTINGS, RunHistory

# settings that differ in any case
IGNORED_SETTINGS = {"output", "save_name", "save_model", "adapter"}
MAX_SETTING_CHARS = 24  # characters of a setting in the table
HOUR, DAY = 3600, 86400


def find_runs(root: Path) -> dict[str, Path]:
    """Return the folders at or below `root` with a run's metrics or settings, by their paths from `root`."""
    folders = {}
    for folder, subfolders, file_names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if METRICS_FILE in file_names or SETTINGS in file_names:
            path = Path(folder)
            name = path.relative_to(root).as_posix() if path != root else path.resolve().name
            folders[name.encode(errors="replace").decode()] = path
    return folders


def differing_settings(runs: Iterable[RunHistory]) -> list[str]:
    """Return the names of settings in which runs differ, ignoring runs without settings."""
    settings_list = [run.settings for run in runs if run.settings]
    names = dict.fromkeys(name for settings in settings_list for name in settings)
    return [
        name for name in names
        if name not in IGNORED_SETTINGS and len({settings.get(name, "") for settings in settings_list}) > 1
    ]  # fmt: skip


def comparison_rows(runs: Sequence[RunHistory]) -> list[dict[str, Any]]:
    """Return the table of runs as plain data: a dict for each run, with the settings in which runs differ."""
    setting_names = differing_settings(runs)
    return [
        run.table_row() | {"settings": {name: run.settings.get(name) for name in setting_names}}
        for run in runs
    ]


def lines(run_rows: Sequence[dict[str, Any]], width: float = math.inf) -> Iterator[str]:
    """Yield the lines of a table of `comparison_rows`; columns beyond `width` characters are named below it."""
    differ = list(run_rows[0]["settings"]) if run_rows else []
    headings = [
        *["run", "state", "step", "learnt", "loss", "best", "val", "best", "tokens/s", "time"], "last record",
    ]  # fmt: skip
    table_cells = [[*headings, *differ], *(_table_cells(row, differ) for row in run_rows)]
    widths = [max(len(row[k]) for row in table_cells) for k in range(len(table_cells[0]))]
    column_ends = itertools.accumulate(widths, lambda column_end, wide: column_end + 2 + wide)
    num_columns = max(sum(column_end <= width for column_end in column_ends), 2)
    yield from aligned([row[:num_columns] for row in table_cells], range(2, len(headings)))
    if left_out := table_cells[0][num_columns:]:
        yield f"for {', '.join(left_out)}: a wider terminal, --json or --html"


def _table_cells(row: dict[str, Any], setting_names: Sequence[str]) -> list[str]:
    of_total = f"/{row['steps']:,}" if row["steps"] else ""
    figures = [
        f"{row['step']:,}{of_total}", _number_text(row["tokens"], "{:,.0f}".format),
        *(_number_text(row[key], "{:.4f}".format) for key in ("loss", "best_loss", "val_loss", "best_val_loss")),
        _number_text(row["tokens_per_second"], "{:,.0f}".format), _number_text(row["seconds"], clock),
        ago(time.time() - row["changed"]) if row["changed"] else "-",
    ]  # fmt: skip
    settings = (_shortened_setting(row["settings"][name]) for name in setting_names)
    return [printable(row["name"]), row["state"], *figures, *settings]


def _number_text(value: float | None, format_number: Callable[[float], str]) -> str:
    return "-" if value is None or not math.isfinite(value) else format_number(value)


def _shortened_setting(value: str | None) -> str:
    text = printable(value or "-")
    return text if len(text) <= MAX_SETTING_CHARS else f"…{text[1 - MAX_SETTING_CHARS :]}"


def ago(seconds: float) -> str:
    """Format an age: 59 becomes '59 s ago'."""
    if seconds < 2 * 60:
        return f"{max(seconds, 0):.0f} s ago"
    if seconds < 2 * HOUR:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / HOUR:.0f} h ago" if seconds < 2 * DAY else f"{seconds / DAY:.0f} days ago"
