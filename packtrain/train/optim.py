"""Optimizers as graph builders: states are leaves, settings are inputs, so one plan serves every step."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from packtrain import ops
from packtrain.grad import differentiate
from packtrain.graph import Graph
from packtrain.tensor import GraphError, Tensor, input, named, state


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW with decoupled decay, for tensors of two or more axes only. Loshchilov & Hutter, arXiv 1711.05101."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def inputs(self, t: int, lr: float | None = None) -> dict[str, np.ndarray]:
        """The `adamw` input of step t, counted from 1."""
        corrections = 1 - self.beta1**t, 1 - self.beta2**t
        rate = self.lr if lr is None else lr
        hyper = rate, self.beta1, self.beta2, self.eps, self.weight_decay, *corrections
        return {"adamw": np.array(hyper, np.float32)}

    def update(self, w: Tensor, g: Tensor, hyper: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        """The handles of w and its two moments `m/<name>` and `v/<name>` after one step."""
        m, v = state(f"m/{w.name}", w.shape), state(f"v/{w.name}", w.shape)
        return ops.opt_step_adamw(w, g, m, v, hyper, gate, decay=len(w.shape) > 1)


def training(
    outputs: Mapping[str, Tensor],
    trained: Collection[Tensor],
    optimizer: AdamW,
    *,
    keep: Collection[Tensor] | None = None,
    max_norm: float | None = None,
) -> Graph:
    """The graph of one step: forward, backward and update of outputs["loss"]; it also outputs `squares`.

    squares  the sum of squares of all gradients: the gradient norm before clipping, squared
    keep     forward values to keep, see differentiate
    max_norm None applies each gradient as soon as it is complete, so that no two need memory at once; a number
             clips by global norm, for which all gradients must be there first. A step whose loss or gradient is
             not finite changes nothing; without max_norm that holds from the first such gradient on.
    """
    if not trained:
        raise GraphError("training needs at least one tensor to train")
    loss = outputs["loss"]
    hyper, handles, squares = input("adamw", (7,)), list[Tensor](), list[Tensor]()

    def measure(w: Tensor, g: Tensor) -> None:
        squares.append(ops.sum_squares(g, squares[-1] if squares else None))

    def gate(norm: float) -> Tensor:
        return ops.clip_gate(ops.add(squares[-1], ops.scale(loss, by=0.0)), max_norm=norm)

    def update_now(w: Tensor, g: Tensor) -> None:
        measure(w, g)
        handles.extend(optimizer.update(w, g, hyper, gate(float("inf"))))

    if max_norm is None:
        differentiate(loss, list(trained), keep, then=update_now)
    else:
        gradients = differentiate(loss, list(trained), keep, then=measure)
        clip = gate(max_norm)
        for w, g in gradients.items():
            handles.extend(optimizer.update(w, g, hyper, clip))
    return Graph({**outputs, "squares": named("squares", squares[-1])}, handles)
