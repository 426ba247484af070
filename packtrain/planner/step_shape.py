"""StepShape: the computation of a training step and its model, for which plans are made."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from packtrain.dtypes import Dtype, f32
from packtrain.engine.optim import RankShare
from packtrain.engine.tensor import Tensor
from packtrain.models.config import Config
from packtrain.models.distillation_loss import DistillationLoss
from packtrain.models.lora import SUFFIXES
from packtrain.models.preference_loss import PreferenceLoss
from packtrain.models.replay_loss import ReplayLoss
from packtrain.planner.checkpointing import RecomputeChoice

# Tokens of the loss head at a time, by default. Chunks of 512 gain 2 to 3 % of the head of `15m`, nothing for `110m`,
# and take 32 MiB more.
DEFAULT_CHUNK = 256


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model file that a finetuning run starts from, for planning. Frozen tensors are read in place from the file.

    types               types of the file's matrices by name, used by frozen ones
    frozen              name patterns of frozen tensors; with LoRA, only the adapters are trained
    num_trained_blocks  train only the last N blocks and nothing else; 0: no limit
    strict              setting --strict, by which --memory limits pages of the base, too; only `mark` reads this
    masters             type of trained matrices; vectors and LoRA adapters are f32
    """

    types: tuple[tuple[str, Dtype], ...]
    frozen: tuple[str, ...] = ()
    num_trained_blocks: int = 0
    strict: bool = False
    masters: Dtype = f32

    @property
    def mark(self) -> str:
        """The text by which a resumed run checks that its files belong to these fields; its words never change."""
        fields = f"types={self.types}, frozen={self.frozen}, last={self.num_trained_blocks}"
        return f"Base({fields}, strict={self.strict}, masters={self.masters!r})"

    def trained_names(self, config: Config, leaves: Mapping[str, Tensor]) -> dict[str, None]:
        """Return the names of the leaves that are trained weights of the model, in order."""
        names = [name for name, leaf in leaves.items() if leaf.role == "weight"]
        if config.lora is not None:
            return dict.fromkeys([name for name in names if name.endswith(SUFFIXES)])
        if self.num_trained_blocks:
            first = config.block_count - self.num_trained_blocks
            names = [n for n in names if n.startswith("blk.") and int(n.split(".")[1]) >= first]
        for pattern in self.frozen:
            names = [name for name in names if not fnmatchcase(name, pattern)]
        return dict.fromkeys(names)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The computation of a step: micro_batch_size × seq_len tokens in each of `num_micro_batches` micro-batches.

    max_norm             clip gradients to this global norm, and then each of their values to `max_value`
    chunk                tokens of the loss head at a time
    keep                 forward values saved for the backward pass; None: everything
    two_passes           a first pass only measures the gradients' norm, so that no two gradients are stored
    num_two_pass_blocks  number of first trained blocks that run backward twice, first for the norm: only gradients of
                         the other blocks are stored
    layered              all micro-batches go through each block in turn, so that no gradient is stored between blocks
    num_evaluations      evaluations of the gradient per step by the optimizer; from two on, the update is a graph
    world_size           processes that compute on other rows and add up their gradients before the update
    moment_share         the share of moments that this process has; None: all moments
    scatters_gradients   processes share out sums of gradients, too
    base                 the model file that is tuned; None: train a new model
    preference           loss of pairs of answers, at most `max_pairs` in a row; None: loss of the next token
    distill              loss of a teacher's distribution, or of the base's own texts, that is added
    num_row_tiles        tiles of rows in which a block runs, forward and, recomputed, backward: see models.tiled_block
    """

    config: Config
    micro_batch_size: int
    seq_len: int
    num_micro_batches: int = 1
    max_norm: float | None = None
    evaluate: bool = True
    chunk: int = DEFAULT_CHUNK
    keep: RecomputeChoice | None = None
    two_passes: bool = False
    num_two_pass_blocks: int = 0
    layered: bool = False
    num_evaluations: int = 1
    world_size: int = 1
    moment_share: RankShare | None = None
    scatters_gradients: bool = False
    base: BaseModel | None = None
    max_value: float | None = None
    preference: PreferenceLoss | None = None
    max_pairs: int = 0
    distill: DistillationLoss | ReplayLoss | None = None
    num_row_tiles: int = 1

    @property
    def num_passes(self) -> int:
        """How often a step runs its blocks and their gradients: 2 if a first pass measures the gradients' norm."""
        return 1 + self.two_passes

    @property
    def once(self) -> "StepShape":
        """The shape in which no block runs backward twice (to measure the gradients' norm first)."""
        return replace(self, two_passes=False, num_two_pass_blocks=0)

    @property
    def has_separate_update(self) -> bool:
        """Whether the update is always a graph of its own, whatever the number of micro-batches."""
        return self.num_evaluations > 1 or self.world_size > 1

    @property
    def num_positions(self) -> int:
        """Token positions of a step on this rank, including padding."""
        return self.micro_batch_size * self.seq_len * self.num_micro_batches
