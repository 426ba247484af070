"""The metadata of a model file: GGUF keys to a Config and back, for every architecture.

A key that changes the computation is supported or refused; keys that llama.cpp ignores for an architecture are
ignored here, too, so that both compute the same. Defaults are llama.cpp's (llama-model.cpp, src/models).
"""

from typing import Any, cast, get_args

import numpy as np

from packtrain.common.errors import InputError
from packtrain.dtypes import DTYPES
from packtrain.gguf import GGUF, QUANTIZATION_VERSION, Value
from packtrain.models import expert_metadata
from packtrain.models.arch.architecture import Architecture
from packtrain.models.config import Config, RopeScaling, Scaling
from packtrain.models.expert_metadata import (
    EXPERT_WIDTH,
    expert_sizes,
    feed_forward_length,
    mixture,
)
from packtrain.models.gguf_keys import MOST, ROPE_FREQ_BASE, Keys, eps_key
from packtrain.models.mixer_metadata import LATENT, mixer_keys, mixing
from packtrain.models.per_block_metadata import FEED_FORWARD, PER_LAYER, kind_keys, kinds

WIDEST = 64  # limit, times the embedding width: a small hostile file must not take much memory
WINDOW = "attention.sliding_window"
WINDOWS, NEXT = "attention.sliding_window_pattern", "nextn_predict_layers"

# ---- reading -------------------------------------------------------------------------------------------------


def read(gguf: GGUF) -> Config:
    """The Config of a model file, from its metadata and its optional tensors. Raises InputError."""
    keys = Keys(gguf)
    keys.check()
    vocabulary, blocks = _vocabulary_size(gguf), _block_count(gguf, keys)
    heads = keys.size("attention.head_count")
    windows = _windows(keys)
    config = Config(
        vocab_size=vocabulary,
        context_length=keys.size("context_length"),
        embedding_length=keys.size("embedding_length"),
        block_count=blocks,
        head_count=heads,
        rope_freq_base=keys.real("rope.freq_base", ROPE_FREQ_BASE),
        rms_eps=keys.real(eps_key(keys.architecture)),
        tied=_tied(gguf, keys.architecture),
        architecture=keys.architecture.name,
        optional=_optional(gguf, keys.architecture, blocks - 1),
        rope_scaling=_scaling(keys),
        attention_softcap=keys.own("attn_logit_softcapping"),
        final_softcap=keys.own("final_logit_softcapping"),
        temperature_scale=keys.own("attention.temperature_scale"),
        score_scale=keys.own("attention.scale"),
        embedding_scale=keys.own("embedding_scale"),
        residual_scale=keys.own("residual_scale"),
        logit_scale=keys.own("logit_scale"),
        **{**_heads(keys, heads), **mixing(keys, blocks, heads), **windows},
        **(kinds(keys, gguf, blocks, windows) or {FEED_FORWARD: feed_forward_length(keys)}),
        **mixture(keys),
    )
    _check_widths(keys, config)
    _check_heads(keys, config)
    return config


def unused_blocks(keys: Keys) -> int:
    """How many of the last blocks are there to guess more tokens, which nothing here uses."""
    if NEXT not in keys.architecture.keys:
        return 0
    count, blocks = keys.size(NEXT, least=0), keys.size("block_count")
    if count >= blocks:
        raise keys.wrong(NEXT, count, f"less than {keys.architecture.name}.block_count {blocks}")
    return count


def _block_count(gguf: GGUF, keys: Keys) -> int:
    """The blocks that are used; each has tensors, so that no list of blocks is longer than the file allows."""
    count = keys.size("block_count") - unused_blocks(keys)
    if count > len(gguf.entries):
        right = f"less than the number of tensors, {len(gguf.entries)}"
        raise keys.wrong("block_count", count, right)
    return count


def _vocabulary_size(gguf: GGUF) -> int:
    entry = gguf.entries.get("token_embd.weight")
    if entry is None:
        raise InputError(
            f"{gguf.path}: there is no tensor token_embd.weight; a model needs its weights"
        )
    if len(entry.shape) != 2 or not 0 < entry.shape[0] <= MOST:
        raise InputError(
            f"{gguf.path}: token_embd.weight has shape {list(entry.shape)}; it must be [vocabulary, width]"
        )
    return entry.shape[0]


def _tied(gguf: GGUF, architecture: Architecture) -> bool:
    separate = architecture.always_apart or "output.weight" in gguf.entries
    return architecture.always_tied or not separate


def _optional(gguf: GGUF, architecture: Architecture, last: int) -> tuple[str, ...]:
    """Optional tensors that the file has; the first blocks may lack those of experts, the last has them."""
    names = architecture.optional
    at = "", "blk.0.", f"blk.{last}."
    return tuple(n for n in names if any(f"{prefix}{n}" in gguf.entries for prefix in at))


def _scaling(keys: Keys) -> RopeScaling:
    """Rope scaling; as in llama.cpp, a factor alone means linear scaling."""
    type = keys.get("rope.scaling.type", "linear")
    if not isinstance(type, str) or type not in get_args(Scaling):
        raise keys.wrong("rope.scaling.type", type, " or ".join(get_args(Scaling)))
    old = keys.real("rope.scale_linear", 0.0, zero=True)
    factor = keys.real("rope.scaling.factor", old, zero=True) or 1.0
    if type == "none" or (type == "linear" and factor == 1):
        type, factor = "none", 1.0
    if type == "yarn" and factor < 1:
        raise keys.wrong("rope.scaling.factor", factor, "1 or more")
    if type == "yarn" and keys.real("rope.freq_base", ROPE_FREQ_BASE) <= 1:
        raise keys.wrong("rope.freq_base", keys.get("rope.freq_base"), "above 1 with yarn")
    context = keys.size("context_length")
    original = keys.size("rope.scaling.original_context_length", context)
    return RopeScaling(
        cast(Scaling, type),
        factor,
        0 if original == context else original,
        keys.real("rope.scaling.attn_factor", 1.0),
        keys.real("rope.scaling.yarn_beta_fast", 32.0),
        keys.real("rope.scaling.yarn_beta_slow", 1.0),
        keys.own("rope.scaling.yarn_log_multiplier"),
    )


def _heads(keys: Keys, heads: int) -> dict[str, Any]:
    """Head widths that do not follow from embedding_length."""
    width = keys.size("embedding_length") // heads
    length = keys.size("attention.key_length", width or 1)
    dims = keys.size("rope.dimension_count", length)
    return {
        "key_length": None if length == width else length,
        "rope_dims": None if dims == length else dims,
    }


def _windows(keys: Keys) -> dict[str, Any]:
    """Sliding windows, for architectures that have them."""
    if not keys.architecture.windowed(keys.size("block_count")):
        return {}
    pattern = keys.get(WINDOWS)
    truths = isinstance(pattern, np.ndarray) and pattern.dtype.kind in "biu"
    if truths and len(pattern) >= keys.size("block_count"):
        pattern = tuple(map(bool, pattern.tolist()))
    elif isinstance(pattern, np.ndarray):
        right = f"{keys.size('block_count')} times a truth"
        raise keys.wrong(WINDOWS, pattern, right)
    else:
        pattern = keys.size(WINDOWS, least=0)
    window, chunk = keys.size(WINDOW, least=0), keys.architecture.chunk
    if chunk and not window:
        raise keys.wrong(WINDOW, window, f"left out, or {chunk}")
    return {
        "window": chunk or window,
        "window_pattern": pattern,
        "rope_freq_base_swa": keys.own("rope.freq_base_swa") or None,
    }


def _check_heads(keys: Keys, config: Config) -> None:
    if config.kv_lora_rank:
        return
    width, heads, kv = config.embedding_length, config.head_count, config.head_count_kv
    arch, head, square = config.architecture, config.head_width, config.traits.square
    partial = config.traits.partial_rope
    if keys.get("attention.key_length") is None and width % (2 * heads):
        right = f"a divisor of half of {arch}.embedding_length {width}, so that heads have an even width"
        raise keys.wrong("attention.head_count", heads, right)
    if heads % kv or heads % (config.head_count_kv_swa or kv):
        right = f"a divisor of {arch}.attention.head_count {heads}"
        raise keys.wrong("attention.head_count_kv", keys.get("attention.head_count_kv"), right)
    if config.key_length_swa % 2:
        raise keys.wrong("attention.key_length_swa", config.key_length_swa, "even")
    if head % 2 or (square and config.key_length is not None):
        right = f"embedding_length / head_count = {width // heads}" if square else "even"
        raise keys.wrong("attention.key_length", head, right)
    if keys.size("attention.value_length", head) != head:
        value = keys.get("attention.value_length")
        raise keys.wrong("attention.value_length", value, f"the width of keys, {head}")
    dims = config.rope_width
    if dims % 2 or dims > head or (dims < head and not partial):
        right = f"even and at most {head}" if partial else f"the width of a head, {head}"
        raise keys.wrong("rope.dimension_count", dims, right)


def _check_widths(keys: Keys, config: Config) -> None:
    max_width, used = WIDEST * config.embedding_length, config.expert_used_count or 1
    width_key = "feed_forward_length" if config.expert_feed_forward_length is None else EXPERT_WIDTH
    for key, size, times in (
        (width_key, config.expert_width, used),
        (width_key, max(config.feed_forward_lengths, default=0), 1),
        ("attention.key_length", config.head_width, config.head_count),
        ("attention.key_length_swa", config.key_length_swa, config.head_count),
        (PER_LAYER, config.embedding_length_per_layer, 1),
        (LATENT, config.kv_lora_rank, 1),
        ("attention.q_lora_rank", config.q_lora_rank, 1),
    ):
        if size * times > max_width:
            raise keys.wrong(
                key,
                size,
                f"at most {max_width // times}, by embedding_length {config.embedding_length}",
            )


# ---- writing -------------------------------------------------------------------------------------------------


def metadata(config: Config, name: str, dtype: str = "f32") -> dict[str, Value]:
    """The general.* keys and those of the architecture, for a model file whose matrices are of `dtype`."""
    arch, scaling = config.architecture, config.rope_scaling
    sizes = {
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "embedding_length": config.embedding_length,
        "block_count": config.block_count,
        "feed_forward_length": config.feed_forward_length,
        "attention.head_count": config.head_count,
        "rope.dimension_count": config.rope_width,
    }
    reals = {"rope.freq_base": config.rope_freq_base, eps_key(config.traits): config.rms_eps}
    if config.traits.learned_positions:
        del sizes["rope.dimension_count"], reals["rope.freq_base"]
    if config.key_length is not None:
        sizes |= dict.fromkeys(
            ("attention.key_length", "attention.value_length"), config.key_length
        )
    if config.expert_count:
        sizes |= {
            "expert_count": config.expert_count,
            "expert_used_count": config.expert_used_count,
        }
    sizes |= expert_sizes(config)
    return {
        **_general(arch, name, dtype),
        **{f"{arch}.{key}": Value("u32", size) for key, size in sizes.items()},
        **{f"{arch}.{key}": value for key, value in mixer_keys(config).items()},
        **{f"{arch}.{key}": value for key, value in kind_keys(config).items()},
        **{f"{arch}.{key}": Value("f32", real) for key, real in reals.items()},
        **{f"{arch}.{key}": value for key, value in _scaling_keys(config, scaling).items()},
        **{f"{arch}.{key}": value for key, value in _window_keys(config).items()},
        **{f"{arch}.{key}": value for key, value in _factor_keys(config).items()},
        **{f"{arch}.{key}": value for key, value in expert_metadata.weight_keys(config).items()},
    }


def _general(architecture: str, name: str, dtype: str) -> dict[str, Value]:
    return {
        "general.architecture": Value("string", architecture),
        "general.type": Value("string", "model"),
        "general.name": Value("string", name),
        "general.file_type": Value("u32", DTYPES[dtype].file_type),
        "general.quantization_version": Value("u32", QUANTIZATION_VERSION),
    }


def _scaling_keys(config: Config, scaling: RopeScaling) -> dict[str, Value]:
    reals = {
        "rope.scaling.factor": (scaling.factor, 1.0),
        "rope.scaling.attn_factor": (scaling.attn_factor, 1.0),
        "rope.scaling.yarn_log_multiplier": (scaling.log_multiplier, 0.0),
        "rope.scaling.yarn_beta_fast": (scaling.beta_fast, 32.0),
        "rope.scaling.yarn_beta_slow": (scaling.beta_slow, 1.0),
        "attention.temperature_scale": (config.temperature_scale, 0.0),
    }
    keys = {key: Value("f32", real) for key, (real, default) in reals.items() if real != default}
    if scaling.original_context:
        keys["rope.scaling.original_context_length"] = Value("u32", scaling.original_context)
    if scaling.type != "none":
        keys["rope.scaling.type"] = Value("string", scaling.type)
    return keys


def _window_keys(config: Config) -> dict[str, Value]:
    defaults, pattern = config.traits.keys, config.window_pattern
    if not config.traits.windowed(config.block_count):
        return {}
    keys = {WINDOW: Value("u32", config.window)}
    if pattern != defaults[WINDOWS]:
        keys[WINDOWS] = Value("bool" if isinstance(pattern, tuple) else "u32", pattern)
    if config.rope_freq_base_swa is not None:
        keys["rope.freq_base_swa"] = Value("f32", config.rope_freq_base_swa)
    return keys


def _factor_keys(config: Config) -> dict[str, Value]:
    """Caps and scales."""
    factors = {
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
        "attention.scale": config.score_scale,
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": config.logit_scale,
    }
    zero = config.traits.zero
    return {key: Value("f32", n) for key, n in factors.items() if n or key in zero}
