"""What the graphs of a run take, measured without packing: bytes, seconds, calls, leaves.

A Shape goes in, out come its Sizes, by graphs of a few blocks, from which those of many follow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from packtrain import cost
from packtrain.generate import placements
from packtrain.packing import lower_bound
from packtrain.place import Placed
from packtrain.plan.lifetimes import columns, storages
from packtrain.recompute import ALIGNMENT, Built, Chain, Choice, Like
from packtrain.tensor import Spec, Tensor
from packtrain.train.depth import reached, with_blocks
from packtrain.train.optim import Optimizer
from packtrain.train.plans import (
    BOUND_NBYTES,
    STEP,
    Plans,
    Shape,
    blocks_in,
    build,
    lasting,
    leaves,
    make_plans,
    still,
)

HEAD = "linear_cross_entropy"
CALL_NBYTES = 2_000  # of this process for each call of a planned graph, measured
TOGETHER = 32  # ways to run a block that are measured in one graph


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
class Part:
    """What a graph takes: bytes of an arena at the lower bound, seconds of a run, its calls, its lasting leaves."""

    arena: int
    seconds: float
    calls: int
    leaves: Mapping[str, Tensor]


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


def measured(placed: Placed, rates: cost.Rates) -> Part:
    arena, _ = lower_bound(*columns(storages(placed), ALIGNMENT))
    return Part(arena, cost.seconds(placed, rates), len(placed.graph.calls), lasting(placed))


def with_chunk(placed: Placed, chunk: int) -> Placed:
    """The graph with so many tokens of its loss head at a time, which no tensor depends on: for measuring alone."""
    steps = [
        replace(step, call=replace(step.call, attrs=step.call.attrs | {"chunk": chunk}))
        if step.op.name == HEAD
        else step
        for step in placed.steps
    ]
    return replace(placed, steps=tuple(steps))


def passes(shape: Shape) -> int:
    """Graphs with the blocks and their gradients."""
    return 2 if shape.two_passes else 1


def chain(
    shape: Shape, setting: Setting, like: Chain | None = None, calls: int | None = None
) -> Chain:
    """The blocks of the training graph that decides about memory; `like` has the same and has measured them.

    calls  of that graph if it keeps everything, where that is known
    """
    name, whole = blocks_in(shape), reached(shape)

    def made(count: int, choice: Choice | None) -> Built:
        one = shape if count == whole else with_blocks(shape, count)
        return build(name, replace(one, keep=choice), setting.optimizer)

    waiting = name == STEP and shape.max_norm is not None
    reserved = _gradients(shape) if waiting else (0, 0)
    per_call = (CALL_NBYTES + BOUND_NBYTES) * passes(shape)
    if calls is None:
        calls = len(made(whole, None).graph.calls)

    def chunked(placed: Placed) -> Placed:
        return with_chunk(placed, shape.chunk)

    same = None if like is None else Like(like, chunked)
    return Chain(made, whole, setting.rates, reserved, per_call, calls, same, TOGETHER)


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
