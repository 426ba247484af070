"""Records of a run: metrics.jsonl, TensorBoard events, samples and the loss curve in its folder; drawing progress.

Input: a record of numbers per step. It measures peak private memory, and knows nothing of models or training."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from packtrain.common.events import Events
from packtrain.common.files import write_text
from packtrain.common.memory import MemoryPeak
from packtrain.training.monitoring.curve import LossCurve
from packtrain.training.monitoring.metrics_file import MetricsFile, iter_records
from packtrain.training.monitoring.tensorboard_events import EventFile

__all__ = ["CURVE_FILE", "METRICS_FILE", "RUN_LOCK", "SAMPLES_FILE", "RunMonitor"]

METRICS_FILE, CURVE_FILE, SAMPLES_FILE = "metrics.jsonl", "loss.svg", "samples.jsonl"
RUN_LOCK = "lock"  # in the run folder, locked while the run is alive


class RunMonitor:
    """Records what a training loop reports, step by step, in metrics.jsonl, TensorBoard events and the loss curve.

    peak    peak of the private memory inside the `with` block
    writes  write files; otherwise only measure and report
    The first step of a run replaces the files in `folder`, unless `resume` has been called.
    """

    def __init__(
        self, folder: Path, events: Events, *, tensorboard: bool = True, writes: bool = True
    ) -> None:
        self.folder, self.events = folder, events
        self.tensorboard, self.writes = tensorboard, writes
        self.curve, self.peak = LossCurve(), MemoryPeak()
        self._peak_stack = ExitStack()
        self.log_files: list[MetricsFile | EventFile] = []
        self.samples_file: MetricsFile | None = None  # samples, once there is one

    def resume(self, step: int) -> None:
        """Continue the files of an earlier run after this step; records of later steps are dropped."""
        if not self.writes:
            return
        self._open_files(step)
        for record in iter_records(self.folder / METRICS_FILE):
            self.curve.add(record)

    def _open_files(self, after_step: int | None) -> None:
        self.log_files.append(MetricsFile(self.folder / METRICS_FILE, after_step))
        if self.tensorboard:
            self.log_files.append(EventFile(self.folder, after_step))
        if after_step is None:
            (self.folder / SAMPLES_FILE).unlink(missing_ok=True)
        elif (self.folder / SAMPLES_FILE).exists():
            self.samples_file = MetricsFile(self.folder / SAMPLES_FILE, after_step)

    def _opened_files(self) -> list[MetricsFile | EventFile]:
        if not self.log_files:
            self._open_files(None)
        return self.log_files

    def record_step(self, record: Mapping[str, float]) -> None:
        """Record and report a step: `step, tokens, loss, lr, grad_norm, tokens_per_second, seconds`.
        `tokens_per_second` counts trained tokens; `positions_per_second`, where given, all computed positions.
        A step with a validation after it is reported after that: it has `val_loss`, `val_accuracy` and their errors.
        """
        for log in (*self._opened_files(), self.curve) if self.writes else ():
            log.add(record)
        self.events.step(record, self.peak.nbytes)

    def record_sample(self, step: int, text: str) -> None:
        """Record a text that the model generated after a step."""
        self.samples_file = self.samples_file or MetricsFile(self.folder / SAMPLES_FILE, step)
        self.samples_file.add({"step": step, "text": text})

    def save(self) -> None:
        """Sync all records to the disk and draw the loss curve, as at each checkpoint."""
        for log_file in self.log_files:
            os.fsync(log_file.file.fileno())
        write_text(self.folder / CURVE_FILE, self.curve.svg())

    def record_end(self, record: Mapping[str, Any]) -> None:
        """Write the last line of a finished run: `planned_bytes, peak_bytes, baseline_bytes`."""
        metrics, *_ = self._opened_files()
        metrics.add({"event": "end", **record})
        self.save()

    def __enter__(self) -> "RunMonitor":
        self._peak_stack.enter_context(self.peak)
        return self

    def __exit__(self, *error: object) -> None:
        self._peak_stack.close()
        for log_file in (*self.log_files, *filter(None, [self.samples_file])):
            log_file.file.close()
