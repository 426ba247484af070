"""The plans of a training run: its graphs, and an offset for every byte.

Nothing is allocated here. All plans share the leaves, by name, and one arena.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import get_args

from packtrain.distributed import rooms_nbytes
from packtrain.dtypes import Dtype, f32
from packtrain.engine.backends import CPU, HOST, Target, aligned
from packtrain.engine.graph import Graph
from packtrain.engine.memory_plan import Plan, make_plan
from packtrain.engine.optim import Optimizer, accumulating, applying, measuring, training, updating
from packtrain.engine.placement import Placed, place
from packtrain.engine.tensor import GraphError, Role, Tensor
from packtrain.models import transformer
from packtrain.models.arch.architecture import LAYER_INPUTS, is_matrix
from packtrain.models.config import Config
from packtrain.models.lora import EMBEDDING
from packtrain.models.replay_loss import Replay
from packtrain.planner import cost_model
from packtrain.planner.checkpointing import AWAY, Built
from packtrain.planner.step_shape import Base, StepShape

LOOP_NBYTES = (
    1 << 22
)  # progress line, metrics and files of the loop, stacks of threads; up to 3.2 MiB were measured
WRITING_NBYTES = (
    8 << 20
)  # what stays of writing texts, before step 1: code, and heaps with free room
THREADS_NBYTES = 1 << 20  # of the threads that exchange with other processes: stacks and heaps
PASSING = 2  # such leaves at a time
BOUND_NBYTES = 1_100  # bytes of an executor for each call, measured in a heap without free room
STEP, MICRO, UPDATE, EVALUATE = "step", "micro", "update", "evaluate"
MEASURE, APPLY = "measure", "apply"
Name = str | int  # of a graph; a number for graphs that generate samples: tokens per run


@dataclass(frozen=True)
class Plans:
    """A placed graph and a plan for each thing that a run does, by name.

    baseline   bytes of the process before any of it is reserved
    searching  peak bytes of this process and the searching child together
    refusal    why these plans, the smallest possible, do not fit
    """

    shape: StepShape
    placed: Mapping[Name, Placed]
    plans: Mapping[Name, Plan]
    target: Target = CPU
    baseline: int = 0
    searching: int = 0
    refusal: str | None = None

    @cached_property
    def leaves(self) -> dict[str, Tensor]:
        """Every weight and state by name, over all graphs."""
        return {n: leaf for placed in self.placed.values() for n, leaf in lasting(placed).items()}

    @cached_property
    def kept(self) -> dict[str, Tensor]:
        """The same without those that are mapped from a file."""
        return {n: leaf for n, leaf in self.leaves.items() if not is_mapped(self.shape, leaf)}

    @property
    def trained(self) -> list[str]:
        return [name for name, leaf in self.kept.items() if leaf.role == "weight"]

    @property
    def saved(self) -> dict[str, Tensor]:
        """Those that a checkpoint holds: trained weights and moments. Sums and caches start from zero."""
        return {n: leaf for n, leaf in self.kept.items() if leaf.role not in ("sum", "cache")}

    @property
    def mapped_nbytes(self) -> int:
        return nbytes_of(self.leaves.values()) - nbytes_of(self.kept.values())

    @property
    def largest(self) -> Plan:
        """The plan that needs the largest arena, which all share."""
        return self.largest_in(self.target.space)

    def largest_in(self, space: str) -> Plan:
        """The same by the arena of another space."""
        return max(self.plans.values(), key=lambda plan: plan.arena(space).nbytes)

    @property
    def spaces(self) -> list[str]:
        """All memory spaces in use other than the process's own."""
        return sorted({a.space for plan in self.plans.values() for a in plan.arenas} - {HOST})

    def nbytes_of(self, *roles: Role, space: str | None = None) -> int:
        """Bytes of allocated leaves with these roles, in one space or in all."""
        matching_leaves = (leaf for leaf in self.kept.values() if leaf.role in roles)
        return nbytes_of(
            leaf for leaf in matching_leaves if space in (None, self.target.home(leaf).space)
        )

    @property
    def state_nbytes(self) -> int:
        """Moments of the optimizer, and the KV cache for samples."""
        return self.nbytes_of("moment", "cache")

    @property
    def gradient_nbytes(self) -> int:
        """Running sums over micro-batches. Gradients of a single batch live in the arena."""
        return self.nbytes_of("sum")

    @property
    def weight_nbytes(self) -> int:
        return self.nbytes_of("weight", "table")

    @property
    def arena_nbytes(self) -> int:
        return self.largest.arena(self.target.space).nbytes

    @property
    def calls(self) -> int:
        """Calls of all graphs together."""
        return sum(len(placed.graph.calls) for placed in self.placed.values())

    @property
    def loop_nbytes(self) -> int:
        passing = passing_nbytes(self.kept.values(), self.target)
        return loop_nbytes(self.shape, self.calls) + passing + self.whole_nbytes

    @property
    def whole_nbytes(self) -> int:
        """Bytes for the moments of a weight from all processes, on their way into a file, beside the arena."""
        if self.shape.share is None:
            return 0
        largest = max((self.leaves[name].spec.nbytes for name in self.trained), default=0)
        return max(largest - self.largest_in(HOST).arena(HOST).nbytes, 0)

    @property
    def nbytes(self) -> int:
        """Bytes that a run adds to the process's own memory."""
        return self.nbytes_in(HOST)

    @property
    def total_nbytes(self) -> int:
        """The most bytes that the process takes, in all of its memories."""
        return self.baseline + self.nbytes + sum(map(self.nbytes_in, self.target.aside))

    @property
    def needed_nbytes(self) -> int:
        """The same, or the bytes of the search if that needed more."""
        return max(self.total_nbytes, self.searching)

    def nbytes_in(self, space: str) -> int:
        """Bytes that a run takes of a memory space."""
        leaves = counted(self.shape, self.leaves.values(), self.target, space)
        constants = sum(plan.arena(space).constant_nbytes for plan in self.plans.values())
        overhead = self.loop_nbytes if space == HOST else constants
        arena, rooms = self.largest_in(space).arena(space), rooms_nbytes(self.shape.ranks, space)
        return leaves + arena.nbytes + overhead + rooms + self.pool_nbytes(space)

    def pool_nbytes(self, space: str) -> int:
        """What kernels take of a space beside their workspaces, and buffers beside what they hold."""
        kernels = max(plan.arena(space).pool_nbytes for plan in self.plans.values())
        return kernels + self.target.beyond(space, self._buffers(space))

    def _buffers(self, space: str) -> list[int]:
        """Sizes of what a session has there: what was copied from a file, other leaves and constants, the arena."""
        local_leaves = [
            leaf for leaf in self.leaves.values() if self.target.home(leaf).space == space
        ]
        mapped = [leaf.spec.nbytes for leaf in local_leaves if is_mapped(self.shape, leaf)]
        resident_nbytes = held_nbytes(
            (leaf for leaf in local_leaves if not is_mapped(self.shape, leaf)), self.target
        )
        constants = sum(plan.arena(space).constant_nbytes for plan in self.plans.values())
        return [*mapped, resident_nbytes + constants, self.largest_in(space).arena(space).nbytes]

    def seconds(self, rates: cost_model.Rates) -> float:
        """Expected time of one training step."""
        return sum(
            count * cost_model.seconds(self.placed[name], rates)
            for name, count in runs(self.shape).items()
        )

    def ops(self, plan: Plan) -> list[str]:
        """Names of the ops of a plan's steps."""
        name = next(name for name, p in self.plans.items() if p is plan)
        return [step.op.name for step in self.placed[name].steps]


def lasting(placed: Placed) -> dict[str, Tensor]:
    """Weights and states of a graph by name."""
    return {leaf.label: leaf for leaf in placed.graph.leaves if leaf.role}


def nbytes_of(leaves: Iterable[Tensor]) -> int:
    return sum(leaf.spec.nbytes for leaf in leaves)


def held_nbytes(leaves: Iterable[Tensor], target: Target) -> int:
    """The same in a session's buffer: each begins at a multiple of its backend's alignment."""
    return sum(aligned(leaf.spec.nbytes, target.home(leaf).alignment) for leaf in leaves)


def is_mapped(shape: StepShape, leaf: Tensor) -> bool:
    """Whether a leaf is mapped from the file of the base."""
    base = shape.base
    return base is not None and leaf.kind == "weight" and not base.trains(shape.config, leaf)


def packed_types(shape: StepShape) -> set[Dtype]:
    """The types of its weights that are not f32."""
    return {leaf.dtype for leaf in leaves(shape)[0].values()} - {f32}


def counted(
    shape: StepShape, leaves: Iterable[Tensor], target: Target = CPU, space: str = HOST
) -> int:
    """Bytes of these leaves in a memory space; mapped ones count only if they had to be copied."""
    strict = space != HOST or (shape.base is not None and shape.base.strict)
    local_leaves = [leaf for leaf in leaves if target.home(leaf).space == space]
    resident_nbytes = held_nbytes(
        (leaf for leaf in local_leaves if not is_mapped(shape, leaf)), target
    )
    return (
        resident_nbytes
        + nbytes_of(leaf for leaf in local_leaves if is_mapped(shape, leaf)) * strict
    )


def passing_nbytes(leaves: Iterable[Tensor], target: Target) -> int:
    """Bytes of this process for leaves of a memory that it cannot see, on their way into a file or out of one."""
    remote_sizes = (leaf.spec.nbytes for leaf in leaves if target.home(leaf).space != HOST)
    return PASSING * max(remote_sizes, default=0)


def loop_nbytes(shape: StepShape, calls: int) -> int:
    """Bytes of the training loop outside the session: executors, batches, files."""
    # tokens, targets, weights, pos, seq, and which targets are an answer's, or what a teacher or the base says
    num_targets = 0 if shape.distill is None else shape.distill.numbers(shape.time)
    batch = 4 * shape.rows * ((5 + 2 * shape.pairs) * shape.time + num_targets)
    # as they come, with their share of the loss, and together or those before
    times = 3 if shape.layered or shape.evaluations > 1 else 2
    fixed_nbytes = LOOP_NBYTES + THREADS_NBYTES * (shape.ranks > 1)
    if isinstance(shape.distill, Replay):
        fixed_nbytes += WRITING_NBYTES + shape.distill.nbytes
    return fixed_nbytes + BOUND_NBYTES * calls + times * batch * shape.micros


def make_plans(
    shape: StepShape,
    optimizer: Optimizer,
    extra_graphs: Mapping[Name, Placed] | None = None,
    target: Target = CPU,
) -> Plans:
    """Plans for training, optionally for evaluation, and for other graphs on the same leaves."""
    graphs = ((name, build_graph(name, shape, optimizer).graph) for name in names(shape))
    placed = dict[Name, Placed]((name, place(g, target)) for name, g in graphs) | dict(
        extra_graphs or {}
    )
    plans = Plans(shape, placed, {name: make_plan(p) for name, p in placed.items()}, target)
    named = {name for name in target.homes if not name.startswith("cache.")}
    unknown = named - plans.leaves.keys() - {*get_args(Role)}
    if unknown:
        raise GraphError(f"homes names {sorted(unknown)}, which are no leaves")
    return plans


def names(shape: StepShape) -> tuple[str, ...]:
    """Names of a run's graphs, first those of a step in order."""
    return (*_of_a_step(shape), EVALUATE) if shape.evaluate else _of_a_step(shape)


def runs(shape: StepShape) -> dict[str, int]:
    """How often each graph runs in a step."""
    times = {MICRO: shape.micros * shape.evaluations, UPDATE: shape.evaluations}
    return {name: times.get(name, 1) for name in _of_a_step(shape)}


def _of_a_step(shape: StepShape) -> tuple[str, ...]:
    if shape.apart or (shape.micros > 1 and not shape.layered):
        return MICRO, UPDATE
    return (MEASURE, APPLY) if shape.graphs > 1 else (STEP,)


def blocks_in(shape: StepShape) -> str:
    """The graph of a step whose blocks are recomputed to save memory; the first pass does the same."""
    return next(name for name in (MICRO, APPLY, STEP) if name in _of_a_step(shape))


def build_graph(name: str, shape: StepShape, optimizer: Optimizer) -> Built:
    """A graph of a run, with the stream through the blocks that its backward pass reaches."""
    weights, trained = leaves(shape)
    if name == UPDATE:
        kind = shape.share, shape.scatter
        return Built(updating(trained, optimizer, *kind, **shape.clipping), [], {})
    parts = shape.micros if shape.layered and name != EVALUATE else 1
    config = shape.config.still if name == EVALUATE else shape.config
    chosen, head = shape.preference, {"chunk": shape.chunk, "parts": parts}
    even = name != EVALUATE and chosen is not None
    loss = transformer.loss(config, weights, shape.rows * parts, shape.time, even=even, **head)
    outputs = {"loss": loss.loss}
    if name == EVALUATE:
        return Built(Graph(outputs | {"losses": loss.losses, "right": loss.right}), loss.blocks, {})
    if chosen is not None:
        outputs["loss"], outputs["logps"] = chosen.loss(loss.losses, shape.pairs)
    elif shape.distill is not None:
        outputs["loss"] = shape.distill.loss(config, weights, loss, shape.chunk)
    first, inner = passed_over(shape.config, shape.base) * parts, dict[Tensor, Tensor]()
    stream = loss.blocks[first:]
    keep = None if shape.keep is None else shape.keep.ranks(stream)
    if name == MICRO:
        sum_share = shape.share if shape.scatter else None
        graph = accumulating(outputs, trained, keep=keep, inner=inner, share=sum_share)
    elif name == MEASURE:
        graph = measuring(outputs, trained, keep=keep, inner=inner)
    elif name == APPLY:
        graph = applying(outputs, trained, optimizer, keep=keep, inner=inner, **shape.clipping)
    else:
        next_blocks = stream[shape.twice * parts :][:parts]
        split_pass = (_of_twice(shape, trained), next_blocks) if shape.twice else None
        options = shape.clipping | {"twice": split_pass}
        graph = training(outputs, trained, optimizer, keep=keep, inner=inner, **options)
    graph.away = frozenset(t for t, rank in (keep or {}).items() if rank == AWAY)
    return Built(graph, stream, inner)


def _of_twice(shape: StepShape, trained: Iterable[Tensor]) -> list[Tensor]:
    """The weights of blocks whose gradients are computed twice."""
    end = passed_over(shape.config, shape.base) + shape.twice
    prefixes = tuple(f"blk.{at}." for at in range(end))
    return [leaf for leaf in trained if leaf.label.startswith(prefixes)]


@cache
def passed_over(config: Config, base: Base | None) -> int:
    """Number of blocks before the first one that the backward pass reaches."""
    all_weights = transformer.weights(config).items()
    names = (name for name, leaf in all_weights if base is None or base.trains(config, leaf))
    trained = [n for n in names if n.startswith(("blk.", EMBEDDING, *LAYER_INPUTS))]
    if any(not name.startswith("blk.") for name in trained):
        return 0
    return min((int(name.split(".")[1]) for name in trained), default=config.block_count)


def leaves(shape: StepShape) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The weights of the model by name, and those that are trained."""
    if shape.base is None:
        weights = transformer.weights(shape.config)
        return weights, [leaf for leaf in weights.values() if leaf.role == "weight"]
    base = shape.base
    trained = {
        name: base.masters if is_matrix(name, leaf.shape) else f32
        for name, leaf in transformer.weights(shape.config).items()
        if base.trains(shape.config, leaf)
    }
    weights = transformer.weights(shape.config, dict(base.types) | trained)
    return weights, [weights[name] for name in trained]
