"""A model with its plans bound to memory: forward, gradient and update graphs on one session."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.common.memory import parse_size, private_nbytes, settle
from packtrain.common.text import plural
from packtrain.dtypes import TRAINABLE, WRITABLE, f32
from packtrain.engine.backends import DEVICES
from packtrain.engine.backends import target as target_of
from packtrain.engine.executor import Session
from packtrain.engine.optim import ROUNDING, Optimizer, updating
from packtrain.engine.tensor import Tensor
from packtrain.kernels.quantized_arrays import quantize
from packtrain.planner.training_plans import EVALUATE, MICRO, STEP
from packtrain.training.checkpoint_shards import Values
from packtrain.training.generic.dataset import Dataset
from packtrain.training.generic.fit_model import Model, initial
from packtrain.training.generic.fit_variants import Asked, Build, Form, choose
from packtrain.training.training_engine import NotFinite, Turn, judged

Arrays = Mapping[str, np.ndarray]
ORDERS = ("written", "least")


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step: the outputs of each physical batch, the gradient norm before clipping, and how often it evaluated."""

    outputs: tuple[Arrays, ...]
    norm: float
    evaluations: int = 1


class Trainer:
    """Steps and evaluations of a model, in memory that is planned and reserved here.

    model      a Model, a scalar loss, or a function from a number of datapoints to either
    optimizer  None: the model is only evaluated
    evaluated  the model as it is evaluated, if that differs, such as without dropout
    batch      datapoints per step (the logical batch); None: a physical batch
    physical   datapoints at a time; None: as many as memory allows, if `model` is a function
    values     weights by name; the others are drawn by `seed`, see `initial`
    inputs     values of inputs that are not data, by the number of the physical batch, from 1 through all steps, such
               as the key of a dropout; 0 in an evaluation
    memory     limit on the private memory of the process, such as "64MiB"
    order      "least": each graph runs in the order, of several, that needs the fewest bytes, see least_order
    beside     bytes that the caller will take beside it
    Raises DoesNotFit with the least limit that would do; InputError, GraphError.
    """

    def __init__(
        self,
        model: "Model | Tensor | Build",
        optimizer: Optimizer | None = None,
        *,
        evaluated: "Model | Build | None" = None,
        batch: int | None = None,
        physical: int | None = None,
        values: Arrays | None = None,
        max_norm: float | None = None,
        order: str = "written",
        memory: str | None = None,
        device: str = "cpu",
        seed: int = 0,
        inputs: Callable[[int], Arrays] = lambda step: {},
        beside: int = 0,
        on_message: Callable[[str], None] = lambda text: None,
    ) -> None:
        _check(optimizer, order=(order, ORDERS), device=(device, tuple(DEVICES)))
        if not isinstance(seed, int | np.integer) or not 0 <= seed < 1 << 63:
            raise InputError(f"seed={seed!r} must be a whole number from 0 to 2**63 - 1")
        request = Asked(model, evaluated, batch, physical, max_norm, order)
        limit = math.inf if memory is None else parse_size(str(memory), "memory")
        optimizer_kernels = optimizer.kernels if optimizer else ()
        kernels.load_all((*kernels.LEARNING, *kernels.OF_OPS, *optimizer_kernels))
        settle()  # now the memory of kernels is part of the baseline
        self.baseline = private_nbytes() + beside
        self.form: Form = choose(request, optimizer, target_of(device), limit, self.baseline)
        self.seed, self.inputs, self.say, self.done = seed, inputs, on_message, 0
        self._bad = self._summed = 0
        self._before: Turn | None = None  # the last step, if its gradients are still there
        self._space = dict[str, np.ndarray]()  # a batch of data
        self.optimizer, self.lr = optimizer, optimizer.lr if optimizer else 0.0
        self.session = Session()
        self.run = self.session.executors(self.form.placed, self.form.plans)
        self._begin(values or {})

    def _begin(self, values: Arrays) -> None:
        weights = {n: t for n, t in self.form.leaves.items() if t.kind == "weight"}
        unknown = sorted(values.keys() - weights.keys())
        if unknown:
            raise InputError(
                f"values has {unknown[0]}, which is no weight of the model; it has {', '.join(weights)}"
            )
        for name, leaf in weights.items():
            if name in values:
                value = np.asarray(values[name])
            elif leaf.dtype in TRAINABLE:
                value = initial(leaf, self.seed)
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
        """Batches of a dataset in the model's types, in memory that the next one overwrites."""
        if self._space.keys() != data.columns.keys():
            specs = {name: self.form.inputs[name] for name in data.columns}
            self._space = {
                name: np.empty((self.batch, *s.dtype.array_shape(s.shape)[1:]), s.dtype.numpy)
                for name, s in specs.items()
            }
        return data.batches(size, order, self._space)

    @property
    def planned_nbytes(self) -> int:
        """The most private memory of the process."""
        return self.baseline + self.form.nbytes

    # ---- values

    @property
    def weights(self) -> Values:
        """Weights by name, read on access; they change as the trainer runs."""
        return Values(self.session, [n for n, t in self.form.leaves.items() if t.kind == "weight"])

    @property
    def saved(self) -> Values:
        """Weights and moments: what a checkpoint holds."""
        roles = "weight", "table", "moment"
        return Values(self.session, [n for n, t in self.form.leaves.items() if t.role in roles])

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        """Sums of gradients since the last `fresh` physical batch, by weight; see add_gradients. Raises InputError."""
        self._want_sums()
        trained = (w.label for w in self.model.trained)
        return {name: self.session.get(f"g/{name}") for name in trained}

    # ---- running

    def forward(self, batch: Arrays) -> Arrays:
        """Outputs of a physical batch, by the forward graph: `loss`, `predictions`, `correct`."""
        return self.run[EVALUATE](self._given(EVALUATE, batch, 0))

    def add_gradients(self, batch: Arrays, fresh: bool) -> Arrays:
        """Add the gradients of a physical batch to their sums, which a `fresh` one resets; returns its outputs.

        Only where a step has several physical batches or evaluations; a mean is formed as they come.
        """
        self._want_sums()
        self._summed = 1 if fresh else self._summed + 1
        flag = np.array(float(fresh), np.float32)
        number = self.done * self.form.micros + self._summed
        return self.run[MICRO]({**self._given(MICRO, batch, number), "fresh": flag})

    def _want_sums(self) -> None:
        if MICRO not in self.run:
            raise InputError("gradients are summed only if batch is larger than the physical batch")

    def step(self, batch: Arrays) -> Stepped:
        """Train on a logical batch. Raises InputError, and NotFinite for the third bad step in a row."""
        if self.optimizer is None:
            raise InputError("this trainer has no optimizer")
        number = self.done + 1
        wrong = [name for name, v in batch.items() if len(v) != self.batch]
        if wrong:
            raise InputError(
                f"a step takes {plural(self.batch, 'datapoint')}; {wrong[0]} has {len(batch[wrong[0]])}"
            )
        if not isinstance(self.lr, float | int | np.number) or not math.isfinite(self.lr):
            raise InputError(f"step {number}: the learning rate is {self.lr!r}; it must be finite")
        first = STEP if STEP in self.run else MICRO
        if self.optimizer.evaluations > 1:  # the next step compares its batch with this one
            batch = {name: np.array(values) for name, values in batch.items()}
        starts = enumerate(range(0, self.batch, self.rows), 1 + self.done * self.form.micros)
        parts = [
            self._given(first, {n: v[at : at + self.rows] for n, v in batch.items()}, part)
            for part, at in starts
        ]
        rounding = np.array([self.seed, number], np.int64)
        needs_rounding = any(ROUNDING in run.inputs for run in self.run.values())
        turn = Turn(self.run, parts, {ROUNDING: rounding} if needs_rounding else {}, self._before)
        self._before = None
        outputs = self.optimizer.drive(turn, number, self.lr)
        self._before = turn if self.optimizer.evaluations > 1 else None
        self.done = number
        try:
            self._bad, bad = judged(outputs, turn, self._bad)
        except NotFinite as error:
            raise NotFinite(f"step {number}: {error}") from None
        if turn.note:
            self.say(f"step {number}: {turn.note}")
        if bad:
            self.say(f"step {number} skipped, its loss or gradient is not finite: {bad}")
        return Stepped(tuple(turn.outputs), float(outputs["squares"]) ** 0.5, turn.evaluations)

    def check_finite(self) -> None:
        """Raise NotFinite if the last step was skipped, because its loss or gradient was not finite."""
        if self._bad:
            raise NotFinite(
                f"step {self.done}: the loss or gradient is not finite, as of {plural(self._bad, 'step')} at the end"
            )

    def _given(self, graph: str, batch: Arrays, number: int) -> dict[str, Any]:
        """The inputs of a graph: those columns that it reads, and what is not data."""
        input_names = self.run[graph].inputs
        candidates = {**batch, **self.inputs(number)}
        return {name: value for name, value in candidates.items() if name in input_names}

    def change(self, optimizer: Optimizer) -> None:
        """Go on with other numbers, such as another weight decay. Raises InputError if that needs another plan."""
        _check(optimizer)
        now = self.optimizer
        trained = self.model.trained
        if (
            now is None
            or updating(trained, now).fingerprint != updating(trained, optimizer).fingerprint
        ):
            raise InputError(f"{optimizer} needs another plan than {now}; create another trainer")
        self.optimizer, self.lr = optimizer, optimizer.lr


def _check(optimizer: Optimizer | None, **chosen: tuple[str, tuple[str, ...]]) -> None:
    """Raise InputError unless each value is one of its choices, and the optimizer's settings are within bounds."""
    for name, (value, choices) in chosen.items():
        if value not in choices:
            raise InputError(f"{name}={value!r} must be one of {', '.join(choices)}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InputError(f"the optimizer is {optimizer!r}; give one such as pt.AdamW(lr=1e-3)")
    if optimizer is not None:
        optimizer.check()
        if float(optimizer.lr) < 0:
            raise InputError(f"optimizer: lr is {optimizer.lr}; it must be at least 0")
