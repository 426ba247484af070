"""The fastest way to train within so many bytes: every way that computes the same, measured without packing anything.

In go a Shape as asked for, a limit, and what this machine can do; out comes an Answer. Micro-batches and how they go
through the blocks, recomputation, the chunks of the loss head and the way of clipping are chosen by predicted time.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from packtrain.models.config import Config
from packtrain.place import place
from packtrain.recompute import (
    Chain,
    spaced,
    spacing,
    uniform,
)
from packtrain.train.depth import even, reached, with_blocks
from packtrain.train.forms import CHUNKS, candidates, extremes
from packtrain.train.optim import SGD
from packtrain.train.parts import (
    CALL_NBYTES,
    Part,
    Setting,
    Sizes,
    chain,
    measured,
    passes,
    with_chunk,
)
from packtrain.train.plans import (
    CHUNK,
    EVALUATE,
    MICRO,
    UPDATE,
    Plans,
    Shape,
    blocks_in,
    build,
    counted,
    loop_nbytes,
    names,
    passed_over,
    runs,
)

SAMPLED = 3  # blocks of the larger chain that others are judged by
ROUNDS = 3
SLACK = 0.03  # how far estimates may be off
CLOSE = 0.01  # where they are no farther apart, both are built
WORTH = 0.02  # of the room: less is no reason for a smaller chunk


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


class Search:
    """Ways to train under one setting; remembers what it has measured."""

    def __init__(self, setting: Setting, recompute: str) -> None:
        self.setting, self.recompute = setting, recompute
        self._parts: dict[tuple[str, Shape], dict[int, Part]] = {}
        self._samples: dict[Config, list[Part]] = {}
        self._chains: dict[Shape, Chain] = {}

    # ---- what a shape takes

    def sizes(self, shape: Shape) -> Sizes:
        """By chains of two and three blocks, since everything grows evenly from there on."""
        more = reached(shape) - SAMPLED
        if more <= 0 or not even(shape):
            return self._sizes(shape)
        below = passed_over(shape.config, shape.base)
        two, three = (self._sizes(with_blocks(shape, n)) for n in (SAMPLED - 1, SAMPLED))
        under = self._sizes(with_blocks(shape, SAMPLED, 1)) if below else three
        each = zip(two, three, under, strict=True)
        return Sizes(*(b + more * (b - a) + below * (c - b) for a, b, c in each))

    def _sizes(self, shape: Shape) -> Sizes:
        parts = {name: self._part(name, shape) for name in names(shape)}
        every = [*parts.values(), *self._of_samples(shape)]
        leaves = {name: leaf for part in every for name, leaf in part.leaves.items()}
        inside = parts[blocks_in(shape)]
        return Sizes(
            counted(shape, leaves.values()),
            inside.arena,
            max((part.arena for part in every if part is not inside), default=0),
            sum(part.calls for part in every),
            inside.calls,
            sum(count * parts[name].seconds for name, count in runs(shape).items()),
        )

    def _part(self, name: str, shape: Shape) -> Part:
        key, rates = (name, _what_matters(name, shape)), self.setting.rates
        if key not in self._parts:
            placed = place(build(*key, self.setting.optimizer).graph)
            chunks = {shape.chunk, *CHUNKS}
            found = {chunk: measured(with_chunk(placed, chunk), rates) for chunk in chunks}
            self._parts[key] = found
        return self._parts[key][shape.chunk]

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
            calls = int(self.sizes(shape).inside)
            self._chains[shape] = chain(shape, self.setting, like, calls)
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
        forms = list(candidates(shape, fixed))
        waiting = [(0.0, at, 0) for at in range(len(forms))]
        bounds = self._two_passes_take, self._takes
        while waiting:
            seconds, at, known = heappop(waiting)
            below = math.inf if best is None else best.seconds
            if seconds >= below:
                break
            if known < len(bounds):
                bound = max(seconds, bounds[known](forms[at], limit))
                heappush(waiting, (bound, at, known + 1))
            else:
                best = self._best_chunk(forms[at], limit, below, fixed) or best
        return best

    def _two_passes_take(self, form: Shape, limit: int) -> float:
        """Seconds that two passes take at least, by what one takes; 0 for one pass."""
        if not form.two_passes:
            return 0.0
        one = replace(form, two_passes=False)
        forward = reached(form) * self.chain(one).forward_seconds
        return self.sizes(one).seconds + 2 * forward

    def _takes(self, form: Shape, limit: int) -> float:
        """Seconds that a step of the form takes at least within the limit; no number is infinite where nothing fits."""
        sizes, least = self.sizes(form), replace(form, chunk=min(CHUNKS))
        beside = self.sizes(least).beside  # graphs without gradients have a loss head, too
        if self._nbytes(form, sizes, 0) + beside * (1 - SLACK) > limit:
            return math.inf
        if self.recompute != "auto":
            return sizes.seconds
        over = self.rough(least).nbytes - limit
        return sizes.seconds + repeats(form) * self.chain(form).least_seconds(over)

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
        """The one that takes the least bytes; only those are built that could, by estimate."""
        found: Draft | None = None
        estimates = [one for asked in shapes for one in self._estimates(asked)]
        for nbytes, shape in sorted(estimates, key=lambda one: one[0]):
            if found is not None and nbytes > found.nbytes * (1 + CLOSE):
                break
            draft = self.draft(shape)
            found = draft if found is None or draft.nbytes < found.nbytes else found
        assert found is not None
        return found

    def _estimates(self, shape: Shape) -> list[tuple[int, Shape]]:
        """The shape as asked for, and with the recomputation that takes the least, with their bytes by estimate."""
        if self.recompute != "auto":
            asked = self.draft(self.as_asked(shape))
            return [(asked.nbytes, asked.shape)]
        sizes, smallest = self.sizes(shape), self.chain(shape).smallest
        inside = smallest.nbytes - int(self.chain(shape).call_nbytes * sizes.inside)
        least = self._nbytes(shape, sizes, 0) + max(inside, int(sizes.beside))
        return [(self.rough(shape).nbytes, shape), (least, replace(shape, keep=smallest.choice))]

    def change(self, shape: Shape, limit: int) -> str:
        """The first of a few changes to the run that fits."""
        shape = replace(shape, keep=None)
        for context in (shape.time // 2, shape.time // 4, shape.time // 8):
            if context > 1 and self._could_fit(replace(shape, time=context), limit):
                return f"it would fit with --ctx {context}"
        plain = Search(replace(self.setting, optimizer=SGD()), self.recompute)
        if plain._could_fit(shape, limit):
            return "it would fit with --optimizer sgd, which has no moments"
        return f"no shorter context fits either: {_smaller(shape)}"

    def _could_fit(self, shape: Shape, limit: int) -> bool:
        """Whether the shape fits, by recomputation if that may be chosen; nothing is built that should not."""
        least = min(nbytes for nbytes, _ in self._estimates(shape))
        return least <= limit * (1 + SLACK) and self.least_of([shape]).nbytes <= limit


def _smaller(shape: Shape) -> str:
    """What to change where nothing else helps."""
    if shape.base is None:
        return "take a smaller model (--preset, --layers, --dim, --vocab-size)"
    if shape.config.lora is None:
        return "take a smaller base model, or leave out --full: a LoRA adapter trains fewer weights"
    return "take a smaller base model, or train fewer weights (--lora-rank, --lora-modules, --num-layers)"


def repeats(shape: Shape) -> int:
    """How often a step computes again what its blocks do not keep."""
    return shape.micros if blocks_in(shape) == MICRO else passes(shape)


def _what_matters(name: str, shape: Shape) -> Shape:
    """The shape less what makes no difference to a graph that keeps everything: equal graphs, equal keys."""
    if name == UPDATE:
        return Shape(shape.config, 1, 1, 2, max_norm=shape.max_norm, base=shape.base)
    if name == EVALUATE:
        return Shape(shape.config, shape.rows, shape.time, base=shape.base)
    return replace(shape, keep=None, evaluate=False, chunk=CHUNK)


def as_asked(shape: Shape, recompute: str, setting: Setting) -> Plans:
    """Plans without a limit."""
    return setting.plans(Search(setting, recompute).as_asked(shape))
