"""The metadata of a model file: from GGUF keys to a Config and back, for every architecture.

A key that changes the computation is supported or refused; keys that llama.cpp ignores for an architecture are
ignored here, too, so that both compute the same. Defaults are llama.cpp's (llama-model.cpp, src/models)."""

from typing import Any, cast, get_args

import numpy as np

from packtrain.common.errors import InputError
from packtrain.dtypes import DTYPES
from packtrain.gguf import GGUF, QUANTIZATION_VERSION, MetadataValue
from packtrain.models import expert_metadata
from packtrain.models.arch.architecture import Architecture
from packtrain.models.config import Config, RopeScaling, ScalingType
from packtrain.models.expert_metadata import EXPERT_WIDTH, expert_sizes, feed_forward_length
from packtrain.models.gguf_keys import MAX_SIZE, ROPE_FREQ_BASE, MetadataReader, eps_key
from packtrain.models.mixer_metadata import KV_LORA_RANK, mixer_metadata, read_mixers
from packtrain.models.per_block_metadata import FEED_FORWARD, PER_LAYER, kinds, per_block_metadata

WIDEST = 64  # limit, times the embedding width: a small hostile file must not take much memory
WINDOW_KEY = "attention.sliding_window"
WINDOWS, NEXT = "attention.sliding_window_pattern", "nextn_predict_layers"
TEMPERATURE_KEY = "attention.temperature_scale"
# fields of a Config that hold softcaps and scales, by their keys
FACTOR_FIELDS = {
    "attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "final_softcap",
    "attention.scale": "score_scale", "embedding_scale": "embedding_scale", "residual_scale": "residual_scale",
    "logit_scale": "logit_scale",
}  # fmt: skip

# ---- reading -------------------------------------------------------------------------------------------------


def read_config(gguf: GGUF) -> Config:
    """Read the Config of a model file, from its metadata and its optional tensors. Raises InputError."""
    reader = MetadataReader(gguf)
    reader.check_supported()
    vocabulary_size, num_blocks = _read_vocabulary_size(gguf), _read_block_count(gguf, reader)
    num_heads = reader.size("attention.head_count")
    windows = _read_window_fields(reader)
    factors = {f: reader.read_optional_float(key) for key, f in FACTOR_FIELDS.items()}
    has_output = reader.architecture.always_untied or "output.weight" in gguf.entries
    config = Config(
        vocab_size=vocabulary_size, context_length=reader.size("context_length"),
        embedding_length=reader.size("embedding_length"), block_count=num_blocks, head_count=num_heads,
        rope_freq_base=reader.real("rope.freq_base", ROPE_FREQ_BASE), rms_eps=reader.real(eps_key(reader.architecture)),
        tied=reader.architecture.always_tied or not has_output, architecture=reader.architecture.name,
        optional=_optional_tensors(gguf, reader.architecture, num_blocks - 1), rope_scaling=_read_rope_scaling(reader),
        temperature_scale=reader.read_optional_float(TEMPERATURE_KEY),
        **{**_heads(reader, num_heads), **read_mixers(reader, num_blocks, num_heads), **windows, **factors},
        **(kinds(reader, gguf, num_blocks, windows) or {FEED_FORWARD: feed_forward_length(reader)}),
        **expert_metadata.read_expert_fields(reader),
    )  # fmt: skip
    _check_widths(reader, config)
    _check_heads(reader, config)
    return config


def num_unused_blocks(keys: MetadataReader) -> int:
    """Return how many last blocks are for multi-token prediction, which nothing here uses. Raises InputError."""
    if NEXT not in keys.architecture.key_defaults:
        return 0
    count, blocks = keys.size(NEXT, min_size=0), keys.size("block_count")
    if count >= blocks:
        raise keys.wrong(NEXT, count, f"less than {keys.architecture.name}.block_count {blocks}")
    return count


def _read_block_count(gguf: GGUF, keys: MetadataReader) -> int:
    """Return the number of used blocks, each with tensors: no list of blocks is longer than the file allows."""
    num_blocks = keys.size("block_count") - num_unused_blocks(keys)
    if num_blocks > len(gguf.entries):
        expected = f"less than the number of tensors, {len(gguf.entries)}"
        raise keys.wrong("block_count", num_blocks, expected)
    return num_blocks


def _read_vocabulary_size(gguf: GGUF) -> int:
    tensor_info = gguf.entries.get("token_embd.weight")
    if tensor_info is None:
        fact = f"{gguf.path}: there is no tensor token_embd.weight; a model needs its weights"
        raise InputError(fact)
    if len(tensor_info.shape) != 2 or not 0 < tensor_info.shape[0] <= MAX_SIZE:
        fact = f"{gguf.path}: token_embd.weight has shape {list(tensor_info.shape)}"
        raise InputError(f"{fact}; it must be [vocabulary, width]")
    return tensor_info.shape[0]


def _optional_tensors(gguf: GGUF, architecture: Architecture, last_block: int) -> tuple[str, ...]:
    """Return the architecture's optional tensors that the file has, by names within blocks: it looks outside blocks, in
    the first block, and in `last_block`, as first blocks may have no experts."""
    names = architecture.optional_tensors
    at = "", "blk.0.", f"blk.{last_block}."
    return tuple(name for name in names if any(f"{prefix}{name}" in gguf.entries for prefix in at))


def _read_rope_scaling(keys: MetadataReader) -> RopeScaling:
    """Read rope scaling; as in llama.cpp, a factor alone means linear scaling."""
    scaling_type = keys.get("rope.scaling.type", "linear")
    if not isinstance(scaling_type, str) or scaling_type not in get_args(ScalingType):
        raise keys.wrong("rope.scaling.type", scaling_type, " or ".join(get_args(ScalingType)))
    linear_scale = keys.real("rope.scale_linear", 0.0, zero=True)
    factor = keys.real("rope.scaling.factor", linear_scale, zero=True) or 1.0
    if scaling_type == "none" or (scaling_type == "linear" and factor == 1):
        scaling_type, factor = "none", 1.0
    if scaling_type == "yarn" and factor < 1:
        raise keys.wrong("rope.scaling.factor", factor, "1 or more")
    if scaling_type == "yarn" and keys.real("rope.freq_base", ROPE_FREQ_BASE) <= 1:
        raise keys.wrong("rope.freq_base", keys.get("rope.freq_base"), "above 1 with yarn")
    max_context = keys.size("context_length")
    original_context = keys.size("rope.scaling.original_context_length", max_context)
    return RopeScaling(
        cast(ScalingType, scaling_type), factor, 0 if original_context == max_context else original_context,
        keys.real("rope.scaling.attn_factor", 1.0), keys.real("rope.scaling.yarn_beta_fast", 32.0),
        keys.real("rope.scaling.yarn_beta_slow", 1.0), keys.read_optional_float("rope.scaling.yarn_log_multiplier"),
    )  # fmt: skip


def _heads(keys: MetadataReader, heads: int) -> dict[str, Any]:
    """Read Config fields of head widths, None where they follow from embedding_length and the number of `heads`."""
    default_width = keys.size("embedding_length") // heads
    head_width = keys.size("attention.key_length", default_width or 1)
    rotated_width = keys.size("rope.dimension_count", head_width)
    return {
        "key_length": None if head_width == default_width else head_width,
        "rope_dims": None if rotated_width == head_width else rotated_width,
    }


def _read_window_fields(keys: MetadataReader) -> dict[str, Any]:
    """Read Config fields of sliding windows, for architectures that have them; else none."""
    if not keys.architecture.has_windows(keys.size("block_count")):
        return {}
    window_pattern, num_blocks = keys.get(WINDOWS), keys.size("block_count")
    is_array = isinstance(window_pattern, np.ndarray)
    flags = tuple(map(bool, keys.numbers(WINDOWS, "biu")))
    if is_array and (not flags or len(flags) < num_blocks):
        raise keys.wrong(WINDOWS, window_pattern, f"{num_blocks} times a truth")
    window_pattern = flags if is_array else keys.size(WINDOWS, min_size=0)
    window, chunk = keys.size(WINDOW_KEY, min_size=0), keys.architecture.attention_chunk
    if chunk and not window:
        raise keys.wrong(WINDOW_KEY, window, f"left out, or {chunk}")
    return {
        "window": chunk or window, "window_pattern": window_pattern,
        "rope_freq_base_swa": keys.read_optional_float("rope.freq_base_swa") or None,
    }  # fmt: skip


def _check_heads(keys: MetadataReader, config: Config) -> None:
    if config.kv_lora_rank:
        return
    width, num_heads, kv = config.embedding_length, config.head_count, config.head_count_kv
    arch, head, square = config.architecture, config.head_width, config.traits.fixed_head_width
    partial = config.traits.partial_rope
    if keys.get("attention.key_length") is None and width % (2 * num_heads):
        expected = f"a divisor of half of {arch}.embedding_length {width}, so that heads have an even width"
        raise keys.wrong("attention.head_count", num_heads, expected)
    if num_heads % kv or num_heads % (config.head_count_kv_swa or kv):
        expected = f"a divisor of {arch}.attention.head_count {num_heads}"
        raise keys.wrong("attention.head_count_kv", keys.get("attention.head_count_kv"), expected)
    if config.key_length_swa % 2:
        raise keys.wrong("attention.key_length_swa", config.key_length_swa, "even")
    if head % 2 or (square and config.key_length is not None):
        expected = f"embedding_length / head_count = {width // num_heads}" if square else "even"
        raise keys.wrong("attention.key_length", head, expected)
    if keys.size("attention.value_length", head) != head:
        value = keys.get("attention.value_length")
        raise keys.wrong("attention.value_length", value, f"the width of keys, {head}")
    rotated_width = config.rope_width
    if rotated_width % 2 or rotated_width > head or (rotated_width < head and not partial):
        expected = f"even and at most {head}" if partial else f"the width of a head, {head}"
        raise keys.wrong("rope.dimension_count", rotated_width, expected)


def _check_widths(keys: MetadataReader, config: Config) -> None:
    """Raise InputError for widths so large that a small file would take much memory."""
    max_width, num_used_experts = WIDEST * config.embedding_length, config.expert_used_count or 1
    width_key = "feed_forward_length" if config.expert_feed_forward_length is None else EXPERT_WIDTH
    for key, size, multiplier in (
        (width_key, config.expert_width, num_used_experts),
        (width_key, max(config.feed_forward_lengths, default=0), 1),
        ("attention.key_length", config.head_width, config.head_count),
        ("attention.key_length_swa", config.key_length_swa, config.head_count),
        (PER_LAYER, config.embedding_length_per_layer, 1), (KV_LORA_RANK, config.kv_lora_rank, 1),
        ("attention.q_lora_rank", config.q_lora_rank, 1),
    ):  # fmt: skip
        if size * multiplier > max_width:
            limit = max_width // multiplier
            expected = f"at most {limit}, by embedding_length {config.embedding_length}"
            raise keys.wrong(key, size, expected)


# ---- writing -------------------------------------------------------------------------------------------------


def model_metadata(config: Config, name: str, dtype: str = "f32") -> dict[str, MetadataValue]:
    """Return the general.* keys and those of the architecture, for a model file whose matrices are of `dtype`."""
    arch, rope_scaling = config.architecture, config.rope_scaling
    sizes = {
        "vocab_size": config.vocab_size, "context_length": config.context_length,
        "embedding_length": config.embedding_length, "block_count": config.block_count,
        "feed_forward_length": config.feed_forward_length, "attention.head_count": config.head_count,
        "rope.dimension_count": config.rope_width,
    }  # fmt: skip
    float_values = {"rope.freq_base": config.rope_freq_base, eps_key(config.traits): config.rms_eps}
    if config.traits.learned_positions:
        del sizes["rope.dimension_count"], float_values["rope.freq_base"]
    if config.key_length is not None:
        sizes["attention.key_length"] = sizes["attention.value_length"] = config.key_length
    if config.expert_count:
        sizes["expert_count"] = config.expert_count
        sizes["expert_used_count"] = config.expert_used_count
    sizes |= expert_sizes(config)
    values_by_key = {
        **{key: MetadataValue("u32", size) for key, size in sizes.items()}, **mixer_metadata(config),
        **per_block_metadata(config), **{key: MetadataValue("f32", real) for key, real in float_values.items()},
        **_scaling_keys(config, rope_scaling), **_window_metadata(config), **_factor_metadata(config),
        **expert_metadata.weight_keys(config),
    }  # fmt: skip
    general = general_metadata(arch, name, dtype)
    return general | {f"{arch}.{key}": value for key, value in values_by_key.items()}


def general_metadata(architecture: str, name: str, dtype: str) -> dict[str, MetadataValue]:
    """Return the general.* keys of a model whose matrices are of `dtype`."""
    return {
        "general.architecture": MetadataValue("string", architecture),
        "general.type": MetadataValue("string", "model"), "general.name": MetadataValue("string", name),
        "general.file_type": MetadataValue("u32", DTYPES[dtype].file_type),
        "general.quantization_version": MetadataValue("u32", QUANTIZATION_VERSION),
    }  # fmt: skip


def _scaling_keys(config: Config, rope_scaling: RopeScaling) -> dict[str, MetadataValue]:
    float_values = {
        "rope.scaling.factor": (rope_scaling.factor, 1.0), "rope.scaling.attn_factor": (rope_scaling.attn_factor, 1.0),
        "rope.scaling.yarn_log_multiplier": (rope_scaling.log_multiplier, 0.0),
        "rope.scaling.yarn_beta_fast": (rope_scaling.beta_fast, 32.0),
        "rope.scaling.yarn_beta_slow": (rope_scaling.beta_slow, 1.0), TEMPERATURE_KEY: (config.temperature_scale, 0.0),
    }  # fmt: skip
    keys = {k: MetadataValue("f32", v) for k, (v, default) in float_values.items() if v != default}
    if rope_scaling.original_context:
        context = MetadataValue("u32", rope_scaling.original_context)
        keys["rope.scaling.original_context_length"] = context
    if rope_scaling.type != "none":
        keys["rope.scaling.type"] = MetadataValue("string", rope_scaling.type)
    return keys


def _window_metadata(config: Config) -> dict[str, MetadataValue]:
    key_defaults, pattern = config.traits.key_defaults, config.window_pattern
    if not config.traits.has_windows(config.block_count):
        return {}
    metadata = {WINDOW_KEY: MetadataValue("u32", config.window)}
    if pattern != key_defaults[WINDOWS]:
        metadata[WINDOWS] = MetadataValue("bool" if isinstance(pattern, tuple) else "u32", pattern)
    if config.rope_freq_base_swa is not None:
        metadata["rope.freq_base_swa"] = MetadataValue("f32", config.rope_freq_base_swa)
    return metadata


def _factor_metadata(config: Config) -> dict[str, MetadataValue]:
    """Return the GGUF metadata of softcaps and scales."""
    factors = {key: getattr(config, field) for key, field in FACTOR_FIELDS.items()}
    zero_keys = config.traits.zero_keys
    return {key: MetadataValue("f32", n) for key, n in factors.items() if n or key in zero_keys}
