"""The line that is redrawn on a terminal, by rich, at most every REDRAW_SECONDS; rich respects NO_COLOR."""

import time
from collections.abc import Sequence
from typing import TextIO

import rich.progress
from rich.console import Console
from rich.table import Column

REDRAW_SECONDS = 0.2
BAR_COLUMNS = 5  # least width of the bar, with a space


class Bar:
    """The line on a terminal: a bar, and as many parts as fit."""

    def __init__(self, stream: TextIO, steps: int) -> None:
        cut = Column(no_wrap=True, overflow="ellipsis")
        self.line = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.description}", table_column=cut, markup=False),
            # emoji: a table that would be loaded when the first line is drawn, inside a plan's memory
            console=Console(file=stream, force_terminal=True, emoji=False),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            expand=True,
        )
        self.task = self.line.add_task("", total=steps)
        self.due = 0.0

    def draw(self, step: int, parts: Sequence[str]) -> None:
        """Draw the parts, the least important last."""
        text = fitting(parts, self.line.console.width - BAR_COLUMNS)
        self.line.update(self.task, completed=step, description=text)
        self.line.start()
        self.line.refresh()
        self.due = time.monotonic() + REDRAW_SECONDS

    def say(self, text: str) -> None:
        self.line.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.line.stop()


def fitting(parts: Sequence[str], columns: int) -> str:
    """A line of as many whole parts as fit; always the first one."""
    line, *optional_parts = filter(None, parts)
    for part in optional_parts:
        longer = f"{line}  {part}"
        if len(longer) > columns:
            break
        line = longer
    return line
