"""The plans of a training run: its graphs, and an offset for every byte.

Nothing is allocated here. All plans share the leaves, by name, and one arena.
The heap keeps a part of made plans, and a printed budget must do for the next process: so a child measures what plans
add to `baseline_nbytes`, and the run's process makes plans once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, get_args

from packtrain.distributed import rooms_nbytes
from packtrain.dtypes import Dtype, f32
from packtrain.engine import optim
from packtrain.engine.backends import CPU, HOST, Target, aligned
from packtrain.engine.graph import Graph
from packtrain.engine.memory_plan import Plan, make_plan
from packtrain.engine.optim import Optimizer
from packtrain.engine.placement import Placed, place
from packtrain.engine.tensor import GraphError, Role, Tensor, spec_nbytes
from packtrain.models import transformer
from packtrain.models.arch.architecture import LAYER_INPUTS, is_matrix
from packtrain.models.config import Config
from packtrain.models.lora import EMBEDDING
from packtrain.models.replay_loss import ReplayLoss
from packtrain.planner import cost_model
from packtrain.planner.checkpointing import OFFLOADED, BuiltGraph
from packtrain.planner.step_shape import BaseModel, StepShape

# progress line, metrics and files of the loop, stacks of threads; up to 3.2 MiB were measured
LOOP_NBYTES = 1 << 22
# code, and heaps with free room, that remain of writing texts for replay before step 1
REPLAY_NBYTES = 8 << 20
THREADS_NBYTES = 1 << 20  # stacks and heaps of the threads that exchange with other processes
NUM_PASSING_LEAVES = 2  # leaves of another memory that are on their way into a file at a time
BOUND_NBYTES = 1_100  # bytes of an executor for each call, measured in a heap without free room
STEP, MICRO, UPDATE, EVALUATE = "step", "micro", "update", "evaluate"
MEASURE, APPLY = "measure", "apply"
MAPPED = "mapped"  # in place of the role of a leaf in a mapped file
Name = str | int  # name of a graph; graphs that generate samples are named by their tokens per run
Graphs = Mapping[Name, Placed]


@dataclass(frozen=True, slots=True)
class BaseWindow:
    """At most `nbytes` of the base's pages are in memory; a step reads `read_nbytes` from its file, in `read_seconds`.
    A call reads `call_nbytes` at once, less than which no window can have. The schedule takes `schedule_nbytes`."""

    nbytes: int
    call_nbytes: int
    schedule_nbytes: int
    read_nbytes: int
    read_seconds: float


@dataclass(frozen=True)
class TrainingPlans:
    """The placed graphs of a run by name, each with its plan: an offset for every byte.

    baseline_nbytes  bytes of the process before any planned byte is allocated
    search_nbytes    peak bytes of this process and the searching child together
    refusal          the reason why these plans, the smallest possible, do not fit
    window           the pages of the base that stay in memory; None: as the system decides
    """

    shape: StepShape
    placed_graphs: Graphs
    plans: Mapping[Name, Plan]
    target: Target = CPU
    baseline_nbytes: int = 0
    search_nbytes: int = 0
    refusal: str | None = None
    window: BaseWindow | None = None

    @cached_property
    def leaves(self) -> dict[str, Tensor]:
        """All weights and states (moments, gradient sums, KV cache) of all graphs, by name."""
        return {n: leaf for p in self.placed_graphs.values() for n, leaf in lasting(p).items()}

    @cached_property
    def resident_leaves(self) -> dict[str, Tensor]:
        """The weights and states that are allocated, not mapped from the base's file, by name."""
        mapped = mapped_leaves(self.shape, self.leaves.values())
        return {name: leaf for name, leaf in self.leaves.items() if leaf not in mapped}

    @cached_property
    def leaf_sizes(self) -> dict[tuple[str, str], list[int]]:
        """Bytes of each leaf, by memory space and role; the role of leaves in a mapped file is `mapped`."""
        sizes = dict[tuple[str, str], list[int]]()
        for name, leaf in self.leaves.items():
            role = str(leaf.role) if name in self.resident_leaves else MAPPED
            group = sizes.setdefault((self.target.home(leaf).space, role), [])
            group.append(spec_nbytes(leaf.spec.shape, leaf.spec.dtype))
        return sizes

    @property
    def trained_names(self) -> list[str]:
        return [name for name, leaf in self.resident_leaves.items() if leaf.role == "weight"]

    @property
    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint stores: trained weights and moments. Gradient sums and KV caches start from zero."""
        return {n: t for n, t in self.resident_leaves.items() if t.role not in ("sum", "cache")}

    @property
    def largest_plan(self) -> Plan:
        """The plan with the largest arena, in which all plans run."""
        return self.largest_plan_in(self.target.space)

    def largest_plan_in(self, space: str) -> Plan:
        """Return the plan with the largest arena in a memory space."""
        return max(self.plans.values(), key=lambda plan: plan.arena(space).nbytes)

    @property
    def device_spaces(self) -> list[str]:
        """All memory spaces in use other than the process's own."""
        return sorted({a.space for plan in self.plans.values() for a in plan.arenas} - {HOST})

    def role_nbytes(self, *roles: str, space: str | None = None) -> int:
        """Return the bytes of leaves with these roles, in one memory space or in all."""
        items = self.leaf_sizes.items()
        return sum([sum(n) for (at, role), n in items if role in roles and space in (None, at)])

    def resident_nbytes(self, space: str) -> int:
        """Return the bytes of a session's buffer for leaves that are not mapped, each at its backend's alignment."""
        alignment = next((b.alignment for b in self.target.every if b.space == space), 1)
        groups = [n for (at, role), n in self.leaf_sizes.items() if at == space and role != MAPPED]
        return sum([-(-nbytes // alignment) * alignment for sizes in groups for nbytes in sizes])

    # moments and caches; sums of gradients over micro-batches, as those of one micro-batch live in the arena
    state_nbytes = property(lambda self: self.role_nbytes("moment", "cache"))
    gradient_nbytes = property(lambda self: self.role_nbytes("sum"))
    weight_nbytes = property(lambda self: self.role_nbytes("weight", "table"))
    mapped_nbytes = property(lambda self: self.role_nbytes(MAPPED))
    arena_nbytes = property(lambda self: self.largest_plan.arena(self.target.space).nbytes)

    @cached_property
    def calls(self) -> int:
        """Number of calls of all graphs together; each takes some bytes of the process."""
        return sum(len(placed.graph.calls) for placed in self.placed_graphs.values())

    @cached_property
    def loop_nbytes(self) -> int:
        schedule_nbytes = self.window.schedule_nbytes if self.window else 0
        file_nbytes = transit_nbytes(self.resident_leaves.values(), self.target)
        if self.shape.moment_share is not None:
            # a weight's moments from all processes, on their way into a file, beyond the arena
            largest = max((self.leaves[name].spec.nbytes for name in self.trained_names), default=0)
            file_nbytes += max(largest - self.largest_plan_in(HOST).arena(HOST).nbytes, 0)
        return loop_nbytes(self.shape, self.calls) + file_nbytes + schedule_nbytes

    @cached_property
    def nbytes(self) -> int:
        """Bytes that the run adds to the process's own memory."""
        return self.nbytes_in(HOST)

    @property
    def total_nbytes(self) -> int:
        """Peak bytes of the process during the run, also those that count as a device's, such as cpu:1."""
        return self.baseline_nbytes + self.nbytes + sum(map(self.nbytes_in, self.target.aside))

    @property
    def needed_nbytes(self) -> int:
        """Peak bytes of the process: of the search or of the run, whichever is more."""
        return max(self.total_nbytes, self.search_nbytes)

    def nbytes_in(self, space: str) -> int:
        """Return all bytes that the run takes of a memory space: leaves, arena, kernels and the loop."""
        leaf_nbytes = self.resident_nbytes(space)
        leaf_nbytes += self.role_nbytes(MAPPED, space=space) * (space != HOST)  # copied there
        constant_nbytes = sum(plan.arena(space).constant_nbytes for plan in self.plans.values())
        overhead_nbytes = self.loop_nbytes if space == HOST else constant_nbytes
        arena = self.largest_plan_in(space).arena(space)
        rooms = rooms_nbytes(self.shape.world_size, space)
        return leaf_nbytes + arena.nbytes + overhead_nbytes + rooms + self.pool_nbytes(space)

    def pool_nbytes(self, space: str) -> int:
        """Return the bytes of a memory space that kernels take beside workspaces, and that allocators round up."""
        kernel_nbytes = max(plan.arena(space).pool_nbytes for plan in self.plans.values())
        return kernel_nbytes + self.target.extra_nbytes(space, self._buffer_nbytes(space))

    def _buffer_nbytes(self, space: str) -> list[int]:
        """Return the sizes of what a session allocates in a space: copies from a file, other leaves, the arena."""
        resident = self.resident_nbytes(space)
        resident += sum(plan.arena(space).constant_nbytes for plan in self.plans.values())
        arena_nbytes = self.largest_plan_in(space).arena(space).nbytes
        return [*self.leaf_sizes.get((space, MAPPED), ()), resident, arena_nbytes]

    def step_seconds(self, rates: cost_model.BackendRates) -> float:
        """Return the expected seconds of a training step; at least those to read the base's pages from its file."""
        graphs, counts = self.placed_graphs, runs(self.shape).items()
        seconds = sum(n * cost_model.graph_seconds(graphs[name], rates) for name, n in counts)
        return max(seconds, self.window.read_seconds if self.window else 0.0)

    def op_names(self, plan: Plan) -> list[str]:
        name = next(name for name, candidate in self.plans.items() if candidate is plan)
        return [step.op.name for step in self.placed_graphs[name].steps]


def lasting(placed: Placed) -> dict[str, Tensor]:
    """Return the leaves of a graph whose values stay between runs (weights and states), by name."""
    return {placed.names[leaf]: leaf for leaf in placed.graph.leaves if leaf.role}


def leaves_nbytes(leaves: Iterable[Tensor]) -> int:
    return sum([spec_nbytes(leaf.spec.shape, leaf.spec.dtype) for leaf in leaves])


def buffer_nbytes(leaves: Iterable[Tensor], target: Target) -> int:
    """Return the bytes of leaves in a session's buffer, where each begins at its backend's alignment."""
    return sum([aligned(leaf.spec.nbytes, target.home(leaf).alignment) for leaf in leaves])


def mapped_leaves(shape: StepShape, of: Iterable[Tensor]) -> dict[Tensor, None]:
    """Return, as keys in order, those of the leaves `of` that are mapped from the base's file: its frozen weights."""
    if shape.base is None:
        return {}
    weights = {leaf.name or "": leaf for leaf in of if leaf.kind == "weight"}
    trained = shape.base.trained_names(shape.config, weights)
    return {leaf: None for name, leaf in weights.items() if name not in trained}


def packed_weight_types(shape: StepShape) -> set[Dtype]:
    """Return the types other than f32 that the model's weights have."""
    return {leaf.spec.dtype for leaf in leaves(shape.config, shape.base)[0].values()} - {f32}


def counted(shape: StepShape, of: Iterable[Tensor], target: Target = CPU, space: str = HOST) -> int:
    """Return the bytes that leaves `of` take in `space`; those mapped from the base's file count on devices alone."""
    local = [leaf for leaf in of if target.home(leaf).space == space]
    mapped = mapped_leaves(shape, local)
    resident_nbytes = buffer_nbytes([leaf for leaf in local if leaf not in mapped], target)
    return resident_nbytes + leaves_nbytes(mapped) * (space != HOST)


def transit_nbytes(leaves: Iterable[Tensor], target: Target) -> int:
    """Return the bytes of this process in which leaves of devices pass, a few at once, into or out of a checkpoint."""
    remote = [] if target.private else [t for t in leaves if target.home(t).space != HOST]
    return NUM_PASSING_LEAVES * max([leaf.spec.nbytes for leaf in remote], default=0)


def loop_nbytes(shape: StepShape, calls: int) -> int:
    """Return the bytes of the training loop outside the session: executors of `calls` calls, batches, files."""
    # tokens, targets, weights, pos, seq; the answer of each target; values of a teacher or the base
    num_targets = 0 if shape.distill is None else shape.distill.numbers(shape.seq_len)
    nbytes = 4 * shape.micro_batch_size * ((5 + 2 * shape.max_pairs) * shape.seq_len + num_targets)
    # batches as read, with their share of the loss, and either joined for the graph or those of earlier evaluations
    num_copies = 3 if shape.layered or shape.num_evaluations > 1 else 2
    fixed_nbytes = LOOP_NBYTES + THREADS_NBYTES * (shape.world_size > 1)
    if isinstance(shape.distill, ReplayLoss):
        fixed_nbytes += REPLAY_NBYTES + shape.distill.nbytes
    return fixed_nbytes + BOUND_NBYTES * calls + num_copies * nbytes * shape.num_micro_batches


def make_plans(
    shape: StepShape, optimizer: Optimizer, extra_graphs: Graphs | None = None, target: Target = CPU
) -> TrainingPlans:
    """Make plans for training, for evaluation if the shape has it, and for `extra_graphs` on the same leaves."""
    graphs = ((name, build_graph(name, shape, optimizer).graph) for name in graph_names(shape))
    placed = dict[Name, Placed]((name, place(graph, target)) for name, graph in graphs)
    placed |= extra_graphs or {}
    plans = TrainingPlans(shape, placed, {name: make_plan(p) for name, p in placed.items()}, target)
    placed_names = {name for name in target.homes if not name.startswith("cache.")}
    unknown_names = placed_names - plans.leaves.keys() - {*get_args(Role)}
    if unknown_names:
        raise GraphError(f"homes names {sorted(unknown_names)}, which are no leaves")
    return plans


def graph_names(shape: StepShape) -> tuple[str, ...]:
    """Return the names of a run's graphs: those of a step in order, then evaluation."""
    return (*_step_graph_names(shape), EVALUATE) if shape.evaluate else _step_graph_names(shape)


def runs(shape: StepShape) -> dict[str, int]:
    """Return how often each graph runs in a training step, {name: times}."""
    counts = {MICRO: shape.num_micro_batches * shape.num_evaluations, UPDATE: shape.num_evaluations}
    return {name: counts.get(name, 1) for name in _step_graph_names(shape)}


def _step_graph_names(shape: StepShape) -> tuple[str, ...]:
    if shape.has_separate_update or (shape.num_micro_batches > 1 and not shape.layered):
        return MICRO, UPDATE
    return (MEASURE, APPLY) if shape.num_passes > 1 else (STEP,)


def block_graph(shape: StepShape) -> str:
    """Return the name of the step's graph that runs the blocks for their gradients; recomputation is chosen for it."""
    return next(name for name in (MICRO, APPLY, STEP) if name in _step_graph_names(shape))


def build_graph(name: str, shape: StepShape, optimizer: Optimizer) -> BuiltGraph:
    """Build the graph `name` of a run, with the values between those blocks that its backward pass reaches."""
    weights, trained = leaves(shape.config, shape.base)
    clip: dict[str, Any] = {"max_norm": shape.max_norm, "max_value": shape.max_value}
    if name == UPDATE:
        kind = shape.moment_share, shape.scatters_gradients
        return BuiltGraph(optim.update_graph(trained, optimizer, *kind, **clip), [], {})
    parts = shape.num_micro_batches if shape.layered and name != EVALUATE else 1
    config = shape.config.still if name == EVALUATE else shape.config
    preference, size = shape.preference, (shape.micro_batch_size * parts, shape.seq_len)
    even = name != EVALUATE and preference is not None
    options = {"chunk": shape.chunk, "num_parts": parts, "num_row_tiles": shape.num_row_tiles}
    loss = transformer.loss(config, weights, *size, even=even, **options)
    outputs = {"loss": loss.loss}
    if name == EVALUATE:
        outputs |= {"losses": loss.losses, "right": loss.right}
        return BuiltGraph(Graph(outputs), loss.block_outputs, {})
    if preference is not None:
        outputs["loss"], outputs["logps"] = preference.loss(loss.losses, shape.max_pairs)
    elif shape.distill is not None:
        outputs["loss"] = shape.distill.loss(config, weights, loss, shape.chunk)
    first_reached, inner = num_unreached(shape.config, shape.base) * parts, dict[Tensor, Tensor]()
    reached_stream = loss.block_outputs[first_reached:]
    keep = None
    if shape.keep is not None:
        keep = shape.keep.tensor_ranks(reached_stream, with_input=saves_input(shape))
    if name == MICRO:
        sum_share = shape.moment_share if shape.scatters_gradients else None
        graph = optim.accumulation_graph(outputs, trained, keep=keep, inner=inner, share=sum_share)
    elif name == MEASURE:
        graph = optim.measuring_graph(outputs, trained, keep=keep, inner=inner)
    elif name == APPLY:
        graph = optim.applying_graph(outputs, trained, optimizer, keep=keep, inner=inner, **clip)
    else:
        next_blocks = reached_stream[shape.num_two_pass_blocks * parts :][:parts]
        split_pass = (_repeated(shape, trained), next_blocks) if shape.num_two_pass_blocks else None
        clip["two_pass"] = split_pass
        graph = optim.training_graph(outputs, trained, optimizer, keep=keep, inner=inner, **clip)
    graph.offloaded = frozenset(t for t, rank in (keep or {}).items() if rank == OFFLOADED)
    return BuiltGraph(graph, reached_stream, inner)


def _repeated(shape: StepShape, trained: Iterable[Tensor]) -> list[Tensor]:
    """Return those of `trained` weights that are in blocks that run backward twice, or in blocks below these."""
    end_block = num_unreached(shape.config, shape.base) + shape.num_two_pass_blocks
    prefixes = tuple(f"blk.{block_index}." for block_index in range(end_block))
    return [leaf for leaf in trained if leaf.label.startswith(prefixes)]


def saves_input(shape: StepShape) -> bool:
    """Whether to save the input of the first block that the backward pass reaches: blocks compute it, or it is read
    again after an update. Otherwise it is looked up again."""
    return num_unreached(shape.config, shape.base) > 0 or shape.num_two_pass_blocks > 0


@cache
def num_unreached(config: Config, base: BaseModel | None) -> int:
    """Return the number of blocks that the backward pass does not reach, as nothing in or below them is trained."""
    weights = transformer.weights(config)
    names = weights if base is None else base.trained_names(config, weights)
    reached_names = [n for n in names if n.startswith(("blk.", EMBEDDING, *LAYER_INPUTS))]
    if any(not name.startswith("blk.") for name in reached_names):
        return 0
    return min((int(name.split(".")[1]) for name in reached_names), default=config.block_count)


@lru_cache(maxsize=4)
def leaves(config: Config, base: BaseModel | None) -> tuple[Mapping[str, Tensor], Sequence[Tensor]]:
    """Return all weights of the model by name, and the list of those that are trained."""
    named_leaves = transformer.weights(config)
    if base is None:
        return named_leaves, [t for t in named_leaves.values() if t.role == "weight"]
    shapes = {n: named_leaves[n].spec.shape for n in base.trained_names(config, named_leaves)}
    types = {name: base.masters if is_matrix(name, s) else f32 for name, s in shapes.items()}
    weights = transformer.weights(config, dict(base.types) | types)
    return weights, [weights[name] for name in types]
