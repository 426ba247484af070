"""Optimizers as graph builders: states are leaves, settings are inputs, so one plan serves every step."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from packtrain import ops
from packtrain.dtypes import f32, i64
from packtrain.grad import Keep, differentiate
from packtrain.graph import Graph
from packtrain.models.lora import noise
from packtrain.tensor import GraphError, Tensor, input, named, state

ROUNDING = "rounding"  # the input that the rounding of bf16 weights depends on: seed and step


Inner = dict[Tensor, Tensor] | None


class Optimizer(Protocol):
    """Settings of an update rule, and the rule as calls. States are leaves by name, numbers are an input `hyper`."""

    @property
    def lr(self) -> float: ...

    def hyper(self) -> Tensor:
        """The input leaf that `inputs` feeds."""

    def inputs(self, t: int, lr: float | None = None) -> dict[str, np.ndarray]:
        """The input of step t, counted from 1, with another rate than `lr` where one is given."""

    def update(
        self, w: Tensor, g: Tensor, hyper: Tensor, gate: Tensor, key: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The handles of all that one step changes for w; nothing changes if the gate is not finite.

        key  seed and step, of a bf16 alone: it is rounded at random
        """


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW with decoupled decay, for tensors of two or more axes only. Loshchilov & Hutter, arXiv 1711.05101."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def hyper(self) -> Tensor:
        return input("adamw", (7,))

    def inputs(self, t: int, lr: float | None = None) -> dict[str, np.ndarray]:
        corrections = 1 - self.beta1**t, 1 - self.beta2**t
        rate = self.lr if lr is None else lr
        hyper = rate, self.beta1, self.beta2, self.eps, self.weight_decay, *corrections
        return {"adamw": np.array(hyper, np.float32)}

    def update(
        self, w: Tensor, g: Tensor, hyper: Tensor, gate: Tensor, key: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The handles of w and its two moments `m/<name>` and `v/<name>` after one step."""
        m, v = (state(f"{kind}/{w.name}", w.shape, role="moment") for kind in "mv")
        return ops.opt_step_adamw(
            w, g, m, v, hyper, gate, key, decay=len(w.shape) > 1, stream=stream_of(w)
        )


@dataclass(frozen=True, slots=True)
class SGD:
    """Gradient descent with decoupled decay, for tensors of two or more axes only; it has no state."""

    lr: float = 1e-1
    weight_decay: float = 0.0

    def hyper(self) -> Tensor:
        return input("sgd", (2,))

    def inputs(self, t: int, lr: float | None = None) -> dict[str, np.ndarray]:
        return {"sgd": np.array((self.lr if lr is None else lr, self.weight_decay), np.float32)}

    def update(
        self, w: Tensor, g: Tensor, hyper: Tensor, gate: Tensor, key: Tensor | None
    ) -> tuple[Tensor, ...]:
        return ops.opt_step_sgd(w, g, hyper, gate, key, decay=len(w.shape) > 1, stream=stream_of(w))


def stream_of(w: Tensor) -> int:
    """The stream of random numbers by which a weight is rounded; 0 for one that is not."""
    return 0 if w.dtype == f32 else noise(w.label)


def training(
    outputs: Mapping[str, Tensor],
    trained: Collection[Tensor],
    optimizer: Optimizer,
    *,
    keep: Keep = None,
    max_norm: float | None = None,
    inner: Inner = None,
) -> Graph:
    """The graph of one step: forward, backward and update of outputs["loss"]; it also outputs `squares`.

    squares  the sum of squares of all gradients: the gradient norm before clipping, squared
    keep     forward values to keep, see differentiate
    max_norm None applies each gradient as soon as it is complete, so that no two need memory at once; a number
             clips by global norm, for which all gradients must be there first. A step whose loss or gradient is
             not finite changes nothing; without max_norm that holds from the first such gradient on.
    inner    filled with gradients of forward values, see differentiate
    """
    loss, update = outputs["loss"], _Update(optimizer, outputs["loss"], max_norm)
    _check(trained)
    if max_norm is None:
        differentiate(loss, list(trained), keep, update.measure_and_apply, inner)
    else:
        for w, g in differentiate(loss, list(trained), keep, update.measure, inner).items():
            update.apply(w, g)
    return Graph({**outputs, "squares": named("squares", update.squares[-1])}, update.handles)


def measuring(
    outputs: Mapping[str, Tensor],
    trained: Collection[Tensor],
    *,
    keep: Keep = None,
    inner: Inner = None,
) -> Graph:
    """The first pass of a step that clips without keeping its gradients: outputs and `squares`, no updates."""
    _check(trained)
    squares = list[Tensor]()

    def measure(w: Tensor, g: Tensor) -> None:
        _measure(squares, g)

    differentiate(outputs["loss"], list(trained), keep, measure, inner)
    return Graph({**outputs, "squares": named("squares", squares[-1])})


def applying(
    outputs: Mapping[str, Tensor],
    trained: Collection[Tensor],
    optimizer: Optimizer,
    *,
    keep: Keep = None,
    max_norm: float,
    inner: Inner = None,
) -> Graph:
    """The second pass: the same gradients, each used up at once; input `squares` () is what the first one gave."""
    _check(trained)
    update = _Update(optimizer, outputs["loss"], max_norm)
    update.squares.append(input("squares", ()))
    differentiate(outputs["loss"], list(trained), keep, update.apply, inner)
    return Graph(outputs, update.handles)


def accumulating(
    outputs: Mapping[str, Tensor],
    trained: Collection[Tensor],
    *,
    keep: Keep = None,
    inner: Inner = None,
) -> Graph:
    """The graph of one micro-batch: forward, backward, and each gradient added to its state `g/<name>`.

    The input `fresh` () is 1 for the first micro-batch of a step, which begins the sums, else 0.
    """
    _check(trained)
    fresh, handles = input("fresh", ()), list[Tensor]()

    def add(w: Tensor, g: Tensor) -> None:
        handles.append(ops.accumulate(_sum_of(w), g, fresh))

    differentiate(outputs["loss"], list(trained), keep, add, inner)
    return Graph(outputs, handles)


def updating(
    trained: Collection[Tensor], optimizer: Optimizer, *, max_norm: float | None = None
) -> Graph:
    """The graph that ends an accumulated step: updates from the sums `g/<name>`; input `loss` () is their loss."""
    _check(trained)
    update = _Update(optimizer, input("loss", ()), float("inf") if max_norm is None else max_norm)
    sums = [(w, _sum_of(w)) for w in trained]
    for w, g in sums:
        update.measure(w, g)
    for w, g in sums:
        update.apply(w, g)
    return Graph({"squares": named("squares", update.squares[-1])}, update.handles)


def _sum_of(w: Tensor) -> Tensor:
    return state(f"g/{w.name}", w.shape, role="sum")


def _measure(squares: list[Tensor], g: Tensor) -> None:
    """Go on with the running sum of squares of all gradients."""
    squares.append(ops.sum_squares(g, squares[-1] if squares else None))


def _check(trained: Collection[Tensor]) -> None:
    if not trained:
        raise GraphError("training needs at least one tensor to train")


class _Update:
    """Writes the end of a step: the norm of all gradients so far, the gate made from it, and the updates."""

    def __init__(self, optimizer: Optimizer, loss: Tensor, max_norm: float | None) -> None:
        self.optimizer, self.loss, self.max_norm = optimizer, loss, max_norm
        self.hyper, self.key = optimizer.hyper(), input(ROUNDING, (2,), i64)
        self.squares: list[Tensor] = []
        self.handles: list[Tensor] = []
        self.clip: Tensor | None = None

    def measure(self, w: Tensor, g: Tensor) -> None:
        _measure(self.squares, g)

    def apply(self, w: Tensor, g: Tensor) -> None:
        self.clip = self.clip or self._gate()
        self._update(w, g, self.clip)

    def measure_and_apply(self, w: Tensor, g: Tensor) -> None:
        self.measure(w, g)
        self._update(w, g, self._gate())

    def _update(self, w: Tensor, g: Tensor, gate: Tensor) -> None:
        key = None if w.dtype == f32 else self.key
        self.handles.extend(self.optimizer.update(w, g, self.hyper, gate, key))

    def _gate(self) -> Tensor:
        finite = ops.add(self.squares[-1], ops.scale(self.loss, by=0.0))
        norm = float("inf") if self.max_norm is None else self.max_norm
        return ops.clip_gate(finite, max_norm=norm)
