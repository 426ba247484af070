"""Finding the runs below a folder, and comparing them as a table."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from packtrain.common.errors import printable
from packtrain.common.text import clock
from packtrain.training.monitoring import METRICS
from packtrain.training.monitoring.history import SETTINGS, History

ALONE = {"output", "save_name", "save_model", "adapter"}  # settings that differ in any case
WIDE = 24  # characters of a setting in the table
HOUR, DAY = 3600, 86400


def find(root: Path) -> dict[str, Path]:
    """The folders below `root`, and itself, that have a run's metrics or settings, by their paths from there."""
    folders = {}
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        if METRICS in files or SETTINGS in files:
            path = Path(folder)
            name = path.relative_to(root).as_posix() if path != root else path.resolve().name
            folders[name.encode(errors="replace").decode()] = path
    return folders


def differing(runs: Iterable[History]) -> list[str]:
    """The settings in which runs differ that have any."""
    settings_list = [run.settings for run in runs if run.settings]
    names = dict.fromkeys(name for settings in settings_list for name in settings)
    return [
        name for name in names
        if name not in ALONE and len({settings.get(name, "") for settings in settings_list}) > 1
    ]  # fmt: skip


def rows(runs: Sequence[History]) -> list[dict[str, Any]]:
    """The table as plain data."""
    differ = differing(runs)
    return [
        run.figures() | {"settings": {name: run.settings.get(name) for name in differ}}
        for run in runs
    ]


def lines(run_rows: Sequence[dict[str, Any]], width: float = math.inf) -> Iterator[str]:
    """The table as text; numbers stand to the right. Columns beyond the width are named below it."""
    differ = list(run_rows[0]["settings"]) if run_rows else []
    heads = [
        *["run", "state", "step", "learnt", "loss", "best", "val", "best", "tokens/s", "time"],
        "last record",
    ]
    cells = [[*heads, *differ], *(_cells(row, differ) for row in run_rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(cells[0]))]
    column_ends = itertools.accumulate(widths, lambda end, wide: end + 2 + wide)
    count = max(sum(end <= width for end in column_ends), 2)
    for row in cells:
        shown = [
            cell.rjust(wide) if 2 <= k < len(heads) else cell.ljust(wide)
            for k, (cell, wide) in enumerate(zip(row[:count], widths, strict=False))
        ]
        yield "  ".join(shown).rstrip()
    if left_out := cells[0][count:]:
        yield f"for {', '.join(left_out)}: a wider terminal, --json or --html"


def _cells(row: dict[str, Any], differ: Sequence[str]) -> list[str]:
    of_total = f"/{row['steps']:,}" if row["steps"] else ""
    figures = [
        f"{row['step']:,}{of_total}",
        _text(row["tokens"], "{:,.0f}".format),
        *(_text(row[key], "{:.4f}".format) for key in ("loss", "best_loss", "val_loss", "best_val_loss")),
        _text(row["tokens_per_second"], "{:,.0f}".format),
        _text(row["seconds"], clock),
        ago(time.time() - row["changed"]) if row["changed"] else "-",
    ]  # fmt: skip
    settings = (_cut(row["settings"][name]) for name in differ)
    return [printable(row["name"]), row["state"], *figures, *settings]


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None or not math.isfinite(value) else form(value)


def _cut(value: str | None) -> str:
    text = printable(value or "-")
    return text if len(text) <= WIDE else f"…{text[1 - WIDE :]}"


def ago(seconds: float) -> str:
    """59 -> '59 s ago'."""
    if seconds < 2 * 60:
        return f"{max(seconds, 0):.0f} s ago"
    if seconds < 2 * HOUR:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / HOUR:.0f} h ago" if seconds < 2 * DAY else f"{seconds / DAY:.0f} days ago"
