"""The metadata of what mixes the tokens of each block: GGUF keys to the fields of a Config and back."""

from typing import Any

import numpy as np

from packtrain.gguf import Value
from packtrain.models.config import Config
from packtrain.models.keys import Keys

KV, CONV_WIDTH = "attention.head_count_kv", "shortconv.l_cache"
WIDEST_CONV = 16  # a small hostile file must not take much memory


def mixing(keys: Keys, blocks: int, heads: int) -> dict[str, Any]:
    """Heads of keys and values: of hybrids for each block, where blocks without any have a short convolution."""
    if CONV_WIDTH not in keys.architecture.keys:
        return {"head_count_kv": keys.size(KV, heads)}
    own = keys.get(KV)
    each = own.tolist() if isinstance(own, np.ndarray) and own.dtype.kind in "iu" else []
    there = {*each} - {0}
    if len(each) != blocks or len(there) != 1 or min(there) < 0 or all(each):
        raise keys.wrong(
            KV, own, f"0 or the same number for each of {blocks} blocks, both somewhere"
        )
    width = keys.size(CONV_WIDTH, least=2)
    if width > WIDEST_CONV:
        raise keys.wrong(CONV_WIDTH, width, f"at most {WIDEST_CONV}")
    attending = tuple(count > 0 for count in each)
    return {"head_count_kv": there.pop(), "attending": attending, "conv_width": width}


def mixer_keys(config: Config) -> dict[str, Value]:
    if CONV_WIDTH not in config.traits.keys:
        return {KV: Value("u32", config.head_count_kv)}
    each = [config.head_count_kv * config.attends(i) for i in range(config.block_count)]
    return {KV: Value("i32", each), CONV_WIDTH: Value("u32", config.conv_width)}
