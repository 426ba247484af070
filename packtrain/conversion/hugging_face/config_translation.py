"""Translates a config.json into GGUF metadata, tensors of the checkpoint, and tensors computed from the config.

Keys and tensors are those that llama.cpp's converter writes (its conversion/*.py). Raises InputError for what nothing
here computes."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face.checkpoint_folder import CheckpointFolder
from packtrain.conversion.hugging_face.tensor_names import ConvertedTensor, convert_tensors
from packtrain.conversion.hugging_face.unread_keys import check_unread
from packtrain.gguf import MetadataValue
from packtrain.models.arch import architecture as arch
from packtrain.models.arch import families_by_class
from packtrain.models.arch.architecture import BIASES, FACTORS, LONG, SHORT_FACTORS, Family, Keys
from packtrain.models.arch.hf_config import ORIGINAL, WINDOW, HFConfig
from packtrain.models.arch.size_fields import ModelSizes
from packtrain.models.config import Config, RopeScaling
from packtrain.models.gguf_keys import ROPE_FREQ_BASE, eps_key

# turns of a pair in the original context, at the ends of the ramp
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
ATTN_FACTOR, MULTIPLIER_KEY = "rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier"
MAGNITUDE_KEYS = "attention_factor", "mscale", "mscale_all_dim"
FACTOR_TOLERANCE = 1e-6
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_tanh", "gelu_new", "gelu_fast")
SQUARED_RELU = ("relu2",)
NEW_ACTIVATION_KEY = "hidden_activation"
TANH = ("falcon", "gemma")  # architectures whose gelu llama.cpp computes with tanh
ROUNDED_RAMPS = ("gpt-oss",)  # architectures whose checkpoints have a ramp that llama.cpp rounds
UNWINDOWED = ("Qwen", "SmolLM3")  # classes that have windows only if `use_sliding_window` says so
LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
# other names that some configs have for a key
KEY_ALIASES = {
    "layer_norm_eps": ("layer_norm_epsilon", "norm_epsilon", "norm_eps"), "num_experts": ("num_local_experts",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The contents of a GGUF file: metadata, tensors of the checkpoint, tensors computed from the config."""

    metadata: dict[str, MetadataValue]
    tensors: list[ConvertedTensor]
    computed_tensors: dict[str, np.ndarray]
    vocab_size: int
    model_family: Family


def describe_checkpoint(checkpoint: CheckpointFolder) -> ModelDescription:
    """Describe the GGUF file of a checkpoint. Raises InputError if packtrain cannot compute what its config says."""
    supported, hf_config = families_by_class(), checkpoint.config
    if checkpoint.model_class not in supported:
        fact = f"{checkpoint.folder}: {checkpoint.model_class} cannot be converted"
        raise InputError(f"{fact}; supported are {', '.join(supported)}")
    for key in LAYER_COUNT_KEYS:
        num_layers, max_layers = hf_config.get(key, 0), len(checkpoint.tensors)
        if type(num_layers) is int and num_layers > max_layers:
            raise hf_config.wrong(key, num_layers, f"at most {max_layers}, the number of tensors")
    hf_config = hf_config.with_aliases(KEY_ALIASES)
    kind = supported[checkpoint.model_class][1].other_class(hf_config) or checkpoint.model_class
    architecture, family = supported[kind]
    hf_config = family.normalize_config(hf_config)
    _check_activation(hf_config, architecture)
    model_sizes, optional = _model_sizes(hf_config, family), family.optional_tensors
    config = Config(
        **asdict(model_sizes), tied=hf_config.flag("tie_word_embeddings", family.tied_by_default),
        architecture=architecture.name, optional=optional(hf_config) if optional else _bias_names(hf_config, family),
        **family.per_block_fields(hf_config),
    )  # fmt: skip
    family.check_values(hf_config)
    tensors = convert_tensors(checkpoint, config, family)
    family_keys = family.metadata(hf_config, model_sizes)
    rope_keys, computed = _rope_keys(hf_config, model_sizes, architecture, family, family_keys)
    keys = _common_keys(hf_config, model_sizes, architecture, family) | rope_keys | family_keys
    computed |= {FACTORS: family.factors(hf_config)} if family.factors else {}
    max_context = check_unread(checkpoint.config, not checkpoint.model_class.startswith(UNWINDOWED))
    if 0 < max_context < model_sizes.context_length:
        keys["context_length"] = max_context
        hf_config.notes.append(
            f"{WINDOW} is {max_context}, which files of a {architecture.name} do not hold: the context is"
            f" {max_context} tokens, not {model_sizes.context_length}, within which both compute the same"
        )
    metadata = {"general.architecture": MetadataValue("string", architecture.name)}
    metadata |= {f"{architecture.name}.{key}": _value(value) for key, value in keys.items()}
    return ModelDescription(metadata, tensors, computed, model_sizes.vocab_size, family)


def _check_activation(hf_config: HFConfig, architecture: arch.Architecture) -> None:
    activations = GELU if architecture.use_gelu else SILU if architecture.gated else SQUARED_RELU
    if hf_config.get(NEW_ACTIVATION_KEY):
        hf_config.require_one_of(NEW_ACTIVATION_KEY, None, *activations)
    # other architectures with the new key do not read hidden_act
    if not hf_config.get(NEW_ACTIVATION_KEY) or architecture.name == "gemma":
        loose = ("gelu",) if architecture.use_gelu and architecture.name.startswith(TANH) else ()
        hf_config.require_one_of("hidden_act", activations[0], *activations, *loose)


def _value(value: int | float | bool | str | list[bool] | list[int] | list[float]) -> MetadataValue:
    """Return a number, text or list as a metadata value of the type that llama.cpp's converter writes."""
    if isinstance(value, list):
        return MetadataValue({bool: "bool", int: "i32", float: "f32"}[type(value[0])], value)
    type_names = {bool: "bool", int: "u32", float: "f32", str: "string"}
    return MetadataValue(type_names[type(value)], value)


def _model_sizes(c: HFConfig, family: Family) -> ModelSizes:
    """Read the model's sizes from the config. Raises InputError for sizes that do not fit together."""
    width, num_heads, experts = c.size("hidden_size"), c.size("num_attention_heads"), family.experts
    default_width = family.default_head_width or width // num_heads
    if not (family.default_head_width or c.get("head_dim")) and width % num_heads:
        raise c.wrong("num_attention_heads", num_heads, f"a divisor of hidden_size {width}")
    if experts and c.get(experts.count_key[0]) == 0:
        experts = None
    shared_length, num_dense = experts.shared_and_dense(c) if experts else (0, 0)
    return ModelSizes(
        vocab_size=c.size("vocab_size"), context_length=c.size("max_position_embeddings"), embedding_length=width,
        block_count=c.size("num_hidden_layers"), feed_forward_length=c.size("intermediate_size"), head_count=num_heads,
        head_count_kv=c.size("num_key_value_heads", num_heads), key_length=c.size("head_dim", default_width),
        expert_count=c.size(*experts.count_key) if experts else 0,
        expert_used_count=c.size(*experts.used_count_key) if experts else 0,
        expert_feed_forward_length=c.size(*experts.width) if experts and experts.width else None,
        expert_shared_feed_forward_length=shared_length, leading_dense_block_count=num_dense, **family.mixer_fields(c),
    )  # fmt: skip


def _bias_names(c: HFConfig, family: Family) -> tuple[str, ...]:
    attention_biases = (*BIASES, "attn_output.bias") if c.flag("attention_bias") else ()
    mlp_biases = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias") if c.flag("mlp_bias") else ()
    return BIASES if family.has_qkv_bias else (*attention_biases, *mlp_biases)


def _common_keys(
    c: HFConfig, sizes: ModelSizes, architecture: arch.Architecture, family: Family
) -> Keys:
    """Return the GGUF metadata that all architectures have, but for keys that the family's converter omits."""
    eps_name = "layer_norm_eps" if architecture.layer_norms else "rms_norm_eps"
    keys: Keys = {
        "context_length": sizes.context_length, "embedding_length": sizes.embedding_length,
        "block_count": sizes.block_count, "feed_forward_length": sizes.feed_forward_length,
        "attention.head_count": sizes.head_count, "attention.head_count_kv": sizes.head_count_kv,
        eps_key(architecture): c.real(eps_name), "rope.freq_base": c.rope_base(family.rope_freq_base),
    }  # fmt: skip
    width = sizes.head_width
    if width * sizes.head_count != sizes.embedding_length or c.get("head_dim"):
        keys |= {"attention.key_length": width, "attention.value_length": width}
    defaults = {
        "rope.freq_base": ROPE_FREQ_BASE, "attention.head_count_kv": sizes.head_count,
        "feed_forward_length": sizes.expert_feed_forward_length,
    }  # fmt: skip
    omitted_keys = [key for key in family.omitted_keys if keys[key] == defaults[key]]
    keys = {key: value for key, value in keys.items() if key not in omitted_keys}
    return keys | _expert_keys(sizes)


def _expert_keys(sizes: ModelSizes) -> Keys:
    if not sizes.expert_count:
        return {}
    keys: Keys = {"expert_count": sizes.expert_count, "expert_used_count": sizes.expert_used_count}
    width = sizes.expert_feed_forward_length
    return keys | ({} if width is None else {"expert_feed_forward_length": width})


# ---- rope ------------------------------------------------------------------------------------------------


def _rope_keys(
    c: HFConfig, sizes: ModelSizes, architecture: arch.Architecture, family: Family, family_keys: Keys,
) -> tuple[Keys, dict[str, np.ndarray]]:  # fmt: skip
    """Return (keys of rope scaling, {tensor: divisors of frequencies}); `family_keys`: those only the family has."""
    rope_params, kind = c.full_rotation(), c.scaling()
    tensor_by_scaling = {"llama3": FACTORS, "longrope": LONG}
    computed = [name for name, t in tensor_by_scaling.items() if t in architecture.optional_tensors]
    if kind == "llama3" in computed:
        return {}, {FACTORS: _llama3(c, c.rope_base(family.rope_freq_base), sizes.head_width)}
    if kind == "longrope" in computed:
        return {}, _longrope_factors(c, c.rotated_width(sizes.head_width) // 2)
    if kind in ("default", *family.rope_scaling_types):
        return {}, {}
    if kind not in ("linear", "yarn"):
        allowed_text = " or ".join(("default", "linear", "yarn", *computed))
        raise c.wrong("rope_scaling.type", kind, allowed_text)
    keys: Keys = {
        "rope.scaling.type": kind, "rope.scaling.factor": c.number("rope_scaling.factor", rope_params.get("factor")),
    }  # fmt: skip
    is_yarn = kind == "yarn"
    return _yarn_keys(c, sizes, architecture, family, keys, family_keys) if is_yarn else (keys, {})


RAMP_ENDS_ROUNDED = (
    "rope_scaling.truncate is False, which files of a gpt-oss do not hold: packtrain and llama.cpp round the ends of"
    " the ramp to whole pairs, as with all GGUF files of it"
)


def _yarn_keys(
    c: HFConfig, sizes: ModelSizes, architecture: arch.Architecture, family: Family, keys: Keys, family_keys: Keys,
) -> tuple[Keys, dict[str, np.ndarray]]:  # fmt: skip
    """Return YaRN as (GGUF keys, {}), or (key, {tensor: frequency divisors}) if no keys say its ramp. InputError."""
    rope_params, factor = c.full_rotation(), c.number("factor", keys["rope.scaling.factor"])
    original = c.number(ORIGINAL, rope_params.get(ORIGINAL, c.get(ORIGINAL, sizes.context_length)))
    if not original.is_integer() or original < 2 * math.pi:  # YaRN's ramp would end below 0
        raise c.wrong(ORIGINAL, original, "a whole number above 6")
    turns = {k: c.number(f"rope_scaling.{k}", rope_params.get(k) or n) for k, n in YARN.items()}
    keys |= {f"rope.scaling.yarn_{key}": n for key, n in turns.items() if rope_params.get(key)}
    keys["rope.scaling.original_context_length"] = int(original)
    (fast_turns, slow_turns), is_latent = turns.values(), bool(family.latent_module)
    multiplier = float(str(family_keys.get(MULTIPLIER_KEY, 0.0)))
    scaling = RopeScaling("yarn", factor, 0, 1.0, fast_turns, slow_turns, multiplier)
    width = c.rotated_width(sizes.head_width) if architecture.partial_rope else sizes.head_width
    ramp_place = sizes.rope_dims or width, c.rope_base(family.rope_freq_base), int(original)
    ramp_blend = scaling.blend(*ramp_place, truncate=bool(rope_params.get("truncate", True)))
    ramp_start, ramp_end = ramp_blend or (0.0, 1.0)
    held_keys = {key for key in YARN if f"rope.scaling.yarn_{key}" in architecture.key_defaults}
    wrong = {key: n for key, n in YARN.items() if turns[key] != n and key not in held_keys}
    wrong |= {} if (ramp_start, ramp_end) == scaling.blend(*ramp_place) else {"truncate": True}
    longer = _attention_magnitude(c, rope_params, factor)
    if wrong and FACTORS in architecture.optional_tensors:
        ramp = np.clip((np.arange(ramp_place[0] // 2) - ramp_start) / (ramp_end - ramp_start), 0, 1)
        return {ATTN_FACTOR: longer}, {FACTORS: (1 / (1 - ramp + ramp / factor)).astype(np.float32)}
    if architecture.name in ROUNDED_RAMPS and wrong.pop("truncate", False):
        c.notes.append(RAMP_ENDS_ROUNDED)
    for key, number in wrong.items():
        allowed_text = f"{number}: files of a {architecture.name} hold no other"
        raise c.wrong(f"rope_scaling.{key}", rope_params.get(key), allowed_text)
    extra_factor = longer / scaling.magnitude(factor, is_latent)
    if abs(extra_factor - 1) <= FACTOR_TOLERANCE:
        return keys, {}
    if is_latent or ("rope.freq_base_swa" in family_keys and not architecture.unscaled_window_rope):
        # the key would also apply where heads come from narrow vectors, or in blocks with a window
        key = next(name for name in MAGNITUDE_KEYS if rope_params.get(name))
        raise c.wrong(f"rope_scaling.{key}", rope_params.get(key), "left out")
    return keys | {ATTN_FACTOR: extra_factor}, {}


def _attention_magnitude(c: HFConfig, rope_params: Mapping[str, Any], factor: float) -> float:
    """Return the factor by which YaRN with this scaling `factor` multiplies cosines and sines."""
    # an mscale of 0 is none, and an attention_factor of 0 is wrong
    attention_factor, mscale, shared_mscale = (
        c.number(f"rope_scaling.{name}", value)
        if value not in (None, 0) or (value == 0 and name == "attention_factor")
        else 0.0
        for name, value in ((name, rope_params.get(name)) for name in MAGNITUDE_KEYS)
    )
    mscale, shared_mscale = (mscale, shared_mscale) if mscale and shared_mscale else (1.0, 0.0)
    log_factor = 0.1 * math.log(max(factor, 1.0))
    return attention_factor or (1 + mscale * log_factor) / (1 + shared_mscale * log_factor)


def _longrope_factors(c: HFConfig, count: int) -> dict[str, np.ndarray]:
    """Return longrope's frequency divisors, `count` for long and `count` for short contexts, by tensor name."""
    factors = {}
    for name, tensor in (("long", LONG), ("short", SHORT_FACTORS)):
        factor_list = c.full_rotation().get(f"{name}_factor")
        if not isinstance(factor_list, list) or len(factor_list) != count:
            raise c.wrong(f"rope_scaling.{name}_factor", factor_list, f"a list of {count} numbers")
        divisors = [c.number(f"rope_scaling.{name}_factor", number) for number in factor_list]
        factors[tensor] = np.array(divisors, np.float32)
    return factors


def _llama3(c: HFConfig, base: float, width: int) -> np.ndarray:
    """Return Llama 3's frequency divisors (width / 2,): long wavelengths are stretched by `factor`, short ones stay, a
    ramp between; `base`: rope's frequency base."""
    names = "factor", "low_freq_factor", "high_freq_factor"
    rope_params = c.full_rotation()
    factor, low, high = (c.number(f"rope_scaling.{name}", rope_params.get(name)) for name in names)
    if low >= high:
        raise c.wrong("rope_scaling.low_freq_factor", low, f"below high_freq_factor, {high}")
    original = c.number(ORIGINAL, rope_params.get(ORIGINAL, c.get("max_position_embeddings")))
    wavelengths = 2 * math.pi * base ** (np.arange(0, width, 2, dtype=np.float64) / width)
    ramp = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - ramp) / factor + ramp)).astype(np.float32)
