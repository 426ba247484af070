"""The training loop: steps, validation, early stopping, samples and checkpoints."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packtrain.common.errors import Interrupted
from packtrain.common.events import Events
from packtrain.common.text import plural
from packtrain.distributed import current_world
from packtrain.gguf import GGUF
from packtrain.training import checkpoint_shards, checkpoints
from packtrain.training.checkpoints import TrainingProgress
from packtrain.training.monitoring import RunMonitor
from packtrain.training.run_settings import RunSettings
from packtrain.training.training_engine import TrainingEngine
from packtrain.training.training_job import TrainingJob

BEST_FILE, CHECKPOINT = "best.gguf", "checkpoint.gguf"
SAMPLE_PREFIX = "sample: "  # begins the message of a sample


@dataclass(slots=True)
class TrainingLoop:
    """A job on its engine: `init_weights` sets the values of the leaves, `train` trains to the end."""

    job: TrainingJob
    engine: TrainingEngine
    folder: Path
    check_pace: Callable[[float, int], str | None] | None = None  # see planner.expected_pace
    sample: Callable[[], str] | None = None
    events: Events = field(default_factory=Events)
    progress: TrainingProgress = field(default_factory=TrainingProgress)

    # ---- start

    def init_weights(self, checkpoint: checkpoints.TrainingCheckpoint | None) -> None:
        """Set initial values, or those of a checkpoint that passed `check_compatible`."""
        session = self.engine.session
        if checkpoint is None:
            self.job.model.init_weights(session)
            return
        before, now = checkpoint.about.get("optimizer", "adamw"), self.job.settings.optimizer
        checkpoint_shards.restore(session, self.engine.plans, checkpoint, moments=before == now)
        checkpoint.gguf.close()  # saves replace the file, and a deleted one that is mapped takes room
        self.progress = replace(checkpoint.progress, shuffled=self.job.train.shuffle_key)
        if before != now:
            self.progress = replace(self.progress, since=self.progress.step)
            leaves = self.engine.plans.checkpoint_tensors.values()
            has_moments = any(leaf.role == "moment" for leaf in leaves)
            self.events.message(
                f"--optimizer was {before} and is {now}: moments of {before} are dropped, and {now} begins"
                f" {'with zero moments' if has_moments else 'without moments'}"
            )
        self.engine.optimizer_start = self.progress.since
        if (
            math.isfinite(checkpoint.progress.base)
            and checkpoint.progress.batches != self.job.num_eval_batches
        ):
            # these losses were measured on other batches and cannot be compared
            self.progress = replace(self.progress, base=math.inf, last=math.inf)
        is_old = checkpoint.path != self.checkpoint
        if current_world().rank == 0 and is_old and self.checkpoint.exists():
            # otherwise the first save would keep the damaged file instead of the valid one
            self.checkpoint.replace(self.folder / "checkpoint.damaged.gguf")

    @property
    def checkpoint(self) -> Path:
        return self.folder / CHECKPOINT

    # ---- training

    def train(self, monitor: RunMonitor, stopped: Callable[[], bool]) -> None:
        """Train to the end or an early stop. Raises NotFinite; Interrupted, after saving, if `stopped()` on a rank."""
        num_positions = current_world().world_size * self.job.shape.num_positions
        while self.progress.step < self.job.steps and not self._report_early_stop():
            if current_world().any_rank(stopped()):
                self.save(monitor)
                raise Interrupted(f"stopped after step {self.progress.step} of {self.job.steps}")
            monitor.record_step(self._train_step(num_positions))
            if self.sample and self._is_due(self.job.settings.sample_every, at_last_step=False):
                text = self.sample()
                monitor.record_sample(self.progress.step, text.removeprefix(SAMPLE_PREFIX))
                self.events.sample(text)
            if self._is_due(self.job.settings.save_every, at_last_step=False):
                self.save(monitor)
        self.save(monitor)

    def _train_step(self, num_positions: int) -> dict[str, Any]:
        """Train one step (of `num_positions` on all ranks), validate if that is due, and return the metrics record."""
        start_time, step = time.perf_counter(), self.progress.step + 1
        rate = self.job.schedule.rate(step)
        result = self.engine.step(self.job.batches(step), step, rate)
        seconds = time.perf_counter() - start_time
        self.progress = self.progress.after_step(result.tokens, seconds)
        pace_note = self.check_pace and self.check_pace(seconds, self.job.steps - step)
        if pace_note:
            self.events.message(pace_note)
        if result.skip_reason:
            self.events.message(
                f"step {step} skipped, its loss or gradient is not finite: {result.skip_reason}"
            )
        else:
            num_past = self.job.settings.past
            self.progress = self.progress.with_train_loss(result.loss, result.norm, num_past)
        if result.note:
            self.events.message(f"step {step}: {result.note}")
        record: dict[str, Any] = {
            "step": step, "tokens": self.progress.tokens, "loss": result.loss, "lr": rate, "grad_norm": result.norm,
            "tokens_per_second": result.tokens / seconds,
            "positions_per_second": num_positions / seconds, "seconds": self.progress.seconds, **result.extra_metrics,
        }  # fmt: skip
        due = self._is_due(self.job.steps_per_eval, at_last_step=True)
        if self.job.valid is not None and (due or stop_reason(self.job.settings, self.progress)):
            record |= self._measure_validation()
        return record

    def _measure_validation(self) -> dict[str, float]:
        """Return the validation metrics by name; with --patience, save the weights if they are the best so far."""
        evaluated = self.engine.evaluate(self.job.validation_batches(), self.job.model.eog_ids)
        patient = bool(self.job.settings.patience)
        self.progress = self.progress.validated(evaluated.loss, evaluated.eog_counts, best=patient)
        if current_world().rank == 0 and patient and not self.progress.stale:
            self.job.model.save_weights(self.folder / BEST_FILE, self.engine.session.view)
        spread = {} if math.isnan(evaluated.error) else {"val_error": evaluated.error}
        accuracy, accuracy_error = evaluated.accuracy, evaluated.accuracy_error
        metrics = {"val_loss": evaluated.loss, **spread, "val_accuracy": accuracy}
        return metrics | {"val_accuracy_error": accuracy_error}

    def _is_due(self, interval: int, at_last_step: bool) -> bool:
        """Return whether work of every `interval` steps (0: never) is due; `at_last_step`: also at the last step."""
        at_end = at_last_step and self.progress.step == self.job.steps
        return at_end or bool(interval and self.progress.step % interval == 0)

    def _report_early_stop(self) -> bool:
        reason = stop_reason(self.job.settings, self.progress)
        if reason:
            self.events.message(f"stopped early: {reason}")
        return reason is not None

    # ---- saving

    def save(self, monitor: RunMonitor) -> None:
        """Write a checkpoint, and the files of --save-name and --save-model, on rank 0; other ranks send parts."""
        arrays = checkpoint_shards.checkpoint_arrays(self.engine.session, self.engine.plans)
        if current_world().rank:
            if isinstance(arrays, checkpoint_shards.GatheredArrays):
                arrays.serve_shards()
            return
        monitor.save()  # first: metrics may be ahead of the checkpoint (they are truncated on resume), never behind it
        checkpoints.save(self.checkpoint, self.progress, self.job.about(), arrays)
        if isinstance(arrays, checkpoint_shards.GatheredArrays):
            arrays.finish()
        self._save_as(self.job.settings.save_name, lambda to: checkpoints.copy(self.checkpoint, to))
        view = self.engine.session.view
        self._save_as(
            self.job.settings.save_model, lambda to: self.job.model.save_weights(to, view)
        )
        self.events.checkpoint_saved(self.checkpoint)

    def _save_as(self, pattern: str, write_file: Callable[[Path], object]) -> None:
        """Call write_file with path `pattern`, ITERATION being the step; link it as LATEST. "" writes nothing."""
        if not pattern:
            return
        numbered_path, latest_path = (
            self.folder / pattern.replace("ITERATION", str(name))
            for name in (self.progress.step, "LATEST")
        )
        write_file(numbered_path)
        checkpoints.link_file(numbered_path, latest_path)

    def write_result(self) -> None:
        """Write the run's result: with --patience the weights of the best validation, set first, else the last ones."""
        best_path = self.folder / BEST_FILE
        if self.job.settings.patience and best_path.exists():
            best_weights = GGUF(best_path)
            for name in best_weights.entries:
                self.engine.session.set({name: best_weights.array(name)})
        self.job.model.write_result(self.engine.session.view)


def stop_reason(settings: RunSettings, progress: TrainingProgress) -> str | None:
    """Return the criterion that ends the run, as a sentence; None if the run goes on."""
    s, recent_losses = settings, progress.recent
    if s.patience and progress.stale >= s.patience:
        return f"no better validation loss than {progress.best:.4f} in {plural(s.patience, 'validation')}"
    if s.past and len(recent_losses) > s.past:
        earlier_loss, latest_loss = recent_losses[-1 - s.past], recent_losses[-1]
        if abs(earlier_loss - latest_loss) < s.delta * abs(latest_loss):
            return f"in {plural(s.past, 'step')} the loss changed by less than {s.delta:g} of its value (--delta)"
    if s.max_no_improvement and progress.unimproved >= s.max_no_improvement:
        steps_text = plural(s.max_no_improvement, "step")
        return f"no better training loss than {progress.lowest:.4f} in {steps_text}"
    if s.grad_tol and progress.norm <= s.grad_tol:
        return f"the gradient norm is {progress.norm:.3g}, at most --grad-tol {s.grad_tol:g}"
    return None
