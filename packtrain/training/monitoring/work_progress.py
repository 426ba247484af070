"""Progress of work other than training steps: merging, validation, evaluation."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self, TextIO

from packtrain.common.text import clock
from packtrain.training.monitoring.progress import bar_module, redraws

PLAIN_SECONDS = 10.0  # between progress lines that cannot be redrawn
MakeBar = Callable[[int], Any]  # the number of steps -> a bar


class WorkCounter:
    """`with WorkCounter(stream, "merging", "block") as count:` shows `count(3, 18)` as block 3 of 18, 0:40 left.

    The line is redrawn on a terminal or by `make_bar`, and printed every PLAIN_SECONDS elsewhere.
    """

    def __init__(
        self, stream: TextIO, label: str, unit: str, make_bar: MakeBar | None = None
    ) -> None:
        self.stream, self.label, self.unit = stream, label, unit
        self.can_redraw = make_bar is not None or redraws(stream)
        self.make_bar = make_bar or (lambda total: bar_module().TerminalBar(stream, total))
        self.bar: Any = None
        self.start_time = time.monotonic()
        self.next_print_time = self.start_time + PLAIN_SECONDS

    def __call__(self, done: int, total: int, *texts: str) -> None:
        """Report that `done` of `total` parts are done; the texts show results so far."""
        now = time.monotonic()
        left = clock((now - self.start_time) / max(done, 1) * (total - done))
        parts = f"{self.label}: {self.unit} {done} of {total}, {left} left", *texts
        with suppress(OSError):  # the work outlives the terminal
            if self.can_redraw:
                self.bar = self.bar or self.make_bar(total)
                if done == total or now >= self.bar.due:
                    self.bar.draw(done, parts)
            elif done < total and now >= self.next_print_time:  # the next message shows the end
                print("  ".join(parts), file=self.stream, flush=True)
                self.next_print_time = now + PLAIN_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            with suppress(OSError):
                self.bar.close()
