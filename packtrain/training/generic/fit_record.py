"""The files of a run of `fit`: checkpoints, metrics, the loss curve and the plan's picture."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.common.files import file_lock, write_text
from packtrain.gguf.gguf_format import NAME_NBYTES
from packtrain.planner.plan_view import page_html
from packtrain.training import checkpoints
from packtrain.training.generic.fit_result import Result
from packtrain.training.generic.trainer import Trainer
from packtrain.training.monitoring import RUN_LOCK, RunMonitor
from packtrain.training.training_loop import CHECKPOINT


class FitRecorder:
    """Writes a run's files into its folder, if any; with `resume` the trainer continues from the checkpoint there.

    about  values that must be equal to resume, as plain data
    """

    def __init__(
        self, folder: str | Path | None, trainer: Trainer, about: Mapping[str, Any], resume: bool,
        report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.folder = None if folder is None else Path(folder)
        graphs = {str(n): placed.graph.fingerprint for n, placed in trainer.form.placed.items()}
        self.trainer, self.about = trainer, {**about, "graphs": graphs}
        self.resume, self.report = resume, report
        self.progress, self.last = checkpoints.TrainingProgress(), dict[str, Any]()
        self.step_start = time.perf_counter()
        self.monitor: RunMonitor | None = None
        self.exit_stack = ExitStack()

    def __enter__(self) -> "FitRecorder":
        if self.folder is None:
            if self.resume:
                raise InputError("resume needs the folder of the run")
            return self
        long_names = [name for name in self.trainer.saved if len(name.encode()) >= NAME_NBYTES]
        if long_names:
            fact = f"a checkpoint cannot hold {long_names[0]}: more than {NAME_NBYTES - 1} bytes"
            raise InputError(fact)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.exit_stack.enter_context(file_lock(self.folder / RUN_LOCK, f"folder: {self.folder}"))
        path = self.folder / CHECKPOINT
        if path.exists() and not self.resume:
            raise InputError(f"{self.folder} has a run already; resume=True continues it")
        checkpoint = checkpoints.load_checkpoint(path, self.report) if self.resume else None
        self.monitor = self.exit_stack.enter_context(RunMonitor(self.folder, Events()))
        if checkpoint is not None:
            self._restore(checkpoint)
            self.monitor.resume(self.progress.step)
        variant = self.trainer.form
        rows = [(label, nbytes, "") for label, nbytes in variant.parts.items() if label != "arena"]
        process_row = ("process", self.trainer.baseline, "before the run")
        page = page_html(variant.largest_plan, title=str(variant), rows=[process_row, *rows])
        write_text(self.folder / "plan.html", page)
        self.step_start = time.perf_counter()
        return self

    def _restore(self, checkpoint: checkpoints.TrainingCheckpoint) -> None:
        """Set weights, moments and the number of steps from a checkpoint. Raises InputError if it is of another run."""
        other = [name for name, value in self.about.items() if checkpoint.about.get(name) != value]
        if other:
            name = other[0]
            fact = f"{checkpoint.path}: it was trained with {name} {checkpoint.about.get(name)}"
            raise InputError(f"{fact}, not {self.about[name]}")
        for name in self.trainer.saved:
            self.trainer.session.set({name: checkpoint.array(name)})
        self.progress, self.trainer.done = checkpoint.progress, checkpoint.progress.step

    def record_step(self, result: Result, norm: float) -> None:
        """Write the previous step's record; note this step's mean loss (last in `result`), gradient norm and speed."""
        self._write_record()
        seconds, step_end = time.perf_counter() - self.step_start, time.perf_counter()
        self.step_start, batch = step_end, self.trainer.batch
        self.progress = replace(self.progress.after_step(batch, seconds), step=self.trainer.done)
        losses = result.losses[-self.trainer.form.micros :]
        self.last = {
            "step": self.trainer.done, "datapoints": self.progress.tokens,
            "loss": sum(losses) / (len(losses) if result.mean else 1), "lr": self.trainer.lr, "grad_norm": norm,
            "datapoints_per_second": batch / seconds, "seconds": self.progress.seconds,
        }  # fmt: skip

    def record_epoch(self, eval_result: Result) -> None:
        """Write the record of the epoch's last step with the validation's results, and save a checkpoint."""
        if eval_result.ndata:
            self.last |= {"val_loss": eval_result.loss, "val_error": eval_result.loss_error}
            if eval_result.correct is not None:
                error = eval_result.accuracy_error
                self.last |= {"val_accuracy": eval_result.accuracy, "val_accuracy_error": error}
            self.progress = self.progress.validated(eval_result.loss)
        self._write_record()
        self.save()

    def _write_record(self) -> None:
        if self.monitor is not None and self.last:
            self.monitor.record_step(self.last)
        self.last = {}

    def save(self) -> None:
        """Write pending metrics and a checkpoint; nothing without a folder."""
        if self.monitor is None or self.folder is None:
            return
        self._write_record()
        self.monitor.save()
        checkpoints.save(self.folder / CHECKPOINT, self.progress, self.about, self.trainer.saved)
        self.step_start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.exit_stack.close()
