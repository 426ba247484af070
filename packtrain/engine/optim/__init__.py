"""Optimizers, one file each, and the graphs of a training step. A new one is listed here, and nowhere else."""

from collections.abc import Iterator

from packtrain.engine.optim.adamw import AdamW
from packtrain.engine.optim.graphs import (
    ROUNDING,
    accumulating,
    applying,
    measuring,
    training,
    updating,
)
from packtrain.engine.optim.lbfgs import LBFGS
from packtrain.engine.optim.muon import Muon
from packtrain.engine.optim.optimizer import Given, Optimizer, Turn, moment
from packtrain.engine.optim.parts import PART, Share, part_of_weight, whole_name
from packtrain.engine.optim.sgd import SGD
from packtrain.engine.tensor import weight

__all__ = [
    "LBFGS", "OPTIMIZERS", "PART", "ROUNDING", "SGD", "AdamW", "Given", "Muon", "Optimizer", "Share", "Turn",
    "accumulating", "applying", "leaner", "measuring", "moment", "part_of_weight", "training", "updating",
    "whole_name",
]  # fmt: skip

KINDS: tuple[type[Optimizer], ...] = (AdamW, SGD, Muon, LBFGS)  # the first one is the default
OPTIMIZERS = {kind.name: kind for kind in KINDS}


def leaner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The other optimizers with less state for each weight, the least first."""
    optimizers = (kind(optimizer.lr) for kind in KINDS)
    yield from sorted(
        (o for o in optimizers if state_nbytes(o) < state_nbytes(optimizer)), key=state_nbytes
    )


def state_nbytes(optimizer: Optimizer) -> int:
    """Bytes of state for a matrix of a fixed size."""
    return sum(leaf.spec.nbytes for leaf in optimizer.states(weight("w", (64, 64))))
