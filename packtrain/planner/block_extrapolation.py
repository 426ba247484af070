"""Shortens a run's model to a few blocks: graphs of two and three blocks tell what each further block costs.

with_num_blocks returns a StepShape with fewer blocks, in which every block trains the tensors trained in the long one.
"""

from dataclasses import replace
from functools import cache

from packtrain.models import transformer
from packtrain.models.config import Config
from packtrain.planner.step_shape import BaseModel, StepShape
from packtrain.planner.training_plans import num_unreached

NUM_KV_SOURCES = 2  # blocks whose keys and values others share: one with a window and one without
TensorKinds = frozenset[str]  # names of tensors within a block


def num_reached_blocks(shape: StepShape) -> int:
    """Return how many blocks the backward pass runs through: all from the lowest trained tensor on."""
    return shape.config.block_count - num_unreached(shape.config, shape.base)


def blocks_match(shape: StepShape) -> bool:
    """Whether the blocks that the backward pass reaches are alike, so that few measured blocks tell the cost of all.
    Tensors of the same names and shapes are trained in all. The first block of a mixture of experts may be dense, as a
    shorter model has such a block, too."""
    config, first = shape.config, num_unreached(shape.config, shape.base)
    num_dense = _dense(config, first)
    if config.differing or (config.interleave_moe_layer_step > 1 and num_reached_blocks(shape) > 1):
        return False
    return num_dense <= 1 and len(set(_trained(shape.config, shape.base)[first + num_dense :])) <= 1


def with_num_blocks(shape: StepShape, count: int, below: int = 0) -> StepShape:
    """Return the shape with a model of `below + count` blocks, of which the backward pass reaches the last `count`. If
    blocks differ, tensors trained in any of them are trained in all; if no block is trained, everything is. Of a
    mixture's dense blocks at most one is reached, and a single block has experts; where blocks with experts alternate
    with others, all have experts. If reached blocks only share keys and values, two unreached blocks compute them."""
    config, base = shape.config, shape.base
    first = 0 if base is None else num_unreached(config, base)
    shares_kv = 0 < config.own_kv <= first
    below = max(below, NUM_KV_SOURCES) if shares_kv else below
    num_blocks = below + count
    dense = min(config.leading_dense_block_count, below) + min(_dense(config, first), count - 1, 1)
    short = replace(
        config, block_count=num_blocks, window_pattern=_windows(config, num_blocks), leading_dense_block_count=dense,
        interleave_moe_layer_step=1, own_kv=NUM_KV_SOURCES * shares_kv,
    )  # fmt: skip
    if config.interleave_moe_layer_step > 1 and not _mixture_blocks(config, first):
        short = replace(short, expert_count=0)
    if config.attending:
        source_blocks = _source_blocks(config, short, first, below)
        short = replace(short, attending=tuple(config.attending[i] for i in source_blocks))
    if config.differing:
        source_blocks = _source_blocks(config, short, first, below)
        ffn_lengths = tuple(map(config.feed_forward_of, source_blocks))
        windowed = tuple(map(config.has_window, source_blocks))
        short = replace(short, feed_forward_lengths=ffn_lengths, window_pattern=windowed)
    if base is None:
        return replace(shape, config=short)
    lora = config.lora and replace(config.lora, last=count if below else 0)
    short = replace(short, lora=lora)
    return replace(shape, config=short, base=_short_base(config, base, short, below))


def _windows(config: Config, count: int) -> int | tuple[bool, ...]:
    """Return `Config.window_pattern`, which says where attention has a sliding window, for `count` blocks."""
    pattern = config.window_pattern
    if isinstance(pattern, tuple) and count > len(pattern):
        return (pattern * count)[:count]
    if isinstance(pattern, int) and 1 < count < pattern <= config.block_count:
        return False, *(True,) * (count - 1)  # a block without a window may have another rope
    return pattern


@cache
def _short_base(config: Config, base: BaseModel, short: Config, below: int) -> BaseModel:
    """Return the base of the shorter model `short`, whose first `below` blocks the backward pass does not reach; its
    blocks have the types of the blocks they stand for."""
    first, types = num_unreached(config, base), dict(base.types)
    trained_kinds = frozenset[str]().union(*_trained(config, base))
    source_blocks, matching_types, frozen = _source_blocks(config, short, first, below), [], []
    short_leaves = transformer.weights(replace(short, lora=None))
    trained_names = base.trained_names(config, short_leaves)
    for name in short_leaves:
        at, tensor_kind = _block_and_kind(name)
        if at is None:
            source_name, is_trained = name, name in trained_names
        else:
            source_name = f"blk.{source_blocks[at]}.{tensor_kind}"
            is_trained = at >= below and (tensor_kind in trained_kinds or not trained_kinds)
        if source_name in types:
            matching_types.append((name, types[source_name]))
        if not is_trained:
            frozen.append(name)
    return replace(base, types=tuple(matching_types), frozen=tuple(frozen), num_trained_blocks=0)


def _source_blocks(config: Config, short: Config, first: int, below: int) -> list[int]:
    """Return, by block of `short`, the block of the longer model that it stands for; the backward pass reaches blocks
    from `below` on in `short`, from `first` on in the longer model."""
    num_dropped = _dense(config, first) - _dense(short, below)
    dense, last = short.leading_dense_block_count, config.block_count - 1
    if config.interleave_moe_layer_step > 1 and (mixture_blocks := _mixture_blocks(config, first)):
        return [*range(below), *(mixture_blocks * short.block_count)[: short.block_count - below]]
    lower = config.own_kv - NUM_KV_SOURCES if short.own_kv else 0
    return [
        lower + i if i < below else min(first + i - below + (0 if i < dense else num_dropped), last)
        for i in range(short.block_count)
    ]


def _mixture_blocks(config: Config, first_block: int) -> list[int]:
    return [i for i in range(first_block, config.block_count) if config.has_experts(i)]


def _dense(config: Config, first_block: int) -> int:
    """Return how many blocks from `first_block` on have a dense feed-forward network in a mixture-of-experts model."""
    return max(0, config.leading_dense_block_count - first_block)


@cache
def _trained(config: Config, base: BaseModel | None) -> tuple[TensorKinds, ...]:
    """Return, by block, the names of its trained tensors without `blk.N.`, such as `attn_q.weight`."""
    block_kinds: list[set[str]] = [set() for _ in range(config.block_count)]
    leaves = transformer.weights(config)
    for name in leaves if base is None else base.trained_names(config, leaves):
        block_index, tensor_kind = _block_and_kind(name)
        if block_index is not None:
            block_kinds[block_index].add(tensor_kind)
    return tuple(map(frozenset, block_kinds))


def _block_and_kind(name: str) -> tuple[int | None, str]:
    """Split `blk.3.attn_q.weight` into (3, "attn_q.weight"); the number is None for tensors outside of blocks."""
    if not name.startswith("blk."):
        return None, name
    _, block_text, tensor_kind = name.split(".", 2)
    return int(block_text), tensor_kind
