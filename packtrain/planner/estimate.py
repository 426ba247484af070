"""Measures the graphs of a run without packing: bytes, seconds, calls, leaves.

Numbers of bytes are those of one memory space.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from packtrain.engine.backends import HOST
from packtrain.engine.memory_plan.lifetimes import columns, storages
from packtrain.engine.memory_plan.memory_plan import pool_nbytes
from packtrain.engine.ops import linear_cross_entropy as HEAD
from packtrain.engine.optim import Optimizer
from packtrain.engine.packing import lower_bound
from packtrain.engine.placement import Placed
from packtrain.engine.step import Step
from packtrain.engine.tensor import Spec, Tensor
from packtrain.planner import cost_model
from packtrain.planner.block_extrapolation import reached, with_blocks
from packtrain.planner.checkpointing import ALIGNMENT, NEVER, Built, Chain, Choice, aligned
from packtrain.planner.cost_model import Rates
from packtrain.planner.plan_request import CALL_NBYTES, Request
from packtrain.planner.step_shape import StepShape
from packtrain.planner.step_variants import CHUNKS
from packtrain.planner.training_plans import (
    BOUND_NBYTES,
    STEP,
    blocks_in,
    build_graph,
    lasting,
    leaves,
)

TOGETHER = 32  # ways to run a block measured in one graph


@dataclass(frozen=True, slots=True)
class GraphEstimate:
    """Measurements of a graph: lower bound of its arena, seconds of a run, its calls, its weights and states, and what
    its kernels take beside."""

    arena: int
    seconds: float
    calls: int
    leaves: Mapping[str, Tensor]
    pool: int = 0


class StepEstimate(NamedTuple):
    """Measurements of a shape that keeps everything: leaves, the arena of the graph with its blocks, calls, step time.

    beside   the largest arena of its other graphs
    calls    of all graphs; `inside`: of the one with its blocks
    pool     what kernels take beside their workspaces
    """

    leaves: float
    arena: float
    beside: float
    calls: float
    inside: float
    seconds: float
    pool: float


def estimated(placed: Placed, rates: Rates, space: str) -> GraphEstimate:
    """The estimate of a graph without a loss head."""
    return by_chunk(placed, rates, space, (0,))[0]


def by_chunk(
    placed: Placed, rates: Rates, space: str, chunks: Iterable[int]
) -> dict[int, GraphEstimate]:
    """Estimates of the graph for several chunk sizes of its loss head."""
    stored = storages(placed, space)
    read = {t for step in placed.steps for t in step.reads}
    start, end, size = columns(stored, ALIGNMENT)
    work = [
        at
        for at, storage in enumerate(stored)
        if (storage.op, storage.category) == (HEAD.name, "workspace")
    ]
    heads = [step for step in placed.steps if step.op is HEAD]
    rest = [step for step in placed.steps if step.op is not HEAD]
    seconds = sum(cost_model.call_seconds(step, rates, read) for step in rest)
    estimates = dict[int, GraphEstimate]()
    for chunk in chunks:
        cut = [_with_chunk(step, chunk) for step in heads]
        if work:
            size[work] = [aligned(spec) for step in cut for spec in step.workspaces]
        arena, _ = lower_bound(start, end, size)
        total_seconds = seconds + sum(cost_model.call_seconds(step, rates, read) for step in cut)
        pool = pool_nbytes((*rest, *cut), space)
        estimates[chunk] = GraphEstimate(
            arena, total_seconds, len(placed.graph.calls), lasting(placed), pool
        )
    return estimates


def with_chunk(placed: Placed, chunk: int) -> Placed:
    """The graph with another chunk of its loss head, on which no tensor depends: only for measuring."""
    steps = [_with_chunk(s, chunk) if s.op is HEAD else s for s in placed.steps]
    return replace(placed, steps=tuple(steps))


def _with_chunk(step: Step, chunk: int) -> Step:
    return replace(step, call=replace(step.call, attrs=step.call.attrs | {"chunk": chunk}))


def chain(
    shape: StepShape,
    request: Request,
    space: str | None = None,
    like: Chain | None = None,
    calls: int | None = None,
    make: Callable[[str, StepShape, Optimizer], Built] = build_graph,
) -> Chain:
    """The blocks of the training graph that determines memory; `like` has the same blocks, measured.

    space  whose bytes count; by default the arena's
    calls  of that graph if it keeps everything, if known
    """
    name, num_blocks = blocks_in(shape), reached(shape)
    space = space or request.target.space

    def graph(count: int, choice: Choice | None) -> Built:
        variant = shape if count == num_blocks else with_blocks(shape, count)
        return make(name, replace(variant, keep=choice), request.optimizer)

    def twice(count: int, choice: Choice | None) -> Built:
        variant = replace(with_blocks(shape, count), twice=count, keep=choice)
        return make(name, variant, request.optimizer)

    waiting = name == STEP and shape.max_norm is not None and not shape.two_passes
    reserved = _gradients(shape) if waiting else (0, 0)
    per_call = (CALL_NBYTES + BOUND_NBYTES) * shape.graphs if space == HOST else 0
    if calls is None:
        calls = len(graph(num_blocks, None).graph.calls)

    heads = {chunk: partial(with_chunk, chunk=chunk) for chunk in (shape.chunk, *CHUNKS)}
    offload = NEVER if space == HOST else request.offload
    options = reserved, per_call, calls, like, TOGETHER, request.target, space, offload
    return Chain(graph, num_blocks, request.rates, *options, shape.twice, twice, heads, shape.chunk)


def _gradients(shape: StepShape) -> tuple[int, int]:
    """Bytes of the gradients of a block, and of everything outside of blocks."""
    block = head = 0
    for leaf in leaves(with_blocks(shape, 1))[1]:
        nbytes = aligned(Spec(leaf.shape))  # f32, whatever the type of the leaf
        if leaf.label.startswith("blk."):
            block += nbytes
        else:
            head += nbytes
    return block, head
