"""The metadata of experts: from GGUF keys to fields of a Config and back."""

from typing import Any

from packtrain.gguf import MetadataValue
from packtrain.models.config import Config
from packtrain.models.gguf_keys import MetadataReader

MAX_EXPERTS = 512  # as in llama.cpp
EXPERT_WIDTH = "expert_feed_forward_length"
SHARED_WIDTH, SHARED_COUNT = "expert_shared_feed_forward_length", "expert_shared_count"
STEP = "interleave_moe_layer_step"
GATING, GATING_FUNCS = "expert_gating_func", (0, 1, 2)
GROUPS = "expert_group_count", "expert_group_used_count"
DENSE = "leading_dense_block_count"
WEIGHTS_SCALE, WEIGHTS_NORM = "expert_weights_scale", "expert_weights_norm"


def feed_forward_length(keys: MetadataReader) -> int:
    """Return the feed-forward's width; in files that have only experts, an expert's. Raises InputError."""
    return keys.size("feed_forward_length", keys.get(EXPERT_WIDTH))


def read_expert_fields(keys: MetadataReader) -> dict[str, Any]:
    key_defaults = keys.architecture.key_defaults
    is_required = key_defaults.get("expert_count", 0) is None
    if not is_required and not keys.size("expert_count", 0, min_size=0):
        return {}
    count = keys.size("expert_count")
    if count > MAX_EXPERTS:
        raise keys.wrong("expert_count", count, f"at most {MAX_EXPERTS}")
    used = keys.size("expert_used_count")
    if used > count:
        expected = f"{keys.architecture.name}.expert_count {count} at most"
        raise keys.wrong("expert_used_count", used, expected)
    width = None
    if EXPERT_WIDTH in key_defaults:
        width = keys.size(EXPERT_WIDTH, feed_forward_length(keys) // used)
    fields = {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}
    return fields | _shared_expert_fields(keys, width or 0) | _routing_fields(keys)


def _shared_expert_fields(keys: MetadataReader, expert_width: int) -> dict[str, Any]:
    """Read Config fields of the shared expert (`expert_width`: a routed one's) and of which blocks have experts."""
    key_defaults, shared_fields = keys.architecture.key_defaults, {}
    if SHARED_WIDTH in key_defaults:
        default_width = feed_forward_length(keys) if keys.architecture.gated_shared_expert else 0
        shared_fields[SHARED_WIDTH] = keys.size(SHARED_WIDTH, min_size=0) or default_width
    elif keys.architecture.shared_expert_alike:
        shared_fields[SHARED_WIDTH] = expert_width
    elif SHARED_COUNT in key_defaults:
        shared_fields[SHARED_WIDTH] = keys.size(SHARED_COUNT, min_size=0) * expert_width
    if STEP in key_defaults and STEP not in keys.architecture.neutral:
        shared_fields[STEP] = keys.size(STEP)
    return shared_fields | ({DENSE: keys.size(DENSE, min_size=0)} if DENSE in key_defaults else {})


def _routing_fields(keys: MetadataReader) -> dict[str, Any]:
    """Read the Config fields of how experts are chosen and weighed. Raises InputError."""
    is_normalized = keys.get(WEIGHTS_NORM, False)
    if not isinstance(is_normalized, bool):
        raise keys.wrong(WEIGHTS_NORM, is_normalized, "true or false")
    fields = {WEIGHTS_SCALE: keys.read_optional_float(WEIGHTS_SCALE), WEIGHTS_NORM: is_normalized}
    if GATING not in keys.architecture.key_defaults:
        return fields
    gating_func, num_groups, used = (keys.size(key, 0, min_size=0) for key in (GATING, *GROUPS))
    if gating_func not in GATING_FUNCS:
        raise keys.wrong(GATING, gating_func, "1 for a softmax or 2 for sigmoids")
    if num_groups > 1 and (
        keys.size("expert_count") % num_groups or keys.size("expert_count") < 2 * num_groups
    ):
        expected = "a divisor of expert_count, with two experts or more in a group"
        raise keys.wrong(GROUPS[0], num_groups, expected)
    if num_groups > 1 and not 0 < used <= num_groups:
        raise keys.wrong(GROUPS[1], used, f"from 1 to {GROUPS[0]} {num_groups}")
    experts_per_group = keys.size("expert_count") // max(num_groups, 1)
    if num_groups > 1 and used * experts_per_group < keys.size("expert_used_count"):
        raise keys.wrong(GROUPS[1], used, "enough for expert_used_count")
    return {**fields, GATING: gating_func, **dict(zip(GROUPS, (num_groups, used), strict=True))}


def expert_sizes(config: Config) -> dict[str, int]:
    sizes = {
        EXPERT_WIDTH: config.expert_width, SHARED_WIDTH: config.expert_shared_feed_forward_length,
        SHARED_COUNT: config.expert_shared_feed_forward_length // config.expert_width,
        DENSE: config.leading_dense_block_count, STEP: config.interleave_moe_layer_step,
    }  # fmt: skip
    known_keys = config.traits.key_defaults if config.expert_count else ()
    return {key: size for key, size in sizes.items() if key in known_keys}


def weight_keys(config: Config) -> dict[str, MetadataValue]:
    """Return the GGUF metadata of how a router chooses and weighs experts."""
    weights_scale, is_normalized = config.expert_weights_scale, config.expert_weights_norm
    keys = {WEIGHTS_SCALE: MetadataValue("f32", weights_scale)} if weights_scale else {}
    keys |= {k: MetadataValue("u32", v[0]) for k, v in config.traits.neutral.items() if k == GATING}
    routing_values = {
        GATING: config.expert_gating_func, GROUPS[0]: config.expert_group_count,
        GROUPS[1]: config.expert_group_used_count,
    }  # fmt: skip
    if config.traits.sigmoid_routing is None:
        keys |= {key: MetadataValue("u32", value) for key, value in routing_values.items() if value}
    return keys | ({WEIGHTS_NORM: MetadataValue("bool", True)} if is_normalized else {})
