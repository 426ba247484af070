"""The metadata of sizes by which blocks differ: from GGUF keys to fields of a Config and back.

For architectures whose later blocks may share keys and values: head_count_kv and feed_forward_length may be arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packtrain.gguf import GGUF, MetadataValue
from packtrain.models.arch.architecture import HEAD_WIDTHS
from packtrain.models.config import Config
from packtrain.models.gguf_keys import MetadataReader

SHARED_KV, PER_LAYER = "attention.shared_kv_layers", "embedding_length_per_layer_input"
WINDOW_PATTERN = "attention.sliding_window_pattern"
FEED_FORWARD, KV = "feed_forward_length", "attention.head_count_kv"
ALTUP_KEYS = "altup.active_idx", "altup.num_inputs"
WINDOW_WIDTHS = "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"


def kinds(
    keys: MetadataReader, gguf: GGUF, blocks: int, window_fields: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Read Config fields of sizes by which blocks differ, {} if none may; `window_fields`: Config fields of windows."""
    if not keys.architecture.has_uneven_blocks:
        return {}
    pattern, every = window_fields["window_pattern"], keys.architecture.key_defaults[WINDOW_PATTERN]
    if not isinstance(pattern, tuple) and every:
        pattern = tuple(not pattern or i % pattern < pattern - 1 for i in range(blocks))
    if not isinstance(pattern, tuple):
        raise keys.wrong(WINDOW_PATTERN, pattern, f"{blocks} times a truth")
    ffn_widths, kv = _each(keys, FEED_FORWARD, blocks), _each(keys, KV, blocks)
    full_heads, window_heads = (
        {n for n, count in zip(kv, pattern, strict=False) if count == kind} for kind in (0, 1)
    )
    if len(full_heads) > 1 or len(window_heads) > 1:
        raise keys.wrong(KV, keys.get(KV), "one number for blocks with a window, one for others")
    has_two_counts = full_heads and full_heads != window_heads
    fields: dict[str, Any] = {
        "head_count_kv": min(full_heads or window_heads),
        "head_count_kv_swa": min(window_heads, default=0) if has_two_counts else 0,
        "feed_forward_length": min(ffn_widths),
        "feed_forward_lengths": () if len({*ffn_widths}) == 1 else tuple(ffn_widths),
        "embedding_length_per_layer": keys.size(PER_LAYER, min_size=0),
        "own_kv": _read_num_kv_blocks(keys, blocks, pattern),
    }
    if WINDOW_WIDTHS[0] not in keys.architecture.key_defaults:
        return fields
    full_width, window_width = keys.size("attention.key_length"), keys.size(WINDOW_WIDTHS[0])
    for key in WINDOW_WIDTHS[1:]:
        if keys.size(key) != window_width:
            raise keys.wrong(key, keys.get(key), f"{WINDOW_WIDTHS[0]} {window_width}")
    last = max((i for i in range(fields["own_kv"] or blocks) if not pattern[i]), default=None)
    keys_are_values = last is not None and f"blk.{last}.attn_v.weight" not in gguf.entries
    return {
        **fields, "key_length_swa": 0 if window_width == full_width else window_width,
        "keys_are_values": keys_are_values,
    }  # fmt: skip


def _each(keys: MetadataReader, key: str, blocks: int) -> list[int]:
    """Return for each of `blocks` the size under `key`, one number for all or an array in the file."""
    value = keys.get(key)
    if not isinstance(value, np.ndarray):
        return [keys.size(key)] * blocks
    sizes = keys.numbers(key)
    if len(sizes) < blocks or min(sizes) <= 0:
        raise keys.wrong(key, value, f"{blocks} whole numbers from 1")
    return sizes[:blocks]


def _read_num_kv_blocks(keys: MetadataReader, blocks: int, pattern: Sequence[bool]) -> int:
    """Return how many first blocks have keys and values of their own; 0: all. `pattern`: whether each block has a
    window. llama.cpp gives later blocks those of the last of these, if they have no window, or of the one before."""
    limit = keys.architecture.num_kv_blocks
    num_shared = max(blocks - limit, 0) if limit else keys.size(SHARED_KV, min_size=0)
    num_owning = blocks - num_shared
    if num_shared and (num_owning < 2 or pattern[num_owning - 1] or not pattern[num_owning - 2]):
        right = "0, or leave a block with a window and one without as the last with keys and values"
        if limit:
            right = f"such that block {limit - 2} has a window and block {limit - 1} has none"
            raise keys.wrong(WINDOW_PATTERN, keys.get(WINDOW_PATTERN), right)
        raise keys.wrong(SHARED_KV, num_shared, right)
    return num_owning if num_shared else 0


def per_block_metadata(config: Config) -> dict[str, MetadataValue]:
    if not config.traits.has_uneven_blocks:
        return {}
    every = range(config.block_count)
    num_shared = config.block_count - (config.own_kv or config.block_count)
    metadata = {
        SHARED_KV: MetadataValue("u32", num_shared), PER_LAYER: MetadataValue("u32", config.embedding_length_per_layer),
    }  # fmt: skip
    if config.traits.num_streams:
        metadata[ALTUP_KEYS[0]] = MetadataValue("u32", 0)
        metadata[ALTUP_KEYS[1]] = MetadataValue("u32", config.traits.num_streams)
    if config.feed_forward_lengths:
        metadata[FEED_FORWARD] = MetadataValue("i32", [config.feed_forward_of(i) for i in every])
    if config.head_count_kv_swa:
        metadata[KV] = MetadataValue("i32", [config.kv_heads_of(i) for i in every])
    if WINDOW_WIDTHS[0] in config.traits.key_defaults:
        window_width = config.key_length_swa or config.head_width
        metadata |= dict.fromkeys(WINDOW_WIDTHS, MetadataValue("u32", window_width))
        metadata |= dict.fromkeys(HEAD_WIDTHS, MetadataValue("u32", config.head_width))
    return metadata
