"""Events on the command line: messages on standard error, and a progress line that is redrawn on a terminal."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from packtrain.cli import print_message, print_row
from packtrain.cli.side_by_side import MIN_WIDTH, side_by_side
from packtrain.common.events import Counted, Events
from packtrain.common.signals import stop_on_signals
from packtrain.distributed import rank
from packtrain.training.monitoring.progress import ProgressLine, bar_module, redraws
from packtrain.training.monitoring.work_progress import WorkCounter

CONTROL_CHARS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed


def write(text: str) -> None:
    """Print generated text at once; without control characters on a terminal."""
    sys.stdout.write(CONTROL_CHARS.sub("\ufffd", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def run_events() -> Events:
    """The events of a training run, which rank 0 prints."""
    return SilentEvents() if rank() else TerminalEvents()


class SilentEvents(Events):
    """Prints nothing; a signal stops the task after saving."""

    @contextmanager
    def stopping(self) -> Iterator[Callable[[], bool]]:
        with stop_on_signals() as stopped:
            yield stopped


class TerminalEvents(Events):
    """Prints events. A signal stops the task after saving, a second one at once."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        if redraws(self._stream):
            bar_module()  # now, not inside a plan's memory
        self._progress: ProgressLine | None = None

    def message(self, text: str) -> None:
        if self._progress is None:
            print_message(text)
        else:
            self._progress.print_above(text)

    def text(self, piece: str) -> None:
        write(piece)

    def row(self, text: str) -> None:
        print_row(text)

    def plan(self, run_plan: Any) -> None:
        self.message(run_plan.ended or "\n".join([str(run_plan), *run_plan.notes]))

    @contextmanager
    def training(
        self, steps: int, planned_nbytes: int, report_every: int, limit_nbytes: int | None = None
    ) -> Iterator[None]:
        self._progress = ProgressLine(
            self._stream, steps, planned_nbytes, report_every, limit_nbytes
        )
        try:
            yield
        finally:
            self._progress.close()
            self._progress = None

    def step(self, record: Mapping[str, Any], peak_nbytes: int) -> None:
        assert self._progress is not None
        self._progress.step(record, peak_nbytes)

    def sample(self, text: str) -> None:
        self.message(text)

    def answers(self, answers: Sequence[Any]) -> None:
        columns = shutil.get_terminal_size().columns if self._stream.isatty() else MIN_WIDTH - 1
        self.message("\n".join(side_by_side(answers, columns)))

    @contextmanager
    def counting(self, label: str, unit: str) -> Iterator[Counted]:
        with WorkCounter(self._stream, label, unit) as counter:
            yield counter

    @contextmanager
    def stopping(self) -> Iterator[Callable[[], bool]]:
        with stop_on_signals() as stopped:
            yield stopped
