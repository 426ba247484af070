"""Epochs over a dataset: training and evaluation, with callbacks around every batch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.text import plural
from packtrain.engine.tensor import Spec
from packtrain.training.generic.dataset import Dataset
from packtrain.training.generic.fit_result import Result
from packtrain.training.generic.fit_variants import UNSCALED_LOSS
from packtrain.training.generic.trainer import Trainer


@dataclass(slots=True)
class Batch:
    """A batch, as callbacks see it before and after it runs. They may set `trainer.lr` or call `trainer.change`.

    train          True: the batch of a step; False: a physical batch of an evaluation
    number, count  the batch's number, from 1, and the number of batches in the epoch
    result         the epoch's Result so far
    """

    trainer: Trainer
    train: bool
    epoch: int
    number: int
    count: int
    result: Result


Callback = Callable[[Batch], None]


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions that are called before and after every training step, and every batch of an evaluation."""

    before: Callback | None = None
    after: Callback | None = None
    before_evaluation: Callback | None = None
    after_evaluation: Callback | None = None

    def __call__(self, batch: Batch, *, after: bool) -> None:
        if batch.train:
            callback = self.after if after else self.before
        else:
            callback = self.after_evaluation if after else self.before_evaluation
        if callback is not None:
            callback(batch)


NO_CALLBACKS = Callbacks()


def epoch(
    trainer: Trainer, data: Dataset | Mapping[str, Any], split: int | None = None, *,
    order: np.ndarray | None = None, callbacks: Callbacks = NO_CALLBACKS, number: int = 1, keep: bool = False,
) -> tuple[Result, Result]:  # fmt: skip
    """Train on the first `split` datapoints (None: all), evaluate on the rest; returns (training, evaluation) results.

    data    a Dataset, or its columns by name
    order   positions of the datapoints; None: as they are
    number  the epoch's number, which callbacks get
    keep    whether to save predictions in the results
    Incomplete batches are left out: `split` and the rest should be multiples of the logical and physical batch.
    Raises InputError for data that does not fit the model; NotFinite.
    """
    data = as_dataset(data)
    check_dataset(trainer, data)
    positions = np.arange(len(data)) if order is None else np.asarray(order)
    at = len(positions) if split is None else split
    if not isinstance(at, int | np.integer) or not 0 <= at <= len(positions):
        raise InputError(f"split={split!r} must be a whole number from 0 to {len(positions)}")
    mean = trainer.model.mean
    train_result, eval_result = Result(mean, keep), Result(mean, keep)
    if at:
        for _ in train_steps(trainer, data, positions[:at], train_result, callbacks, number):
            pass
        trainer.check_finite()
    if at < len(positions):
        evaluate(trainer, data, positions[at:], eval_result, callbacks, number)
    return train_result, eval_result


def train_steps(
    trainer: Trainer, data: Dataset, order: np.ndarray, result: Result, callbacks: Callbacks = NO_CALLBACKS,
    number: int = 1,
) -> Iterator[float]:  # fmt: skip
    """Train on the datapoints at positions `order`, and yield the gradient norm after each step. Adds each step's loss
    and predictions to `result`; callbacks get the epoch's `number`. Raises NotFinite."""
    num_batches = len(order) // trainer.batch
    for batch_number, batch_arrays in enumerate(trainer.batches(data, trainer.batch, order), 1):
        batch_event = Batch(trainer, True, number, batch_number, num_batches, result)
        callbacks(batch_event, after=False)
        step_result = trainer.step(batch_arrays)
        for outputs in step_result.outputs:
            _add_outputs(result, trainer, outputs)
        callbacks(batch_event, after=True)
        yield step_result.norm


def evaluate(
    trainer: Trainer, data: Dataset, order: np.ndarray | None = None, result: Result | None = None,
    callbacks: Callbacks = NO_CALLBACKS, number: int = 1,
) -> Result:  # fmt: skip
    """Evaluate the datapoints at positions `order` (None: all) with the forward graph alone. Returns `result`, by
    default a new one, to which loss, accuracy and predictions are added; callbacks get the epoch's `number`."""
    result = result or Result(trainer.model.mean)
    num_batches = len(data if order is None else order) // trainer.rows
    for batch_number, batch_arrays in enumerate(trainer.batches(data, trainer.rows, order), 1):
        batch_event = Batch(trainer, False, number, batch_number, num_batches, result)
        callbacks(batch_event, after=False)
        _add_outputs(result, trainer, trainer.forward(batch_arrays))
        callbacks(batch_event, after=True)
    return result


def _add_outputs(result: Result, trainer: Trainer, outputs: Mapping[str, Any]) -> None:
    """Add a physical batch's outputs of the forward graph (loss, correct labels, predictions) to a result."""
    correct = outputs.get("correct")
    loss = float(outputs.get(UNSCALED_LOSS, outputs["loss"]))
    num_correct, num_labels = None if correct is None else int(correct), trainer.model.label_count
    result.add(trainer.rows, loss, num_correct, outputs.get("predictions"), num_labels)


def as_dataset(data: Dataset | Mapping[str, Any]) -> Dataset:
    return data if isinstance(data, Dataset) else Dataset(data)


def check_dataset(trainer: Trainer, data: Dataset, label: str = "the dataset") -> None:
    """Raise InputError, which calls the data `label`, unless columns and extra inputs match the model's inputs."""
    inputs, extra_inputs, rows = trainer.form.inputs, trainer.inputs(0), trainer.rows
    for name, column in data.columns.items():
        if name not in inputs:
            fact = f"{label} has {name}, which is no input of the model; it has {', '.join(inputs)}"
            raise InputError(fact)
        _check_column(name, column, inputs[name], rows)
    _check_labels(trainer, data)
    missing = [name for name in inputs if name not in data.columns and name not in extra_inputs]
    if missing:
        raise InputError(f"{label} has no {missing[0]}, an input of the model")
    if len(data) < rows:
        fact = f"a batch of {rows:,} is more than the {plural(len(data), 'datapoint')} of {label}"
        raise InputError(fact)


def _check_labels(trainer: Trainer, data: Dataset) -> None:
    """Raise InputError for a label that is no class of the model."""
    name, num_classes = trainer.model.classes
    if name not in data.columns:
        return
    column = data.columns[name]
    bad_positions = np.argwhere((column < 0) | (column >= num_classes))
    if len(bad_positions):
        at = tuple(bad_positions[0].tolist())
        fact = f"{name}[{', '.join(map(str, at))}] is {column[at]}"
        raise InputError(f"{fact}; classes are whole numbers from 0 to {num_classes - 1}")


def _check_column(name: str, column: np.ndarray, spec: Spec, rows: int) -> None:
    shape, kind, item_shape = spec.dtype.array_shape(spec.shape), spec.dtype.numpy, column.shape[1:]
    if not shape or shape[0] != rows:
        raise InputError(f"{name} is {spec} in a model of {plural(rows, 'datapoint')}: no column")
    if item_shape != shape[1:]:
        raise InputError(
            f"{name} is {spec} in the model, of shape {list(shape[1:])} for each datapoint;"
            f" those of the data have {list(item_shape)}"
        )
    if not np.can_cast(column.dtype, kind, "same_kind"):
        raise InputError(
            f"{name} is {spec} in the model and {column.dtype} in the data; convert it, as with"
            f" .astype({kind.name!r})"
        )
