"""Optimizers, one file each, and the graphs of a training step. A new optimizer is listed here, and nowhere else."""

from collections.abc import Iterator

from packtrain.engine.optim.adamw import AdamW
from packtrain.engine.optim.adamw8bit import AdamW8bit
from packtrain.engine.optim.graphs import (
    ROUNDING, accumulation_graph, applying_graph, measuring_graph, training_graph, update_graph,
)  # fmt: skip
from packtrain.engine.optim.lbfgs import LBFGS
from packtrain.engine.optim.muon import Muon
from packtrain.engine.optim.muon8bit import Muon8bit
from packtrain.engine.optim.optimizer import Optimizer, StepInputs, StepRunner, moment
from packtrain.engine.optim.over_ranks import PART_PREFIX, RankShare, part_of_weight, unsplit_name
from packtrain.engine.optim.sgd import SGD
from packtrain.engine.tensor import weight

__all__ = [
    "LBFGS", "OPTIMIZERS", "PART_PREFIX", "ROUNDING", "SGD", "AdamW", "AdamW8bit", "Muon", "Muon8bit", "Optimizer",
    "RankShare", "StepInputs", "StepRunner", "accumulation_graph", "applying_graph", "leaner_optimizers",
    "measuring_graph", "moment", "part_of_weight", "training_graph", "unsplit_name", "update_graph",
]  # fmt: skip

# the first one is the default
KINDS: tuple[type[Optimizer], ...] = (AdamW, SGD, Muon, LBFGS, AdamW8bit, Muon8bit)
OPTIMIZERS = {kind.name: kind for kind in KINDS}


def leaner_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the other optimizers with less state for each weight than this one, the leanest first."""
    optimizers = (optimizer_class(optimizer.lr) for optimizer_class in KINDS)
    yield from sorted(
        (o for o in optimizers if state_nbytes(o) < state_nbytes(optimizer)), key=state_nbytes
    )


def state_nbytes(optimizer: Optimizer) -> int:
    """Return the bytes of state for a 64 × 64 matrix, to compare optimizers."""
    return sum(leaf.spec.nbytes for leaf in optimizer.states(weight("w", (64, 64))))
