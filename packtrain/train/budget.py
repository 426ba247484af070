"""The promise of `--memory`: the fastest way to train that fits into so many bytes, or a refusal that helps.

In go a Shape as asked for, a limit, and what this machine can do; out come Plans. Micro-batch, recomputation, the
chunks of the loss head and the way of clipping are chosen here, by predicted time; nothing of it changes a result but
for the order of additions, which is said.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from packtrain import cost
from packtrain.errors import DoesNotFit
from packtrain.graph import Graph
from packtrain.models import llama
from packtrain.place import Placed
from packtrain.plan import size_text
from packtrain.recompute import Chain, Choice, aligned, spaced, spacing, uniform
from packtrain.tensor import Tensor
from packtrain.train.optim import AdamW
from packtrain.train.plans import APPLY, MICRO, STEP, Plans, Shape, make_plans, training_graphs

CHUNKS = (256, 64, 16)
OWNERS = 10


@dataclass(frozen=True, slots=True)
class Setting:
    """What plans are made for beside the shape: the optimizer, graphs on the same leaves, and this machine."""

    optimizer: AdamW
    others: Mapping[str, Placed]
    rates: cost.Rates
    baseline: int

    def total(self, plans: Plans) -> int:
        """What the process will hold at its peak."""
        return self.baseline + plans.nbytes

    def plans(self, shape: Shape) -> Plans:
        return make_plans(shape, self.optimizer, self.others)


def chain(shape: Shape, setting: Setting) -> Chain:
    """The blocks of the training graph that decides about memory, for recomputation to choose from."""
    name = MICRO if shape.micros > 1 else APPLY if shape.two_passes else STEP

    def build(count: int, choice: Choice | None) -> tuple[Graph, list[Tensor]]:
        config = replace(shape.config, block_count=count)
        return training_graphs(replace(shape, config=config, keep=choice), setting.optimizer)[name]

    waiting = name == STEP and shape.max_norm is not None
    block, head = _gradients(shape.config) if waiting else (0, 0)
    return Chain(build, shape.config.block_count, setting.rates, (block, head))


def _gradients(config: llama.Config) -> tuple[int, int]:
    """Bytes of the gradients of a block, and of all that is in no block."""
    block = head = 0
    for name, leaf in llama.weights(config).items():
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


def within(shape: Shape, recompute: str, setting: Setting, limit: int) -> Plans:
    """The fastest plans of at most `limit` bytes, the process included. Raises DoesNotFit with all that helps."""
    for chunk in CHUNKS:
        best: tuple[float, Plans] | None = None
        for candidate in candidates(replace(shape, chunk=chunk)):
            plans = fitted(candidate, recompute, setting, limit)
            if plans is None:
                continue
            seconds = plans.seconds(setting.rates)
            if best is None or seconds < best[0]:
                best = seconds, plans
            if recompute != "auto" or plans.shape.keep is None:
                break  # nothing more is computed again than was asked for: what follows can only be slower
        if best is not None:
            return best[1]
    least = min((smallest(one, recompute, setting) for one in extremes(shape)), key=setting.total)
    if setting.total(least) <= limit:
        return least
    raise DoesNotFit(refusal(shape, least, setting, limit))


def candidates(shape: Shape) -> Iterator[Shape]:
    """Shapes that compute the same as this one, those that should be fast first."""
    rows, micros = shape.rows, shape.micros
    while True:
        one = replace(shape, rows=rows, micros=micros)
        yield one
        if micros == 1 and shape.max_norm is not None:
            yield replace(one, two_passes=True)
        if rows % 2:
            return
        rows, micros = rows // 2, micros * 2


def extremes(shape: Shape) -> list[Shape]:
    """Where the least memory can be: all rows at once, or as few as possible; gradients summed, or used up at once."""
    found = list(candidates(replace(shape, chunk=CHUNKS[-1])))
    return list(dict.fromkeys([*found[:2], found[-1]]))


def fitted(shape: Shape, recompute: str, setting: Setting, limit: int) -> Plans | None:
    """Plans of this shape within the limit, by recomputation if that may be chosen; None if none was found."""
    plans = as_asked(shape, recompute, setting)
    if setting.total(plans) <= limit:
        return plans
    rest = setting.total(plans) - plans.arena_nbytes
    if recompute != "auto" or rest >= limit:
        return None
    blocks = chain(shape, setting)
    found = blocks.within(limit - rest) if rest + blocks.head_work < limit else None
    if found is None:
        return None
    plans = setting.plans(replace(shape, keep=found.choice))
    return plans if setting.total(plans) <= limit else None


def smallest(shape: Shape, recompute: str, setting: Setting) -> Plans:
    """Plans of this shape with the smallest arena."""
    if recompute != "auto":
        return as_asked(shape, recompute, setting)
    return setting.plans(replace(shape, keep=chain(shape, setting).least().choice))


# ---- refusal


def refusal(shape: Shape, smallest: Plans, setting: Setting, limit: int) -> str:
    """One screen: asked, the smallest that would do, who owns its peak, and the cheapest change that fits."""
    total = setting.total(smallest)
    lines = [
        f"this does not fit into {size_text(limit)}; the smallest --memory that would do is {mib(total)}",
        f"  {_described(smallest)}",
        *smallest.rows(setting.baseline),
        f"  the peak of its arena, {size_text(smallest.arena_nbytes)}, belongs to",
    ]
    lines += [
        f"    {size_text(b.nbytes):>10}  {b.name}  ({b.op}, {b.category})"
        for b in smallest.largest.peak()[:OWNERS]
    ]
    return "\n".join([*lines, f"  {_change(shape, setting, limit)}"])


def mib(nbytes: int) -> str:
    """A number of bytes as --memory takes it, rounded up."""
    return f"{-(-nbytes // (1 << 20))}MiB"


def _described(plans: Plans) -> str:
    shape = plans.shape
    choices = "".join(f"; {choice}" for choice in plans.choices)
    return f"that is with {shape.micros} × {shape.rows} × {shape.time} tokens a step{choices}"


def _change(shape: Shape, setting: Setting, limit: int) -> str:
    """The first of a few changes to the run that fits."""
    for context in (shape.time // 2, shape.time // 4, shape.time // 8):
        if context < 2:
            break
        others = extremes(replace(shape, time=context))
        if min(setting.total(smallest(one, "auto", setting)) for one in others) <= limit:
            return f"it would fit with --ctx {context}"
    return "no shorter context fits either: take a smaller model (--preset, --layers, --dim, --vocab-size)"
