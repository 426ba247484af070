"""The metadata of experts: GGUF keys to the fields of a Config and back."""

from typing import Any

from packtrain.gguf import Value
from packtrain.models.config import Config
from packtrain.models.gguf_keys import Keys

MOST_EXPERTS = 512  # as in llama.cpp
EXPERT_WIDTH = "expert_feed_forward_length"
SHARED_WIDTH, SHARED_COUNT = "expert_shared_feed_forward_length", "expert_shared_count"
STEP = "interleave_moe_layer_step"
GATING, GATINGS = "expert_gating_func", (0, 1, 2)
GROUPS = "expert_group_count", "expert_group_used_count"
DENSE = "leading_dense_block_count"
WEIGHTS_SCALE, WEIGHTS_NORM = "expert_weights_scale", "expert_weights_norm"


def feed_forward_length(keys: Keys) -> int:
    """Of files that have only experts, their width."""
    return keys.size("feed_forward_length", keys.get(EXPERT_WIDTH))


def mixture(keys: Keys) -> dict[str, Any]:
    defaults = keys.architecture.keys
    is_required = defaults.get("expert_count", 0) is None
    if not is_required and not keys.size("expert_count", 0, least=0):
        return {}
    count = keys.size("expert_count")
    if count > MOST_EXPERTS:
        raise keys.wrong("expert_count", count, f"at most {MOST_EXPERTS}")
    used = keys.size("expert_used_count")
    if used > count:
        raise keys.wrong(
            "expert_used_count", used, f"{keys.architecture.name}.expert_count {count} at most"
        )
    width = None
    if EXPERT_WIDTH in defaults:
        width = keys.size(EXPERT_WIDTH, feed_forward_length(keys) // used)
    fields = {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}
    return fields | _shared(keys, width or 0) | _weights(keys)


def _shared(keys: Keys, width: int) -> dict[str, Any]:
    """The width of the shared expert, and the number of blocks without experts."""
    defaults, fields = keys.architecture.keys, {}
    if SHARED_WIDTH in defaults:
        default_width = feed_forward_length(keys) if keys.architecture.shared_gate else 0
        fields[SHARED_WIDTH] = keys.size(SHARED_WIDTH, least=0) or default_width
    elif keys.architecture.shared_alike:
        fields[SHARED_WIDTH] = width
    elif SHARED_COUNT in defaults:
        fields[SHARED_WIDTH] = keys.size(SHARED_COUNT, least=0) * width
    if STEP in defaults and STEP not in keys.architecture.neutral:
        fields[STEP] = keys.size(STEP)
    return fields | ({DENSE: keys.size(DENSE, least=0)} if DENSE in defaults else {})


def _weights(keys: Keys) -> dict[str, Any]:
    """What happens to the weights of the chosen experts."""
    norm = keys.get(WEIGHTS_NORM, False)
    if not isinstance(norm, bool):
        raise keys.wrong(WEIGHTS_NORM, norm, "true or false")
    fields = {WEIGHTS_SCALE: keys.own(WEIGHTS_SCALE), WEIGHTS_NORM: norm}
    if GATING not in keys.architecture.keys:
        return fields
    func, groups, used = (keys.size(key, 0, least=0) for key in (GATING, *GROUPS))
    if func not in GATINGS:
        raise keys.wrong(GATING, func, "1 for a softmax or 2 for sigmoids")
    if groups > 1 and (
        keys.size("expert_count") % groups or keys.size("expert_count") < 2 * groups
    ):
        raise keys.wrong(
            GROUPS[0], groups, "a divisor of expert_count, with two experts or more in a group"
        )
    if groups > 1 and not 0 < used <= groups:
        raise keys.wrong(GROUPS[1], used, f"from 1 to {GROUPS[0]} {groups}")
    each = keys.size("expert_count") // max(groups, 1)
    if groups > 1 and used * each < keys.size("expert_used_count"):
        raise keys.wrong(GROUPS[1], used, "enough for expert_used_count")
    return {**fields, GATING: func, **dict(zip(GROUPS, (groups, used), strict=True))}


def expert_sizes(config: Config) -> dict[str, int]:
    sizes = {
        EXPERT_WIDTH: config.expert_width, SHARED_WIDTH: config.expert_shared_feed_forward_length,
        SHARED_COUNT: config.expert_shared_feed_forward_length // config.expert_width,
        DENSE: config.leading_dense_block_count, STEP: config.interleave_moe_layer_step,
    }  # fmt: skip
    known_keys = config.traits.keys if config.expert_count else ()
    return {key: size for key, size in sizes.items() if key in known_keys}


def weight_keys(config: Config) -> dict[str, Value]:
    """Keys of what happens to the weights of the chosen experts."""
    by, norm = config.expert_weights_scale, config.expert_weights_norm
    keys = {WEIGHTS_SCALE: Value("f32", by)} if by else {}
    keys |= {k: Value("u32", v[0]) for k, v in config.traits.neutral.items() if k == GATING}
    numbers = {
        GATING: config.expert_gating_func,
        GROUPS[0]: config.expert_group_count,
        GROUPS[1]: config.expert_group_used_count,
    }
    if config.traits.sigmoids is None:
        keys |= {key: Value("u32", number) for key, number in numbers.items() if number}
    return keys | ({WEIGHTS_NORM: Value("bool", True)} if norm else {})
