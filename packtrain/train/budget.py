"""The promise of `--memory`: the fastest way to train that fits into so many bytes, or a refusal that helps.

In go a Shape as asked for, a limit, and what this machine can do; out come Plans. Micro-batch, recomputation, the
chunks of the loss head and the way of clipping are chosen here, by predicted time; nothing of it changes a result but
for the order of additions, which is said. The search runs in a child, so that its memory is gone afterwards.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from packtrain import cost
from packtrain.errors import DoesNotFit
from packtrain.generate import placements
from packtrain.graph import Graph
from packtrain.memory import private_nbytes, settle
from packtrain.models import transformer
from packtrain.models.config import Config
from packtrain.plan import size_text
from packtrain.recompute import Chain, Choice, aligned, spaced, spacing, uniform
from packtrain.tensor import Tensor
from packtrain.train.optim import Optimizer
from packtrain.train.plans import (
    APPLY,
    BOUND_NBYTES,
    CHUNK,
    MICRO,
    STEP,
    Plans,
    Shape,
    make_plans,
    training_graphs,
)

CHUNKS = (CHUNK, 64, 16)
OWNERS = 10
CALL_NBYTES = 2_000  # of this process for each call of a planned graph, measured
SPARE_NBYTES = 1 << 20  # how much a process differs from the next one that does the same
ROUNDS = 3


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

    def plans(self, shape: Shape) -> Plans:
        found = placements(shape.config, self.cells) if self.cells else {}
        others = {f"generate {size}": placed for size, placed in found.items()}
        return make_plans(shape, self.optimizer, others)

    def total(self, plans: Plans) -> int:
        """What the process will hold at its peak, by estimate."""
        return self.baseline + CALL_NBYTES * plans.calls + plans.nbytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The fastest shape that fits; or the smallest one, which does not, and a change to the run that would."""

    shape: Shape
    fits: bool
    change: str = ""


def planned(
    shape: Shape, recompute: str, setting: Setting, limit: int, fixed: bool = False
) -> tuple[Plans, int]:
    """Plans within the limit, and the bytes of this process with them. Raises DoesNotFit with all that helps.

    fixed  nothing may be chosen that changes the order of additions: a run is resumed
    """
    for _ in range(ROUNDS):
        answer = in_child(shape, recompute, setting, limit, fixed)
        plans = setting.plans(answer.shape)
        settle()
        baseline = private_nbytes()
        over = baseline + plans.nbytes - limit
        if over <= 0:
            return plans, baseline
        if not answer.fits:
            raise DoesNotFit(refusal(plans, answer.change, baseline, limit))
        setting = replace(setting, baseline=setting.baseline + over + SPARE_NBYTES // 4)
    raise DoesNotFit(refusal(plans, "a little more would do", baseline, limit))


def in_child(shape: Shape, recompute: str, setting: Setting, limit: int, fixed: bool) -> Answer:
    """`search` in a short-lived process."""
    request = pickle.dumps((shape, recompute, setting, limit, fixed))
    paths = filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "packtrain.train"],
        input=request,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise RuntimeError(f"the search for a budget failed, exit {done.returncode}: {last[0]}")
    found = pickle.loads(done.stdout)
    assert isinstance(found, Answer)
    return found


def search(
    shape: Shape, recompute: str, setting: Setting, limit: int, fixed: bool = False
) -> Answer:
    """The fastest shape of at most `limit` bytes, the process included; else the smallest."""
    best: tuple[float, Shape] | None = None
    for chunk in (shape.chunk,) if fixed else CHUNKS:
        for candidate in candidates(replace(shape, chunk=chunk), fixed):
            plans = fitted(candidate, recompute, setting, limit)
            if plans is None:
                continue
            seconds = plans.seconds(setting.rates)
            if best is None or seconds < best[0]:
                best = seconds, plans.shape
            free = plans.shape.keep is None and not plans.shape.two_passes
            if recompute != "auto" or free:
                # nothing is done twice: the rest can only be slower
                return Answer(best[1], fits=True)
    if best is not None:
        return Answer(best[1], fits=True)
    least = min(
        (smallest(one, recompute, setting) for one in extremes(shape, fixed)), key=setting.total
    )
    if setting.total(least) <= limit:
        return Answer(least.shape, fits=True)
    return Answer(least.shape, fits=False, change=_change(shape, recompute, setting, limit))


def chain(shape: Shape, setting: Setting) -> Chain:
    """The blocks of the training graph that decides about memory, for recomputation to choose from."""
    name = MICRO if shape.micros > 1 else APPLY if shape.two_passes else STEP

    def build(count: int, choice: Choice | None) -> tuple[Graph, list[Tensor]]:
        config = replace(shape.config, block_count=count)
        return training_graphs(replace(shape, config=config, keep=choice), setting.optimizer)[name]

    waiting = name == STEP and shape.max_norm is not None
    block, head = _gradients(shape.config) if waiting else (0, 0)
    per_call = (CALL_NBYTES + BOUND_NBYTES) * (2 if shape.two_passes else 1)
    return Chain(build, shape.config.block_count, setting.rates, (block, head), per_call)


def _gradients(config: Config) -> tuple[int, int]:
    """Bytes of the gradients of a block, and of all that is in no block."""
    block = head = 0
    for name, leaf in transformer.weights(config).items():
        block += aligned(leaf) if name.startswith("blk.0.") else 0
        head += aligned(leaf) if not name.startswith("blk.") else 0
    return block, head


def as_asked(shape: Shape, recompute: str, setting: Setting) -> Plans:
    """Plans without a limit: recomputation as the setting says; `auto` then has no reason for any."""
    count = shape.config.block_count
    keep = None
    if recompute == "blocks":
        keep = uniform(count, ())
    elif recompute == "sqrt":
        keep = spaced(count, spacing(chain(shape, setting)))
    return setting.plans(replace(shape, keep=keep))


def candidates(shape: Shape, fixed: bool = False) -> Iterator[Shape]:
    """Shapes that compute the same as this one, those that should be fast first; bit for bit the same if `fixed`."""
    sizes = [n for n in range(shape.rows, 0, -1) if shape.rows % n == 0]
    for rows in sizes[:1] if fixed else sizes:
        micros = shape.micros * shape.rows // rows
        one = replace(shape, rows=rows, micros=micros)
        yield one
        if micros == 1 and shape.max_norm is not None:
            yield replace(one, two_passes=True)


def extremes(shape: Shape, fixed: bool = False) -> list[Shape]:
    """Where the least memory can be: all rows at once, or as few as possible; gradients summed, or used up at once."""
    found = list(candidates(shape if fixed else replace(shape, chunk=CHUNKS[-1]), fixed))
    return list(dict.fromkeys([*found[:2], found[-1]]))


def fitted(shape: Shape, recompute: str, setting: Setting, limit: int) -> Plans | None:
    """Plans of this shape within the limit, by recomputation if that may be chosen; None if none was found."""
    plans = as_asked(shape, recompute, setting)
    if setting.total(plans) <= limit:
        return plans
    blocks = chain(shape, setting)
    rest = setting.total(plans) - plans.arena_nbytes - blocks.call_nbytes * _calls(plans)
    if recompute != "auto" or rest + blocks.head_work > limit:
        return None
    room = limit - rest
    for _ in range(ROUNDS):
        found = blocks.within(room)
        if found is None:
            return None
        plans = setting.plans(replace(shape, keep=found.choice))
        over = setting.total(plans) - limit
        if over <= 0:
            return plans
        room -= over
    return None


def _calls(plans: Plans) -> int:
    """Calls of one pass of the training graph."""
    return next(len(plans.placed[n].graph.calls) for n in (MICRO, APPLY, STEP) if n in plans.placed)


def smallest(shape: Shape, recompute: str, setting: Setting) -> Plans:
    """Plans of this shape with the smallest arena."""
    if recompute != "auto":
        return as_asked(shape, recompute, setting)
    least = chain(shape, setting).least().choice
    forms = (setting.plans(replace(shape, keep=keep)) for keep in (None, least))
    return min(forms, key=setting.total)


# ---- refusal


def refusal(smallest: Plans, change: str, baseline: int, limit: int) -> str:
    """One screen: asked, the smallest that would do, who owns its peak, and the cheapest change that fits."""
    total = baseline + smallest.nbytes + SPARE_NBYTES
    lines = [
        f"this does not fit into {size_text(limit)}; the smallest --memory that would do is {mib(total)}",
        f"  {_described(smallest)}",
        *smallest.rows(baseline),
        f"  the peak of its arena, {size_text(smallest.arena_nbytes)}, belongs to",
    ]
    lines += [
        f"    {size_text(b.nbytes):>10}  {b.name}  ({b.op}, {b.category})"
        for b in smallest.largest.peak()[:OWNERS]
    ]
    return "\n".join([*lines, f"  {change}"])


def mib(nbytes: int) -> str:
    """A number of bytes as --memory takes it, rounded up."""
    return f"{-(-nbytes // (1 << 20))}MiB"


def _described(plans: Plans) -> str:
    shape = plans.shape
    choices = "".join(f"; {choice}" for choice in plans.choices)
    return f"that is with {shape.micros} × {shape.rows} × {shape.time} tokens a step{choices}"


def _change(shape: Shape, recompute: str, setting: Setting, limit: int) -> str:
    """The first of a few changes to the run that fits."""
    for context in (shape.time // 2, shape.time // 4, shape.time // 8):
        if context < 2:
            break
        others = extremes(replace(shape, time=context))
        if min(setting.total(smallest(one, recompute, setting)) for one in others) <= limit:
            return f"it would fit with --ctx {context}"
    return "no shorter context fits either: take a smaller model (--preset, --layers, --dim, --vocab-size)"
