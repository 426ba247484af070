"""Progress reports of a long task, and requests to stop it.

`Events` ignores all reports; cli.event_output prints them, `TaskCallbacks` calls the caller's functions.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Counted = Callable[..., None]  # count(done, total, *texts)


@dataclass(frozen=True, slots=True)
class StepReport:
    """A training step, with the validation after it, if there was one.

    step, steps           number of this step, from 1, and of the last step
    tokens                trained tokens since the run began
    loss, grad_norm       means over the tokens of the step, before clipping
    lr                    learning rate
    tokens_per_second     trained tokens; `positions_per_second` counts padding and prompts, too
    seconds               of all steps so far
    peak_nbytes           private memory of the process at its peak so far
    val_loss, val_error   mean and standard error in nats
    val_accuracy          share of tokens that the model predicted; its standard error is `val_accuracy_error`
    """

    step: int
    steps: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    positions_per_second: float
    seconds: float
    peak_nbytes: int
    val_loss: float | None = None
    val_error: float | None = None
    val_accuracy: float | None = None
    val_accuracy_error: float | None = None


class Events:
    """Reports nothing and never stops the task."""

    def message(self, text: str) -> None:
        """Report a message to the user: a choice, a warning, the next stage."""

    def notice(self, text: str) -> None:
        """Report a message that nobody may miss: the task was stopped, and how to resume it."""
        self.message(text)

    def text(self, piece: str) -> None:
        """Report a piece of generated text as soon as it is known."""

    def row(self, text: str) -> None:
        """Report a row of the printed table: a tensor that was written."""

    def plan(self, planned_run: Any) -> None:
        """Report that a run is planned (`workflows.planned_run.PlannedRun`) and starts now."""

    @contextmanager
    def training(
        self, steps: int, planned_nbytes: int, report_every: int, limit_nbytes: int | None = None
    ) -> Iterator[None]:
        """Enclose training, whose `steps` are reported inside, each `report_every`-th as a line; memory in bytes."""
        yield

    def step(self, record: Mapping[str, Any], peak_nbytes: int) -> None:
        """Report a line of metrics.jsonl, `record`: a step, with `val_loss` and `val_error` if validation followed."""

    def sample(self, text: str) -> None:
        """Report text that the model generated after --sample-prompt."""

    def answers(self, answers: Sequence[Any]) -> None:
        """Report held-out questions with the base's and the tuned model's answers (`behaviour_check.CheckedAnswer`)."""

    def checkpoint_saved(self, path: Path) -> None:
        """Report that a checkpoint was written."""

    @contextmanager
    def counting(self, label: str, unit: str) -> Iterator[Counted]:
        """`with events.counting("merging", "block") as count:` reports progress: `count(done, total, *texts)`."""
        yield lambda done, total, *texts: None

    @contextmanager
    def stopping(self) -> Iterator[Callable[[], bool]]:
        """Yields a function that returns whether the task should save and stop."""
        yield lambda: False


@dataclass
class TaskCallbacks(Events):
    """Pass reports to the caller's functions, in the task's thread; setting `cancel` saves and stops the task."""

    on_message: Callable[[str], None] | None = None
    on_plan: Callable[[Any], None] | None = None
    on_step: Callable[[StepReport], None] | None = None
    on_validation: Callable[[StepReport], None] | None = None
    on_sample: Callable[[str], None] | None = None
    on_save: Callable[[Path], None] | None = None
    on_progress: Callable[[str, int, int], None] | None = None
    on_text: Callable[[str], None] | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    _num_steps: int = field(default=0, init=False, repr=False)

    def message(self, text: str) -> None:
        _call_if_set(self.on_message, text)

    row = message

    def text(self, piece: str) -> None:
        _call_if_set(self.on_text, piece)

    def plan(self, planned_run: Any) -> None:
        _call_if_set(self.on_plan, planned_run)

    @contextmanager
    def training(
        self, steps: int, planned_nbytes: int, report_every: int, limit_nbytes: int | None = None
    ) -> Iterator[None]:
        self._num_steps = steps
        yield

    def step(self, record: Mapping[str, Any], peak_nbytes: int) -> None:
        step = StepReport(steps=self._num_steps, peak_nbytes=peak_nbytes, **record)
        _call_if_set(self.on_step, step)
        if step.val_loss is not None:
            _call_if_set(self.on_validation, step)

    def sample(self, text: str) -> None:
        _call_if_set(self.on_sample, text)

    def checkpoint_saved(self, path: Path) -> None:
        _call_if_set(self.on_save, path)

    @contextmanager
    def counting(self, label: str, unit: str) -> Iterator[Counted]:
        yield lambda done, total, *texts: _call_if_set(self.on_progress, label, done, total)

    @contextmanager
    def stopping(self) -> Iterator[Callable[[], bool]]:
        yield self.cancel.is_set


def _call_if_set(function: Callable[..., None] | None, *args: Any) -> None:
    if function is not None:
        function(*args)
