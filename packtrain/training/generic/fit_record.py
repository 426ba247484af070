"""The files of a run of `fit`: checkpoints, metrics, the loss curve and the plan's picture."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.common.files import locked, write_text
from packtrain.gguf.gguf_format import NAME_NBYTES
from packtrain.planner.plan_view import page
from packtrain.training import checkpoints
from packtrain.training.checkpoints import Progress
from packtrain.training.generic.fit_result import Result
from packtrain.training.generic.trainer import Trainer
from packtrain.training.monitoring import Watch
from packtrain.training.training_loop import CHECKPOINT


class Record:
    """Writes into a folder, or nothing where there is none. The trainer continues from its checkpoint with `resume`.

    about  what must be equal to resume, as plain data
    """

    def __init__(
        self,
        folder: str | Path | None,
        trainer: Trainer,
        about: Mapping[str, Any],
        resume: bool,
        say: Callable[[str], None],
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        graphs = {str(n): p.graph.fingerprint for n, p in trainer.form.placed.items()}
        self.trainer, self.about = trainer, {**about, "graphs": graphs}
        self.resume, self.say = resume, say
        self.progress, self.last = Progress(), dict[str, Any]()
        self.at = time.perf_counter()
        self.watch: Watch | None = None
        self.open = ExitStack()

    def __enter__(self) -> "Record":
        if self.folder is None:
            if self.resume:
                raise InputError("resume needs the folder of the run")
            return self
        long = [name for name in self.trainer.saved if len(name.encode()) >= NAME_NBYTES]
        if long:
            raise InputError(
                f"a checkpoint cannot hold {long[0]}: more than {NAME_NBYTES - 1} bytes"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.open.enter_context(locked(self.folder / "lock", f"folder: {self.folder}"))
        checkpoint = self._found(self.folder / CHECKPOINT)
        self.watch = self.open.enter_context(Watch(self.folder, Events()))
        if checkpoint is not None:
            self._continue(checkpoint)
            self.watch.resume(self.progress.step)
        form = self.trainer.form
        rows = [(label, nbytes, "") for label, nbytes in form.parts.items() if label != "arena"]
        before = ("process", self.trainer.baseline, "before the run")
        write_text(
            self.folder / "plan.html", page(form.largest, title=str(form), rows=[before, *rows])
        )
        self.at = time.perf_counter()
        return self

    def _found(self, path: Path) -> checkpoints.Checkpoint | None:
        if self.resume:
            return checkpoints.load(path, self.say)
        if path.exists():
            raise InputError(f"{path.parent} has a run already; resume=True continues it")
        return None

    def _continue(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Set the leaves and the step of a checkpoint. Raises InputError if it is of another run."""
        other = [name for name, value in self.about.items() if checkpoint.about.get(name) != value]
        if other:
            name = other[0]
            raise InputError(
                f"{checkpoint.path}: it was trained with {name} {checkpoint.about.get(name)}, not {self.about[name]}"
            )
        for name in self.trainer.saved:
            self.trainer.session.set({name: checkpoint.array(name)})
        self.progress, self.trainer.done = checkpoint.progress, checkpoint.progress.step

    def step(self, result: Result, norm: float) -> None:
        """Record a step, whose losses came last."""
        self._write()
        seconds, now = time.perf_counter() - self.at, time.perf_counter()
        self.at, batch = now, self.trainer.batch
        self.progress = replace(self.progress.after(batch, seconds), step=self.trainer.done)
        losses = result.losses[-self.trainer.form.micros :]
        self.last = {
            "step": self.trainer.done,
            "datapoints": self.progress.tokens,
            "loss": sum(losses) / (len(losses) if result.mean else 1),
            "lr": self.trainer.lr,
            "grad_norm": norm,
            "datapoints_per_second": batch / seconds,
            "seconds": self.progress.seconds,
        }

    def epoch(self, tested: Result) -> None:
        """Record an epoch's validation with its last step, and save."""
        if tested.ndata:
            self.last |= {"val_loss": tested.loss, "val_error": tested.loss_error}
            if tested.correct is not None:
                error = tested.accuracy_error
                self.last |= {"val_accuracy": tested.accuracy, "val_accuracy_error": error}
            self.progress = self.progress.validated(tested.loss)
        self._write()
        self.save()

    def _write(self) -> None:
        if self.watch is not None and self.last:
            self.watch.step(self.last)
        self.last = {}

    def save(self) -> None:
        """Write a checkpoint."""
        if self.watch is None or self.folder is None:
            return
        self._write()
        self.watch.save()
        checkpoints.save(self.folder / CHECKPOINT, self.progress, self.about, self.trainer.saved)
        self.at = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.open.close()
