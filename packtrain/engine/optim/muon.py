"""Muon: matrices step along the orthogonal part of their momentum, everything else by AdamW."""

from dataclasses import dataclass, replace
from typing import ClassVar

from packtrain.common.options import OPTIMIZER
from packtrain.engine import ops
from packtrain.engine.optim.adamw import HYPER, AdamW
from packtrain.engine.optim.optimizer import StepInputs, Tensors, moment
from packtrain.engine.optim.sgd import hyper_number, opt_momentum, opt_step_sgd
from packtrain.engine.optim.weights import stream_of
from packtrain.engine.tensor import Tensor

NUM_ROUNDS, POLYNOMIAL = 5, (3.4445, -4.7750, 2.0315)  # x = a x + b (x x^T) x + c (x x^T)^2 x
ADAMW_UPDATE_RMS = 0.2  # root mean square of an update: about that of AdamW's
EMBEDDING_TABLES = ("token_embd.weight", "per_layer_token_embd.weight", "output.weight")
FILTERS = ("shortconv.conv.weight",)


@dataclass(frozen=True, slots=True)
class Muon(AdamW):
    """Steps matrices by updates whose singular values are near 1. Jordan et al. 2024; scaled as in arXiv 2502.16982.
    Embeddings, the head and vectors are updated by AdamW, with the same rate."""

    name: ClassVar[str] = "muon"
    note: ClassVar[str] = "keeps one moment for a matrix and orthogonalizes its steps"
    hyper: ClassVar[tuple[str, ...]] = (*HYPER, "momentum")
    kernels: ClassVar[tuple[str, ...]] = ("elementwise", "matmul_f32", "reduce", "update")
    by_parts: ClassVar[bool] = False
    for_others: ClassVar[type[AdamW]] = AdamW  # updates what is not orthogonalized

    muon_momentum: float = OPTIMIZER(0.95, "Muon: momentum", min_value=0, max_value=0.9999)

    def numbers(self, t: int, lr: float) -> tuple[float, ...]:
        return *AdamW.numbers(self, t, lr), self.muon_momentum

    def states(self, w: Tensor) -> Tensors:
        return self.momentum_of(w) if _is_orthogonalized(w) else self.for_others.states(self, w)

    def update(self, w: Tensor, g: Tensor, *states: Tensor, step_inputs: StepInputs) -> Tensors:
        if not _is_orthogonalized(w):
            adamw_inputs = replace(
                step_inputs, hyper=ops.narrow(step_inputs.hyper, axis=0, start=0, length=len(HYPER))
            )
            return self.for_others.update(self, w, g, *states, step_inputs=adamw_inputs)
        momentum = hyper_number(step_inputs.hyper, len(HYPER))
        *handles, b = self.add_momentum(g, states, momentum, step_inputs.gate)
        direction = ops.add(ops.mul(g, step_inputs.gate), ops.mul(b, momentum))  # Nesterov's
        step = ops.scale(orthogonalize(direction), by=ADAMW_UPDATE_RMS * max(w.shape) ** 0.5)
        # lr and weight_decay
        numbers = ops.slice(step_inputs.hyper, start=(0,), shape=(2,), step=(4,))
        read = w, step, numbers, ops.div(step_inputs.gate, step_inputs.gate), step_inputs.key(w)
        return *handles, *opt_step_sgd(*read, decay=self.decay_axes <= 2, stream=stream_of(w))

    def momentum_of(self, w: Tensor) -> Tensors:
        """Return the state leaves that hold the momentum of a matrix."""
        return (moment("b", w),)

    def add_momentum(self, g: Tensor, states: Tensors, momentum: Tensor, gate: Tensor) -> Tensors:
        """Write the update of a matrix's momentum by gradient g; return the new handles, and the momentum last."""
        handles = opt_momentum(states[0], g, momentum, gate)
        return *handles, handles[0]


def orthogonalize(x: Tensor) -> Tensor:
    """Return x (M, N) with its singular values moved close to 1, by Newton and Schulz's iteration."""
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = ops.cont(ops.transpose(x))
    norm = ops.sqrt(ops.sum_squares(x))
    x = ops.div(x, ops.scale(norm, by=1.0, bias=1e-7))
    a, b, c = POLYNOMIAL
    for _ in range(NUM_ROUNDS):
        square = ops.matmul(x, x)  # x x^T
        polynomial = ops.add(ops.scale(square, by=b), ops.scale(ops.matmul(square, square), by=c))
        x = ops.add(ops.scale(x, by=a), ops.matmul(polynomial, ops.transpose(x)))
    return ops.cont(ops.transpose(x)) if is_tall else x


def _is_orthogonalized(w: Tensor) -> bool:
    return len(w.shape) == 2 and w.label not in EMBEDDING_TABLES and not w.label.endswith(FILTERS)
