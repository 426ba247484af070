"""Candidates for a training step, with memory plans: how many datapoints at a time, and which values are recomputed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.memory import private_nbytes, release_memory
from packtrain.common.text import plural
from packtrain.engine import ops
from packtrain.engine.backends import HOST, Target
from packtrain.engine.graph import Graph
from packtrain.engine.memory_plan import Plan, least_order, make_plan, size_text
from packtrain.engine.optim import Optimizer, accumulation_graph, training_graph, update_graph
from packtrain.engine.placement import Placed, place
from packtrain.engine.tensor import GraphError, Spec, Tensor
from packtrain.planner import training_plans
from packtrain.planner.training_plans import EVALUATE, MICRO, STEP, UPDATE, Name, lasting
from packtrain.training.generic.fit_model import Model

Build = Callable[[int], "Model | Tensor"]
UNSCALED_LOSS = "whole"  # the loss of a physical batch, where `loss` is its share of a step
KERNELS_NBYTES = 1 << 20  # difference of the kernels' memory between processes
BATCH_OBJECTS_NBYTES = 2 << 10  # objects of a physical batch: its arrays, and those of its outputs


@dataclass(frozen=True)
class StepVariant:
    """Graphs and memory plans of a step that adds up the gradients of `micros` physical batches of `rows` datapoints.

    copies      number of copies of a step's data, several if the next step compares its data with them
    recomputed  which forward values the backward pass computes again; empty: none
    """

    model: Model
    eval_model: Model
    rows: int
    micros: int
    recomputed: str
    copies: int
    placed: dict[Name, Placed]
    plans: dict[Name, Plan]
    target: Target

    @property
    def largest_plan(self) -> Plan:
        """The memory plan with the largest arena; all graphs of the step run in that one allocation."""
        return max(self.plans.values(), key=lambda plan: plan.arena().nbytes)

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Weights and states, as leaves of the graphs, by name."""
        return {n: leaf for p in self.placed.values() for n, leaf in lasting(p).items()}

    @property
    def inputs(self) -> dict[str, Spec]:
        """Shapes and types of the inputs of the training and the evaluation model, by name."""
        all_inputs = {**self.eval_model.inputs, **self.model.inputs}
        return {name: leaf.spec for name, leaf in all_inputs.items()}

    @property
    def arena_nbytes(self) -> int:
        return self.largest_plan.arena(HOST).nbytes

    @property
    def loop_nbytes(self) -> int:
        """Bytes beside weights and arena: copies of a step's data and of its outputs, executors, files."""
        outputs, inputs = self.model.outputs.values(), [*self.inputs.values()]
        num_calls = sum(len(placed.graph.calls) for placed in self.placed.values())
        data = sum(s.nbytes for s in inputs) * self.copies + 2 * sum(t.spec.nbytes for t in outputs)
        compared_nbytes = max(s.size for s in inputs) if inputs and self.copies > 1 else 0
        parts = self.micros * (data + BATCH_OBJECTS_NBYTES * self.copies)
        executors_nbytes = training_plans.LOOP_NBYTES + training_plans.BOUND_NBYTES * num_calls
        return KERNELS_NBYTES + executors_nbytes + parts + compared_nbytes

    @property
    def parts(self) -> dict[str, int]:
        """Bytes that a run adds to the process, by purpose, such as weights, optimizer state and arena."""

        def role_nbytes(*roles: str) -> int:
            leaves = (leaf for leaf in self.leaves.values() if leaf.role in roles)
            return training_plans.buffer_nbytes(leaves, self.target)

        return {
            "weights": role_nbytes("weight", "table"), "optimizer state": role_nbytes("moment"),
            "sums of gradients": role_nbytes("sum"),
            "constants": sum(plan.arena(HOST).constant_nbytes for plan in self.plans.values()),
            "arena": self.arena_nbytes, "data and loop": self.loop_nbytes,
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes that a run adds to the process."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        note = f", {self.recomputed} recomputed" if self.recomputed else ""
        return f"{self.micros} × {plural(self.rows, 'datapoint')} per step{note}"


def choose(
    request: "FitRequest", optimizer: Optimizer | None, target: Target, limit: float, baseline: int
) -> StepVariant:
    """Return the first variant whose bytes fit `limit` together with `baseline`, the process's private bytes before it;
    the variants with most datapoints at a time come first. Raises DoesNotFit, which names the least limit."""
    smallest: StepVariant | None = None
    before = private_nbytes()
    for rows in request.batch_sizes():
        for recomputed in ("", "all but products", "all but some products"):
            variant = build_variant(request, rows, recomputed, optimizer, target)
            if variant is None:
                continue
            if baseline + variant.nbytes <= limit:
                return variant
            if smallest is None or variant.nbytes < smallest.nbytes:
                smallest = variant
    assert smallest is not None
    release_memory()
    baseline += max(private_nbytes() - before, 0)  # the search left plans and heaps with free room
    needed_mib = -(-(baseline + smallest.nbytes) >> 20)
    sizes = {"the process before it": baseline, **smallest.parts}
    lines = [
        f"this does not fit into {size_text(int(limit))}; the smallest memory that would do is {needed_mib}MiB",
        f"  that is with {smallest}",
        *(f"  {size_text(nbytes):>10}  {label}" for label, nbytes in sizes.items() if nbytes),
    ]
    raise DoesNotFit("\n".join(lines))


@dataclass(frozen=True)
class FitRequest:
    """A caller's request: a model of fixed size, or a function from a number of datapoints to the model."""

    model: "Model | Tensor | Build"
    eval_model: "Model | Build | None" = None
    batch: int | None = None
    physical: int | None = None
    max_norm: float | None = None
    order: str = "written"

    def batch_sizes(self) -> list[int]:
        """Return the possible numbers of datapoints at a time, largest first. Raises InputError."""
        for name, value in (("batch", self.batch), ("physical", self.physical)):
            if value is not None and (not isinstance(value, int | np.integer) or value < 1):
                raise InputError(f"{name}={value!r} must be a whole number, 1 or more")
        if isinstance(self.model, Model | Tensor):
            sizes = [self._built_batch_size()]
        elif self.physical is not None:
            sizes = [self.physical]
        elif self.batch is None:
            raise InputError("batch must be given: the number of datapoints per step")
        else:
            sizes = [n for n in range(self.batch, 0, -1) if self.batch % n == 0]
        bad_sizes = [n for n in sizes if (self.batch or n) % n]
        if bad_sizes:
            fact = f"batch={self.batch} must be a multiple of the physical batch, {bad_sizes[0]}"
            raise InputError(fact)
        return sizes

    def _built_batch_size(self) -> int:
        """Return the number of datapoints for which the model is built. Raises InputError if `physical` differs."""
        inputs = self.build_model(0).inputs
        sizes = {name: leaf.shape[0] for name, leaf in inputs.items() if leaf.shape}
        rows = next(iter(sizes.values()), 0)
        if self.physical not in (None, rows):
            raise InputError(
                f"physical={self.physical}, but the model is built for {plural(rows, 'datapoint')};"
                " give a function from their number to the model"
            )
        if not rows:
            raise InputError("the model has no inputs with an axis of datapoints")
        return rows

    def build_model(self, rows: int, for_eval: bool = False) -> Model:
        """Build the model for `rows` datapoints at a time, to train or, with `for_eval`, to evaluate."""
        model_source = self.eval_model if for_eval and self.eval_model is not None else self.model
        model = model_source if isinstance(model_source, Model | Tensor) else model_source(rows)
        if not isinstance(model, Model | Tensor):
            raise GraphError(f"the model is {model!r}; it must be a Model, or a scalar loss")
        return Model(model) if isinstance(model, Tensor) else model


def build_variant(
    request: FitRequest, rows: int, recomputed: str, optimizer: Optimizer | None, target: Target
) -> StepVariant | None:
    """Build a step's graphs for `rows` datapoints at a time and plan their memory; `recomputed` says which forward
    values the backward pass computes again, see `_kept_values`. Returns None if the model has no such values."""
    model, micros = request.build_model(rows), (request.batch or rows) // rows
    eval_model = request.build_model(rows, for_eval=True)
    graphs = {EVALUATE: Graph(eval_model.outputs)}
    if optimizer is not None:
        keep = _kept_values(model, recomputed)
        if recomputed and not keep:
            return None
        graphs |= _training_graphs(model, optimizer, micros, keep, request.max_norm)
    elif recomputed:
        return None
    minimize_memory = request.order == "least"
    placed: dict[Name, Placed] = {
        name: place(graph, target, least_order(graph, target) if minimize_memory else None)
        for name, graph in graphs.items()
    }
    plans = {name: make_plan(p) for name, p in placed.items()}
    copies = 3 if optimizer is not None and optimizer.evaluations > 1 else 1
    return StepVariant(model, eval_model, rows, micros, recomputed, copies, placed, plans, target)


def _training_graphs(
    model: Model, optimizer: Optimizer, micros: int, keep: list[Tensor] | None, norm: float | None
) -> dict[str, Graph]:
    """Return a step's graphs by name: STEP if it has one micro-batch and evaluation, else MICRO, for each of `micros`,
    and UPDATE. `keep`: forward values to save, None: all; `norm`: the largest gradient norm, None: no clipping."""
    trained_weights = model.trained
    if norm is not None and optimizer.first_length is not None:
        raise InputError(f"{optimizer.name} finds the length of its steps itself, without max_norm")
    if norm is not None and not norm > 0:
        raise InputError(f"max_norm={norm} must be more than 0")
    if not trained_weights:
        raise GraphError("the loss depends on no weight that can be trained")
    outputs = model.outputs
    if micros == 1 and optimizer.evaluations == 1:
        return {STEP: training_graph(outputs, trained_weights, optimizer, keep=keep, max_norm=norm)}
    loss_scale = 1 / micros if model.mean else 1.0
    shared = outputs | {"loss": ops.scale(model.loss, by=loss_scale), UNSCALED_LOSS: model.loss}
    return {
        MICRO: accumulation_graph(shared, trained_weights, keep=keep),
        UPDATE: update_graph(trained_weights, optimizer, max_norm=norm),
    }


def _kept_values(model: Model, recomputed: str) -> list[Tensor] | None:
    """Return the forward values to save, None: all. `recomputed` is "" (save all), "all but products" (save products
    with matrices) or "all but some products" (save every second product, but not the last of these)."""
    if not recomputed:
        return None
    products = [
        call.results[0] for call in Graph([model.loss]).calls
        if any(t.base.kind == "weight" and len(t.shape) > 1 for t in call.reads)
    ]  # fmt: skip
    return products if recomputed == "all but products" else products[::2][:-1]
