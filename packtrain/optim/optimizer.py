"""What every optimizer is: settings, leaves by role, the calls of an update, and how a step is driven.

It knows of no model, no data and no memory. Beside this file each optimizer has one, with everything about it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from packtrain.dtypes import f32
from packtrain.tensor import Tensor, input, state

Values = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Given:
    """What the update of every weight reads: the step's numbers, the gate, and seed and step for random rounding.

    Nothing changes if the gate is not finite.
    """

    hyper: Tensor
    gate: Tensor
    rounding: Tensor

    def key(self, w: Tensor) -> Tensor | None:
        """For a bf16 weight alone: it is rounded at random."""
        return None if w.dtype == f32 else self.rounding


class Turn(Protocol):
    """A step of a run: its batch, and the graphs on its session. All give `loss` or `squares`, or both."""

    def whole(self, hyper: Values) -> Values:
        """Evaluate once and update by these numbers."""

    def evaluate(self) -> Values:
        """Sum gradients where the weights are now; for optimizers of several evaluations, as the next one."""

    def update(self, hyper: Values) -> Values:
        """Update by these numbers and the gradients of the last evaluation, which stay."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Settings of an update rule, and the rule as calls. A field that is declared as an option is a flag of its own.

    name         of the flag --optimizer, and of the input with the numbers of a step
    note         what it is good for, where it is not the first choice: `name note` is a sentence
    hyper        what these numbers are
    kernels      modules of kernels that its op calls
    evaluations  of loss and gradient in a step, about; with more than one, gradients are summed in leaves and the
                 update is a graph of its own, for `drive` to run
    """

    name: ClassVar[str]
    note: ClassVar[str] = ""
    hyper: ClassVar[tuple[str, ...]] = ("lr",)
    kernels: ClassVar[tuple[str, ...]] = ()
    evaluations: ClassVar[int] = 1
    lr: float

    def numbers(self, t: int, lr: float) -> tuple[float, ...]:
        """What `hyper` names at step t, counted from 1."""
        return (lr,)

    def states(self, w: Tensor) -> tuple[Tensor, ...]:
        """What is kept for a weight from step to step, see `moment`."""
        return ()

    def update(self, w: Tensor, g: Tensor, *states: Tensor, given: Given) -> tuple[Tensor, ...]:
        """The handles of all that one step changes for w."""
        raise NotImplementedError

    def updates(self, pairs: Iterable[tuple[Tensor, Tensor]], given: Given) -> Iterator[Tensor]:
        """The same for weights with their gradients: each as it is complete, or all, of several evaluations."""
        for w, g in pairs:
            yield from self.update(w, g, *self.states(w), given=given)

    def drive(self, turn: Turn, t: int, lr: float) -> Values:
        """Make step t; gives `loss` and `squares` of its first evaluation."""
        return turn.whole(self.inputs(t, lr))

    def bare(self) -> "Optimizer":
        """The same, but nothing changes a weight that has no gradient."""
        return self

    def leaf(self) -> Tensor:
        """The input that `inputs` feeds."""
        return input(self.name, (len(self.hyper),))

    def inputs(self, t: int, lr: float | None = None) -> dict[str, np.ndarray]:
        """The input of step t, with another rate than its own where one is given."""
        return {self.name: np.array(self.numbers(t, self.lr if lr is None else lr), np.float32)}


def moment(kind: str, w: Tensor) -> Tensor:
    """An f32 leaf `<kind>/<name>` like a weight, that a checkpoint keeps."""
    return state(f"{kind}/{w.name}", w.shape, role="moment")
