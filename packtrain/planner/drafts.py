"""Estimates bytes and seconds of shapes from graphs of a few blocks, without packing anything.

Returns for Shapes under one Request their StepEstimates, Chains (for choosing recomputation), and Drafts.
"""

import gc
from dataclasses import dataclass, replace
from typing import Self

from packtrain.distributed import rooms_nbytes
from packtrain.engine.backends import HOST
from packtrain.engine.optim import Optimizer
from packtrain.engine.placement import place
from packtrain.models.config import Config
from packtrain.planner import training_plans
from packtrain.planner.block_extrapolation import even, reached, with_blocks
from packtrain.planner.checkpointing import Built, Chain
from packtrain.planner.estimate import GraphEstimate, StepEstimate, by_chunk, chain, estimated
from packtrain.planner.plan_request import CALL_NBYTES, Request
from packtrain.planner.step_shape import CHUNK, StepShape
from packtrain.planner.step_variants import CHUNKS
from packtrain.planner.training_plans import (
    EVALUATE,
    MEASURE,
    MICRO,
    UPDATE,
    blocks_in,
    build_graph,
    runs,
)

SAMPLED = 3  # blocks of the larger chain from which others are extrapolated


@dataclass(frozen=True, slots=True)
class Draft:
    """A shape with estimates before packing: peak bytes of a memory space, and seconds of a step."""

    shape: StepShape
    nbytes: int
    seconds: float


class Drafts:
    """Estimates of shapes under one request, in the bytes of one space (by default the arena's); caches them."""

    def __init__(self, request: Request, space: str | None = None) -> None:
        self.request, self.space = request, space or request.target.space
        self._graphs: dict[tuple[str, StepShape], dict[int, GraphEstimate]] = {}
        self._samples: dict[Config, list[GraphEstimate]] = {}
        self._known: dict[StepShape, StepEstimate] = {}
        self._chains: dict[StepShape, Chain] = {}
        self._before: dict[StepShape, Chain] = {}  # whose short chains have been measured
        self._short: dict[tuple[str, StepShape], Built] = {}  # the last one

    def afresh(self) -> Self:
        """The same, whose chains have measured nothing but short ones."""
        fresh = type(self)(self.request, self.space)
        fresh._graphs, fresh._samples, fresh._known = self._graphs, self._samples, self._known
        fresh._before, fresh._short = self._chains, self._short
        return fresh

    def sizes(self, shape: StepShape) -> StepEstimate:
        if shape not in self._known:
            self._known[shape] = self._by_few_blocks(shape)
        return self._known[shape]

    def _by_few_blocks(self, shape: StepShape) -> StepEstimate:
        """Extrapolate from chains of two and three blocks: growth is linear from there on."""
        extra_blocks = reached(shape) - SAMPLED
        if extra_blocks <= 0 or not even(shape) or not self.request.target.uniform:
            return self._sizes(shape)
        if shape.twice:
            return self._going_back_twice(shape)
        below = training_plans.passed_over(shape.config, shape.base)
        two, three = (self._sizes(with_blocks(shape, n)) for n in (SAMPLED - 1, SAMPLED))
        frozen_below = self._sizes(with_blocks(shape, SAMPLED, 1)) if below else three
        triples = zip(two, three, frozen_below, strict=True)
        return StepEstimate(*(b + extra_blocks * (b - a) + below * (c - b) for a, b, c in triples))

    def _going_back_twice(self, shape: StepShape) -> StepEstimate:
        """From a chain of three blocks, of which none, one and all go back twice.

        With everything kept, a block of them gives back the bytes of its gradients and takes those that it keeps.
        """
        blocks, full_sizes = with_blocks(shape, SAMPLED), self.sizes(shape.once)
        no_blocks, single, all_blocks = (
            self._sizes(replace(blocks, twice=n)) for n in (0, 1, SAMPLED)
        )
        extra_blocks, block = shape.twice - 1, self.chain(shape.once).block
        reserve_nbytes = max(block.reserve - block.saved_all, 0)
        arena = full_sizes.arena - extra_blocks * reserve_nbytes
        quadruples = zip(full_sizes, no_blocks, single, all_blocks, strict=True)
        share = extra_blocks / (SAMPLED - 1)
        totals = StepEstimate(*(w + b - a + share * (c - b) for w, a, b, c in quadruples))
        return StepEstimate(totals.leaves, max(arena, full_sizes.beside), *totals[2:])

    def _sizes(self, shape: StepShape) -> StepEstimate:
        parts = {name: self._graph(name, shape) for name in training_plans.names(shape)}
        samples, inner_names = self._of_samples(shape), (blocks_in(shape), MEASURE)
        estimates = [*parts.values(), *samples]
        # a first pass recomputes as the second does, and needs no more
        outer_parts = [*(part for name, part in parts.items() if name not in inner_names), *samples]
        unique_leaves = {
            name: leaf for part in estimates for name, leaf in part.leaves.items()
        }.values()
        block_part, target = parts[blocks_in(shape)], self.request.target
        nbytes = training_plans.counted(shape, unique_leaves, target, self.space)
        nbytes += rooms_nbytes(shape.ranks, self.space)
        if self.space == HOST:
            nbytes += training_plans.passing_nbytes(
                (t for t in unique_leaves if not training_plans.is_mapped(shape, t)), target
            )
        return StepEstimate(
            nbytes,
            block_part.arena,
            max((part.arena for part in outer_parts), default=0),
            sum(part.calls for part in estimates),
            block_part.calls,
            sum(count * parts[name].seconds for name, count in runs(shape).items()),
            max(part.pool for part in estimates),
        )

    def _graph(self, name: str, shape: StepShape) -> GraphEstimate:
        key = name, _what_matters(name, shape)
        if key not in self._graphs:
            graph = self._build(*key, self.request.optimizer).graph
            placed = place(graph, self.request.target)
            chunks = {shape.chunk, *CHUNKS}
            self._graphs[key] = by_chunk(placed, self.request.rates, self.space, chunks)
        return self._graphs[key][shape.chunk]

    def _build(self, name: str, shape: StepShape, optimizer: Optimizer) -> Built:
        """A graph; the short one of a chain is also used as a part."""
        config, key = shape.config, (name, _what_matters(name, shape))
        # the graph before is large, and garbage only as a whole: it is freed first
        if shape.keep is not None or config.block_count != SAMPLED or name != blocks_in(shape):
            gc.collect(1)
            return build_graph(name, shape, optimizer)
        if key not in self._short:
            self._short.clear()
            gc.collect()
            self._short[key] = build_graph(*key, optimizer)
        return self._short[key]

    def _of_samples(self, shape: StepShape) -> list[GraphEstimate]:
        config = shape.config
        if config not in self._samples:
            placed_graphs, rates = self.request.samples(shape).values(), self.request.rates
            self._samples[config] = [
                estimated(placed, rates, self.space) for placed in placed_graphs
            ]
        return self._samples[config]

    def chain(self, shape: StepShape) -> Chain:
        """The blocks of the training graph that determines memory, for choosing recomputation."""
        shape = replace(shape, keep=None)
        if shape not in self._chains:
            chunk = CHUNK if shape.chunk in CHUNKS else shape.chunk
            first, earlier_chain = replace(shape, chunk=chunk, twice=0), self._before.get(shape)
            template = None if first == shape else self.chain(first)
            if earlier_chain is not None:
                self._chains[shape] = earlier_chain.afresh(template)
            else:
                options = self.space, template, int(self.sizes(shape).inside), self._build
                self._chains[shape] = chain(shape, self.request, *options)
        return self._chains[shape]

    def inside(self, shape: StepShape) -> bool:
        """Whether blocks compute in this space."""
        target = self.request.target
        if target.uniform:
            return self.space == target.space
        blocks = (
            leaf
            for name, leaf in training_plans.leaves(shape)[0].items()
            if name.startswith("blk.")
        )
        return any(target.home(leaf).space == self.space for leaf in blocks)

    def recomputes(self, shape: StepShape) -> bool:
        """Whether recomputation may be chosen, and saves bytes of this space."""
        return self.request.recompute == "auto" and self.inside(shape)

    def rough(self, shape: StepShape) -> Draft:
        """The shape with everything kept, without building it."""
        sizes = self.sizes(shape)
        arena = max(sizes.arena, sizes.beside)
        nbytes = self._nbytes(shape, sizes, 0) + self._given(sizes, int(arena))
        return Draft(shape, nbytes, sizes.seconds)

    def draft(self, shape: StepShape) -> Draft:
        """The shape with its recomputation, its blocks built."""
        sizes, recompute_plan = self.sizes(shape), self.chain(shape).plan(shape.keep)
        seconds = sizes.seconds + repeats(shape) * recompute_plan.seconds
        arena = max(recompute_plan.arena, int(sizes.beside))
        recomputed_calls = shape.graphs * recompute_plan.calls
        return Draft(
            shape, self._nbytes(shape, sizes, recomputed_calls) + self._given(sizes, arena), seconds
        )

    def _given(self, sizes: StepEstimate, arena: int) -> int:
        """Bytes of the arena, and by how much it and the leaves get more than they need."""
        return arena + self.request.target.beyond(self.space, (int(sizes.leaves), arena))

    def _nbytes(self, shape: StepShape, sizes: StepEstimate, recomputed_calls: int) -> int:
        """Bytes of everything but the arena, with `recomputed_calls` recomputed calls."""
        calls = int(sizes.calls) + recomputed_calls
        leaf_nbytes = self.request.before(self.space) + int(sizes.leaves) + int(sizes.pool)
        if self.space != HOST:
            return leaf_nbytes
        return leaf_nbytes + CALL_NBYTES * calls + training_plans.loop_nbytes(shape, calls)


def repeats(shape: StepShape) -> int:
    """How often a step recomputes what its blocks do not keep."""
    return runs(shape)[MICRO] if blocks_in(shape) == MICRO else shape.graphs


def _what_matters(name: str, shape: StepShape) -> StepShape:
    """The shape without what does not affect a graph that keeps everything, as a cache key."""
    if name == UPDATE:
        key_shape = replace(shape.once, keep=None, evaluate=False, chunk=CHUNK)
        return replace(key_shape, rows=1, time=1, micros=2, layered=False, evaluations=1, ranks=1)
    if name == EVALUATE:
        return StepShape(shape.config, shape.rows, shape.time, base=shape.base)
    return replace(shape, keep=None, evaluate=False, chunk=CHUNK)
