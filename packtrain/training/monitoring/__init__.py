"""Records of a run: metrics.jsonl, TensorBoard events, samples and the loss curve in its folder; drawing progress.

Input: a record of numbers per step. It measures peak private memory, and knows nothing of models or training.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from packtrain.common.events import Events
from packtrain.common.files import write_text
from packtrain.common.memory import Peak
from packtrain.training.monitoring.curve import Curve
from packtrain.training.monitoring.metrics_file import Metrics, records
from packtrain.training.monitoring.tensorboard_events import EventFile

__all__ = ["METRICS", "PICTURE", "SAMPLES", "Watch"]

METRICS, PICTURE, SAMPLES = "metrics.jsonl", "loss.svg", "samples.jsonl"


class Watch:
    """Records what a training loop reports: `with Watch(...) as watch:`, `step` after each step, `end` at the end.

    peak  private memory since then
    writes  files; otherwise it only measures and reports
    The first step of a run replaces the files in `folder`, unless `resume` has been called.
    """

    def __init__(
        self, folder: Path, events: Events, *, tensorboard: bool = True, writes: bool = True
    ) -> None:
        self.folder, self.events, self.tensorboard, self.writes = (
            folder,
            events,
            tensorboard,
            writes,
        )
        self.curve, self.peak = Curve(), Peak()
        self._measuring = ExitStack()
        self.files: list[Metrics | EventFile] = []
        self.texts: Metrics | None = None  # samples, once there is one

    def resume(self, step: int) -> None:
        """Continue after this step; records of later steps are dropped."""
        if not self.writes:
            return
        self._open(step)
        for record in records(self.folder / METRICS):
            self.curve.add(record)

    def _open(self, after: int | None) -> None:
        self.files.append(Metrics(self.folder / METRICS, after))
        if self.tensorboard:
            self.files.append(EventFile(self.folder, after))
        if after is None:
            (self.folder / SAMPLES).unlink(missing_ok=True)
        elif (self.folder / SAMPLES).exists():
            self.texts = Metrics(self.folder / SAMPLES, after)

    def _opened(self) -> list[Metrics | EventFile]:
        if not self.files:
            self._open(None)
        return self.files

    def step(self, record: Mapping[str, float]) -> None:
        """Record and report a step: `step, tokens, loss, lr, grad_norm, tokens_per_second, seconds`.
        `tokens_per_second` counts trained tokens; `positions_per_second`, where given, all computed positions.
        A step with a validation after it is reported after that: it has `val_loss`, `val_accuracy` and their errors.
        """
        for part in (*self._opened(), self.curve) if self.writes else ():
            part.add(record)
        self.events.step(record, self.peak.nbytes)

    def sample(self, step: int, text: str) -> None:
        """Record a text that the model generated after a step."""
        self.texts = self.texts or Metrics(self.folder / SAMPLES, step)
        self.texts.add({"step": step, "text": text})

    def save(self) -> None:
        """At a checkpoint: sync all records to the disk and draw the curve."""
        for file in self.files:
            file.sync()
        write_text(self.folder / PICTURE, self.curve.svg())

    def end(self, record: Mapping[str, Any]) -> None:
        """Write the last line of a finished run: `planned_bytes, peak_bytes, baseline_bytes`."""
        metrics, *_ = self._opened()
        metrics.add({"event": "end", **record})
        self.save()

    def __enter__(self) -> "Watch":
        self._measuring.enter_context(self.peak)
        return self

    def __exit__(self, *error: object) -> None:
        self._measuring.close()
        for file in (*self.files, *filter(None, [self.texts])):
            file.close()
