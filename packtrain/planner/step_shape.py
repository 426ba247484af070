"""What a step computes, on which model: the shape that plans are made for."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from packtrain.dtypes import Dtype, f32
from packtrain.engine.optim import Share
from packtrain.engine.tensor import Tensor
from packtrain.models.config import Config
from packtrain.models.distillation_loss import Distill
from packtrain.models.lora import SUFFIXES
from packtrain.models.preference_loss import Preference
from packtrain.models.replay_loss import Replay
from packtrain.planner.checkpointing import Choice

CHUNK = 256  # default number of tokens of the loss head at a time


@dataclass(frozen=True, slots=True)
class Base:
    """The model file that a run starts from. Frozen tensors are read in place from the file.

    types   of the file's matrices by name, for frozen ones
    masters type of trained matrices; vectors and LoRA adapters are f32
    frozen  name patterns of frozen tensors; with LoRA, only the adapters are trained
    last    train only the last N blocks and nothing else; 0: no limit
    strict  --memory also counts bytes mapped from the file
    """

    types: tuple[tuple[str, Dtype], ...]
    frozen: tuple[str, ...] = ()
    last: int = 0
    strict: bool = False
    masters: Dtype = f32

    def trains(self, config: Config, leaf: Tensor) -> bool:
        """Whether a weight of the model is trained."""
        name = leaf.label
        if leaf.role != "weight":
            return False
        if config.lora is not None:
            return name.endswith(SUFFIXES)
        first = config.block_count - self.last if self.last else 0
        is_selected = int(name.split(".")[1]) >= first if name.startswith("blk.") else not self.last
        return is_selected and not any(fnmatchcase(name, p) for p in self.frozen)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes: rows × time tokens in each of `micros` micro-batches.

    chunk       tokens of the loss head at a time
    keep        activations kept for the backward pass; None: everything
    two_passes  clip by global norm with a first pass that only measures it, so that no two gradients are stored
    twice       the same for so many of the first blocks that are trained: their part of the backward pass runs twice,
                and what the forward pass keeps in them waits for both; gradients of the others are stored
    layered     all micro-batches go through each block in turn, so that no gradient is stored until the next one
    evaluations of loss and gradient per step, by the optimizer; with more than one the update is a separate graph
    ranks       processes that do the same on other rows and add their gradients before the update
    share       number of this process among those that share out the moments; None: it has all
    scatter     and the sums of gradients, too
    base        the model file that is tuned; None: train a new model
    max_norm    clip gradients to this global norm, and then each of their values to `max_value`
    distill     what a teacher has to say counts, too; or texts of the base
    preference  the loss of pairs of answers, of which a row has at most `pairs`; None: of the next token
    """

    config: Config
    rows: int
    time: int
    micros: int = 1
    max_norm: float | None = None
    evaluate: bool = True
    chunk: int = CHUNK
    keep: Choice | None = None
    two_passes: bool = False
    twice: int = 0
    layered: bool = False
    evaluations: int = 1
    ranks: int = 1
    share: Share | None = None
    scatter: bool = False
    base: Base | None = None
    max_value: float | None = None
    preference: Preference | None = None
    pairs: int = 0
    distill: Distill | Replay | None = None

    @property
    def clipping(self) -> dict[str, Any]:
        return {"max_norm": self.max_norm, "max_value": self.max_value}

    @property
    def graphs(self) -> int:
        """Graphs of a step with the blocks and their gradients."""
        return 1 + self.two_passes

    @property
    def once(self) -> "StepShape":
        """The same in one pass."""
        return replace(self, two_passes=False, twice=0)

    @property
    def apart(self) -> bool:
        """Whether the update is a graph of its own, whatever the number of micro-batches."""
        return self.evaluations > 1 or self.ranks > 1

    @property
    def positions(self) -> int:
        """Positions of a step on this rank, including padding."""
        return self.rows * self.time * self.micros
