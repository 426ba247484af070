"""The base class of optimizers: settings, state leaves, the calls of an update, and how a step is run.

This module knows no model, no data and no memory. Each optimizer has its own file next to this one.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

import numpy as np

from packtrain.common.options import check_values
from packtrain.dtypes import f32
from packtrain.engine.tensor import Tensor, input, state

Values = Mapping[str, np.ndarray]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What updates of all weights in a step read: its numbers, the clipping factor (gate), and the key of stochastic
    rounding. Nothing changes if the gate is not finite."""

    hyper: Tensor
    gate: Tensor
    rounding: Tensor

    def key(self, w: Tensor) -> Tensor | None:
        """Return the key of stochastic rounding for a bf16 weight, else None."""
        return None if w.spec.dtype == f32 else self.rounding


class StepRunner(Protocol):
    """What an optimizer may do in one training step: run the gradient and update graphs on the step's batch.

    last  the last evaluation of the previous step, if its batch was the same: an optimizer that uses it leaves the
          weights where it last evaluated
    """

    last: Values | None

    def evaluate_and_update(self, hyper: Values) -> Values:
        """Compute loss and gradients, update the weights with the step's numbers `hyper`; return outputs by name."""

    def evaluate(self) -> Values:
        """Compute loss and gradients at the current weights, without an update; return `loss`. May be repeated."""

    def update(self, hyper: Values) -> Values:
        """Run the update graph with the numbers `hyper` and the last evaluation's gradients, which are kept for further
        updates; return `squares` (the sum of the gradients' squares) and the extra outputs of `Optimizer.measured`."""

    def report(self, message: str) -> None:
        """Note a message about this step, which the user is shown after the step."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Settings of an update rule, and the rule as calls of a graph. Each field declared as an option becomes a flag.

    name          value of --optimizer, and name of the input with the numbers of a step
    note          when to use it, if it is not the default: `name note` is a sentence
    hyper         names of these numbers
    kernels       kernel modules that its op calls
    evaluations   about how often a step evaluates loss and gradient; with more than one, gradients are summed in leaves
                  and the update is a separate graph, which `drive` runs
    first_length  the rate without --lr of an optimizer that finds the lengths of its steps itself: gradients are not
                  clipped, and the rate has no schedule; None: any other optimizer
    by_parts      whether parts of a weight can be updated separately, with equal results
    """

    name: ClassVar[str]
    note: ClassVar[str] = ""
    hyper: ClassVar[tuple[str, ...]] = ("lr",)
    kernels: ClassVar[tuple[str, ...]] = ()
    evaluations: ClassVar[int] = 1
    first_length: ClassVar[float | None] = None
    by_parts: ClassVar[bool] = False
    lr: float

    def check(self) -> None:
        """Raise InputError unless the settings are within the bounds of their flags."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)}
        plain_settings = {
            name: v.item() if isinstance(v, np.generic) else v for name, v in settings.items()
        }
        check_values(type(self), plain_settings, "optimizer")

    def numbers(self, t: int, lr: float) -> tuple[float, ...]:
        """Return the step's numbers, such as the rate `lr`: the values of `hyper` at step t, counted from 1."""
        return (lr,)

    def states(self, w: Tensor) -> Tensors:
        """Return the state leaves, such as moments, that the optimizer keeps for weight w; see `moment`."""
        return ()

    def update(self, w: Tensor, g: Tensor, *states: Tensor, step_inputs: StepInputs) -> Tensors:
        """Write the calls that update w by gradient g; return the handles (updated leaves) of all that they change."""
        raise NotImplementedError

    def updates(
        self, pairs: Iterable[tuple[Tensor, Tensor]], step_inputs: StepInputs
    ) -> Iterator[Tensor]:
        """Write the updates for pairs (weight, gradient), as they come; yield the handles (updated leaves)."""
        for w, g in pairs:
            yield from self.update(w, g, *self.states(w), step_inputs=step_inputs)

    def measured(
        self, pairs: Iterable[tuple[Tensor, Tensor]], step_inputs: StepInputs
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Write updates as a graph; return ({name: extra output}, [updated leaves]); `drive` reads extra outputs."""
        return {}, list(self.updates(pairs, step_inputs))

    def drive(self, step: StepRunner, t: int, lr: float) -> Values:
        """Run step t of a training run: compute loss and gradient, once or (L-BFGS) at several weights, and update.
        Return `loss` and `squares`, the gradient's sum of squares, at the weights before the step."""
        return step.evaluate_and_update(self.inputs(t, lr))

    def without_decay(self) -> "Optimizer":
        """Return settings by which a weight whose gradient is zero does not change: these without weight decay."""
        return self

    def with_offloaded_state(self) -> "Optimizer":
        """Return settings whose update fits moments that live in another memory than their weights."""
        return self

    def leaf(self) -> Tensor:
        """Return the input leaf for a step's numbers; `inputs` returns its value."""
        return input(self.name, (len(self.hyper),))

    def inputs(self, t: int, lr: float | None = None) -> dict[str, np.ndarray]:
        """Return {input name: the numbers of step t, f32}; `lr` replaces the settings' learning rate, unless None."""
        return {self.name: np.array(self.numbers(t, self.lr if lr is None else lr), np.float32)}


def moment(kind: str, w: Tensor) -> Tensor:
    """Make an f32 state leaf `<kind>/<name>` in the shape of weight w, which checkpoints save."""
    return state(f"{kind}/{w.name}", w.spec.shape, role="moment")
