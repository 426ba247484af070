"""Estimates bytes and seconds of training steps from graphs of a few blocks, without packing anything.

DraftEstimator returns StepEstimates, BlockChains (for choosing recomputation) and PlanDrafts of StepShapes."""

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

from packtrain.distributed import rooms_nbytes
from packtrain.engine.backends import HOST
from packtrain.engine.memory_plan.lifetimes import lifetime_columns, storage_lifetimes
from packtrain.engine.memory_plan.memory_plan import pool_nbytes
from packtrain.engine.ops import linear_cross_entropy as HEAD
from packtrain.engine.optim import Optimizer
from packtrain.engine.packing import lower_bound
from packtrain.engine.placement import Placed, place
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import Spec, Tensor
from packtrain.models.config import Config
from packtrain.planner import checkpointing, cost_model, training_plans
from packtrain.planner.block_extrapolation import blocks_match, num_reached_blocks, with_num_blocks
from packtrain.planner.checkpointing import ALIGNMENT, BlockChain, BuiltGraph, aligned_nbytes
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.plan_request import CALL_NBYTES, PlanRequest
from packtrain.planner.step_shape import DEFAULT_CHUNK, StepShape
from packtrain.planner.step_variants import CHUNK_SIZES
from packtrain.planner.training_plans import EVALUATE, MEASURE, MICRO, STEP, UPDATE, block_graph

TOGETHER = 32  # strategies of a block measured in one graph


@dataclass(frozen=True, slots=True)
class GraphEstimate:
    """Estimates for one placed graph: bytes, calls, weights and states by name, and the seconds of a run.

    arena  lower bound of the arena's bytes
    pool   bytes that kernels take beside their workspaces
    """

    arena: int
    seconds: float
    calls: int
    leaves: Mapping[str, Tensor]
    pool: int = 0


class StepEstimate(NamedTuple):
    """Estimates for a training step without recomputation: bytes of leaves, arenas and kernels; calls; seconds.

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


def by_chunk(
    placed: Placed, rates: BackendRates, space: str, chunks: Iterable[int]
) -> dict[int, GraphEstimate]:
    """Return {chunk: estimate of bytes and seconds} of a graph for sizes of its loss head's chunk, in tokens."""
    stored = storage_lifetimes(placed, space)
    read = {t for step in placed.steps for t in step.reads}
    start_steps, end_steps, size = lifetime_columns(stored, ALIGNMENT)
    work = [i for i, s in enumerate(stored) if (s.op, s.category) == (HEAD.name, "workspace")]
    head_steps = [step for step in placed.steps if step.op is HEAD]
    other_steps = [step for step in placed.steps if step.op is not HEAD]
    seconds = sum(cost_model.step_seconds(other_steps, rates, read))
    result = dict[int, GraphEstimate]()
    for chunk in chunks:
        cut = [_with_chunk(step, chunk) for step in head_steps]
        if work:
            size[work] = [aligned_nbytes(spec) for step in cut for spec in step.workspaces]
        arena, _ = lower_bound(start_steps, end_steps, size)
        total = seconds + sum(cost_model.step_seconds(cut, rates, read))
        pool = pool_nbytes((*other_steps, *cut), space)
        result[chunk] = GraphEstimate(
            arena, total, len(placed.graph.calls), training_plans.lasting(placed), pool
        )
    return result


def with_chunk(placed: Placed, chunk: int) -> Placed:
    """Return the graph with another chunk of its loss head, only for measuring: no tensor depends on the chunk."""
    steps = [_with_chunk(step, chunk) if step.op is HEAD else step for step in placed.steps]
    return replace(placed, steps=tuple(steps))


def _with_chunk(step: KernelStep, chunk: int) -> KernelStep:
    return replace(step, call=replace(step.call, attrs=step.call.attrs | {"chunk": chunk}))


def chain(
    shape: StepShape, request: PlanRequest, space: str | None = None, like: BlockChain | None = None,
    calls: int | None = None, build: Callable[[str, StepShape, Optimizer], BuiltGraph] = training_plans.build_graph,
) -> BlockChain:  # fmt: skip
    """Return a BlockChain, which chooses what blocks save, for the step's graph that runs the blocks for gradients.

    space  memory space whose bytes count; None: the one of the target's first backend
    like   a chain with equal blocks, whose measurements are shared; None: measure anew
    calls  number of calls of that graph without recomputation; None: build the graph and count them
    build  builds a graph by its name
    """
    name, num_blocks = block_graph(shape), num_reached_blocks(shape)
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
    """Return the bytes of the f32 gradients of a block, and of all trained tensors outside of blocks."""
    block_nbytes = outer_nbytes = 0
    one_block = with_num_blocks(shape, 1)
    for leaf in training_plans.leaves(one_block.config, one_block.base)[1]:
        nbytes = aligned_nbytes(Spec(leaf.shape))  # f32, whatever the type of the leaf
        if leaf.label.startswith("blk."):
            block_nbytes += nbytes
        else:
            outer_nbytes += nbytes
    return block_nbytes, outer_nbytes


SAMPLED = 3  # blocks of the longest chain from which estimates are extrapolated


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """A step shape with estimates before packing: peak bytes of a memory space, and seconds of a step."""

    shape: StepShape
    nbytes: int
    seconds: float


class DraftEstimator:
    """Estimates the steps (shapes) that a search considers, in bytes of one memory space and seconds; has a cache."""

    def __init__(self, request: PlanRequest, space: str | None = None) -> None:
        self.request, self.space = request, space or request.target.space
        self._graphs: dict[tuple[str, StepShape], dict[int, GraphEstimate]] = {}
        self._sample_estimates: dict[Config, list[GraphEstimate]] = {}
        self._step_estimates: dict[StepShape, StepEstimate] = {}
        self._block_chains: dict[StepShape, BlockChain] = {}
        self._before: dict[StepShape, BlockChain] = {}  # chains whose short graphs were measured
        self._short_graphs: dict[tuple[str, StepShape], BuiltGraph] = {}  # the last short graph

    def with_fresh_chains(self) -> Self:
        """Return a copy that shares all estimates, but whose chains forget measurements of graphs of many blocks."""
        fresh = type(self)(self.request, self.space)
        fresh._graphs, fresh._sample_estimates = self._graphs, self._sample_estimates
        fresh._step_estimates = self._step_estimates
        fresh._before, fresh._short_graphs = self._block_chains, self._short_graphs
        return fresh

    def estimate(self, shape: StepShape) -> StepEstimate:
        if shape not in self._step_estimates:
            self._step_estimates[shape] = self._extrapolated_estimate(shape)
        return self._step_estimates[shape]

    def _extrapolated_estimate(self, shape: StepShape) -> StepEstimate:
        """Estimate a step that recomputes nothing: from two and three blocks, or from all if few or not alike."""
        extra_blocks = num_reached_blocks(shape) - SAMPLED
        if extra_blocks <= 0 or not blocks_match(shape) or not self.request.target.is_uniform:
            return self._probe(shape)
        if shape.num_two_pass_blocks:
            return self._two_pass_estimate(shape)
        below = training_plans.num_unreached(shape.config, shape.base)
        two, three_blocks = (self._probe(with_num_blocks(shape, n)) for n in (SAMPLED - 1, SAMPLED))
        with_unreached = self._probe(with_num_blocks(shape, SAMPLED, 1)) if below else three_blocks
        triples = zip(two, three_blocks, with_unreached, strict=True)
        return StepEstimate(*(b + extra_blocks * (b - a) + below * (c - b) for a, b, c in triples))

    def _two_pass_estimate(self, shape: StepShape) -> StepEstimate:
        """Estimate a step whose first blocks run backward twice, from three blocks of which none, one and all do. With
        everything saved, each such block frees the bytes of its gradients and takes those of its saved values."""
        short, full_sizes = with_num_blocks(shape, SAMPLED), self.estimate(shape.once)
        samples = [self._probe(replace(short, num_two_pass_blocks=n)) for n in (0, 1, SAMPLED)]
        extra_blocks, block_costs = shape.num_two_pass_blocks - 1, self.chain(shape.once).block
        reserve_nbytes = max(block_costs.reserve - block_costs.full_nbytes, 0)
        arena = full_sizes.arena - extra_blocks * reserve_nbytes
        quadruples = zip(full_sizes, *samples, strict=True)
        block_share = extra_blocks / (SAMPLED - 1)
        totals = StepEstimate(*(w + b - a + block_share * (c - b) for w, a, b, c in quadruples))
        return StepEstimate(totals.leaves, max(arena, full_sizes.other_arena_nbytes), *totals[2:])

    def _probe(self, shape: StepShape) -> StepEstimate:
        """Estimate a step without recomputation from graphs of all its blocks, without extrapolating."""
        parts = {name: self._graph(name, shape) for name in training_plans.graph_names(shape)}
        samples, inner_names = self._estimate_samples(shape), (block_graph(shape), MEASURE)
        estimates = [*parts.values(), *samples]
        # the first of two passes recomputes what the second does, and needs no more bytes
        outer_parts = [*(part for name, part in parts.items() if name not in inner_names), *samples]
        unique_leaves = {n: leaf for e in estimates for n, leaf in e.leaves.items()}.values()
        block_estimate, target = parts[block_graph(shape)], self.request.target
        leaf_nbytes = training_plans.counted(shape, unique_leaves, target, self.space)
        leaf_nbytes += rooms_nbytes(shape.world_size, self.space)
        if self.space == HOST:
            mapped = training_plans.mapped_leaves(shape, unique_leaves)
            resident = [leaf for leaf in unique_leaves if leaf not in mapped]
            leaf_nbytes += training_plans.transit_nbytes(resident, target)
        return StepEstimate(
            leaf_nbytes, block_estimate.arena, max((estimate.arena for estimate in outer_parts), default=0),
            sum(estimate.calls for estimate in estimates), block_estimate.calls,
            sum(num_runs * parts[name].seconds for name, num_runs in training_plans.runs(shape).items()),
            max(estimate.pool for estimate in estimates),
        )  # fmt: skip

    def _graph(self, name: str, shape: StepShape) -> GraphEstimate:
        """Return the estimate of the graph `name`, made once for all shapes for which this graph is equal."""
        cache_key = name, _cache_key_shape(name, shape)
        if cache_key not in self._graphs:
            graph = self._build(*cache_key, self.request.optimizer).graph
            placed = place(graph, self.request.target)
            chunk_sizes = {shape.chunk, *CHUNK_SIZES}
            self._graphs[cache_key] = by_chunk(placed, self.request.rates, self.space, chunk_sizes)
        return self._graphs[cache_key][shape.chunk]

    def _build(self, name: str, shape: StepShape, optimizer: Optimizer) -> BuiltGraph:
        """Build graph `name` of a step; the last one of SAMPLED blocks is cached: chains and estimates both need it."""
        config, cache_key = shape.config, (name, _cache_key_shape(name, shape))
        # the last graph is large, and garbage only as a whole: collect it before the next one is built
        if shape.keep is not None or config.block_count != SAMPLED or name != block_graph(shape):
            gc.collect(1)
            return training_plans.build_graph(name, shape, optimizer)
        if cache_key not in self._short_graphs:
            self._short_graphs.clear()
            gc.collect()
            self._short_graphs[cache_key] = training_plans.build_graph(*cache_key, optimizer)
        return self._short_graphs[cache_key]

    def _estimate_samples(self, shape: StepShape) -> list[GraphEstimate]:
        """Return estimates of the graphs that generate sample texts during a run."""
        config = shape.config
        if config not in self._sample_estimates:
            graphs, rates = self.request.sample_graphs(shape).values(), self.request.rates
            self._sample_estimates[config] = [
                by_chunk(g, rates, self.space, (0,))[0] for g in graphs
            ]
        return self._sample_estimates[config]

    def chain(self, shape: StepShape) -> BlockChain:
        """Return the cached BlockChain that chooses what blocks save, for the step's graph with their gradients."""
        shape = replace(shape, keep=None)
        if shape not in self._block_chains:
            chunk = DEFAULT_CHUNK if shape.chunk in CHUNK_SIZES else shape.chunk
            first = replace(shape, chunk=chunk, num_two_pass_blocks=0)
            earlier_chain = self._before.get(shape)
            similar_chain = None if first == shape else self.chain(first)
            if earlier_chain is not None:
                self._block_chains[shape] = earlier_chain.cleared(similar_chain)
            else:
                num_calls = int(self.estimate(shape).block_calls)
                options = self.space, similar_chain, num_calls, self._build
                self._block_chains[shape] = chain(shape, self.request, *options)
        return self._block_chains[shape]

    def has_blocks(self, shape: StepShape) -> bool:
        """Whether any block's weights are in this memory space, so that recomputation can save bytes of it."""
        target = self.request.target
        if target.is_uniform:
            return self.space == target.space
        leaves = training_plans.leaves(shape.config, shape.base)[0].items()
        block_leaves = (leaf for name, leaf in leaves if name.startswith("blk."))
        return any(target.home(leaf).space == self.space for leaf in block_leaves)

    def may_recompute(self, shape: StepShape) -> bool:
        """Whether --recompute is auto, so that the search chooses, and recomputing saves bytes of this memory space."""
        return self.request.recompute == "auto" and self.has_blocks(shape)

    def rough_draft(self, shape: StepShape) -> PlanDraft:
        """Return estimated bytes and seconds of the step without recomputation; builds no graph of many blocks."""
        estimate = self.estimate(shape)
        arena = max(estimate.arena, estimate.other_arena_nbytes)
        nbytes = self._nbytes(shape, estimate, 0) + self._allocated_nbytes(estimate, int(arena))
        return PlanDraft(shape, nbytes, estimate.seconds)

    def draft(self, shape: StepShape) -> PlanDraft:
        """Return bytes and seconds of the step with its recomputation; builds and measures the graph of all blocks."""
        estimate, planned_choice = self.estimate(shape), self.chain(shape).plan_choice(shape.keep)
        seconds = estimate.seconds + repeats(shape) * planned_choice.seconds
        arena_nbytes = max(planned_choice.arena, int(estimate.other_arena_nbytes))
        nbytes = self._nbytes(shape, estimate, shape.num_passes * planned_choice.calls)
        return PlanDraft(shape, nbytes + self._allocated_nbytes(estimate, arena_nbytes), seconds)

    def _allocated_nbytes(self, sizes: StepEstimate, arena: int) -> int:
        """Return `arena` plus the bytes by which the space's allocator rounds up the leaves and the arena."""
        return arena + self.request.target.extra_nbytes(self.space, (int(sizes.leaves), arena))

    def _nbytes(self, shape: StepShape, sizes: StepEstimate, num_recomputed: int) -> int:
        """Return the bytes of this memory space outside the arena if a step has `num_recomputed` recomputed calls."""
        num_calls = int(sizes.calls) + num_recomputed
        leaf_nbytes = self.request.baseline_in(self.space) + int(sizes.leaves) + int(sizes.pool)
        if self.space != HOST:
            return leaf_nbytes
        return leaf_nbytes + CALL_NBYTES * num_calls + training_plans.loop_nbytes(shape, num_calls)


def repeats(shape: StepShape) -> int:
    """Return how many times a step runs the backward pass of its blocks, and so recomputes what they do not save."""
    return training_plans.runs(shape)[MICRO] if block_graph(shape) == MICRO else shape.num_passes


def _cache_key_shape(name: str, shape: StepShape) -> StepShape:
    """Return the shape without the fields that do not affect the graph `name`, so that equal graphs are built once."""
    if name == UPDATE:
        key = replace(shape.once, keep=None, evaluate=False, chunk=DEFAULT_CHUNK, layered=False)
        key = replace(key, micro_batch_size=1, seq_len=1, num_micro_batches=2, num_row_tiles=1)
        return replace(key, num_evaluations=1, world_size=1)
    if name == EVALUATE:
        sizes = shape.micro_batch_size, shape.seq_len
        return StepShape(shape.config, *sizes, base=shape.base, num_row_tiles=shape.num_row_tiles)
    return replace(shape, keep=None, evaluate=False, chunk=DEFAULT_CHUNK)
