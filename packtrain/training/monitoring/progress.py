"""The progress of a run: one line that is redrawn on a terminal, occasional lines elsewhere.

Input: metrics records and peak private memory. No thread: a line is drawn when a step ends. TERM=dumb: plain lines."""

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Self, TextIO

import numpy as np

from packtrain.common.text import clock, speed_text

BRIEF = ("step", "loss", "val", "eta", "memory", "speed")  # on a terminal, the least important last


class ProgressLine:
    """Progress of a run of `steps` steps. Losses and speeds are means over the last `report_every` steps."""

    def __init__(
        self, stream: TextIO, steps: int, planned_nbytes: int, report_every: int, limit_nbytes: int | None = None,
        bar: Any = None,
    ) -> None:  # fmt: skip
        """bar: draws the line, a TerminalBar or NotebookBar; None: a TerminalBar if `stream` is a terminal."""
        self.stream, self.steps, self.report_every = stream, steps, report_every
        self.planned_nbytes, self.limit_nbytes = planned_nbytes, limit_nbytes
        self.bar = bar or (bar_module().TerminalBar(stream, steps) if redraws(stream) else None)
        self.recent: deque[Mapping[str, Any]] = deque(maxlen=report_every)
        self.first_shown: tuple[int, float] | None = None  # the first step shown, and when it ended
        self.val_text, self.val_step = "", 0  # the last validation, and the step before it

    def step(self, record: Mapping[str, Any], peak_nbytes: int) -> None:
        """Show this step if it is due: the first, the last, or after `report_every` steps or 0.2 seconds."""
        step, now = record["step"], time.monotonic()
        is_first_or_last = self.first_shown is None or step >= self.steps
        self.first_shown = self.first_shown or (step, now)
        self.recent.append(record)
        if "val_loss" in record:
            self.val_text, self.val_step = validation_text(record), step
        if self.bar is not None:
            if is_first_or_last or now >= self.bar.due:
                line_parts = self._line_parts(step, now, peak_nbytes)
                with suppress(OSError):  # a run outlives its terminal or pipe
                    self.bar.draw(step, [line_parts[key] for key in BRIEF])
        elif is_first_or_last or step % self.report_every == 0:
            line_parts = self._line_parts(step, now, peak_nbytes)
            self.print_above(f"step {'  '.join(filter(None, line_parts.values()))}")
            self.recent.clear()

    def _line_parts(self, step: int, now: float, peak_nbytes: int) -> dict[str, str]:
        """Return the parts of a progress line by name, in the order of a plain line; empty where unknown."""
        last_record = self.recent[-1]
        token_rates = [r.get("positions_per_second", r["tokens_per_second"]) for r in self.recent]
        first_step, first_time = self.first_shown or (step, now)
        per_step = (now - first_time) / max(step - first_step, 1)
        val_step_text = f" (step {self.val_step})" if self.val_text and self.val_step < step else ""
        return {
            "step": f"{step}/{self.steps}", "loss": f"loss {mean_text([record['loss'] for record in self.recent])}",
            "val": f"{self.val_text}{val_step_text}", "pairs": pairs_text(self.recent),
            "lr": f"lr {last_record['lr']:.1e}", "norm": f"norm {last_record['grad_norm']:.3g}",
            "speed": speed_text(statistics.harmonic_mean(token_rates)),
            "eta": f"eta {clock(per_step * (self.steps - step))}" if step > first_step else "",
            "memory": memory_text(peak_nbytes, self.planned_nbytes, self.limit_nbytes),
        }  # fmt: skip

    def print_above(self, text: str) -> None:
        """Print a line above the one that is redrawn."""
        with suppress(OSError):
            if self.bar is not None:
                self.bar.print_above(text)
            else:
                print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """Restore the terminal and keep the last line."""
        if self.bar is not None:
            with suppress(OSError):
                self.bar.close()


def validation_text(record: Mapping[str, Any]) -> str:
    """Format a validation: `val 4.6393±0.0123 acc 24.1±0.3%`."""
    error_text = f"±{record['val_error']:.4f}" if "val_error" in record else ""
    if "val_accuracy" not in record:
        return f"val {record['val_loss']:.4f}{error_text}"
    accuracy, accuracy_error = 100 * record["val_accuracy"], 100 * record["val_accuracy_error"]
    return f"val {record['val_loss']:.4f}{error_text} acc {accuracy:.1f}±{accuracy_error:.1f}%"


def pairs_text(records: Iterable[Mapping[str, Any]]) -> str:
    """Format means over steps of pairs: `margin 0.213, chosen 84 %`; empty for a loss of tokens."""
    pair_records = [r for r in records if "rewards_margin" in r]
    if not pair_records:
        return ""
    margin, accuracy = (
        statistics.fmean(r[f"rewards_{metric}"] for r in pair_records)
        for metric in ("margin", "accuracy")
    )
    return f"margin {margin:.3f}, chosen {100 * accuracy:.0f} %"


def bar_module() -> Any:
    """Load the module of the terminal's bar, only for terminals: rich takes longer to load than most of packtrain."""
    return import_module("packtrain.training.monitoring.progress_bar")


def redraws(stream: TextIO) -> bool:
    """Return whether a line can be redrawn on this stream: a terminal that is not dumb."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def memory_text(peak_nbytes: int, planned_nbytes: int, limit_nbytes: int | None = None) -> str:
    """Format bytes as `memory: peak 612, plan 640, limit 1,024 MiB`; without --memory there is no limit."""
    memory_parts = {"peak": peak_nbytes, "plan": planned_nbytes, "limit": limit_nbytes}
    part_texts = (f"{name} {n / 2**20:,.0f}" for name, n in memory_parts.items() if n is not None)
    return f"memory: {', '.join(part_texts)} MiB"


def mean_text(losses: list[float]) -> str:
    """Format the mean of the finite losses, with its standard error if there are several: 3.1234±0.0123."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < 2:
        return f"{finite[0]:.4f}" if finite else "not finite"
    return f"{np.mean(finite):.4f}±{np.std(finite, ddof=1) / len(finite) ** 0.5:.4f}"


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
