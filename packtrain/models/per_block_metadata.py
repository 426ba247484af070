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
    wide, kv = _each(keys, FEED_FORWARD, blocks), _each(keys, KV, blocks)
    far, near = ({n for n, one in zip(kv, pattern, strict=False) if one == kind} for kind in (0, 1))
    if len(far) > 1 or len(near) > 1:
        raise keys.wrong(KV, keys.get(KV), "one number for blocks with a window, one for others")
    found: dict[str, Any] = {
        "head_count_kv": min(far or near),
        "head_count_kv_swa": 0 if far == near or not far else min(near or {0}),
        "feed_forward_length": min(wide),
        "feed_forward_lengths": () if len({*wide}) == 1 else tuple(wide),
        "embedding_length_per_layer": keys.size(PER_LAYER, least=0),
        "own_kv": _own(keys, blocks, pattern),
    }
    if NEAR[0] not in keys.architecture.keys:
        return found
    whole, part = keys.size("attention.key_length"), keys.size(NEAR[0])
    for key in NEAR[1:]:
        if keys.size(key) != part:
            raise keys.wrong(key, keys.get(key), f"{NEAR[0]} {part}")
    last = max((i for i in range(found["own_kv"] or blocks) if not pattern[i]), default=None)
    lacking = last is not None and f"blk.{last}.attn_v.weight" not in gguf.entries
    return {**found, "key_length_swa": 0 if part == whole else part, "keys_are_values": lacking}


def _each(keys: Keys, key: str, blocks: int) -> list[int]:
    """A size of each block, from one number or an array."""
    own = keys.get(key)
    if not isinstance(own, np.ndarray):
        return [keys.size(key)] * blocks
    whole = own.tolist() if own.dtype.kind in "iu" else []
    if len(whole) < blocks or min(whole) <= 0:
        raise keys.wrong(key, own, f"{blocks} whole numbers from 1")
    return whole[:blocks]


def _own(keys: Keys, blocks: int, pattern: Sequence[bool]) -> int:
    """How many first blocks have keys and values of their own; 0: all.

    llama.cpp gives later ones those of the last of them without a window, or of the one before it.
    """
    most = keys.architecture.owning_blocks
    shared = max(blocks - most, 0) if most else keys.size(SHARED_KV, least=0)
    own = blocks - shared
    if shared and (own < 2 or pattern[own - 1] or not pattern[own - 2]):
        right = "0, or leave a block with a window and one without as the last with keys and values"
        if most:
            right = f"such that block {most - 2} has a window and block {most - 1} has none"
            raise keys.wrong(PATTERN, keys.get(PATTERN), right)
        raise keys.wrong(SHARED_KV, shared, right)
    return own if shared else 0


def kind_keys(config: Config) -> dict[str, Value]:
    if not config.traits.uneven:
        return {}
    every = range(config.block_count)
    shared = config.block_count - (config.own_kv or config.block_count)
    found = {
        SHARED_KV: Value("u32", shared),
        PER_LAYER: Value("u32", config.embedding_length_per_layer),
    }
    if config.traits.streams:
        found |= {ALTUP[0]: Value("u32", 0), ALTUP[1]: Value("u32", config.traits.streams)}
    if config.feed_forward_lengths:
        found[FEED_FORWARD] = Value("i32", [config.feed_forward_of(i) for i in every])
    if config.head_count_kv_swa:
        found[KV] = Value("i32", [config.kv_heads_of(i) for i in every])
    if NEAR[0] in config.traits.keys:
        width = config.key_length_swa or config.head_width
        found |= dict.fromkeys(NEAR, Value("u32", width))
        found |= dict.fromkeys(
            ("attention.key_length", "attention.value_length"), Value("u32", config.head_width)
        )
    return found
