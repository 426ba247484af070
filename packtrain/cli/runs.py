"""packtrain runs: compare the runs below a folder, as a table or a page."""

import json
import math
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packtrain.cli import DONE, print_message
from packtrain.common.errors import InputError
from packtrain.common.files import check_writable, require_existing, write_text
from packtrain.common.options import option, positional
from packtrain.training.monitoring.page_data import RunsPageData
from packtrain.training.monitoring.run_folders import comparison_rows, find_runs, lines
from packtrain.training.monitoring.runs_page import page_with_data
from packtrain.workflows.run_page_server import import_runs_server


@dataclass(frozen=True)
class RunsSettings:
    """Settings of the comparison of runs."""

    folder: Path = positional("a folder that has runs in it, at any depth", Path("."))
    json: bool = option(False, "print JSON")
    html: Path | None = option(None, "write an HTML page with the curves of all runs, and no table")
    watch: str | None = option(
        None, "serve this page at a port of this machine, live; 0: any that is free", metavar="[HOST:]PORT"
    )  # fmt: skip


def run(settings: RunsSettings) -> int:
    """Print the table of runs, or write or serve the page; returns 0. Raises InputError."""
    root = require_existing(settings.folder, "FOLDER")
    if not root.is_dir():
        raise InputError(f"FOLDER: {root} is a file; give the folder that has the runs")
    page_data = RunsPageData(partial(find_runs, root), f"runs in {root.resolve().name or root}")
    if settings.watch is not None:
        server = import_runs_server().RunsPageServer(settings.watch, page_data)
        print_message(f"watch the runs at {server.url}, stop with Ctrl-C")
        server.run()
        return DONE
    check_writable(settings.html, "--html")
    page_data.refresh()
    if not page_data.runs:
        raise InputError(f"{root} has no runs; they are folders with a metrics.jsonl or a run.yaml")
    if settings.html is not None:
        write_text(settings.html, page_with_data(page_data.data()))
    table_rows = comparison_rows([*page_data.runs.values()])
    if settings.json:
        print(json.dumps(table_rows, indent=2))
    elif settings.html is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
        print("\n".join(lines(table_rows, width)))
    return DONE
