"""The metadata of attention heads, convolutions and scans: from GGUF keys to fields of a Config and back."""

from typing import Any

import numpy as np

from packtrain.gguf import MetadataValue
from packtrain.models.arch.size_fields import Scan
from packtrain.models.config import Config
from packtrain.models.gguf_keys import MetadataReader

KV, CONV_WIDTH = "attention.head_count_kv", "shortconv.l_cache"
KV_LORA_RANK = "attention.kv_lora_rank"
MLA_WIDTHS = "attention.key_length_mla", "attention.value_length_mla"
SCAN = (
    "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count", "ssm.conv_kernel",
)  # fmt: skip
ROPE_FINETUNED = "rope.scaling.finetuned"  # false: there is no rope
RECURRENT_LAYERS, ATTENTION_INTERVAL = "attention.recurrent_layers", "full_attention_interval"
SECTIONS = "rope.dimension_sections"
MAX_SCAN_RATIO = 16  # most values of a scan, times the embedding's width
MAX_CONV_TAPS = 16  # a small hostile file must not take much memory


def read_mixers(keys: MetadataReader, blocks: int, heads: int) -> dict[str, Any]:
    """Read Config fields, by name, of K/V heads, convolutions and scans of all `blocks`; those with 0 K/V heads do not
    attend. `heads`: query heads, the default."""
    if KV_LORA_RANK in keys.architecture.key_defaults:
        return _read_latent_fields(keys, heads)
    if keys.architecture.has_uneven_blocks:
        return {}
    scan = _read_scan(keys)
    if scan and ROPE_FINETUNED in keys.architecture.key_defaults:
        scan["turned"] = keys.get(ROPE_FINETUNED)
        if not isinstance(scan["turned"], bool):
            raise keys.wrong(ROPE_FINETUNED, scan["turned"], "true or false")
    if keys.architecture.delta:
        _check_rope_sections(keys)
        attending_blocks = _read_attending(keys, blocks)
        return {"head_count_kv": keys.size(KV, heads), "attending": attending_blocks, **scan}
    if CONV_WIDTH not in keys.architecture.key_defaults and (
        not scan or keys.architecture.parallel_scan
    ):
        return {"head_count_kv": keys.size(KV, heads), **scan}
    each = keys.numbers(KV)
    nonzero_counts = {*each} - {0}
    if len(each) != blocks or len(nonzero_counts) != 1 or min(nonzero_counts) < 0 or all(each):
        expected = f"0 or the same number for each of {blocks} blocks, both somewhere"
        raise keys.wrong(KV, keys.get(KV), expected)
    attending_blocks = tuple(head_count > 0 for head_count in each)
    mixer_fields = {"head_count_kv": nonzero_counts.pop(), "attending": attending_blocks}
    return mixer_fields | (scan or {"conv_width": _read_taps(keys, CONV_WIDTH)})


def _read_taps(keys: MetadataReader, key: str) -> int:
    num_taps = keys.size(key, min_size=2)
    if num_taps > MAX_CONV_TAPS:
        raise keys.wrong(key, num_taps, f"at most {MAX_CONV_TAPS}")
    return num_taps


def _read_scan(keys: MetadataReader) -> dict[str, Any]:
    """Read Config fields of scans, none without. Raises InputError if sizes do not fit each other."""
    if SCAN[0] not in keys.architecture.key_defaults:
        return {}
    inner, state_width, heads, num_groups = (keys.size(key) for key in SCAN[:4])
    max_size = MAX_SCAN_RATIO * keys.size("embedding_length")
    for key, size in zip(SCAN, (inner, num_groups * state_width), strict=False):
        if size > max_size:
            raise keys.wrong(key, size, f"at most {max_size}, by embedding_length")
    if inner % heads:
        raise keys.wrong(SCAN[2], heads, f"a divisor of {keys.architecture.name}.{SCAN[0]} {inner}")
    if heads % num_groups:
        expected = f"a divisor of {keys.architecture.name}.{SCAN[2]} {heads}"
        raise keys.wrong(SCAN[3], num_groups, expected)
    if keys.architecture.delta and inner != heads * state_width:
        raise keys.wrong(SCAN[0], inner, f"{SCAN[2]} {heads} * {SCAN[1]} {state_width}")
    return {"scan": Scan(inner, state_width, heads, num_groups, _read_taps(keys, SCAN[4]))}


def _read_attending(keys: MetadataReader, blocks: int) -> tuple[bool, ...]:
    """Read for each block whether it attends: every N-th block, or those that are not listed as recurrent."""
    recurrent_layers, attention_interval = keys.get(RECURRENT_LAYERS), keys.size(ATTENTION_INTERVAL)
    is_listed = recurrent_layers is not None and np.size(recurrent_layers) > 0
    attending_blocks = tuple((i + 1) % attention_interval == 0 for i in range(blocks))
    if is_listed:
        recurrent_flags = keys.numbers(RECURRENT_LAYERS, "biu")
        attending_blocks = tuple(not flag for flag in recurrent_flags[:blocks])
    if len(attending_blocks) != blocks or all(attending_blocks) or not any(attending_blocks):
        raise keys.wrong(
            RECURRENT_LAYERS if is_listed else ATTENTION_INTERVAL,
            recurrent_layers if is_listed else attention_interval,
            f"such that some of the {blocks} blocks have attention and some have none",
        )
    return attending_blocks


def _check_rope_sections(keys: MetadataReader) -> None:
    """Check rope's sections for time, height and width, which must cover all pairs; text has equal positions."""
    if SECTIONS not in keys.architecture.key_defaults:
        return
    width = keys.size("embedding_length") // keys.size("attention.head_count")
    pairs = keys.size("rope.dimension_count", keys.size("attention.key_length", width or 1)) // 2
    section_pairs = keys.numbers(SECTIONS)
    total = sum(section_pairs) if len(section_pairs) == 4 and min(section_pairs) >= 0 else 0
    # the first three sections take pairs in turn, and start again after `turn` pairs
    turn = min(pairs, total)
    if not turn or any((turn + 2 - n) // 3 > section_pairs[n] for n in range(3)):
        expected = f"four numbers of which the first three share out {pairs} pairs"
        raise keys.wrong(SECTIONS, keys.get(SECTIONS), expected)


def _attends(config: Config) -> dict[str, MetadataValue]:
    """Return the GGUF metadata that says which blocks have attention, and rope's sections if the model has them."""
    metadata = {
        RECURRENT_LAYERS: MetadataValue("bool", [not attends for attends in config.attending]),
        ATTENTION_INTERVAL: MetadataValue("u32", config.attending.index(True) + 1),
    }
    if SECTIONS in config.traits.key_defaults:
        pairs = config.rope_width // 2
        metadata[SECTIONS] = MetadataValue("i32", [(pairs + 2 - n) // 3 for n in range(3)] + [0])
    return metadata


def mixer_metadata(config: Config) -> dict[str, MetadataValue]:
    if config.kv_lora_rank:
        return {key: MetadataValue("u32", size) for key, size in _latent_sizes(config).items()}
    scan_values = zip(SCAN, config.scan or (), strict=False)
    metadata = {key: MetadataValue("u32", size) for key, size in scan_values}
    if ROPE_FINETUNED in config.traits.key_defaults:
        metadata[ROPE_FINETUNED] = MetadataValue("bool", config.turned)
    if config.traits.delta:
        return {KV: MetadataValue("u32", config.head_count_kv), **metadata, **_attends(config)}
    if not config.attending:
        return {KV: MetadataValue("u32", config.head_count_kv), **metadata}
    kv_head_counts = [config.head_count_kv * config.attends(i) for i in range(config.block_count)]
    if config.conv_width:
        metadata[CONV_WIDTH] = MetadataValue("u32", config.conv_width)
    return {KV: MetadataValue("i32", kv_head_counts), **metadata}


def _read_latent_fields(keys: MetadataReader, heads: int) -> dict[str, Any]:
    """Read Config fields of latent attention (MLA), `heads` heads; files with attn_kv_b lack the keys of widths."""
    rank, dims = keys.size(KV_LORA_RANK), keys.size("rope.dimension_count")
    of_heads = keys.get(MLA_WIDTHS[0]) is not None
    width_keys = MLA_WIDTHS if of_heads else ("attention.key_length", "attention.value_length")
    key, value_width = map(keys.size, width_keys)
    if dims % 2 or dims >= key:
        raise keys.wrong("rope.dimension_count", dims, f"even and below {width_keys[0]} {key}")
    if value_width > key:
        raise keys.wrong(width_keys[1], value_width, f"at most {width_keys[0]} {key}")
    expected_sizes = (
        {"head_count_kv": 1, "key_length": rank + dims} if of_heads else {"head_count_kv": heads}
    )
    for name, expected in expected_sizes.items():
        if keys.size(f"attention.{name}", expected) != expected:
            raise keys.wrong(f"attention.{name}", keys.get(f"attention.{name}"), str(expected))
    return {
        "head_count_kv": heads, "key_length": key, "value_length": value_width, "rope_dims": dims,
        "q_lora_rank": keys.size("attention.q_lora_rank", 0, min_size=0), "kv_lora_rank": rank,
    }  # fmt: skip


def _latent_sizes(config: Config) -> dict[str, int]:
    rank, head_width, value_width = config.kv_lora_rank, config.head_width, config.value_width
    sizes = {
        KV: config.head_count, "attention.key_length": head_width, "attention.value_length": value_width,
        KV_LORA_RANK: rank,
    }  # fmt: skip
    if config.has_latent_cache:
        sizes |= dict(zip(MLA_WIDTHS, (head_width, value_width), strict=True))
        sizes[KV], sizes["attention.value_length"] = 1, rank
        sizes["attention.key_length"] = rank + config.rope_width
    return sizes | ({"attention.q_lora_rank": config.q_lora_rank} if config.q_lora_rank else {})
