"""The same run with fewer blocks, to estimate the whole one from shorter graphs.

Returns for a StepShape one with fewer blocks, in which the same tensors are trained, the same in every block.
"""

from dataclasses import replace
from functools import cache

from packtrain.design.plans import Base, StepShape, passed_over
from packtrain.models import transformer
from packtrain.models.config import Config

Kinds = frozenset[str]  # names of tensors within a block


def reached(shape: StepShape) -> int:
    """Number of blocks that the backward pass reaches."""
    return shape.config.block_count - passed_over(shape.config, shape.base)


def even(shape: StepShape) -> bool:
    """Whether the same tensors are trained in every block that the backward pass reaches."""
    return len(set(_trained(shape.config, shape.base)[-reached(shape) :])) <= 1


def with_blocks(shape: StepShape, count: int, below: int = 0) -> StepShape:
    """The shape with `count` blocks that the backward pass reaches, after `below` that it does not.

    If blocks differ, tensors trained in any of them are trained in all; if no block is trained, everything is.
    """
    config, base, whole = shape.config, shape.base, below + count
    pattern = config.window_pattern
    if isinstance(pattern, tuple) and whole > len(pattern):
        pattern = (pattern * whole)[:whole]
    if isinstance(pattern, int) and 1 < whole < pattern <= config.block_count:
        pattern = (
            False,
            *(True,) * (whole - 1),
        )  # one without a window, which may have a rope of its own
    short = replace(config, block_count=whole, window_pattern=pattern)
    if base is None:
        return replace(shape, config=short)
    lora = config.lora and replace(config.lora, last=count if below else 0)
    short = replace(short, lora=lora)
    return replace(shape, config=short, base=_stand_in(config, base, short, below))


@cache
def _stand_in(config: Config, base: Base, short: Config, below: int) -> Base:
    """The base of the shorter model, with the types and frozen tensors of the longer one, block by block."""
    first, types = passed_over(config, base), dict(base.types)
    trained = frozenset[str]().union(*_trained(config, base))
    found, frozen = [], []
    for name, leaf in transformer.weights(replace(short, lora=None)).items():
        at, kind = _place(name)
        if at is None:
            like, free = name, base.trains(config, leaf)
        else:
            passed = at < below
            beyond = at if passed else min(first + at - below, config.block_count - 1)
            like, free = f"blk.{beyond}.{kind}", not passed and (kind in trained or not trained)
        if like in types:
            found.append((name, types[like]))
        if not free:
            frozen.append(name)
    return replace(base, types=tuple(found), frozen=tuple(frozen), last=0)


@cache
def _trained(config: Config, base: Base | None) -> tuple[Kinds, ...]:
    """The trained tensors of each block."""
    kinds: list[set[str]] = [set() for _ in range(config.block_count)]
    for name, leaf in transformer.weights(config).items():
        at, kind = _place(name)
        if at is not None and (base is None or base.trains(config, leaf)):
            kinds[at].add(kind)
    return tuple(map(frozenset, kinds))


def _place(name: str) -> tuple[int | None, str]:
    """The block number of a tensor (None outside of blocks), and its name within the block."""
    if not name.startswith("blk."):
        return None, name
    _, number, kind = name.split(".", 2)
    return int(number), kind
