"""Events on the command line: messages on standard error, and a progress line that is redrawn on a terminal."""

import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any, TextIO

from packtrain.cli import print_message, print_row
from packtrain.common.events import Counted, Events
from packtrain.common.signals import stop_on_signals
from packtrain.distributed import rank
from packtrain.kernels.runtime import environment
from packtrain.training.monitoring.metrics_file import record_line
from packtrain.training.monitoring.progress import ProgressLine, WorkCounter, bar_module, redraws
from packtrain.training.run_settings import RunSettings
from packtrain.workflows.behaviour_check import END_LABELS, CheckedAnswer

MIN_WIDTH = 100  # characters of a terminal that shows two columns
MAX_LINES = 12  # most lines of a shown answer


def side_by_side(answers: Sequence[CheckedAnswer], width: int) -> Iterator[str]:
    """Yield lines of at most `width` characters that show held-out answers of base and tuned model."""
    for number, answer in enumerate(answers, 1):
        question, data_answer = (
            " ".join(text.split()) for text in (answer.question, answer.reference)
        )
        heading = without_controls(f"held-out question {number} of {len(answers)}: {question}")
        yield from wrap(heading, width, max_lines=3, placeholder=" …")
        reference = without_controls(f"  data: {data_answer}")
        yield from wrap(reference, width, subsequent_indent="    ", max_lines=3, placeholder=" …")
        columns = (
            (f"base ({END_LABELS[answer.base_ended]})", answer.base),
            (f"tuned ({END_LABELS[answer.tuned_ended]})", answer.tuned),
        )
        if width < MIN_WIDTH:
            for title, text in columns:
                yield f"  {title}"
                yield from (f"    {line}" for line in _wrapped_lines(text, width - 4))
            continue
        column_width = (width - 5) // 2
        left, right = ([title, *_wrapped_lines(text, column_width)] for title, text in columns)
        for base_line, tuned_line in zip_longest(left, right, fillvalue=""):
            yield f"  {base_line:<{column_width}} │ {tuned_line}".rstrip()


def _wrapped_lines(text: str, width: int) -> list[str]:
    """Return a text's lines, wrapped, at most MAX_LINES; the last line is `…` if there are more."""
    lines = [part for line in text.splitlines() for part in wrap(without_controls(line), width)]
    return lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], "…"]


CONTROL_CHARS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed


def without_controls(text: str) -> str:
    """Replace control characters, which a terminal would obey; joiners of emoji and all kinds of spaces stay."""
    return CONTROL_CHARS.sub("\ufffd", text)


def write(text: str) -> None:
    """Print generated text at once; without control characters on a terminal."""
    sys.stdout.write(without_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def run_events(settings: RunSettings) -> Events:
    """Return a training run's events: rank 0 prints them, others nothing; sets environment.is_quiet by --quiet."""
    if rank():
        return SilentEvents()
    environment.is_quiet = settings.quiet
    return TerminalEvents(is_quiet=settings.quiet, log_json=settings.log_json)


class SilentEvents(Events):
    """Prints nothing; a signal stops the task after saving."""

    @contextmanager
    def stopping(self) -> Iterator[Callable[[], bool]]:
        with stop_on_signals() as stopped:
            yield stopped


class TerminalEvents(Events):
    """Prints events. A signal stops the task after saving, a second one at once.

    is_quiet  prints notices only
    log_json  prints each event as a line of JSON to standard output, too
    """

    def __init__(
        self, stream: TextIO | None = None, *, is_quiet: bool = False, log_json: bool = False
    ) -> None:
        self._stream = io.StringIO() if is_quiet else stream or sys.stderr
        self._is_quiet, self._log_json = is_quiet, log_json
        if redraws(self._stream):
            bar_module()  # now, not inside a plan's memory
        self._progress: ProgressLine | None = None

    def _log(self, event: str, record: Mapping[str, Any]) -> None:
        if self._log_json:
            with suppress(BrokenPipeError):  # the run goes on without its reader
                print(record_line({"event": event, **record}), end="", flush=True)

    def message(self, text: str, event: str = "message") -> None:
        self._log(event, {"text": text})
        if self._progress is not None:
            self._progress.print_above(text)
        elif not self._is_quiet:
            print_message(text)

    def notice(self, text: str) -> None:
        self._log("notice", {"text": text})
        print_message(text)

    def text(self, piece: str) -> None:
        write(piece)

    def row(self, text: str) -> None:
        print_row(text)

    def plan(self, run_plan: Any) -> None:
        self.message(run_plan.ended or "\n".join([str(run_plan), *run_plan.notes]), "plan")

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
        self._log("step", {**record, "steps": self._progress.steps, "peak_nbytes": peak_nbytes})
        self._progress.step(record, peak_nbytes)

    def sample(self, text: str) -> None:
        self.message(text, "sample")

    def checkpoint_saved(self, path: Path) -> None:
        self._log("checkpoint", {"path": str(path)})

    def answers(self, answers: Sequence[Any]) -> None:
        columns = shutil.get_terminal_size().columns if self._stream.isatty() else MIN_WIDTH - 1
        self.message("\n".join(side_by_side(answers, columns)), "answers")

    @contextmanager
    def counting(self, label: str, unit: str) -> Iterator[Counted]:
        with WorkCounter(self._stream, label, unit) as counter:
            yield counter

    stopping = SilentEvents.stopping
