"""The metadata of what mixes the tokens of each block: GGUF keys to the fields of a Config and back."""

from typing import Any

import numpy as np

from packtrain.gguf import Value
from packtrain.models.config import Config
from packtrain.models.keys import Keys

KV, CONV_WIDTH = "attention.head_count_kv", "shortconv.l_cache"
LATENT = "attention.kv_lora_rank"
BY_HEADS = "attention.key_length_mla", "attention.value_length_mla"
WIDEST_CONV = 16  # a small hostile file must not take much memory


def mixing(keys: Keys, blocks: int, heads: int) -> dict[str, Any]:
    """Heads of keys and values: of hybrids for each block, where blocks without any have a short convolution."""
    if LATENT in keys.architecture.keys:
        return _latent(keys, heads)
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
    if config.kv_lora_rank:
        return {key: Value("u32", size) for key, size in _latent_sizes(config).items()}
    if CONV_WIDTH not in config.traits.keys:
        return {KV: Value("u32", config.head_count_kv)}
    each = [config.head_count_kv * config.attends(i) for i in range(config.block_count)]
    return {KV: Value("i32", each), CONV_WIDTH: Value("u32", config.conv_width)}


def _latent(keys: Keys, heads: int) -> dict[str, Any]:
    """Heads that are made from narrow vectors; files with attn_kv_b have no keys of the widths by heads."""
    rank, dims = keys.size(LATENT), keys.size("rope.dimension_count")
    of_heads = keys.get(BY_HEADS[0]) is not None
    names = BY_HEADS if of_heads else ("attention.key_length", "attention.value_length")
    key, value = map(keys.size, names)
    if dims % 2 or dims >= key:
        raise keys.wrong("rope.dimension_count", dims, f"even and below {names[0]} {key}")
    if value > key:
        raise keys.wrong(names[1], value, f"at most {names[0]} {key}")
    stored = (
        {"head_count_kv": 1, "key_length": rank + dims} if of_heads else {"head_count_kv": heads}
    )
    for name, right in stored.items():
        if keys.size(f"attention.{name}", right) != right:
            raise keys.wrong(f"attention.{name}", keys.get(f"attention.{name}"), str(right))
    return {
        "head_count_kv": heads,
        "key_length": key,
        "value_length": value,
        "rope_dims": dims,
        "q_lora_rank": keys.size("attention.q_lora_rank", 0, least=0),
        "kv_lora_rank": rank,
    }


def _latent_sizes(config: Config) -> dict[str, int]:
    rank, d, v = config.kv_lora_rank, config.head_width, config.value_width
    sizes = {
        KV: config.head_count,
        "attention.key_length": d,
        "attention.value_length": v,
        LATENT: rank,
    }
    if config.latent:
        sizes |= dict(zip(BY_HEADS, (d, v), strict=True))
        sizes |= {
            KV: 1,
            "attention.key_length": rank + config.rope_width,
            "attention.value_length": rank,
        }
    return sizes | ({"attention.q_lora_rank": config.q_lora_rank} if config.q_lora_rank else {})
