"""Searches for the fastest step within a limit of bytes, among shapes with equal results, without packing buffers.

find_fastest_shape returns a SearchResult for a StepShape and a PlanRequest with limits. The search chooses the
micro-batch and its order through the blocks, recomputation, the loss head's chunk, and blocks that run backward twice.

Worked example: four rows within 100 MiB. Three variants of the step wait in a queue, each with a lower bound of its
seconds, at first 0; the least bound comes first. Each visit raises the bound by a function that takes longer:

    variant                   _repeat_bound  _step_bound  _solver_bound  draft that was built
    A  1 micro-batch of 4     inf: 120 MiB
    B  2 micro-batches of 2   0.0            1.10         1.15           1.20 s, 98 MiB
    C  4 micro-batches of 1   0.0            1.30

    _repeat_bound rejects A, and leaves 0 to B and C, where no block runs twice. _step_bound puts B before C; B is
    solved, built, and the best draft, with 1.20 s. C is next, but with 1.30 s, so the search ends and never builds C.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from packtrain.engine.backends import HOST, cpu
from packtrain.engine.optim import Optimizer, leaner_optimizers
from packtrain.planner import checkpointing
from packtrain.planner.block_extrapolation import blocks_match, num_reached_blocks
from packtrain.planner.checkpointing import ALWAYS_OFFLOAD, NEVER_OFFLOAD, uniform_choice
from packtrain.planner.drafts import DraftEstimator, PlanDraft, repeats
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.step_shape import StepShape
from packtrain.planner.step_variants import CHUNK_SIZES, candidates, extreme_shapes, tile_counts
from packtrain.planner.training_plans import EVALUATE, MEASURE, MICRO, block_graph

ROUNDS, EXTRA_ROUNDS = 3, 6  # choices built for a shape; more rounds for each other limited space
SLACK = 0.03  # relative error of estimates
CLOSE_ESTIMATES = 0.01  # if two estimates are this close, both are built
# Share of a step that recomputation may take by estimate where no limit requires recomputation. Estimates of cheap ops
# are too low: with 1 %, a LoRA step of Gemma 3 270M took 1.06 of its time, with 0.5 % 1.02.
FREE = 0.005
MIN_SAVING_SHARE = 0.02  # share of the bytes that a smaller chunk must save
OPTIMIZER_FREE_GRAPHS = MICRO, MEASURE, EVALUATE  # graphs without an optimizer


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The fastest shape (variant of a step) within the limits, or else the smallest one, with advice on settings."""

    shape: StepShape
    is_within_limits: bool
    suggested_change: str = ""


def find_fastest_shape(shape: StepShape, request: PlanRequest) -> SearchResult:
    """Return the fastest variant of a training step within every limit of the request; the smallest if none fits."""
    spaces = sorted(request.limits, key=lambda space: space != request.target.space)
    searches = [PlanSearch(request, space) for space in spaces]
    for space_search in searches:
        space_search.other_searches = [peer for peer in searches if peer is not space_search]
    best_draft: PlanDraft | None = None
    for space_search in searches:
        candidate = space_search.fastest_draft(shape, space_search.limit, request.fixed)
        if candidate is not None and (best_draft is None or candidate.seconds < best_draft.seconds):
            best_draft = candidate
        if best_draft is not None and best_draft.shape == shape:
            break
    if best_draft is not None:
        return SearchResult(best_draft.shape, True)
    smallest_shape = searches[0].smallest_draft(shape, request.fixed).shape
    full_search = next((s for s in searches if s.draft(smallest_shape).nbytes > s.limit), None)
    if full_search is None:
        return SearchResult(smallest_shape, True)
    if full_search is not searches[0]:  # a refusal names the fewest bytes of the space that is full
        smallest_shape = full_search.smallest_draft(shape, request.fixed).shape
    return SearchResult(smallest_shape, False, full_search.suggest_change(smallest_shape))


def smallest(shape: StepShape, request: PlanRequest) -> StepShape:
    """Return the variant of the training step whose plan takes the fewest bytes, whatever its seconds."""
    return PlanSearch(request).smallest_draft(shape, request.fixed).shape


class PlanSearch(DraftEstimator):
    """Searches the variants of a training step for the fastest within the limit of one memory space; caches estimates.

    other_searches  searches in the other limited spaces, whose limits a draft must keep, too
    """

    def __init__(self, request: PlanRequest, space: str | None = None) -> None:
        super().__init__(request, space)
        self.other_searches: list[PlanSearch] = []

    @property
    def limit(self) -> int:
        return self.request.limits[self.space]

    @property
    def may_tile(self) -> bool:
        """Whether blocks may run in tiles of rows: on the CPU alone, if the search chooses what is recomputed."""
        is_cpu = all(backend.name == cpu.name for backend in self.request.target.every)
        return is_cpu and self.request.recompute == "auto"

    # ---- within a limit

    def fastest_draft(self, shape: StepShape, limit: int, fixed: bool) -> PlanDraft | None:
        """Return the fastest variant within `limit` bytes, or None. `fixed`: only variants with bit-equal results."""
        best_draft = self._requested_draft(shape, limit)
        if best_draft is not None and best_draft.shape == shape:
            return best_draft
        # offloaded values return for the first backward pass and stay for the second, so offloading would save nothing
        may_repeat = self.request.target.space == HOST or self.request.offload_mode == NEVER_OFFLOAD
        variants = candidates(shape, fixed, self.may_tile)
        forms = [v for v in variants if may_repeat or not v.num_two_pass_blocks]
        queue = [(0.0, index, 0) for index in range(len(forms))]
        bound_functions = (
            self._tile_bound, self._repeat_bound, self._step_bound, self._solver_bound,
        )  # fmt: skip
        while queue:
            seconds, index, level = heappop(queue)
            max_seconds = math.inf if best_draft is None else best_draft.seconds
            if seconds >= max_seconds:
                break
            if level < len(bound_functions):
                lower_bound = max(seconds, bound_functions[level](forms[index], limit))
                heappush(queue, (lower_bound, index, level + 1))
            else:
                best_draft = self._by_chunk(forms[index], limit, max_seconds, fixed) or best_draft
        return best_draft

    def _tile_bound(self, variant: StepShape, limit: int) -> float:
        """Return a lower bound of a step's seconds if blocks run in tiles, which recompute every block; else 0."""
        if variant.num_row_tiles == 1:
            return 0.0
        n, untiled = num_reached_blocks(variant), replace(variant.once, num_row_tiles=1)
        recompute_seconds = n * self.chain(untiled).block.forward_seconds if n else 0.0
        return self.estimate(untiled).seconds + recompute_seconds

    def _repeat_bound(self, variant: StepShape, limit: int) -> float:
        """Return a lower bound of a step's seconds if blocks run backward twice, else 0; inf if over `limit` bytes."""
        if self._min_nbytes(replace(variant, chunk=min(CHUNK_SIZES))) > limit * (1 + SLACK):
            return math.inf
        n = 2 * num_reached_blocks(variant) if variant.two_passes else variant.num_two_pass_blocks
        if not n:
            return 0.0
        single = variant.once
        return self.estimate(single).seconds + n * self.chain(single).block.forward_seconds

    def _step_bound(self, variant: StepShape, limit: int) -> float:
        """Return a lower bound of a step's seconds if it recomputes what is cheapest until it fits; inf if none."""
        estimate, min_chunk = self.estimate(variant), replace(variant, chunk=min(CHUNK_SIZES))
        # graphs without gradients have a loss head, too
        outer_nbytes = self.estimate(min_chunk).other_arena_nbytes
        if self._nbytes(variant, estimate, 0) + outer_nbytes * (1 - SLACK) > limit:
            return math.inf
        if not self.may_recompute(variant):
            return estimate.seconds
        excess_nbytes = self.rough_draft(min_chunk).nbytes - limit
        return estimate.seconds + repeats(variant) * self.chain(variant).min_seconds(excess_nbytes)

    def _solver_bound(self, variant: StepShape, limit: int) -> float:
        """Return a lower bound of a step's seconds by the chain solver, the least over chunks; 0 if none applies."""
        if not self.may_recompute(variant):
            return 0.0
        return min(self._chunk_bound(replace(variant, chunk=chunk), limit) for chunk in CHUNK_SIZES)

    def _chunk_bound(self, shape: StepShape, limit: int) -> float:
        """Return a lower bound of a step's seconds within `limit` bytes for the shape's loss head chunk."""
        seconds = self.estimate(shape).seconds
        if self.rough_draft(shape).nbytes <= limit * (1 + MIN_SAVING_SHARE):
            return seconds
        remaining_nbytes = int(self._remaining_nbytes(shape, limit) * (1 + SLACK))
        return seconds + repeats(shape) * self.chain(shape).seconds_bound(remaining_nbytes)

    def _by_chunk(self, form: StepShape, limit: int, below: float, fixed: bool) -> PlanDraft | None:
        """Return a variant's fastest draft with any head chunk (`fixed`: its own), under `below` seconds, or None."""
        best_draft, head_nbytes = None, math.inf
        run_nbytes = self._min_nbytes(form) - self.request.baseline_in(self.space)
        min_saving = MIN_SAVING_SHARE * run_nbytes  # independent of the limit
        for chunk in (form.chunk,) if fixed else CHUNK_SIZES:
            variant = replace(form, chunk=chunk)
            estimate, has_blocks = self.estimate(variant), self.has_blocks(variant)
            work = self.chain(variant).head_work if has_blocks else int(estimate.arena)
            work += int(estimate.pool)
            if work > head_nbytes - min_saving:
                continue
            head_nbytes, candidate = work, self.fit_draft(variant, limit, below)
            if candidate is not None and candidate.seconds < below:
                best_draft, below = candidate, candidate.seconds
            if candidate is not None and candidate.shape.keep is None:
                break
        return best_draft

    def fit_draft(self, shape: StepShape, limit: int, below: float) -> PlanDraft | None:
        """Return a draft of the step within `limit` bytes, recomputing as much as that takes; None if none was found.

        below  seconds of the fastest draft so far: only faster ones are built by recomputing
        """
        seconds, full_draft = self.estimate(shape).seconds, self._requested_draft(shape, limit)
        if full_draft is not None or not self.may_recompute(shape) or seconds >= below:
            return full_draft
        left = self._remaining_nbytes(shape, limit)
        for _ in range(ROUNDS + len(self.other_searches) * EXTRA_ROUNDS):
            candidate = self.chain(shape).fastest_within(left, (below - seconds) / repeats(shape))
            if candidate is None:
                return None
            built_draft = self.draft(replace(shape, keep=candidate.choice))
            if self._fits(built_draft, limit):
                return built_draft
            excess = built_draft.nbytes - limit  # 0 or less: another limit was exceeded
            left = left - excess if excess > 0 else min(left, candidate.nbytes) * 7 // 8
        return None

    def _fits(self, draft: PlanDraft, limit: int) -> bool:
        """Whether a draft takes at most `limit` bytes here, and keeps the limits of the other memory spaces."""
        shape, peers = draft.shape, self.other_searches
        return draft.nbytes <= limit and all(s.draft(shape).nbytes <= s.limit for s in peers)

    def _requested_draft(self, shape: StepShape, limit: int) -> PlanDraft | None:
        """Return the draft with the recomputation that the user asked for; None if it exceeds `limit` bytes."""
        is_free = self.request.recompute == "auto" and self.request.offload_mode != ALWAYS_OFFLOAD
        if is_free and self.rough_draft(shape).nbytes > limit * (1 + MIN_SAVING_SHARE):
            return None
        built_draft = self.draft(self.with_requested_recompute(shape))
        return built_draft if self._fits(built_draft, limit) else None

    def _remaining_nbytes(self, shape: StepShape, limit: int) -> int:
        """Return what `limit` leaves for arena and calls of the graph with the blocks; 0 if another arena is larger."""
        estimate = self.estimate(shape)
        remaining_nbytes = limit - self._nbytes(shape, estimate, 0)
        if remaining_nbytes < estimate.other_arena_nbytes:
            return 0
        return remaining_nbytes + int(self.chain(shape).call_nbytes * estimate.block_calls)

    def with_requested_recompute(self, shape: StepShape) -> StepShape:
        """Return the shape with the recomputation of --recompute and --offload; with --recompute auto, none."""
        num_blocks = num_reached_blocks(shape)
        keep = None
        if self.request.recompute == "blocks":
            keep = uniform_choice(num_blocks, ())
        elif self.request.recompute == "sqrt":
            keep = checkpointing.spaced_choice(
                num_blocks, checkpointing.checkpoint_spacing(self.chain(shape))
            )
        if num_blocks and self.request.offload_mode == ALWAYS_OFFLOAD:
            keep = (keep or uniform_choice(num_blocks, self.chain(shape).block.read)).as_offloaded()
        return replace(shape, keep=keep)

    def with_free_recompute(self, shape: StepShape) -> StepShape:
        """Return the shape as requested; with --recompute auto, recompute what adds at most FREE (0.5 %) of a step."""
        num_blocks, requested = num_reached_blocks(shape), self.with_requested_recompute(shape)
        must_offload = self.request.offload_mode == ALWAYS_OFFLOAD
        if not num_blocks or not self.may_recompute(shape) or must_offload:
            return requested
        full = self.rough_draft(shape)
        free_seconds = FREE * full.seconds
        kept_places = self.chain(shape).block.places(free_seconds / (num_blocks * repeats(shape)))
        leaner = self.draft(replace(shape, keep=uniform_choice(num_blocks, kept_places)))
        saves_bytes = leaner.nbytes < full.nbytes and leaner.seconds <= full.seconds + free_seconds
        return leaner.shape if saves_bytes else requested

    # ---- fewest bytes

    def smallest_draft(self, shape: StepShape, fixed: bool = False) -> PlanDraft:
        """Return the variant of the step that takes the fewest bytes; `fixed`: only variants with bit-equal results.
        Estimates of chains of equal blocks decide; where blocks differ, lower and lower limits are tried until nothing
        fits. Earlier measurements do not change the answer."""
        if blocks_match(shape):
            return self._or_all_recomputed(
                self.smallest_of(extreme_shapes(shape, fixed, self.may_tile))
            )
        fresh = self.with_fresh_chains()
        best_draft = fresh.smallest_of(extreme_shapes(shape, fixed, self.may_tile))
        while smaller := fresh.fastest_draft(shape, int(best_draft.nbytes * (1 - SLACK)), fixed):
            best_draft = smaller
        return self._or_all_recomputed(best_draft)

    def _or_all_recomputed(self, best_draft: PlanDraft) -> PlanDraft:
        """Return the draft, or the one that recomputes all blocks if that takes fewer bytes once it is built."""
        shape = best_draft.shape
        if shape.keep is not None or not self.may_recompute(shape):
            return best_draft
        leaner = self.draft(replace(shape, keep=uniform_choice(num_reached_blocks(shape), ())))
        return min(best_draft, leaner, key=lambda draft: draft.nbytes)

    def smallest_of(self, shapes: Iterable[StepShape]) -> PlanDraft:
        """Return the draft of the fewest bytes among the shapes; builds only shapes whose estimates come close."""
        best: PlanDraft | None = None
        queue = [(self._min_nbytes(s), False, at, s) for at, s in enumerate(shapes)]
        heapify(queue)
        while queue:
            nbytes, is_estimated, index, shape = heappop(queue)
            if best is not None and nbytes > best.nbytes * (1 + CLOSE_ESTIMATES):
                break
            if not is_estimated:
                for position, (nbytes, candidate) in enumerate(self._estimated_shapes(shape)):
                    heappush(queue, (nbytes, True, 2 * index + position, candidate))
                continue
            draft = self.draft(shape)
            best = draft if best is None or draft.nbytes < best.nbytes else best
        assert best is not None
        return best

    def _min_nbytes(self, shape: StepShape) -> int:
        """Return a lower bound of a step's peak bytes, whatever is recomputed, to skip variants that cannot fit."""
        single_pass = shape.once
        estimate, arena = self.estimate(single_pass), 0
        if self.has_blocks(single_pass):
            arena = self.chain(single_pass).floor(not shape.two_passes, shape.num_two_pass_blocks)
        return self._nbytes(single_pass, estimate, 0) + max(arena, int(estimate.other_arena_nbytes))

    def _estimated_shapes(self, shape: StepShape) -> list[tuple[int, StepShape]]:
        """Return (bytes, shape) without recomputation and at its fewest bytes; or just the shape that was requested."""
        if not self.may_recompute(shape):
            requested_draft = self.draft(self.with_requested_recompute(shape))
            return [(requested_draft.nbytes, requested_draft.shape)]
        estimate, fewest = self.estimate(shape), self.chain(shape).smallest_choice
        inner = fewest.nbytes - int(self.chain(shape).call_nbytes * estimate.block_calls)
        min_nbytes = self._nbytes(shape, estimate, 0) + max(inner, int(estimate.other_arena_nbytes))
        smallest_shape = replace(shape, keep=fewest.choice)
        return [(self.rough_draft(shape).nbytes, shape), (min_nbytes, smallest_shape)]

    def suggest_change(self, shape: StepShape) -> str:
        """Return advice for the user: the first change of settings (context, optimizer, model) that would fit."""
        shape, limit = replace(shape, keep=None), self.limit
        contexts = [shape.seq_len >> halved for halved in range(1, shape.seq_len.bit_length() - 1)]
        if self._nbytes(replace(shape, seq_len=2), self.estimate(shape), 0) > limit:
            contexts = []  # a shorter context shrinks only the arena
        at = bisect_left(
            contexts, True, key=lambda n: self._could_fit_tiled(replace(shape, seq_len=n), limit)
        )
        if at < len(contexts):
            return f"it would fit with --ctx {contexts[at]}"
        for leaner_optimizer in leaner_optimizers(self.request.optimizer):
            changed_shape = replace(shape, num_evaluations=leaner_optimizer.evaluations)
            if self._with_optimizer(leaner_optimizer, shape)._could_fit(changed_shape, limit):
                return f"it would fit with --optimizer {leaner_optimizer.name}, which {leaner_optimizer.note}"
        return f"no shorter context fits either: {_smaller_model_advice(shape)}"

    def _with_optimizer(self, optimizer: Optimizer, shape: StepShape) -> "PlanSearch":
        """Return a search for another optimizer; measurements that do not depend on the optimizer are shared."""
        graphs, chains = self._graphs.items(), self._block_chains.items()
        request = replace(self.request, optimizer=optimizer)
        request = request.offloaded(shape) if request.offloads_moments else request
        search = PlanSearch(request, self.space)
        search._sample_estimates = self._sample_estimates
        search._graphs = {k: v for k, v in graphs if k[0] in OPTIMIZER_FREE_GRAPHS}
        search._block_chains = {k: v for k, v in chains if block_graph(k) in OPTIMIZER_FREE_GRAPHS}
        return search

    def _could_fit_tiled(self, shape: StepShape, limit: int) -> bool:
        """Whether any number of tiles that the search may choose lets the step fit into `limit` bytes."""
        counts = tile_counts(shape) if self.may_tile else [1]
        return any(self._could_fit(replace(shape, num_row_tiles=n), limit) for n in counts)

    def _could_fit(self, shape: StepShape, limit: int) -> bool:
        """Whether a plan of the step fits into `limit` bytes; builds graphs only if the estimate is close to it."""
        if self._min_nbytes(shape) > limit * (1 + SLACK):
            return False
        min_nbytes = min(nbytes for nbytes, _ in self._estimated_shapes(shape))
        if abs(min_nbytes - limit) > limit * SLACK:
            return min_nbytes < limit
        return self.smallest_of([shape]).nbytes <= limit


def _smaller_model_advice(shape: StepShape) -> str:
    if shape.base is None:
        return "use a smaller model (--preset, --layers, --dim, --vocab-size)"
    if shape.config.lora is None:
        return "use a smaller base model, or leave out --full: a LoRA adapter trains fewer weights"
    return "use a smaller base model, or train fewer weights (--lora-rank, --lora-modules, --num-layers)"


def unlimited(shape: StepShape, request: PlanRequest) -> StepShape:
    """Return the shape for a run without a limit: recomputation only as requested, or where it is nearly free."""
    return PlanSearch(request).with_free_recompute(shape)
