"""What is asked of a plan: how to train, on what, and within how many bytes of each memory space."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from packtrain.engine.backends import CPU, HOST, Target, cpu
from packtrain.engine.optim import Optimizer, part_of_weight
from packtrain.engine.placement import Placed
from packtrain.inference.kv_cache import Cache, Sizes, placements
from packtrain.planner.checkpointing import ALWAYS, MAYBE, NEVER
from packtrain.planner.cost_model import Rates
from packtrain.planner.kernel_memory import Loaded
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import Name, Plans, leaves, make_plans

SAMPLED = (64,)  # tokens of a sample's prompt per run
# of activations, by --offload
ACTIVATIONS = {"auto": MAYBE, "none": NEVER, "moments": NEVER, "activations": ALWAYS, "all": ALWAYS}
NO_KERNELS = Loaded(0)
CALL_NBYTES = 2_000  # of this process for each call of a planned graph, measured


@dataclass(frozen=True, slots=True)
class Request:
    """What plans depend on in addition to the shape of a step.

    baseline   bytes of the process before planning, with its kernels
    cells      of a KV cache for samples during the run; 0 for none
    recompute  the setting --recompute
    limits     most bytes by memory space; others are not limited
    fixed      the order of additions must not change: the run is resumed
    kernels    of the run
    runs       load them; otherwise their expected memory is trusted
    away       see `offloaded`
    offload    whether values that the backward pass needs may, or must, wait in the process's memory for it
    """

    optimizer: Optimizer
    rates: Rates
    baseline: int = 0
    cells: int = 0
    target: Target = CPU
    recompute: str = "auto"
    limits: Mapping[str, int] = field(default_factory=dict)
    fixed: bool = False
    kernels: Loaded = NO_KERNELS
    runs: bool = True
    away: bool = False
    offload: int = NEVER

    def within(self, nbytes: int) -> "Request":
        """The same with a limit of the arena's space."""
        return replace(self, limits={**self.limits, self.target.space: nbytes})

    def offloaded(self, shape: StepShape) -> "Request":
        """The same with the moments in the process's own memory, of weights that live in another."""
        weights = [leaf for leaf in leaves(shape)[1] if self.target.home(leaf).space != HOST]
        local_weights = weights
        if shape.share is not None:  # moments of this process's parts
            local_weights = [
                part for w in weights if (part := part_of_weight(w, shape.share)) is not None
            ]
        moments = [moment for w in local_weights for moment in self.optimizer.states(w)]
        weight_homes = {name: home for name, home in self.target.homes.items() if "/" not in name}
        target = replace(
            self.target, homes={**weight_homes, **{moment.label: cpu for moment in moments}}
        )
        return replace(self, optimizer=self.optimizer.apart(), target=target, away=True)

    def another(self, optimizer: Optimizer, shape: StepShape) -> "Request":
        """The same with another optimizer."""
        changed = replace(self, optimizer=optimizer)
        return changed.offloaded(shape) if self.away else changed

    def samples(self, shape: StepShape) -> dict[Name, Placed]:
        """The graphs that generate samples, by number of tokens per run."""
        if not self.cells:
            return {}
        types = {name: leaf.dtype for name, leaf in leaves(shape)[0].items()}
        cache, sizes = Cache(self.cells), Sizes.of(self.cells, 1, SAMPLED)
        return dict[Name, Placed](placements(shape.config.still, cache, sizes, types, self.target))

    def plans(self, shape: StepShape) -> Plans:
        return make_plans(shape, self.optimizer, self.samples(shape), self.target)

    def before(self, space: str) -> int:
        """Bytes of a space before planning."""
        return self.baseline if space == HOST else 0

    def total(self, plans: Plans, space: str | None = None) -> int:
        """Estimated peak bytes of a space; by default of the arena's."""
        space = space or self.target.space
        calls = plans.calls if space == HOST else 0
        return self.before(space) + CALL_NBYTES * calls + plans.nbytes_in(space)
