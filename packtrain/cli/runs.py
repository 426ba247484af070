"""packtrain runs: compare the runs below a folder, as a table or a page."""

import json
import math
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packtrain.cli import DONE, say
from packtrain.common.errors import InputError
from packtrain.common.files import check_writable, existing, write_text
from packtrain.common.options import option, positional
from packtrain.training.monitoring.history import History
from packtrain.training.monitoring.page_data import Board
from packtrain.training.monitoring.run_folders import find, lines, rows
from packtrain.training.monitoring.runs_page import still_page
from packtrain.workflows.run_page_server import serving


@dataclass(frozen=True)
class Runs:
    """What to compare, and how to show it."""

    folder: Path = positional("a folder that has runs in it, at any depth", Path("."))
    json: bool = option(False, "print JSON")
    html: Path | None = option(None, "write an HTML page with the curves of all runs, and no table")
    watch: str | None = option(
        None, "serve this page at a port of this machine, live; 0: any that is free", metavar="[HOST:]PORT"
    )  # fmt: skip


def run(settings: Runs) -> int:
    """Print the table, or write or serve the page. Raises InputError."""
    root = existing(settings.folder, "FOLDER")
    if not root.is_dir():
        raise InputError(f"FOLDER: {root} is a file; give the folder that has the runs")
    board = Board(partial(find, root), f"runs in {root.resolve().name or root}")
    if settings.watch is not None:
        server = serving().Watching(settings.watch, board)
        say(f"watch the runs at {server.url}, stop with Ctrl-C")
        server.run()
        return DONE
    if settings.html is not None:
        check_writable(settings.html, "--html")
    board.refresh()
    if not board.runs:
        raise InputError(f"{root} has no runs; they are folders with a metrics.jsonl or a run.yaml")
    if settings.html is not None:
        write_text(settings.html, still_page(board.data()))
    if settings.json or settings.html is None:
        _print([*board.runs.values()], settings.json)
    return DONE


def _print(runs: list[History], as_json: bool) -> None:
    table_rows = rows(runs)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    print(json.dumps(table_rows, indent=2) if as_json else "\n".join(lines(table_rows, width)))
