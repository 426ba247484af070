"""The training loop: steps, validation, early stopping, samples and checkpoints."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packtrain.common.errors import Interrupted
from packtrain.common.events import Events
from packtrain.distributed import here
from packtrain.gguf import GGUF
from packtrain.training import checkpoint_shards, checkpoints
from packtrain.training.checkpoints import Progress
from packtrain.training.monitoring import Watch
from packtrain.training.stop_criteria import why_ended
from packtrain.training.training_engine import Engine
from packtrain.training.training_job import Job

BEST, CHECKPOINT = "best.gguf", "checkpoint.gguf"
SAMPLE = "sample: "  # begins the message of one


@dataclass(slots=True)
class Fit:
    """A job on its engine: `begin` sets the values of the leaves, `go` trains to the end."""

    job: Job
    engine: Engine
    folder: Path
    pace: Callable[[float, int], str | None] | None = None  # see planner.expected_pace
    sample: Callable[[], str] | None = None
    events: Events = field(default_factory=Events)
    progress: Progress = field(default_factory=Progress)

    # ---- start

    def begin(self, checkpoint: checkpoints.Checkpoint | None) -> None:
        """Set initial values, or those of a checkpoint that passed `check_compatible`."""
        session = self.engine.session
        if checkpoint is None:
            self.job.subject.begin(session)
            return
        before, now = checkpoint.about.get("optimizer", "adamw"), self.job.settings.optimizer
        checkpoint_shards.restored(session, self.engine.plans, checkpoint, moments=before == now)
        checkpoint.gguf.close()  # saves replace the file, and a deleted one that is mapped takes room
        self.progress = replace(checkpoint.progress, shuffled=self.job.train.key)
        if before != now:
            self.progress = replace(self.progress, since=self.progress.step)
            kept = any(leaf.role == "moment" for leaf in self.engine.plans.saved.values())
            self.events.message(
                f"--optimizer was {before} and is {now}: moments of {before} are dropped, and {now} begins"
                f" {'with zero moments' if kept else 'without moments'}"
            )
        self.engine.since = self.progress.since
        if (
            math.isfinite(checkpoint.progress.base)
            and checkpoint.progress.batches != self.job.validated
        ):
            # these losses were measured on other batches and cannot be compared
            self.progress = replace(self.progress, base=math.inf, last=math.inf)
        if here().rank == 0 and checkpoint.path != self.checkpoint and self.checkpoint.exists():
            # otherwise the first save would keep the damaged file instead of the valid one
            self.checkpoint.replace(self.folder / "checkpoint.damaged.gguf")

    @property
    def checkpoint(self) -> Path:
        return self.folder / CHECKPOINT

    # ---- training

    def go(self, watch: Watch, stopped: Callable[[], bool]) -> None:
        """Train until the last step, or until early stopping.

        Raises Interrupted after saving if `stopped()`; NotFinite for three bad steps in a row.
        """
        while self.progress.step < self.job.steps and not self._ended():
            if here().any(stopped()):
                self.save(watch)
                raise Interrupted(f"stopped after step {self.progress.step} of {self.job.steps}")
            watch.step(self._step())
            if self._due(self.job.settings.sample_every, last=False) and self.sample:
                self._sample(watch)
            if self._due(self.job.settings.save_every, last=False):
                self.save(watch)
        self.save(watch)

    def _step(self) -> dict[str, Any]:
        """One step, and the validation if it is due, as a metrics record."""
        start_time, number = time.perf_counter(), self.progress.step + 1
        rate = self.job.schedule.rate(number)
        result = self.engine.step(self.job.batches(number), number, rate)
        seconds = time.perf_counter() - start_time
        self.progress = self.progress.after(result.tokens, seconds)
        pace_note = self.pace and self.pace(seconds, self.job.steps - number)
        if pace_note:
            self.events.message(pace_note)
        if result.bad:
            self.events.message(
                f"step {number} skipped, its loss or gradient is not finite: {result.bad}"
            )
        else:
            past = self.job.settings.past
            self.progress = self.progress.learnt(result.loss, result.norm, past)
        if result.note:
            self.events.message(f"step {number}: {result.note}")
        record: dict[str, Any] = {
            "step": number,
            "tokens": self.progress.tokens,
            "loss": result.loss,
            "lr": rate,
            "grad_norm": result.norm,
            "tokens_per_second": result.tokens / seconds,
            "positions_per_second": here().size * self.job.shape.positions / seconds,
            "seconds": self.progress.seconds,
            **result.more,
        }
        due = self._due(self.job.steps_per_eval, last=True)
        if self.job.valid is not None and (due or why_ended(self.job.settings, self.progress)):
            record |= self._validate()
        return record

    def _sample(self, watch: Watch) -> None:
        assert self.sample is not None
        text = self.sample()
        watch.sample(self.progress.step, text.removeprefix(SAMPLE))
        self.events.sample(text)

    def _validate(self) -> dict[str, float]:
        evaluated = self.engine.evaluate(self.job.validation(), self.job.subject.ends)
        patient = bool(self.job.settings.patience)
        self.progress = self.progress.validated(evaluated.loss, evaluated.ends, best=patient)
        if here().rank == 0 and patient and not self.progress.stale:
            self.job.subject.keep(self.folder / BEST, self.engine.session.view)
        return {
            "val_loss": evaluated.loss,
            "val_error": evaluated.error,
            "val_accuracy": evaluated.accuracy,
            "val_accuracy_error": evaluated.accuracy_error,
        }

    def _due(self, interval: int, last: bool) -> bool:
        """Whether something done `interval` steps (0: never) is due; with `last`, also at the last step."""
        at_end = last and self.progress.step == self.job.steps
        return at_end or bool(interval and self.progress.step % interval == 0)

    def _ended(self) -> bool:
        reason = why_ended(self.job.settings, self.progress)
        if reason:
            self.events.message(f"stopped early: {reason}")
        return reason is not None

    # ---- saving

    def save(self, watch: Watch) -> None:
        """Write a checkpoint of the current state; rank 0 does."""
        arrays = checkpoint_shards.saved(self.engine.session, self.engine.plans)
        if here().rank:
            if isinstance(arrays, checkpoint_shards.Whole):
                arrays.serve()
            return
        watch.save()  # first: metrics may be ahead of the checkpoint (they are truncated on resume), never behind it
        checkpoints.save(self.checkpoint, self.progress, self.job.about(), arrays)
        if isinstance(arrays, checkpoint_shards.Whole):
            arrays.end()
        self._keep(self.job.settings.save_name, lambda to: checkpoints.copy(self.checkpoint, to))
        view = self.engine.session.view
        self._keep(self.job.settings.save_model, lambda to: self.job.subject.keep(to, view))
        self.events.saved(self.checkpoint)

    def _keep(self, pattern: str, make: Callable[[Path], object]) -> None:
        """Write a file under the number of the step, and link it as the latest."""
        if not pattern:
            return
        numbered, latest = (
            self.folder / pattern.replace("ITERATION", str(name))
            for name in (self.progress.step, "LATEST")
        )
        make(numbered)
        checkpoints.link(numbered, latest)

    def finish(self) -> None:
        """Write the result: the best weights with early stopping, else the last."""
        best = self.folder / BEST
        if self.job.settings.patience and best.exists():
            best_weights = GGUF(best)
            for name in best_weights.entries:
                self.engine.session.set({name: best_weights.array(name)})
        self.job.subject.write(self.engine.session.view)
