"""Searches the fastest shape within a number of bytes, among all that compute the same, without packing anything.

Returns an Answer for a requested StepShape and a Request with limits. Chooses the micro-batch and its order
through the blocks, recomputation, chunk of the loss head and what clipping computes twice, by predicted time.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from packtrain.engine.backends import HOST
from packtrain.engine.optim import Optimizer, leaner
from packtrain.planner.block_extrapolation import even, reached
from packtrain.planner.checkpointing import ALWAYS, NEVER, spaced, spacing, uniform
from packtrain.planner.drafts import Draft, Drafts, repeats
from packtrain.planner.plan_request import Request
from packtrain.planner.step_shape import StepShape
from packtrain.planner.step_variants import CHUNKS, candidates, extremes
from packtrain.planner.training_plans import EVALUATE, MEASURE, MICRO, blocks_in

ROUNDS, MORE_ROUNDS = 3, 6  # choices built for a shape; more where another space must hold it, too
SLACK = 0.03  # relative error of estimates
CLOSE = 0.01  # if two estimates are this close, both are built
FREE = 0.005  # share of a step that recomputation may take by estimate where no limit asks for it
WORTH = 0.02  # share of the bytes that a smaller chunk must save
SAME = MICRO, MEASURE, EVALUATE  # graphs without an optimizer


@dataclass(frozen=True, slots=True)
class Answer:
    """The fastest shape that fits; or the smallest one, which does not, and a change of settings that would fit."""

    shape: StepShape
    fits: bool
    change: str = ""


def search(shape: StepShape, request: Request) -> Answer:
    """The fastest shape within all limits of the request, the process included; else the smallest."""
    spaces = sorted(request.limits, key=lambda space: space != request.target.space)
    searches = [Search(request, space) for space in spaces]
    for current in searches:
        current.others = [other for other in searches if other is not current]
    best: Draft | None = None
    for current in searches:
        candidate = current.fastest(shape, current.limit, request.fixed)
        if candidate is not None and (best is None or candidate.seconds < best.seconds):
            best = candidate
        if best is not None and best.shape == shape:
            break
    if best is not None:
        return Answer(best.shape, True)
    smallest_shape = searches[0].smallest(shape, request.fixed).shape
    full = next(
        (current for current in searches if current.draft(smallest_shape).nbytes > current.limit),
        None,
    )
    if full is None:
        return Answer(smallest_shape, True)
    if full is not searches[0]:  # the least of that space is what a refusal tells
        smallest_shape = full.smallest(shape, request.fixed).shape
    return Answer(smallest_shape, False, full.change(smallest_shape))


def smallest(shape: StepShape, request: Request) -> StepShape:
    """The shape with the least bytes."""
    return Search(request).smallest(shape, request.fixed).shape


class Search(Drafts):
    """Searches shapes under one request; caches measurements.

    others  searches in the other limited spaces, whose limits count, too
    """

    def __init__(self, request: Request, space: str | None = None) -> None:
        super().__init__(request, space)
        self.others: list[Search] = []

    @property
    def limit(self) -> int:
        return self.request.limits[self.space]

    # ---- within a limit

    def best(self, shape: StepShape, limit: int, fixed: bool = False) -> Draft:
        """The fastest shape of at most `limit` bytes; the smallest if none was found."""
        return self.fastest(shape, limit, fixed) or self.smallest(shape, fixed)

    def fastest(self, shape: StepShape, limit: int, fixed: bool) -> Draft | None:
        """The fastest shape of at most `limit` bytes; None if none was found."""
        best = self._whole(shape, limit)
        if best is not None and best.shape == shape:
            return best
        # what waits elsewhere comes back for the first backward pass, and stays here for a second one
        may_go_back = self.request.target.space == HOST or self.request.offload == NEVER
        forms = [form for form in candidates(shape, fixed) if may_go_back or not form.twice]
        waiting = [(0.0, at, 0) for at in range(len(forms))]
        bounds = self._could, self._takes, self._takes_by_ways
        while waiting:
            seconds, at, level = heappop(waiting)
            below = math.inf if best is None else best.seconds
            if seconds >= below:
                break
            if level < len(bounds):
                bound = max(seconds, bounds[level](forms[at], limit))
                heappush(waiting, (bound, at, level + 1))
            else:
                best = self._best_chunk(forms[at], limit, below, fixed) or best
        return best

    def _could(self, form: StepShape, limit: int) -> float:
        """Infinite if the form cannot fit; else the least seconds of what runs twice, estimated from one pass."""
        if self._at_least(replace(form, chunk=min(CHUNKS))) > limit * (1 + SLACK):
            return math.inf
        repeated_blocks = 2 * reached(form) if form.two_passes else form.twice
        if not repeated_blocks:
            return 0.0
        single_pass = form.once
        return (
            self.sizes(single_pass).seconds
            + repeated_blocks * self.chain(single_pass).block.forward_seconds
        )

    def _takes(self, form: StepShape, limit: int) -> float:
        """The least seconds of a step of the form within the limit; infinite if nothing fits."""
        sizes, min_chunk = self.sizes(form), replace(form, chunk=min(CHUNKS))
        outer_nbytes = self.sizes(
            min_chunk
        ).beside  # graphs without gradients have a loss head, too
        if self._nbytes(form, sizes, 0) + outer_nbytes * (1 - SLACK) > limit:
            return math.inf
        if not self.recomputes(form):
            return sizes.seconds
        excess = self.rough(min_chunk).nbytes - limit
        return sizes.seconds + repeats(form) * self.chain(form).least_seconds(excess)

    def _takes_by_ways(self, form: StepShape, limit: int) -> float:
        """The same from the ways to run the blocks; 0 if not needed."""
        if not self.recomputes(form):
            return 0.0
        return min(self._takes_with(replace(form, chunk=chunk), limit) for chunk in CHUNKS)

    def _takes_with(self, shape: StepShape, limit: int) -> float:
        seconds = self.sizes(shape).seconds
        if self.rough(shape).nbytes <= limit * (1 + WORTH):
            return seconds
        left = int(self._left(shape, limit) * (1 + SLACK))
        return seconds + repeats(shape) * self.chain(shape).bound(left)

    def _best_chunk(self, form: StepShape, limit: int, below: float, fixed: bool) -> Draft | None:
        """The fastest of the form's chunks, if it takes less than `below` seconds."""
        best, head = None, math.inf
        min_saving = WORTH * (
            self._at_least(form) - self.request.before(self.space)
        )  # at any limit
        for chunk in (form.chunk,) if fixed else CHUNKS:
            variant = replace(form, chunk=chunk)
            sizes = self.sizes(variant)
            work = self.chain(variant).head_work if self.inside(variant) else int(sizes.arena)
            work += int(sizes.pool)
            if work > head - min_saving:
                continue
            head, candidate = work, self.fitted(variant, limit, below)
            if candidate is not None and candidate.seconds < below:
                best, below = candidate, candidate.seconds
            if candidate is not None and candidate.shape.keep is None:
                break
        return best

    def fitted(self, shape: StepShape, limit: int, below: float) -> Draft | None:
        """The shape within the limit, with recomputation if allowed; None if nothing was found.

        below  seconds of a step already known to be possible
        """
        seconds, full_draft = self.sizes(shape).seconds, self._whole(shape, limit)
        if full_draft is not None or not self.recomputes(shape) or seconds >= below:
            return full_draft
        left = self._left(shape, limit)
        for _ in range(ROUNDS + len(self.others) * MORE_ROUNDS):
            candidate = self.chain(shape).within(left, (below - seconds) / repeats(shape))
            if candidate is None:
                return None
            draft = self.draft(replace(shape, keep=candidate.choice))
            if self._fits(draft, limit):
                return draft
            excess = draft.nbytes - limit
            left = left - excess if excess > 0 else min(left, candidate.nbytes) * 7 // 8
        return None

    def _fits(self, draft: Draft, limit: int) -> bool:
        """Whether a draft is within the limit, and within those of other spaces."""
        other_usages = ((peer.draft(draft.shape).nbytes, peer.limit) for peer in self.others)
        return draft.nbytes <= limit and all(
            nbytes <= max_nbytes for nbytes, max_nbytes in other_usages
        )

    def _whole(self, shape: StepShape, limit: int) -> Draft | None:
        """The shape with the requested recomputation, if it is within the limit."""
        free = self.request.recompute == "auto" and self.request.offload != ALWAYS
        if free and self.rough(shape).nbytes > limit * (1 + WORTH):
            return None
        draft = self.draft(self.as_asked(shape))
        return draft if self._fits(draft, limit) else None

    def _left(self, shape: StepShape, limit: int) -> int:
        """Bytes left for arena and calls of the graph with the blocks; 0 if another arena is larger."""
        sizes = self.sizes(shape)
        left = limit - self._nbytes(shape, sizes, 0)
        if left < sizes.beside:
            return 0
        return left + int(self.chain(shape).call_nbytes * sizes.inside)

    def as_asked(self, shape: StepShape) -> StepShape:
        """The shape with the requested recomputation; that of `auto` is none."""
        count = reached(shape)
        keep = None
        if self.request.recompute == "blocks":
            keep = uniform(count, ())
        elif self.request.recompute == "sqrt":
            keep = spaced(count, spacing(self.chain(shape)))
        if count and self.request.offload == ALWAYS:
            keep = (keep or uniform(count, self.chain(shape).block.read)).away()
        return replace(shape, keep=keep)

    def freely(self, shape: StepShape) -> StepShape:
        """The same; `auto` recomputes what takes next to no time, if that saves bytes."""
        count, requested = reached(shape), self.as_asked(shape)
        if not count or not self.recomputes(shape) or self.request.offload == ALWAYS:
            return requested
        baseline = self.rough(shape)
        seconds = FREE * baseline.seconds
        places = self.chain(shape).block.free(seconds / (count * repeats(shape)))
        recomputing = self.draft(replace(shape, keep=uniform(count, places)))
        pays = (
            recomputing.nbytes < baseline.nbytes
            and recomputing.seconds <= baseline.seconds + seconds
        )
        return recomputing.shape if pays else requested

    # ---- the least

    def smallest(self, shape: StepShape, fixed: bool = False) -> Draft:
        """The shape with the least bytes, the same whatever was asked before.

        The chains that estimates come from have equal blocks; for others, lower limits are tried as well.
        """
        if even(shape):
            return self._or_again(self.least_of(extremes(shape, fixed)))
        fresh_search = self.afresh()
        best_draft = fresh_search.least_of(extremes(shape, fixed))
        while smaller_draft := fresh_search.fastest(
            shape, int(best_draft.nbytes * (1 - SLACK)), fixed
        ):
            best_draft = smaller_draft
        return self._or_again(best_draft)

    def _or_again(self, best_draft: Draft) -> Draft:
        """The draft, or one that recomputes all blocks, if estimates have hidden that it takes fewer bytes."""
        shape = best_draft.shape
        if shape.keep is not None or not self.recomputes(shape):
            return best_draft
        recomputing = self.draft(replace(shape, keep=uniform(reached(shape), ())))
        return min(best_draft, recomputing, key=lambda draft: draft.nbytes)

    def least_of(self, shapes: Iterable[StepShape]) -> Draft:
        """The shape with the least bytes; estimates and builds only those that could be."""
        best_draft: Draft | None = None
        waiting = [
            (self._at_least(candidate), False, at, candidate) for at, candidate in enumerate(shapes)
        ]
        heapify(waiting)
        while waiting:
            nbytes, estimated, at, shape = heappop(waiting)
            if best_draft is not None and nbytes > best_draft.nbytes * (1 + CLOSE):
                break
            if not estimated:
                for order, (nbytes, candidate) in enumerate(self._estimates(shape)):
                    heappush(waiting, (nbytes, True, 2 * at + order, candidate))
                continue
            draft = self.draft(shape)
            best_draft = (
                draft if best_draft is None or draft.nbytes < best_draft.nbytes else best_draft
            )
        assert best_draft is not None
        return best_draft

    def _at_least(self, shape: StepShape) -> int:
        """Bytes that the shape takes with any recomputation; two passes are estimated from one."""
        single_pass = shape.once
        sizes, arena = self.sizes(single_pass), 0
        if self.inside(single_pass):
            arena = self.chain(single_pass).floor(not shape.two_passes, shape.twice)
        return self._nbytes(single_pass, sizes, 0) + max(arena, int(sizes.beside))

    def _estimates(self, shape: StepShape) -> list[tuple[int, StepShape]]:
        """The requested shape, and the one with the recomputation of least memory, with estimated bytes."""
        if not self.recomputes(shape):
            requested = self.draft(self.as_asked(shape))
            return [(requested.nbytes, requested.shape)]
        sizes, smallest = self.sizes(shape), self.chain(shape).smallest
        block_nbytes = smallest.nbytes - int(self.chain(shape).call_nbytes * sizes.inside)
        min_nbytes = self._nbytes(shape, sizes, 0) + max(block_nbytes, int(sizes.beside))
        return [
            (self.rough(shape).nbytes, shape),
            (min_nbytes, replace(shape, keep=smallest.choice)),
        ]

    def change(self, shape: StepShape) -> str:
        """The first of a few changes of settings that fits."""
        shape, limit = replace(shape, keep=None), self.limit
        contexts = [shape.time >> halved for halved in range(1, shape.time.bit_length() - 1)]
        if self._nbytes(replace(shape, time=2), self.sizes(shape), 0) > limit:
            contexts = []  # because these change the arena
        at = bisect_left(
            contexts, True, key=lambda n: self._could_fit(replace(shape, time=n), limit)
        )
        if at < len(contexts):
            return f"it would fit with --ctx {contexts[at]}"
        for leaner_optimizer in leaner(self.request.optimizer):
            changed_shape = replace(shape, evaluations=leaner_optimizer.evaluations)
            if self._with(leaner_optimizer, shape)._could_fit(changed_shape, limit):
                return f"it would fit with --optimizer {leaner_optimizer.name}, which {leaner_optimizer.note}"
        return f"no shorter context fits either: {_smaller(shape)}"

    def _with(self, optimizer: Optimizer, shape: StepShape) -> "Search":
        """Another search, which shares measurements that do not depend on the optimizer."""
        new_search = Search(self.request.another(optimizer, shape), self.space)
        new_search._samples = self._samples
        new_search._graphs = {key: cached for key, cached in self._graphs.items() if key[0] in SAME}
        new_search._chains = {
            chain_shape: cached
            for chain_shape, cached in self._chains.items()
            if blocks_in(chain_shape) in SAME
        }
        return new_search

    def _could_fit(self, shape: StepShape, limit: int) -> bool:
        """Whether the shape fits, with recomputation if allowed; builds it only if the estimates do not decide."""
        if self._at_least(shape) > limit * (1 + SLACK):
            return False
        min_nbytes = min(nbytes for nbytes, _ in self._estimates(shape))
        if abs(min_nbytes - limit) > limit * SLACK:
            return min_nbytes < limit
        return self.least_of([shape]).nbytes <= limit


def _smaller(shape: StepShape) -> str:
    """Advice if nothing else helps."""
    if shape.base is None:
        return "use a smaller model (--preset, --layers, --dim, --vocab-size)"
    if shape.config.lora is None:
        return "use a smaller base model, or leave out --full: a LoRA adapter trains fewer weights"
    return "use a smaller base model, or train fewer weights (--lora-rank, --lora-modules, --num-layers)"


def unlimited(shape: StepShape, request: Request) -> StepShape:
    """The shape without a limit."""
    return Search(request).freely(shape)
