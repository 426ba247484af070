"""The line that is redrawn on a terminal, by rich, at most every REDRAW_SECONDS; rich respects NO_COLOR."""

import time
from collections.abc import Sequence
from typing import TextIO

import rich.progress
from rich.console import Console
from rich.table import Column

REDRAW_SECONDS = 0.2
MIN_BAR_COLUMNS = 5  # least width of the bar, with a space


class TerminalBar:
    """The line on a terminal: a bar, and as many parts as fit."""

    def __init__(self, stream: TextIO, steps: int) -> None:
        text_column = Column(no_wrap=True, overflow="ellipsis")
        self.progress = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.description}", table_column=text_column, markup=False),
            # emoji: a table that would be loaded when the first line is drawn, inside a plan's memory
            console=Console(file=stream, force_terminal=True, emoji=False), auto_refresh=False, redirect_stdout=False,
            redirect_stderr=False, expand=True,
        )  # fmt: skip
        self.task_id = self.progress.add_task("", total=steps)
        self.due = 0.0

    def draw(self, step: int, parts: Sequence[str]) -> None:
        """Redraw the line: the bar at `step`, then as many of the texts `parts` as fit, the most important first."""
        text = fit_parts(parts, self.progress.console.width - MIN_BAR_COLUMNS)
        self.progress.update(self.task_id, completed=step, description=text)
        self.progress.start()
        self.progress.refresh()
        self.due = time.monotonic() + REDRAW_SECONDS

    def print_above(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()


def fit_parts(parts: Sequence[str], max_columns: int) -> str:
    """Join as many whole parts as fit into `max_columns`, at least the first one."""
    line, *optional_parts = filter(None, parts)
    for part in optional_parts:
        longer_line = f"{line}  {part}"
        if len(longer_line) > max_columns:
            break
        line = longer_line
    return line
