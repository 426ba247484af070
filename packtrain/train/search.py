"""The fastest way to train within so many bytes: every way that computes the same, measured without packing anything.

In go a Shape as asked for, a limit, and what this machine can do; out comes an Answer. Micro-batches and how they go
through the blocks, recomputation, the chunks of the loss head and the way of clipping are chosen by predicted time.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from packtrain import cost
from packtrain.generate import placements
from packtrain.models.config import Config
from packtrain.packing import lower_bound
from packtrain.place import Placed, place
from packtrain.plan.lifetimes import columns, storages
from packtrain.recompute import (
    ALIGNMENT,
    Built,
    Chain,
    Choice,
    spaced,
    spacing,
    uniform,
)
from packtrain.tensor import Spec
from packtrain.train.depth import even, reached, with_blocks
from packtrain.train.forms import CHUNKS, candidates, extremes
from packtrain.train.optim import SGD, Optimizer
from packtrain.train.plans import (
    BOUND_NBYTES,
    CHUNK,
    EVALUATE,
    MICRO,
    STEP,
    UPDATE,
    Plans,
    Shape,
    blocks_in,
    build,
    counted,
    leaves,
    loop_nbytes,
    make_plans,
    names,
    passed_over,
    runs,
    still,
)

CALL_NBYTES = 2_000  # of this process for each call of a planned graph, measured
# most micro-batches of a graph, and blocks counted for each: building it takes time
PARTS, BLOCKS = 8, 256
SAMPLED = 4  # blocks of the larger chain that others are judged by
ROUNDS = 3
TOGETHER = 32  # ways to run a block that are measured in one graph
WORTH = 0.02  # of the room: less is no reason for a smaller chunk


@dataclass(frozen=True, slots=True)
class Setting:
    """What plans are made for beside the shape.

    cells     of a cache for samples during the run; 0 for none
    baseline  bytes of the process before anything is planned
    """

    optimizer: Optimizer
    rates: cost.Rates
    baseline: int
    cells: int = 0

    def samples(self, shape: Shape) -> dict[str, Placed]:
        """The graphs that write samples."""
        if not self.cells:
            return {}
        types = {name: leaf.dtype for name, leaf in leaves(shape)[0].items()}
        found = placements(still(shape.config), self.cells, types=types)
        return {f"generate {size}": placed for size, placed in found.items()}

    def plans(self, shape: Shape) -> Plans:
        return make_plans(shape, self.optimizer, self.samples(shape))

    def total(self, plans: Plans) -> int:
        """What the process will hold at its peak, by estimate."""
        return self.baseline + CALL_NBYTES * plans.calls + plans.nbytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The fastest shape that fits; or the smallest one, which does not, and a change to the run that would."""

    shape: Shape
    fits: bool
    change: str = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """A shape with the bytes of the process at its peak and the seconds of a step, as far as known before packing."""

    shape: Shape
    nbytes: int
    seconds: float


def search(
    shape: Shape, recompute: str, setting: Setting, limit: int, fixed: bool = False
) -> Answer:
    """The fastest shape of at most `limit` bytes, the process included; else the smallest.

    fixed  nothing may be chosen that changes the order of additions: a run is resumed
    """
    looking = Search(setting, recompute)
    best = looking.fastest(shape, limit, fixed)
    if best is not None:
        return Answer(best.shape, fits=True)
    least = looking.least_of(extremes(shape, fixed))
    if least.nbytes <= limit:
        return Answer(least.shape, fits=True)
    return Answer(least.shape, fits=False, change=looking.change(least.shape, limit))


def smallest(shape: Shape, recompute: str, setting: Setting, fixed: bool = False) -> Shape:
    """The shape that takes the least bytes."""
    return Search(setting, recompute).least_of(extremes(shape, fixed)).shape


@dataclass(frozen=True, slots=True)
class Part:
    """What a graph takes: bytes of an arena at the lower bound, seconds of a run, its calls, its leaves by name."""

    arena: int
    seconds: float
    calls: int
    leaves: Mapping[str, int]


def measured(placed: Placed, rates: cost.Rates) -> Part:
    arena, _ = lower_bound(*columns(storages(placed), ALIGNMENT))
    kept = (leaf for leaf in placed.graph.leaves if leaf.kind in ("weight", "state"))
    leaves = {leaf.label: leaf.spec.nbytes for leaf in kept}
    return Part(arena, cost.seconds(placed, rates), len(placed.graph.calls), leaves)


class Sizes(NamedTuple):
    """What a shape takes with everything kept: leaves, the arena of the graph with its blocks, calls, time of a step.

    beside   the largest arena of its other graphs
    calls    of all graphs; `inside`: of the one with its blocks
    """

    leaves: float
    arena: float
    beside: float
    calls: float
    inside: float
    seconds: float


class Search:
    """Ways to train under one setting; remembers what it has measured."""

    def __init__(self, setting: Setting, recompute: str) -> None:
        self.setting, self.recompute = setting, recompute
        self._parts: dict[tuple[str, Shape], Part] = {}
        self._samples: dict[Config, list[Part]] = {}
        self._chains: dict[Shape, Chain] = {}

    # ---- what a shape takes

    def sizes(self, shape: Shape) -> Sizes:
        """By chains of three and four blocks, since everything grows evenly from there on."""
        more = reached(shape) - SAMPLED
        if more <= 0 or not even(shape):
            return self._sizes(shape)
        below = passed_over(shape.config, shape.base)
        three, four = (self._sizes(with_blocks(shape, n)) for n in (SAMPLED - 1, SAMPLED))
        under = self._sizes(with_blocks(shape, SAMPLED, 1)) if below else four
        each = zip(three, four, under, strict=True)
        return Sizes(*(b + more * (b - a) + below * (c - b) for a, b, c in each))

    def _sizes(self, shape: Shape) -> Sizes:
        parts = {name: self._part(name, shape) for name in names(shape)}
        every = [*parts.values(), *self._of_samples(shape)]
        every_leaf = {name: n for part in every for name, n in part.leaves.items()}
        inside = parts[blocks_in(shape)]
        return Sizes(
            counted(shape, every_leaf),
            inside.arena,
            max((part.arena for part in every if part is not inside), default=0),
            sum(part.calls for part in every),
            inside.calls,
            sum(count * parts[name].seconds for name, count in runs(shape).items()),
        )

    def _part(self, name: str, shape: Shape) -> Part:
        key = name, _what_matters(name, shape)
        if key not in self._parts:
            graph = build(*key, self.setting.optimizer).graph
            self._parts[key] = measured(place(graph), self.setting.rates)
        return self._parts[key]

    def _of_samples(self, shape: Shape) -> list[Part]:
        config = shape.config
        if config not in self._samples:
            found = self.setting.samples(shape).values()
            self._samples[config] = [measured(placed, self.setting.rates) for placed in found]
        return self._samples[config]

    def chain(self, shape: Shape) -> Chain:
        """The blocks of the training graph that decides about memory, for recomputation to choose from."""
        shape = replace(shape, keep=None)
        if shape not in self._chains:
            first = replace(shape, chunk=CHUNK)
            like = None if first == shape else self.chain(first)
            self._chains[shape] = chain(shape, self.setting, like)
        return self._chains[shape]

    def rough(self, shape: Shape) -> Draft:
        """The shape with everything kept, without building it."""
        sizes = self.sizes(shape)
        arena = max(sizes.arena, sizes.beside)
        return Draft(shape, self._nbytes(shape, sizes, 0) + int(arena), sizes.seconds)

    def draft(self, shape: Shape) -> Draft:
        """The shape with its recomputation, its blocks built."""
        sizes, found = self.sizes(shape), self.chain(shape).plan(shape.keep)
        seconds = sizes.seconds + repeats(shape) * found.seconds
        arena = max(found.arena, int(sizes.beside))
        again = passes(shape) * found.calls
        return Draft(shape, self._nbytes(shape, sizes, again) + arena, seconds)

    def _nbytes(self, shape: Shape, sizes: Sizes, again: int) -> int:
        """All but the arena, with so many calls again."""
        calls = int(sizes.calls) + again
        kept = self.setting.baseline + int(sizes.leaves)
        return kept + CALL_NBYTES * calls + loop_nbytes(shape, calls)

    # ---- within a limit

    def fastest(self, shape: Shape, limit: int, fixed: bool) -> Draft | None:
        """The fastest shape of at most so many bytes; None if none was found."""
        best = self.fitted(shape, limit, math.inf)
        if best is not None and best.shape == shape:
            return best
        floors = {one: self.sizes(one).seconds for one in candidates(shape, fixed)}
        for form in sorted(floors, key=floors.__getitem__):
            below = math.inf if best is None else best.seconds
            if floors[form] >= below:
                break
            best = self._best_chunk(form, limit, below, fixed) or best
        return best

    def _best_chunk(self, form: Shape, limit: int, below: float, fixed: bool) -> Draft | None:
        """The fastest of the form's chunks, if it takes less than `below` seconds."""
        best, head = None, math.inf
        for chunk in (form.chunk,) if fixed else CHUNKS:
            one = replace(form, chunk=chunk)
            work = self.chain(one).head_work
            if work > head - WORTH * (limit - self.setting.baseline):
                continue
            head, found = work, self.fitted(one, limit, below)
            if found is not None and found.seconds < below:
                best, below = found, found.seconds
            if found is not None and found.shape.keep is None:
                break
        return best

    def fitted(self, shape: Shape, limit: int, below: float) -> Draft | None:
        """The shape within the limit, by recomputation if that may be chosen; None if nothing was found.

        below  seconds of a step that are known to be possible
        """
        whole = self.rough(shape)
        if self.recompute != "auto" or whole.nbytes <= limit * (1 + WORTH):
            whole = self.draft(self.as_asked(shape))
            if whole.nbytes <= limit:
                return whole
        if self.recompute != "auto":
            return None
        room = self._room(shape, limit)
        for _ in range(ROUNDS):
            found = self.chain(shape).within(room, (below - whole.seconds) / repeats(shape))
            if found is None:
                return None
            draft = self.draft(replace(shape, keep=found.choice))
            if draft.nbytes <= limit:
                return draft
            room -= draft.nbytes - limit
        return None

    def _room(self, shape: Shape, limit: int) -> int:
        """What the limit leaves for the arena of the graph with the blocks and for its calls; 0 for another's arena."""
        sizes = self.sizes(shape)
        room = limit - self._nbytes(shape, sizes, 0)
        if room < sizes.beside:
            return 0
        return room + int(self.chain(shape).call_nbytes * sizes.inside)

    def as_asked(self, shape: Shape) -> Shape:
        """Recomputation as the setting says; `auto` without a limit has no reason for any."""
        count = reached(shape)
        keep = None
        if self.recompute == "blocks":
            keep = uniform(count, ())
        elif self.recompute == "sqrt":
            keep = spaced(count, spacing(self.chain(shape)))
        return replace(shape, keep=keep)

    # ---- the least

    def least_of(self, shapes: Iterable[Shape]) -> Draft:
        return min(map(self.least, shapes), key=lambda draft: draft.nbytes)

    def least(self, shape: Shape) -> Draft:
        """The shape with the recomputation that takes the least bytes."""
        asked = self.draft(self.as_asked(shape))
        if self.recompute != "auto":
            return asked
        least = self.draft(replace(shape, keep=self.chain(shape).smallest.choice))
        return min(asked, least, key=lambda draft: draft.nbytes)

    def change(self, shape: Shape, limit: int) -> str:
        """The first of a few changes to the run that fits."""
        shape = replace(shape, keep=None)
        for context in (shape.time // 2, shape.time // 4, shape.time // 8):
            if context > 1 and self.least(replace(shape, time=context)).nbytes <= limit:
                return f"it would fit with --ctx {context}"
        plain = Search(replace(self.setting, optimizer=SGD()), self.recompute)
        if plain.least(shape).nbytes <= limit:
            return "it would fit with --optimizer sgd, which has no moments"
        return "no shorter context fits either: take a smaller model (--preset, --layers, --dim, --vocab-size)"


def repeats(shape: Shape) -> int:
    """How often a step computes again what its blocks do not keep."""
    return shape.micros if blocks_in(shape) == MICRO else passes(shape)


def passes(shape: Shape) -> int:
    """Graphs with the blocks and their gradients."""
    return 2 if shape.two_passes else 1


def chain(shape: Shape, setting: Setting, like: Chain | None = None) -> Chain:
    """The blocks of the training graph that decides about memory; `like` has the same and has measured them."""
    name, whole = blocks_in(shape), reached(shape)

    def made(count: int, choice: Choice | None) -> Built:
        one = shape if count == whole else with_blocks(shape, count)
        return build(name, replace(one, keep=choice), setting.optimizer)

    waiting = name == STEP and shape.max_norm is not None
    reserved = _gradients(shape) if waiting else (0, 0)
    per_call = (CALL_NBYTES + BOUND_NBYTES) * passes(shape)
    return Chain(made, whole, setting.rates, reserved, per_call, like, TOGETHER)


def _gradients(shape: Shape) -> tuple[int, int]:
    """Bytes of the gradients of a block and of all that is in no block."""
    block = head = 0
    for leaf in leaves(with_blocks(shape, 1))[1]:
        nbytes = -(-Spec(leaf.shape).nbytes // ALIGNMENT) * ALIGNMENT  # f32, whatever the leaf is
        if leaf.label.startswith("blk."):
            block += nbytes
        else:
            head += nbytes
    return block, head


def _what_matters(name: str, shape: Shape) -> Shape:
    """The shape less what makes no difference to a graph that keeps everything: equal graphs, equal keys."""
    if name == UPDATE:
        return Shape(shape.config, 1, 1, 2, max_norm=shape.max_norm, base=shape.base)
    if name == EVALUATE:
        return Shape(shape.config, shape.rows, shape.time, chunk=shape.chunk, base=shape.base)
    return replace(shape, keep=None, evaluate=False)


def as_asked(shape: Shape, recompute: str, setting: Setting) -> Plans:
    """Plans without a limit."""
    return setting.plans(Search(setting, recompute).as_asked(shape))
