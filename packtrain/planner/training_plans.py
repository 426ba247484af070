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
from packtrain.engine.optim import (
    Optimizer,
    accumulation_graph,
    applying_graph,
    measuring_graph,
    training_graph,
    update_graph,
)
from packtrain.engine.placement import Placed, place
from packtrain.engine.tensor import GraphError, Role, Tensor
from packtrain.models import transformer
from packtrain.models.arch.architecture import LAYER_INPUTS, is_matrix
from packtrain.models.config import Config
from packtrain.models.lora import EMBEDDING
from packtrain.models.replay_loss import ReplayLoss
from packtrain.planner import cost_model
from packtrain.planner.checkpointing import OFFLOADED, BuiltGraph
from packtrain.planner.step_shape import BaseModel, StepShape

LOOP_NBYTES = (
    1 << 22
)  # progress line, metrics and files of the loop, stacks of threads; up to 3.2 MiB were measured
REPLAY_NBYTES = (
    8 << 20
)  # what stays of writing texts, before step 1: code, and heaps with free room
THREADS_NBYTES = 1 << 20  # of the threads that exchange with other processes: stacks and heaps
NUM_PASSING_LEAVES = 2  # such leaves at a time
BOUND_NBYTES = 1_100  # bytes of an executor for each call, measured in a heap without free room
STEP, MICRO, UPDATE, EVALUATE = "step", "micro", "update", "evaluate"
MEASURE, APPLY = "measure", "apply"
Name = str | int  # of a graph; a number for graphs that generate samples: tokens per run


@dataclass(frozen=True)
class TrainingPlans:
    """A placed graph and a plan for each thing that a run does, by name.

    baseline_nbytes  bytes of the process before any of it is reserved
    search_nbytes    peak bytes of this process and the searching child together
    refusal          why these plans, the smallest possible, do not fit
    """

    shape: StepShape
    placed_graphs: Mapping[Name, Placed]
    plans: Mapping[Name, Plan]
    target: Target = CPU
    baseline_nbytes: int = 0
    search_nbytes: int = 0
    refusal: str | None = None

    @cached_property
    def leaves(self) -> dict[str, Tensor]:
        """Every weight and state by name, over all graphs."""
        return {
            n: leaf for placed in self.placed_graphs.values() for n, leaf in lasting(placed).items()
        }

    @cached_property
    def resident_leaves(self) -> dict[str, Tensor]:
        """The same without those that are mapped from a file."""
        return {name: leaf for name, leaf in self.leaves.items() if not is_mapped(self.shape, leaf)}

    @property
    def trained_names(self) -> list[str]:
        return [name for name, leaf in self.resident_leaves.items() if leaf.role == "weight"]

    @property
    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Those that a checkpoint holds: trained weights and moments. Sums and caches start from zero."""
        return {
            name: leaf
            for name, leaf in self.resident_leaves.items()
            if leaf.role not in ("sum", "cache")
        }

    @property
    def mapped_nbytes(self) -> int:
        return leaves_nbytes(self.leaves.values()) - leaves_nbytes(self.resident_leaves.values())

    @property
    def largest_plan(self) -> Plan:
        """The plan that needs the largest arena, which all share."""
        return self.largest_plan_in(self.target.space)

    def largest_plan_in(self, space: str) -> Plan:
        """The same by the arena of another space."""
        return max(self.plans.values(), key=lambda plan: plan.arena(space).nbytes)

    @property
    def device_spaces(self) -> list[str]:
        """All memory spaces in use other than the process's own."""
        return sorted({a.space for plan in self.plans.values() for a in plan.arenas} - {HOST})

    def role_nbytes(self, *roles: Role, space: str | None = None) -> int:
        """Bytes of allocated leaves with these roles, in one space or in all."""
        matching_leaves = (leaf for leaf in self.resident_leaves.values() if leaf.role in roles)
        return leaves_nbytes(
            leaf for leaf in matching_leaves if space in (None, self.target.home(leaf).space)
        )

    @property
    def state_nbytes(self) -> int:
        """Moments of the optimizer, and the KV cache for samples."""
        return self.role_nbytes("moment", "cache")

    @property
    def gradient_nbytes(self) -> int:
        """Running sums over micro-batches. Gradients of a single batch live in the arena."""
        return self.role_nbytes("sum")

    @property
    def weight_nbytes(self) -> int:
        return self.role_nbytes("weight", "table")

    @property
    def arena_nbytes(self) -> int:
        return self.largest_plan.arena(self.target.space).nbytes

    @property
    def calls(self) -> int:
        """Calls of all graphs together."""
        return sum(len(placed.graph.calls) for placed in self.placed_graphs.values())

    @property
    def loop_nbytes(self) -> int:
        transit_nbytes_total = transit_nbytes(self.resident_leaves.values(), self.target)
        return loop_nbytes(self.shape, self.calls) + transit_nbytes_total + self.whole_nbytes

    @property
    def whole_nbytes(self) -> int:
        """Bytes for the moments of a weight from all processes, on their way into a file, beside the arena."""
        if self.shape.moment_share is None:
            return 0
        largest = max((self.leaves[name].spec.nbytes for name in self.trained_names), default=0)
        return max(largest - self.largest_plan_in(HOST).arena(HOST).nbytes, 0)

    @property
    def nbytes(self) -> int:
        """Bytes that a run adds to the process's own memory."""
        return self.nbytes_in(HOST)

    @property
    def total_nbytes(self) -> int:
        """The most bytes that the process takes, in all of its memories."""
        return self.baseline_nbytes + self.nbytes + sum(map(self.nbytes_in, self.target.aside))

    @property
    def needed_nbytes(self) -> int:
        """The same, or the bytes of the search if that needed more."""
        return max(self.total_nbytes, self.search_nbytes)

    def nbytes_in(self, space: str) -> int:
        """Bytes that a run takes of a memory space."""
        leaf_nbytes = counted(self.shape, self.leaves.values(), self.target, space)
        constant_nbytes = sum(plan.arena(space).constant_nbytes for plan in self.plans.values())
        overhead_nbytes = self.loop_nbytes if space == HOST else constant_nbytes
        arena, rooms = (
            self.largest_plan_in(space).arena(space),
            rooms_nbytes(self.shape.world_size, space),
        )
        return leaf_nbytes + arena.nbytes + overhead_nbytes + rooms + self.pool_nbytes(space)

    def pool_nbytes(self, space: str) -> int:
        """What kernels take of a space beside their workspaces, and buffers beside what they hold."""
        kernel_nbytes = max(plan.arena(space).pool_nbytes for plan in self.plans.values())
        return kernel_nbytes + self.target.extra_nbytes(space, self._buffer_nbytes(space))

    def _buffer_nbytes(self, space: str) -> list[int]:
        """Sizes of what a session has there: what was copied from a file, other leaves and constants, the arena."""
        local_leaves = [
            leaf for leaf in self.leaves.values() if self.target.home(leaf).space == space
        ]
        mapped = [leaf.spec.nbytes for leaf in local_leaves if is_mapped(self.shape, leaf)]
        resident_nbytes = buffer_nbytes(
            (leaf for leaf in local_leaves if not is_mapped(self.shape, leaf)), self.target
        )
        constants = sum(plan.arena(space).constant_nbytes for plan in self.plans.values())
        return [
            *mapped,
            resident_nbytes + constants,
            self.largest_plan_in(space).arena(space).nbytes,
        ]

    def step_seconds(self, rates: cost_model.BackendRates) -> float:
        """Expected time of one training step."""
        return sum(
            num_runs * cost_model.graph_seconds(self.placed_graphs[name], rates)
            for name, num_runs in runs(self.shape).items()
        )

    def op_names(self, plan: Plan) -> list[str]:
        """Names of the ops of a plan's steps."""
        name = next(name for name, candidate in self.plans.items() if candidate is plan)
        return [step.op.name for step in self.placed_graphs[name].steps]


def lasting(placed: Placed) -> dict[str, Tensor]:
    """Weights and states of a graph by name."""
    return {leaf.label: leaf for leaf in placed.graph.leaves if leaf.role}


def leaves_nbytes(leaves: Iterable[Tensor]) -> int:
    return sum(leaf.spec.nbytes for leaf in leaves)


def buffer_nbytes(leaves: Iterable[Tensor], target: Target) -> int:
    """The same in a session's buffer: each begins at a multiple of its backend's alignment."""
    return sum(aligned(leaf.spec.nbytes, target.home(leaf).alignment) for leaf in leaves)


def is_mapped(shape: StepShape, leaf: Tensor) -> bool:
    """Whether a leaf is mapped from the file of the base."""
    base = shape.base
    return base is not None and leaf.kind == "weight" and not base.trains(shape.config, leaf)


def packed_weight_types(shape: StepShape) -> set[Dtype]:
    """The types of its weights that are not f32."""
    return {leaf.dtype for leaf in leaves(shape)[0].values()} - {f32}


def counted(
    shape: StepShape, leaves: Iterable[Tensor], target: Target = CPU, space: str = HOST
) -> int:
    """Bytes of these leaves in a memory space; mapped ones count only if they had to be copied."""
    strict = space != HOST or (shape.base is not None and shape.base.strict)
    local_leaves = [leaf for leaf in leaves if target.home(leaf).space == space]
    resident_nbytes = buffer_nbytes(
        (leaf for leaf in local_leaves if not is_mapped(shape, leaf)), target
    )
    return (
        resident_nbytes
        + leaves_nbytes(leaf for leaf in local_leaves if is_mapped(shape, leaf)) * strict
    )


def transit_nbytes(leaves: Iterable[Tensor], target: Target) -> int:
    """Bytes of this process for leaves of a memory that it cannot see, on their way into a file or out of one."""
    remote_sizes = (leaf.spec.nbytes for leaf in leaves if target.home(leaf).space != HOST)
    return NUM_PASSING_LEAVES * max(remote_sizes, default=0)


def loop_nbytes(shape: StepShape, calls: int) -> int:
    """Bytes of the training loop outside the session: executors, batches, files."""
    # tokens, targets, weights, pos, seq, and which targets are an answer's, or what a teacher or the base says
    num_targets = 0 if shape.distill is None else shape.distill.numbers(shape.seq_len)
    batch_nbytes = (
        4 * shape.micro_batch_size * ((5 + 2 * shape.max_pairs) * shape.seq_len + num_targets)
    )
    # as they come, with their share of the loss, and together or those before
    num_copies = 3 if shape.layered or shape.num_evaluations > 1 else 2
    fixed_nbytes = LOOP_NBYTES + THREADS_NBYTES * (shape.world_size > 1)
    if isinstance(shape.distill, ReplayLoss):
        fixed_nbytes += REPLAY_NBYTES + shape.distill.nbytes
    return fixed_nbytes + BOUND_NBYTES * calls + num_copies * batch_nbytes * shape.num_micro_batches


def make_plans(
    shape: StepShape,
    optimizer: Optimizer,
    extra_graphs: Mapping[Name, Placed] | None = None,
    target: Target = CPU,
) -> TrainingPlans:
    """Plans for training, optionally for evaluation, and for other graphs on the same leaves."""
    graphs = ((name, build_graph(name, shape, optimizer).graph) for name in graph_names(shape))
    placed = dict[Name, Placed]((name, place(graph, target)) for name, graph in graphs) | dict(
        extra_graphs or {}
    )
    plans = TrainingPlans(shape, placed, {name: make_plan(p) for name, p in placed.items()}, target)
    placed_names = {name for name in target.homes if not name.startswith("cache.")}
    unknown_names = placed_names - plans.leaves.keys() - {*get_args(Role)}
    if unknown_names:
        raise GraphError(f"homes names {sorted(unknown_names)}, which are no leaves")
    return plans


def graph_names(shape: StepShape) -> tuple[str, ...]:
    """Names of a run's graphs, first those of a step in order."""
    return (*_step_graph_names(shape), EVALUATE) if shape.evaluate else _step_graph_names(shape)


def runs(shape: StepShape) -> dict[str, int]:
    """How often each graph runs in a step."""
    runs_by_name = {
        MICRO: shape.num_micro_batches * shape.num_evaluations,
        UPDATE: shape.num_evaluations,
    }
    return {name: runs_by_name.get(name, 1) for name in _step_graph_names(shape)}


def _step_graph_names(shape: StepShape) -> tuple[str, ...]:
    if shape.has_separate_update or (shape.num_micro_batches > 1 and not shape.layered):
        return MICRO, UPDATE
    return (MEASURE, APPLY) if shape.num_passes > 1 else (STEP,)


def blocks_in(shape: StepShape) -> str:
    """The graph of a step whose blocks are recomputed to save memory; the first pass does the same."""
    return next(name for name in (MICRO, APPLY, STEP) if name in _step_graph_names(shape))


def build_graph(name: str, shape: StepShape, optimizer: Optimizer) -> BuiltGraph:
    """A graph of a run, with the stream through the blocks that its backward pass reaches."""
    weights, trained = leaves(shape)
    if name == UPDATE:
        kind = shape.moment_share, shape.scatters_gradients
        return BuiltGraph(update_graph(trained, optimizer, *kind, **shape.clip_options), [], {})
    parts = shape.num_micro_batches if shape.layered and name != EVALUATE else 1
    config = shape.config.still if name == EVALUATE else shape.config
    preference, head = shape.preference, {"chunk": shape.chunk, "num_parts": parts}
    even = name != EVALUATE and preference is not None
    loss = transformer.loss(
        config, weights, shape.micro_batch_size * parts, shape.seq_len, even=even, **head
    )
    outputs = {"loss": loss.loss}
    if name == EVALUATE:
        return BuiltGraph(
            Graph(outputs | {"losses": loss.losses, "right": loss.right}), loss.block_outputs, {}
        )
    if preference is not None:
        outputs["loss"], outputs["logps"] = preference.loss(loss.losses, shape.max_pairs)
    elif shape.distill is not None:
        outputs["loss"] = shape.distill.loss(config, weights, loss, shape.chunk)
    first_reached, inner = passed_over(shape.config, shape.base) * parts, dict[Tensor, Tensor]()
    reached_stream = loss.block_outputs[first_reached:]
    keep = None if shape.keep is None else shape.keep.tensor_ranks(reached_stream)
    if name == MICRO:
        sum_share = shape.moment_share if shape.scatters_gradients else None
        graph = accumulation_graph(outputs, trained, keep=keep, inner=inner, share=sum_share)
    elif name == MEASURE:
        graph = measuring_graph(outputs, trained, keep=keep, inner=inner)
    elif name == APPLY:
        graph = applying_graph(
            outputs, trained, optimizer, keep=keep, inner=inner, **shape.clip_options
        )
    else:
        next_blocks = reached_stream[shape.num_two_pass_blocks * parts :][:parts]
        split_pass = (_of_twice(shape, trained), next_blocks) if shape.num_two_pass_blocks else None
        options = shape.clip_options | {"two_pass": split_pass}
        graph = training_graph(outputs, trained, optimizer, keep=keep, inner=inner, **options)
    graph.offloaded = frozenset(t for t, rank in (keep or {}).items() if rank == OFFLOADED)
    return BuiltGraph(graph, reached_stream, inner)


def _of_twice(shape: StepShape, trained: Iterable[Tensor]) -> list[Tensor]:
    """The weights of blocks whose gradients are computed twice."""
    end_block = passed_over(shape.config, shape.base) + shape.num_two_pass_blocks
    prefixes = tuple(f"blk.{block_index}." for block_index in range(end_block))
    return [leaf for leaf in trained if leaf.label.startswith(prefixes)]


@cache
def passed_over(config: Config, base: BaseModel | None) -> int:
    """Number of blocks before the first one that the backward pass reaches."""
    all_weights = transformer.weights(config).items()
    names = (name for name, leaf in all_weights if base is None or base.trains(config, leaf))
    reached_names = [n for n in names if n.startswith(("blk.", EMBEDDING, *LAYER_INPUTS))]
    if any(not name.startswith("blk.") for name in reached_names):
        return 0
    return min((int(name.split(".")[1]) for name in reached_names), default=config.block_count)


def leaves(shape: StepShape) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The weights of the model by name, and those that are trained."""
    if shape.base is None:
        weights = transformer.weights(shape.config)
        return weights, [leaf for leaf in weights.values() if leaf.role == "weight"]
    base = shape.base
    trained_types = {
        name: base.masters if is_matrix(name, leaf.shape) else f32
        for name, leaf in transformer.weights(shape.config).items()
        if base.trains(shape.config, leaf)
    }
    weights = transformer.weights(shape.config, dict(base.types) | trained_types)
    return weights, [weights[name] for name in trained_types]
