"""The metadata of sizes by which blocks differ: GGUF keys to the fields of a Config and back.

For architectures whose later blocks may share keys and values: head_count_kv and feed_forward_length may be arrays.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packtrain.gguf import GGUF, Value
from packtrain.models.config import Config
from packtrain.models.gguf_keys import Keys

SHARED_KV, PER_LAYER = "attention.shared_kv_layers", "embedding_length_per_layer_input"
PATTERN = "attention.sliding_window_pattern"
FEED_FORWARD, KV = "feed_forward_length", "attention.head_count_kv"
ALTUP = "altup.active_idx", "altup.num_inputs"
NEAR = "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"


def kinds(keys: Keys, gguf: GGUF, blocks: int, windows: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those fields of a Config; `windows` are those of its windows."""
    if not keys.architecture.uneven:
        return {}
    pattern, every = windows["window_pattern"], keys.architecture.keys[PATTERN]
    if not isinstance(pattern, tuple) and every:
        pattern = tuple(not pattern or i % pattern < pattern - 1 for i in range(blocks))
    if not isinstance(pattern, tuple):
        raise keys.wrong(PATTERN, pattern, f"{blocks} times a truth")
    ffn_widths, kv = _each(keys, FEED_FORWARD, blocks), _each(keys, KV, blocks)
    full_heads, window_heads = (
        {n for n, count in zip(kv, pattern, strict=False) if count == kind} for kind in (0, 1)
    )
    if len(full_heads) > 1 or len(window_heads) > 1:
        raise keys.wrong(KV, keys.get(KV), "one number for blocks with a window, one for others")
    fields: dict[str, Any] = {
        "head_count_kv": min(full_heads or window_heads),
        "head_count_kv_swa": 0
        if full_heads == window_heads or not full_heads
        else min(window_heads or {0}),
        "feed_forward_length": min(ffn_widths),
        "feed_forward_lengths": () if len({*ffn_widths}) == 1 else tuple(ffn_widths),
        "embedding_length_per_layer": keys.size(PER_LAYER, least=0),
        "own_kv": _own(keys, blocks, pattern),
    }
    if NEAR[0] not in keys.architecture.keys:
        return fields
    full_width, part = keys.size("attention.key_length"), keys.size(NEAR[0])
    for key in NEAR[1:]:
        if keys.size(key) != part:
            raise keys.wrong(key, keys.get(key), f"{NEAR[0]} {part}")
    last = max((i for i in range(fields["own_kv"] or blocks) if not pattern[i]), default=None)
    keys_are_values = last is not None and f"blk.{last}.attn_v.weight" not in gguf.entries
    return {
        **fields,
        "key_length_swa": 0 if part == full_width else part,
        "keys_are_values": keys_are_values,
    }


def _each(keys: Keys, key: str, blocks: int) -> list[int]:
    """A size of each block, from one number or an array."""
    value = keys.get(key)
    if not isinstance(value, np.ndarray):
        return [keys.size(key)] * blocks
    sizes = value.tolist() if value.dtype.kind in "iu" else []
    if len(sizes) < blocks or min(sizes) <= 0:
        raise keys.wrong(key, value, f"{blocks} whole numbers from 1")
    return sizes[:blocks]


def _own(keys: Keys, blocks: int, pattern: Sequence[bool]) -> int:
    """How many first blocks have keys and values of their own; 0: all.

    llama.cpp gives later ones those of the last of them without a window, or of the one before it.
    """
    max_owning = keys.architecture.owning_blocks
    shared = max(blocks - max_owning, 0) if max_owning else keys.size(SHARED_KV, least=0)
    num_owning = blocks - shared
    if shared and (num_owning < 2 or pattern[num_owning - 1] or not pattern[num_owning - 2]):
        right = "0, or leave a block with a window and one without as the last with keys and values"
        if max_owning:
            right = (
                f"such that block {max_owning - 2} has a window and block {max_owning - 1} has none"
            )
            raise keys.wrong(PATTERN, keys.get(PATTERN), right)
        raise keys.wrong(SHARED_KV, shared, right)
    return num_owning if shared else 0


def kind_keys(config: Config) -> dict[str, Value]:
    if not config.traits.uneven:
        return {}
    every = range(config.block_count)
    shared = config.block_count - (config.own_kv or config.block_count)
    values = {
        SHARED_KV: Value("u32", shared),
        PER_LAYER: Value("u32", config.embedding_length_per_layer),
    }
    if config.traits.streams:
        values |= {ALTUP[0]: Value("u32", 0), ALTUP[1]: Value("u32", config.traits.streams)}
    if config.feed_forward_lengths:
        values[FEED_FORWARD] = Value("i32", [config.feed_forward_of(i) for i in every])
    if config.head_count_kv_swa:
        values[KV] = Value("i32", [config.kv_heads_of(i) for i in every])
    if NEAR[0] in config.traits.keys:
        width = config.key_length_swa or config.head_width
        values |= dict.fromkeys(NEAR, Value("u32", width))
        values |= dict.fromkeys(
            ("attention.key_length", "attention.value_length"), Value("u32", config.head_width)
        )
    return values
