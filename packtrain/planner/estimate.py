"""Estimates the graphs of a run without packing: bytes in one memory space, seconds, calls, leaves."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from packtrain.engine.backends import HOST
from packtrain.engine.memory_plan.lifetimes import lifetime_columns, storage_lifetimes
from packtrain.engine.memory_plan.memory_plan import pool_nbytes
from packtrain.engine.ops import linear_cross_entropy as HEAD
from packtrain.engine.optim import Optimizer
from packtrain.engine.packing import lower_bound
from packtrain.engine.placement import Placed
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import Spec, Tensor
from packtrain.planner import checkpointing, cost_model, training_plans
from packtrain.planner.block_extrapolation import num_reached_blocks, with_num_blocks
from packtrain.planner.checkpointing import ALIGNMENT, BlockChain, BuiltGraph, aligned_nbytes
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.plan_request import CALL_NBYTES, PlanRequest
from packtrain.planner.step_shape import StepShape
from packtrain.planner.step_variants import CHUNK_SIZES
from packtrain.planner.training_plans import STEP, blocks_in, build_graph, lasting, leaves

TOGETHER = 32  # strategies of a block measured in one graph


@dataclass(frozen=True, slots=True)
class GraphEstimate:
    """Measurements of a graph: its calls, its weights and states by name, the seconds of a run.

    arena  lower bound of the arena's bytes
    pool   bytes that kernels take beside their workspaces
    """

    arena: int
    seconds: float
    calls: int
    leaves: Mapping[str, Tensor]
    pool: int = 0


class StepEstimate(NamedTuple):
    """Measurements of a step without recomputation: bytes of leaves, arenas and kernels, calls, seconds.

    arena   the arena of the graph with the blocks; `other_arena_nbytes`: the largest of the other graphs
    calls   calls of all graphs; `block_calls`: of the graph with the blocks
    pool    bytes that kernels take beside their workspaces
    """

    leaves: float
    arena: float
    other_arena_nbytes: float
    calls: float
    block_calls: float
    seconds: float
    pool: float


def estimate_graph(placed: Placed, rates: BackendRates, space: str) -> GraphEstimate:
    """Return the estimate of a graph without a loss head."""
    return by_chunk(placed, rates, space, (0,))[0]


def by_chunk(
    placed: Placed, rates: BackendRates, space: str, chunks: Iterable[int]
) -> dict[int, GraphEstimate]:
    """Return estimates of the graph for several chunk sizes of its loss head, by chunk."""
    stored = storage_lifetimes(placed, space)
    read = {t for step in placed.steps for t in step.reads}
    start_steps, end_steps, size = lifetime_columns(stored, ALIGNMENT)
    work = [i for i, s in enumerate(stored) if (s.op, s.category) == (HEAD.name, "workspace")]
    head_steps = [step for step in placed.steps if step.op is HEAD]
    other_steps = [step for step in placed.steps if step.op is not HEAD]
    seconds = sum(cost_model.call_seconds(step, rates, read) for step in other_steps)
    result = dict[int, GraphEstimate]()
    for chunk in chunks:
        cut = [_with_chunk(step, chunk) for step in head_steps]
        if work:
            size[work] = [aligned_nbytes(spec) for step in cut for spec in step.workspaces]
        arena, _ = lower_bound(start_steps, end_steps, size)
        total = seconds + sum(cost_model.call_seconds(step, rates, read) for step in cut)
        pool = pool_nbytes((*other_steps, *cut), space)
        result[chunk] = GraphEstimate(arena, total, len(placed.graph.calls), lasting(placed), pool)
    return result


def with_chunk(placed: Placed, chunk: int) -> Placed:
    """Return the graph with another chunk of its loss head, only for measuring: no tensor depends on the chunk."""
    steps = [_with_chunk(step, chunk) if step.op is HEAD else step for step in placed.steps]
    return replace(placed, steps=tuple(steps))


def _with_chunk(step: KernelStep, chunk: int) -> KernelStep:
    return replace(step, call=replace(step.call, attrs=step.call.attrs | {"chunk": chunk}))


def chain(
    shape: StepShape, request: PlanRequest, space: str | None = None, like: BlockChain | None = None,
    calls: int | None = None, build: Callable[[str, StepShape, Optimizer], BuiltGraph] = build_graph,
) -> BlockChain:  # fmt: skip
    """Return the chain of blocks in the training graph that determines memory.

    space  memory space whose bytes count; by default the arena's
    like   a measured chain with equal blocks
    calls  calls of that graph without recomputation, if known
    build  builds a graph by its name
    """
    name, num_blocks = blocks_in(shape), num_reached_blocks(shape)
    space = space or request.target.space

    def build_variant(count: int, choice: checkpointing.RecomputeChoice | None) -> BuiltGraph:
        variant = shape if count == num_blocks else with_num_blocks(shape, count)
        return build(name, replace(variant, keep=choice), request.optimizer)

    def build_two_pass(count: int, choice: checkpointing.RecomputeChoice | None) -> BuiltGraph:
        variant = replace(with_num_blocks(shape, count), num_two_pass_blocks=count, keep=choice)
        return build(name, variant, request.optimizer)

    gradients_wait = name == STEP and shape.max_norm is not None and not shape.two_passes
    reserved = _gradient_nbytes(shape) if gradients_wait else (0, 0)
    call_nbytes = (
        (CALL_NBYTES + training_plans.BOUND_NBYTES) * shape.num_passes if space == HOST else 0
    )
    if calls is None:
        calls = len(build_variant(num_blocks, None).graph.calls)

    heads = {chunk: partial(with_chunk, chunk=chunk) for chunk in (shape.chunk, *CHUNK_SIZES)}
    offload_mode = checkpointing.NEVER_OFFLOAD if space == HOST else request.offload_mode
    options = reserved, call_nbytes, calls, like, TOGETHER, request.target, space, offload_mode
    saves_input = training_plans.saves_input(shape.once)
    two_pass = shape.num_two_pass_blocks, build_two_pass, heads, shape.chunk, saves_input
    return BlockChain(build_variant, num_blocks, request.rates, *options, *two_pass)


def _gradient_nbytes(shape: StepShape) -> tuple[int, int]:
    """Return the bytes of the gradients of a block, and of all tensors outside of blocks."""
    block_nbytes = outer_nbytes = 0
    for leaf in leaves(with_num_blocks(shape, 1))[1]:
        nbytes = aligned_nbytes(Spec(leaf.shape))  # f32, whatever the type of the leaf
        if leaf.label.startswith("blk."):
            block_nbytes += nbytes
        else:
            outer_nbytes += nbytes
    return block_nbytes, outer_nbytes
