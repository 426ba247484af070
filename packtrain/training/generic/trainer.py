"""Trainer: a user's model, its memory planned and reserved, with forward, gradient and update graphs ready to run."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.common.memory import parse_size, private_nbytes, release_memory
from packtrain.common.text import plural
from packtrain.dtypes import TRAINABLE, WRITABLE, f32
from packtrain.engine.backends import DEVICES
from packtrain.engine.backends import target as target_of
from packtrain.engine.executor import Session
from packtrain.engine.optim import Optimizer, update_graph
from packtrain.engine.tensor import Tensor
from packtrain.kernels.quant.quantized_arrays import quantize
from packtrain.planner.training_plans import EVALUATE, MICRO, STEP
from packtrain.training.checkpoint_shards import LazyArrays
from packtrain.training.generic.dataset import Dataset
from packtrain.training.generic.fit_model import Model, initial_weight
from packtrain.training.generic.fit_variants import Build, FitRequest, StepVariant, choose
from packtrain.training.training_engine import NotFinite, StepEngine

Arrays = Mapping[str, np.ndarray]
OP_ORDERS = ("written", "least")


@dataclass(frozen=True, slots=True)
class FitStepResult:
    """Result of a step: outputs of each physical batch, gradient norm before clipping, number of evaluations."""

    outputs: tuple[Arrays, ...]
    norm: float
    evaluations: int = 1


class Trainer(StepEngine):
    """Trains and evaluates a model, in memory that is planned and reserved when the trainer is created.

    model      a Model, a scalar loss, or a function from a number of datapoints to either
    optimizer  None: the model is only evaluated
    evaluated  the model as it is evaluated, if that differs, such as without dropout
    batch      datapoints per step (the logical batch); None: a physical batch
    physical   datapoints at a time; None: as many as memory allows, if `model` is a function
    values     weights by name; the others are drawn by `seed`, see `initial_weight`
    inputs     values of inputs that are not data, by the number of the physical batch, from 1 through all steps, such
               as the key of a dropout; 0 in an evaluation
    memory     limit on the private memory of the process, such as "64MiB"
    order      "least": each graph runs in the order, of several, that needs the fewest bytes, see least_order
    beside     bytes that the caller needs besides the trainer
    Raises DoesNotFit with the least limit that would do; InputError, GraphError.
    """

    def __init__(
        self, model: "Model | Tensor | Build", optimizer: Optimizer | None = None, *,
        evaluated: "Model | Build | None" = None, batch: int | None = None, physical: int | None = None,
        values: Arrays | None = None, max_norm: float | None = None, order: str = "written",
        memory: str | None = None, device: str = "cpu", seed: int = 0,
        inputs: Callable[[int], Arrays] = lambda step: {}, beside: int = 0,
        on_message: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        _check_choices(optimizer, order=(order, OP_ORDERS), device=(device, tuple(DEVICES)))
        if not isinstance(seed, int | np.integer) or not 0 <= seed < 1 << 63:
            raise InputError(f"seed={seed!r} must be a whole number from 0 to 2**63 - 1")
        request = FitRequest(model, evaluated, batch, physical, max_norm, order)
        limit = math.inf if memory is None else parse_size(str(memory), "memory")
        optimizer_kernels = optimizer.kernels if optimizer else ()
        kernels.load_all((*kernels.TRAINING_KERNELS, *kernels.OP_KERNELS, *optimizer_kernels))
        release_memory()  # now the memory of kernels is part of the baseline
        self.baseline = private_nbytes() + beside
        self.form: StepVariant = choose(request, optimizer, target_of(device), limit, self.baseline)
        self.inputs, self.say, self.done, self._num_summed = inputs, on_message, 0, 0
        self._batch_buffers = dict[str, np.ndarray]()  # a batch of data
        self.optimizer, self.lr = optimizer, optimizer.lr if optimizer else 0.0
        super().__init__(Session(), self.form.placed, self.form.plans, seed)
        self._set_initial_weights(values or {})

    def _set_initial_weights(self, values: Arrays) -> None:
        weights = {n: t for n, t in self.form.leaves.items() if t.kind == "weight"}
        unknown = sorted(values.keys() - weights.keys())
        if unknown:
            fact = f"values has {unknown[0]}, which is no weight of the model"
            raise InputError(f"{fact}; it has {', '.join(weights)}")
        for name, leaf in weights.items():
            if name in values:
                value = np.asarray(values[name])
            elif leaf.dtype in TRAINABLE:
                value = initial_weight(leaf, self.seed)
            else:
                raise InputError(f"values must have {name}: weights of {leaf.dtype} are not drawn")
            is_float = value.dtype.kind == "f" and value.shape == leaf.shape
            if is_float and leaf.dtype in WRITABLE and leaf.dtype != f32:
                value = quantize(value, leaf.dtype)
            self.session.set({name: value})

    @property
    def model(self) -> Model:
        return self.form.model

    @property
    def rows(self) -> int:
        """Datapoints at a time: the physical batch."""
        return self.form.rows

    @property
    def batch(self) -> int:
        """Datapoints per step: the logical batch."""
        return self.form.rows * self.form.micros

    def batches(self, data: Dataset, size: int, order: np.ndarray | None) -> Iterator[Arrays]:
        """Yield batches of `size` datapoints at `order` (None: all), in the model's types; the next overwrites each."""
        if self._batch_buffers.keys() != data.columns.keys():
            specs = {name: self.form.inputs[name] for name in data.columns}
            self._batch_buffers = {
                name: np.empty((self.batch, *s.dtype.array_shape(s.shape)[1:]), s.dtype.numpy)
                for name, s in specs.items()
            }
        return data.batches(size, order, self._batch_buffers)

    @property
    def planned_nbytes(self) -> int:
        """Planned peak of the private memory of the process, in bytes."""
        return self.baseline + self.form.nbytes

    # ---- values

    @property
    def weights(self) -> LazyArrays:
        """Weights by name, read on access; they change as the trainer runs."""
        names = (n for n, t in self.form.leaves.items() if t.kind == "weight")
        return LazyArrays(self.session.view, names)

    @property
    def saved(self) -> LazyArrays:
        """Weights and moments: what a checkpoint holds."""
        names = (n for n, t in self.form.leaves.items() if t.role in ("weight", "table", "moment"))
        return LazyArrays(self.session.view, names)

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        """Sums of gradients by weight since a `fresh` batch, see add_gradients. Raises InputError if there are none."""
        self._require_micro_batches()
        trained = (w.label for w in self.model.trained)
        return {name: self.session.get(f"g/{name}") for name in trained}

    # ---- running

    def forward(self, batch: Arrays) -> Arrays:
        """Run the forward graph on a physical batch; returns `loss`, `predictions` and `correct`."""
        return self.run[EVALUATE](self._graph_inputs(EVALUATE, batch, 0))

    def add_gradients(self, batch: Arrays, fresh: bool) -> Arrays:
        """Add the gradients of a physical batch to their sums; with `fresh`, the sums begin anew. Returns the batch's
        outputs. Raises InputError where a step has only one physical batch and one evaluation."""
        self._require_micro_batches()
        self._num_summed = 1 if fresh else self._num_summed + 1
        fresh_flag = np.array(float(fresh), np.float32)
        number = self.done * self.form.micros + self._num_summed
        return self.run[MICRO]({**self._graph_inputs(MICRO, batch, number), "fresh": fresh_flag})

    def _require_micro_batches(self) -> None:
        if MICRO not in self.run:
            raise InputError("gradients are summed only if batch is larger than the physical batch")

    def step(self, batch: Arrays) -> FitStepResult:
        """Take an optimizer step on a logical batch. Raises InputError; NotFinite for the third bad step in a row."""
        if self.optimizer is None:
            raise InputError("this trainer has no optimizer")
        number = self.done + 1
        bad_names = [name for name, v in batch.items() if len(v) != self.batch]
        if bad_names:
            fact = f"a step takes {plural(self.batch, 'datapoint')}"
            raise InputError(f"{fact}; {bad_names[0]} has {len(batch[bad_names[0]])}")
        if not isinstance(self.lr, float | int | np.number) or not math.isfinite(self.lr):
            raise InputError(f"step {number}: the learning rate is {self.lr!r}; it must be finite")
        first = STEP if STEP in self.run else MICRO
        if self.optimizer.evaluations > 1:  # the next step compares its batch with this one
            batch = {name: np.array(values) for name, values in batch.items()}
        starts = enumerate(range(0, self.batch, self.rows), 1 + self.done * self.form.micros)
        batch_inputs = [
            self._graph_inputs(first, {n: v[at : at + self.rows] for n, v in batch.items()}, part)
            for part, at in starts
        ]
        engine_step, outputs = self.run_step(self.optimizer, batch_inputs, number, number, self.lr)
        self.done = number
        try:
            skip_reason = self.diagnose(engine_step, outputs)
        except NotFinite as error:
            raise NotFinite(f"step {number}: {error}") from None
        if engine_step.note:
            self.say(f"step {number}: {engine_step.note}")
        if skip_reason:
            self.say(f"step {number} skipped, its loss or gradient is not finite: {skip_reason}")
        norm = float(outputs["squares"]) ** 0.5
        return FitStepResult(tuple(engine_step.outputs), norm, engine_step.evaluations)

    def check_finite(self) -> None:
        """Raise NotFinite if the last step was skipped, because its loss or gradient was not finite."""
        if self.num_bad_steps:
            bad_steps = plural(self.num_bad_steps, "step")
            fact = f"step {self.done}: the loss or gradient is not finite"
            raise NotFinite(f"{fact}, as of {bad_steps} at the end")

    def _graph_inputs(self, graph: str, batch: Arrays, batch_number: int) -> dict[str, Any]:
        """Return the inputs, by name, that the graph named `graph` reads: columns of the batch, and inputs that are not
        data, which the user's function gives for `batch_number`."""
        input_names = self.run[graph].inputs
        candidates = {**batch, **self.inputs(batch_number)}
        return {name: value for name, value in candidates.items() if name in input_names}

    def change(self, optimizer: Optimizer) -> None:
        """Continue with other optimizer settings and their rate. Raises InputError if these need another graph."""
        _check_choices(optimizer)
        now = self.optimizer
        trained = self.model.trained
        if (
            now is None
            or update_graph(trained, now).fingerprint
            != update_graph(trained, optimizer).fingerprint
        ):
            raise InputError(f"{optimizer} needs another plan than {now}; create another trainer")
        self.optimizer, self.lr = optimizer, optimizer.lr


def _check_choices(optimizer: Optimizer | None, **chosen: tuple[str, tuple[str, ...]]) -> None:
    """Raise InputError for an argument, name=(value, choices), with another value, or for settings out of bounds."""
    for name, (value, choices) in chosen.items():
        if value not in choices:
            raise InputError(f"{name}={value!r} must be one of {', '.join(choices)}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InputError(f"the optimizer is {optimizer!r}; give one such as pt.AdamW(lr=1e-3)")
    if optimizer is not None:
        optimizer.check()
        if float(optimizer.lr) < 0:
            raise InputError(f"optimizer: lr is {optimizer.lr}; it must be at least 0")
