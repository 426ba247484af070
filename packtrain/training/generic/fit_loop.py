"""`fit`: epochs of training and validation, with the files of a run if asked."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.memory import MemoryPeak
from packtrain.common.signals import stop_on_interrupt
from packtrain.common.text import plural
from packtrain.engine.memory_plan import size_text
from packtrain.engine.optim import AdamW, Optimizer
from packtrain.engine.tensor import Tensor
from packtrain.training.generic import epochs as epoch_steps
from packtrain.training.generic.dataset import Dataset
from packtrain.training.generic.epochs import Batch, Callbacks, as_dataset, evaluate, train_steps
from packtrain.training.generic.fit_model import Model
from packtrain.training.generic.fit_record import FitRecorder
from packtrain.training.generic.fit_result import Result
from packtrain.training.generic.fit_variants import Build
from packtrain.training.generic.trainer import Trainer
from packtrain.training.lr_schedule import LrSchedule
from packtrain.training.monitoring.curve import LossCurve
from packtrain.training.monitoring.notebook import Html, to_frame

ReportFunction = Callable[[str], None]
SCHEDULE_NAMES = ("cosine", "linear", "constant")
ORDERS_NBYTES = 4 * 8  # bytes of a datapoint's positions while an epoch is shuffled


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch's results and seconds; `validated` has no data where nothing is held out."""

    number: int
    trained: Result
    validated: Result
    seconds: float

    def __str__(self) -> str:
        """`epoch 3: loss 0.0712±0.0004 acc 97.90±0.14%, val 0.0801±0.0011 97.1±0.2%, 1.2 s`, in 80 columns."""
        valid = f", val {self.validated.brief.replace(' acc', '')}" if self.validated.ndata else ""
        return f"epoch {self.number}: loss {self.trained.brief}{valid}, {self.seconds:.1f} s"


@dataclass(slots=True, repr=False)
class Fitted:
    """The result of `fit`. `stopped`: the run was asked to stop; the same call with resume=True continues.

    peak_nbytes  private memory of the process at its peak; compare trainer.planned_nbytes
    """

    trainer: Trainer
    epochs: list[Epoch] = field(default_factory=list)
    peak_nbytes: int = 0
    stopped: bool = False

    @property
    def weights(self) -> Mapping[str, np.ndarray]:
        """Weights by name, as `save` takes them."""
        return self.trainer.weights

    @property
    def history(self) -> list[dict[str, float]]:
        """One record per epoch: its number and seconds, training loss and validation loss."""
        return [
            {
                "epoch": epoch.number, "seconds": epoch.seconds, "loss": epoch.trained.loss,
                "val_loss": epoch.validated.loss if epoch.validated.ndata else math.nan,
            }
            for epoch in self.epochs
        ]  # fmt: skip

    def to_frame(self) -> Any:
        """Return `history` as a pandas DataFrame: epoch, seconds, loss, val_loss. Raises InputError without pandas."""
        return to_frame(self.history)

    def plot(self) -> Html:
        """Draw loss and validation loss by epoch as an SVG picture, which a notebook shows."""
        curve = LossCurve()
        for record in self.history:
            curve.add({"step": record["epoch"], **record})
        return Html(curve.svg())

    def __repr__(self) -> str:
        last_text = f"; {self.epochs[-1]}" if self.epochs else ""
        stopped_text = ", stopped: resume=True goes on" if self.stopped else ""
        return f"Fitted({plural(len(self.epochs), 'epoch')}{stopped_text}{last_text})"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>{self.plot().html}"


def fit(
    model: "Model | Tensor | Build", data: "Dataset | Mapping[str, Any]", optimizer: Optimizer | None = None, *,
    epochs: int = 1, batch: int | None = None, val_split: float = 0.0,
    valid: "Dataset | Mapping[str, Any] | None" = None, shuffle: bool = True, seed: int = 0,
    schedule: Callable[[int], float] | str | None = None, callbacks: Callbacks = epoch_steps.NO_CALLBACKS,
    folder: str | Path | None = None, resume: bool = False, stop: Callable[[], bool] = lambda: False,
    on_message: ReportFunction = lambda text: None, **trainer: Any,
) -> Fitted:  # fmt: skip
    """Train a model on a dataset for some epochs.

        done = pt.fit(net, {"x": images, "y": labels}, pt.AdamW(lr=1e-3), epochs=30, batch=1000, val_split=0.05)

    model      see Trainer, as for more arguments: physical, memory, max_norm, order, device, values, evaluated, inputs
    batch      datapoints per step; of these, `physical` at a time
    val_split  share of the data held out for validation, drawn by `seed`; or give `valid`, which is never trained on
    schedule   learning rate by the number of the step, or cosine, linear, constant; default: the optimizer's
    folder     where to write checkpoints, metrics.jsonl, loss.svg and plan.html; `resume` continues, to `epochs` in all
    stop       called after each step; True saves and stops, as Ctrl-C does
    on_message called with messages about choices, and a line per epoch; `print` shows them
    Raises InputError, GraphError; DoesNotFit with the least memory that would do; NotFinite.
    """
    train_data, valid_data = as_dataset(data), None if valid is None else as_dataset(valid)
    _check(epochs, callbacks, val_split, valid_data)
    trainer |= {"seed": seed, "beside": ORDERS_NBYTES * len(train_data), "on_message": on_message}
    runs = Trainer(model, optimizer or AdamW(), batch=batch, **trainer)
    fit_run = _make_run(
        runs, train_data, valid_data, val_split, seed if shuffle else None, on_message
    )
    fit_run.callbacks = _with_schedule(callbacks, schedule, runs.lr, epochs * fit_run.steps)
    recorder = FitRecorder(folder, runs, fit_run.about, resume, on_message)
    return _run_epochs(fit_run, epochs, recorder, stop, on_message)


def _check(epochs: int, callbacks: Callbacks, val_split: float, valid_data: object) -> None:
    """Raise InputError for arguments of fit that are out of range or do not go together."""
    if not isinstance(epochs, int | np.integer) or epochs < 0:
        raise InputError(f"epochs={epochs!r} must be a whole number, 0 or more")
    if not isinstance(callbacks, Callbacks):
        raise InputError(f"callbacks={callbacks!r} must be Callbacks, such as Callbacks(after=…)")
    if not isinstance(val_split, float | int | np.number) or not 0 <= val_split < 1:
        raise InputError(f"val_split={val_split!r} must be at least 0 and less than 1")
    if valid_data is not None and val_split:
        raise InputError("val_split holds out a part of the data; give it or valid, not both")


def _run_epochs(
    fit_run: "FitRun", epochs: int, recorder: FitRecorder, stop: Callable[[], bool], report: ReportFunction,
) -> Fitted:  # fmt: skip
    trainer = fit_run.trainer
    report(f"{trainer.form}; memory: {size_text(trainer.planned_nbytes)} planned")
    fitted = Fitted(trainer)
    with MemoryPeak() as peak, stop_on_interrupt() as interrupted, recorder:
        while trainer.done < epochs * fit_run.steps and not fitted.stopped:
            epoch_result = fit_run.run_epoch(recorder, lambda: interrupted() or stop())
            fitted.stopped = epoch_result is None
            if epoch_result is not None:
                fitted.epochs.append(epoch_result)
                report(str(epoch_result))
        recorder.save()
    if not fitted.stopped:
        trainer.check_finite()
    fitted.peak_nbytes = peak.nbytes
    return fitted


@dataclass(slots=True)
class FitRun:
    """The data of a run and its order: positions for training and for validation.

    seed   draws the order of each epoch; None: the order of the data
    """

    trainer: Trainer
    data: Dataset
    train: np.ndarray
    valid_data: Dataset
    valid: np.ndarray
    seed: int | None
    callbacks: Callbacks = epoch_steps.NO_CALLBACKS

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return len(self.train) // self.trainer.batch

    @property
    def about(self) -> dict[str, Any]:
        """Values saved in checkpoints, which must be equal for a run to be resumed."""
        batch, seed = self.trainer.batch, self.seed
        return {"datapoints": len(self.train), "batch": batch, "seed": seed, "steps": self.steps}

    def run_epoch(self, recorder: FitRecorder, stop: Callable[[], bool]) -> Epoch | None:
        """Train the rest of the current epoch and validate; return its results, or None if `stop()` ended it early."""
        trainer, start_time = self.trainer, time.perf_counter()
        number, num_done_steps = divmod(trainer.done, self.steps)
        number += 1
        order = self.train
        if self.seed is not None:
            order = self.data.shuffled(order, self.seed, number)
        train_result = Result(trainer.model.mean)
        order = order[num_done_steps * trainer.batch :]
        for norm in train_steps(trainer, self.data, order, train_result, self.callbacks, number):
            recorder.record_step(train_result, norm)
            if trainer.done % self.steps and stop():
                return None
        eval_result = Result(trainer.model.mean)
        if len(self.valid):
            evaluate(trainer, self.valid_data, self.valid, eval_result, self.callbacks, number)
        recorder.record_epoch(eval_result)
        return Epoch(number, train_result, eval_result, time.perf_counter() - start_time)


def _make_run(
    trainer: Trainer, train_data: Dataset, valid_data: Dataset | None, val_split: float, seed: int | None,
    report: ReportFunction,
) -> FitRun:  # fmt: skip
    """Check the datasets, hold out the share `val_split`, and return the run over whole batches; `seed` chooses the
    held-out datapoints and each epoch's order (None: both as in the file). Raises InputError."""
    epoch_steps.check_dataset(trainer, train_data)
    order = np.arange(len(train_data))
    if seed is not None:
        order = train_data.shuffled(order, seed, 0)
    num_train, rest = len(order), order[:0]
    if valid_data is not None:
        epoch_steps.check_dataset(trainer, valid_data, "the validation data")
        rest = np.arange(len(valid_data))
    elif val_split:
        num_train = round(num_train * (1 - val_split))
        rest = order[num_train // trainer.batch * trainer.batch :]
    num_used = num_train // trainer.batch * trainer.batch
    if not num_used:
        of_total = f" of {len(order):,}" if num_train < len(order) else ""
        count_text = plural(num_train, "datapoint") + of_total
        raise InputError(f"batch={trainer.batch} is more than the {count_text} to train on")
    if val_split and rest.size < trainer.rows:
        raise InputError(
            f"val_split={val_split} holds out {plural(rest.size, 'datapoint')}, fewer than"
            f" the {trainer.rows:,} that are evaluated at a time"
        )
    if trainer.batch % train_data.shard:
        raise InputError(f"batch={trainer.batch} must be a multiple of shard={train_data.shard}")
    for part, left in (
        ("training", 0 if val_split else num_train - num_used), ("validation", rest.size % trainer.rows),
    ):  # fmt: skip
        if left:
            report(f"{plural(left, 'datapoint')} of {part} make no whole batch and are left out")
    return FitRun(trainer, train_data, order[:num_used], valid_data or train_data, rest, seed)


def _with_schedule(
    callbacks: Callbacks, schedule: Callable[[int], float] | str | None, lr: float, steps: int
) -> Callbacks:
    """Return the callbacks with a `before` that sets each step's learning rate: schedule(step), or if `schedule` is a
    name, that schedule of `train` from peak `lr` over `steps`: warm-up over a twentieth, then decay to a hundredth."""
    if schedule is None:
        return callbacks
    if schedule not in SCHEDULE_NAMES and not callable(schedule):
        names = ", ".join(SCHEDULE_NAMES)
        raise InputError(f"schedule={schedule!r} must be a function of the step, or one of {names}")
    if isinstance(schedule, str):
        schedule = LrSchedule(schedule, lr, lr / 100, steps // 20, steps).rate
    rate, user_hook = schedule, callbacks.before

    def before(batch: Batch) -> None:
        batch.trainer.lr = rate(batch.trainer.done + 1)
        if user_hook is not None:
            user_hook(batch)

    return replace(callbacks, before=before)
