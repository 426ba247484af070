"""The metadata of what mixes the tokens of each block: GGUF keys to the fields of a Config and back."""

from typing import Any

import numpy as np

from packtrain.gguf import Value
from packtrain.models.arch.size_fields import Scan
from packtrain.models.config import Config
from packtrain.models.gguf_keys import Keys

KV, CONV_WIDTH = "attention.head_count_kv", "shortconv.l_cache"
LATENT = "attention.kv_lora_rank"
BY_HEADS = "attention.key_length_mla", "attention.value_length_mla"
SCAN = (
    "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count", "ssm.conv_kernel",
)  # fmt: skip
TURNED = "rope.scaling.finetuned"  # false: there is no rope
RECURRENT, INTERVAL = "attention.recurrent_layers", "full_attention_interval"
SECTIONS = "rope.dimension_sections"
WIDEST_SCAN = 16  # times the embedding's width
WIDEST_CONV = 16  # a small hostile file must not take much memory


def mixing(keys: Keys, blocks: int, heads: int) -> dict[str, Any]:
    """Heads of keys and values: of hybrids for each block, where blocks without any have a short convolution."""
    if LATENT in keys.architecture.keys:
        return _latent(keys, heads)
    if keys.architecture.uneven:
        return {}
    scan = _scan(keys)
    if scan and TURNED in keys.architecture.keys:
        scan["turned"] = keys.get(TURNED)
        if not isinstance(scan["turned"], bool):
            raise keys.wrong(TURNED, scan["turned"], "true or false")
    if keys.architecture.delta:
        _check_sections(keys)
        attending = _in_turn(keys, blocks)
        return {"head_count_kv": keys.size(KV, heads), "attending": attending, **scan}
    if CONV_WIDTH not in keys.architecture.keys and (not scan or keys.architecture.scan_beside):
        return {"head_count_kv": keys.size(KV, heads), **scan}
    kv_heads = keys.get(KV)
    each = (
        kv_heads.tolist()
        if isinstance(kv_heads, np.ndarray) and kv_heads.dtype.kind in "iu"
        else []
    )
    nonzero_counts = {*each} - {0}
    if len(each) != blocks or len(nonzero_counts) != 1 or min(nonzero_counts) < 0 or all(each):
        raise keys.wrong(
            KV, kv_heads, f"0 or the same number for each of {blocks} blocks, both somewhere"
        )
    attending = tuple(count > 0 for count in each)
    fields = {"head_count_kv": nonzero_counts.pop(), "attending": attending}
    return fields | (scan or {"conv_width": _taps(keys, CONV_WIDTH)})


def _taps(keys: Keys, key: str) -> int:
    width = keys.size(key, least=2)
    if width > WIDEST_CONV:
        raise keys.wrong(key, width, f"at most {WIDEST_CONV}")
    return width


def _scan(keys: Keys) -> dict[str, Any]:
    """The sizes of scans, which must fit each other."""
    if SCAN[0] not in keys.architecture.keys:
        return {}
    inner, state, heads, groups = (keys.size(key) for key in SCAN[:4])
    max_size = WIDEST_SCAN * keys.size("embedding_length")
    for key, size in zip(SCAN, (inner, groups * state), strict=False):
        if size > max_size:
            raise keys.wrong(key, size, f"at most {max_size}, by embedding_length")
    if inner % heads:
        raise keys.wrong(SCAN[2], heads, f"a divisor of {keys.architecture.name}.{SCAN[0]} {inner}")
    if heads % groups:
        raise keys.wrong(
            SCAN[3], groups, f"a divisor of {keys.architecture.name}.{SCAN[2]} {heads}"
        )
    if keys.architecture.delta and inner != heads * state:
        raise keys.wrong(SCAN[0], inner, f"{SCAN[2]} {heads} * {SCAN[1]} {state}")
    return {"scan": Scan(inner, state, heads, groups, _taps(keys, SCAN[4]))}


def _in_turn(keys: Keys, blocks: int) -> tuple[bool, ...]:
    """Which blocks have attention: every N-th, or those that are not listed as recurrent."""
    recurrent, every = keys.get(RECURRENT), keys.size(INTERVAL)
    listed = recurrent is not None and np.size(recurrent) > 0
    attending = tuple((i + 1) % every == 0 for i in range(blocks))
    if listed:
        flags = (
            recurrent.tolist()
            if isinstance(recurrent, np.ndarray) and recurrent.dtype.kind in "biu"
            else []
        )
        attending = tuple(not flag for flag in flags[:blocks])
    if len(attending) != blocks or all(attending) or not any(attending):
        raise keys.wrong(
            RECURRENT if listed else INTERVAL,
            recurrent if listed else every,
            f"such that of {blocks} blocks some have attention and some have not",
        )
    return attending


def _check_sections(keys: Keys) -> None:
    """Parts of rope for positions in time, height and width, in turn; those of text are equal."""
    if SECTIONS not in keys.architecture.keys:
        return
    sections = keys.get(SECTIONS)
    width = keys.size("embedding_length") // keys.size("attention.head_count")
    pairs = keys.size("rope.dimension_count", keys.size("attention.key_length", width or 1)) // 2
    listed = (
        sections.tolist()
        if isinstance(sections, np.ndarray) and sections.dtype.kind in "iu"
        else []
    )
    total = sum(listed) if len(listed) == 4 and min(listed) >= 0 else 0
    # the first three have pairs in turn, and all begins again after `whole` pairs
    turn = min(pairs, total)
    if not turn or any((turn + 2 - n) // 3 > listed[n] for n in range(3)):
        right = f"four numbers of which the first three share out {pairs} pairs"
        raise keys.wrong(SECTIONS, sections, right)


def _turns(config: Config) -> dict[str, Value]:
    """Keys of blocks in turn, and of rope's parts."""
    values = {
        RECURRENT: Value("bool", [not attends for attends in config.attending]),
        INTERVAL: Value("u32", config.attending.index(True) + 1),
    }
    if SECTIONS in config.traits.keys:
        pairs = config.rope_width // 2
        values[SECTIONS] = Value("i32", [(pairs + 2 - n) // 3 for n in range(3)] + [0])
    return values


def mixer_keys(config: Config) -> dict[str, Value]:
    if config.kv_lora_rank:
        return {key: Value("u32", size) for key, size in _latent_sizes(config).items()}
    scan = zip(SCAN, config.scan or (), strict=False)
    sizes = {key: Value("u32", size) for key, size in scan}
    if TURNED in config.traits.keys:
        sizes[TURNED] = Value("bool", config.turned)
    if config.traits.delta:
        return {KV: Value("u32", config.head_count_kv), **sizes, **_turns(config)}
    if not config.attending:
        return {KV: Value("u32", config.head_count_kv), **sizes}
    each = [config.head_count_kv * config.attends(i) for i in range(config.block_count)]
    if config.conv_width:
        sizes[CONV_WIDTH] = Value("u32", config.conv_width)
    return {KV: Value("i32", each), **sizes}


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
