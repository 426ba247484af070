"""PlanRequest: how to train, on which backends, and within how many bytes of each memory space."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from packtrain.engine.backends import CPU, HOST, Target, cpu
from packtrain.engine.optim import Optimizer, part_of_weight
from packtrain.engine.placement import Placed
from packtrain.inference.kv_cache import CacheLayout, RunSizes, place_runs
from packtrain.planner.checkpointing import ALWAYS_OFFLOAD, MAY_OFFLOAD, NEVER_OFFLOAD
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.kernel_memory import KernelMemory
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import Name, TrainingPlans, leaves, make_plans

SAMPLED = (64,)  # tokens of a sample's prompt per run
# how activations are offloaded, by --offload
OFFLOAD_MODES = {
    "auto": MAY_OFFLOAD, "none": NEVER_OFFLOAD, "moments": NEVER_OFFLOAD, "activations": ALWAYS_OFFLOAD,
    "all": ALWAYS_OFFLOAD,
}  # fmt: skip
NO_KERNELS = KernelMemory(0)
CALL_NBYTES = 2_000  # bytes of this process for each call of a planned graph, measured


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan must respect beside the shape of a step: optimizer, backends, and limits of bytes by memory space.

    baseline_nbytes   bytes of the process before planning, with its kernels
    num_cells         cells of a KV cache for samples during the run; 0: no samples
    recompute         the setting --recompute
    limits            most bytes by memory space; others are not limited
    fixed             the order of additions must not change, because the run is resumed
    kernels           memory of the run's kernels
    offloads_moments  moments are in the process's memory, see `offloaded`
    offload_mode      whether saved values may, or must, wait in the process's memory for the backward pass
    """

    optimizer: Optimizer
    rates: BackendRates
    baseline_nbytes: int = 0
    num_cells: int = 0
    target: Target = CPU
    recompute: str = "auto"
    limits: Mapping[str, int] = field(default_factory=dict)
    fixed: bool = False
    kernels: KernelMemory = NO_KERNELS
    offloads_moments: bool = False
    offload_mode: int = NEVER_OFFLOAD

    def with_limit(self, nbytes: int) -> "PlanRequest":
        """Return the request with a limit, in bytes, of the memory space in which the arena is."""
        return replace(self, limits={**self.limits, self.target.space: nbytes})

    def offloaded(self, shape: StepShape) -> "PlanRequest":
        """Return the request with the optimizer's moments in the process's memory, also for weights on a device."""
        trained = [] if self.target.private else leaves(shape.config, shape.base)[1]
        weights = [leaf for leaf in trained if self.target.home(leaf).space != HOST]
        local = weights
        if shape.moment_share is not None:  # this process has only moments of its share
            local = [p for w in weights if (p := part_of_weight(w, shape.moment_share)) is not None]
        moments = [moment for weight in local for moment in self.optimizer.states(weight)]
        weight_homes = {name: home for name, home in self.target.homes.items() if "/" not in name}
        target = replace(self.target, homes={**weight_homes, **{m.label: cpu for m in moments}})
        optimizer = self.optimizer.with_offloaded_state()
        return replace(self, optimizer=optimizer, target=target, offloads_moments=True)

    def sample_graphs(self, shape: StepShape) -> dict[Name, Placed]:
        """Return the placed graphs that generate sample texts during a run, by number of tokens per forward pass."""
        if not self.num_cells:
            return {}
        types = {name: leaf.dtype for name, leaf in leaves(shape.config, shape.base)[0].items()}
        cache, sizes = CacheLayout(self.num_cells), RunSizes.of(self.num_cells, 1, SAMPLED)
        return dict[Name, Placed](place_runs(shape.config.still, cache, sizes, types, self.target))

    def make_plans(self, shape: StepShape) -> TrainingPlans:
        return make_plans(shape, self.optimizer, self.sample_graphs(shape), self.target)

    def baseline_in(self, space: str) -> int:
        """Return the bytes of a memory space that are taken before planning: 0 on devices."""
        return self.baseline_nbytes if space == HOST else 0

    def peak_nbytes(self, plans: TrainingPlans, space: str | None = None) -> int:
        """Return the estimated peak bytes of a memory space during a run; by default of the space of the arena."""
        space = space or self.target.space
        num_calls = plans.calls if space == HOST else 0
        return self.baseline_in(space) + CALL_NBYTES * num_calls + plans.nbytes_in(space)
