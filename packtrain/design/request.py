"""What is asked of a plan: how to train, on what, and within how many bytes of each memory space."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from packtrain.backends import CPU, HOST, Target
from packtrain.context import Cache, Sizes, placements
from packtrain.cost import Rates
from packtrain.design.loaded import Loaded
from packtrain.design.plans import Name, Plans, StepShape, leaves, make_plans
from packtrain.optim import Optimizer
from packtrain.placing import Placed

SAMPLED = (64,)  # tokens of a sample's prompt per run
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

    def within(self, nbytes: int) -> "Request":
        """The same with a limit of the arena's space."""
        return replace(self, limits={**self.limits, self.target.space: nbytes})

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
