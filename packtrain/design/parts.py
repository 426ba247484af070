"""Measures the graphs of a run without packing: bytes, seconds, calls, leaves.

Returns the Sizes of a StepShape, by extrapolation from graphs of a few blocks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from packtrain import cost
from packtrain.backends import CPU, Target
from packtrain.design.depth import reached, with_blocks
from packtrain.design.plans import (
    BOUND_NBYTES,
    STEP,
    Name,
    Plans,
    StepShape,
    blocks_in,
    build,
    lasting,
    leaves,
    make_plans,
    still,
)
from packtrain.generation import placements
from packtrain.ops import linear_cross_entropy as HEAD
from packtrain.optim import Optimizer
from packtrain.packing import lower_bound
from packtrain.place import Placed, Step
from packtrain.planning.lifetimes import columns, storages
from packtrain.recompute import ALIGNMENT, Built, Chain, Choice, Like, aligned
from packtrain.tensor import Spec, Tensor

CALL_NBYTES = 2_000  # of this process for each call of a planned graph, measured
TOGETHER = 32  # ways to run a block measured in one graph


@dataclass(frozen=True, slots=True)
class Setting:
    """What plans depend on in addition to the shape.

    cells     of a KV cache for samples during the run; 0 for none
    baseline  bytes of the arena's space in use before planning: those of the process, or none
    """

    optimizer: Optimizer
    rates: cost.Rates
    baseline: int
    cells: int = 0
    target: Target = CPU

    def samples(self, shape: StepShape) -> dict[Name, Placed]:
        """The graphs that generate samples, by number of tokens per run."""
        if not self.cells:
            return {}
        types = {name: leaf.dtype for name, leaf in leaves(shape)[0].items()}
        found = placements(still(shape.config), self.cells, types=types, target=self.target)
        return dict[Name, Placed](found.items())

    def plans(self, shape: StepShape) -> Plans:
        return make_plans(shape, self.optimizer, self.samples(shape), self.target)

    @property
    def call_nbytes(self) -> int:
        """Bytes of the arena's space for each call of a planned graph."""
        return 0 if self.target.apart else CALL_NBYTES

    def total(self, plans: Plans) -> int:
        """Estimated peak bytes of the arena's space."""
        calls = self.call_nbytes * plans.calls
        return self.baseline + calls + plans.nbytes_in(self.target.space)


@dataclass(frozen=True, slots=True)
class Part:
    """Measurements of a graph: lower bound of its arena, seconds of a run, its calls, its weights and states."""

    arena: int
    seconds: float
    calls: int
    leaves: Mapping[str, Tensor]


class Sizes(NamedTuple):
    """Measurements of a shape that keeps everything: leaves, the arena of the graph with its blocks, calls, step time.

    beside   the largest arena of its other graphs
    calls    of all graphs; `inside`: of the one with its blocks
    """

    leaves: float
    arena: float
    beside: float
    calls: float
    inside: float
    seconds: float


def measured(placed: Placed, setting: Setting) -> Part:
    """Measure a graph without a loss head."""
    return by_chunk(placed, setting, (0,))[0]


def by_chunk(placed: Placed, setting: Setting, chunks: Iterable[int]) -> dict[int, Part]:
    """Measure the graph for several chunk sizes of its loss head."""
    rates, stored = setting.rates, storages(placed, setting.target.space)
    read = {t for step in placed.steps for t in step.reads}
    start, end, size = columns(stored, ALIGNMENT)
    work = [
        at for at, one in enumerate(stored) if (one.op, one.category) == (HEAD.name, "workspace")
    ]
    heads = [step for step in placed.steps if step.op is HEAD]
    others = (step for step in placed.steps if step.op is not HEAD)
    seconds = sum(cost.call_seconds(step, rates, read) for step in others)
    found = dict[int, Part]()
    for chunk in chunks:
        cut = [_with_chunk(step, chunk) for step in heads]
        size[work] = [aligned(spec) for step in cut for spec in step.workspaces]
        arena, _ = lower_bound(start, end, size)
        whole = seconds + sum(cost.call_seconds(step, rates, read) for step in cut)
        found[chunk] = Part(arena, whole, len(placed.graph.calls), lasting(placed))
    return found


def with_chunk(placed: Placed, chunk: int) -> Placed:
    """The graph with another chunk of its loss head, on which no tensor depends: only for measuring."""
    steps = [_with_chunk(s, chunk) if s.op is HEAD else s for s in placed.steps]
    return replace(placed, steps=tuple(steps))


def _with_chunk(step: Step, chunk: int) -> Step:
    return replace(step, call=replace(step.call, attrs=step.call.attrs | {"chunk": chunk}))


def passes(shape: StepShape) -> int:
    """Graphs with the blocks and their gradients."""
    return 2 if shape.two_passes else 1


def chain(
    shape: StepShape,
    setting: Setting,
    like: Chain | None = None,
    calls: int | None = None,
    make: Callable[[str, StepShape, Optimizer], Built] = build,
) -> Chain:
    """The blocks of the training graph that determines memory; `like` has the same blocks, measured.

    calls  of that graph if it keeps everything, if known
    """
    name, whole = blocks_in(shape), reached(shape)

    def graph(count: int, choice: Choice | None) -> Built:
        one = shape if count == whole else with_blocks(shape, count)
        return make(name, replace(one, keep=choice), setting.optimizer)

    waiting = name == STEP and shape.max_norm is not None
    reserved = _gradients(shape) if waiting else (0, 0)
    per_call = (CALL_NBYTES + BOUND_NBYTES) * passes(shape) if setting.call_nbytes else 0
    if calls is None:
        calls = len(graph(whole, None).graph.calls)

    def chunked(placed: Placed) -> Placed:
        return with_chunk(placed, shape.chunk)

    same = None if like is None else Like(like, chunked)
    given = reserved, per_call, calls, same, TOGETHER, setting.target
    return Chain(graph, whole, setting.rates, *given)


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
