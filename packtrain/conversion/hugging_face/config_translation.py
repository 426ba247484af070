"""Translates a config.json: GGUF metadata, tensors, and tensors computed from the config.

Keys and tensors are those that llama.cpp's converter writes (its conversion/*.py). Raises InputError for what no
architecture here computes.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face.checkpoint_folder import Checkpoint
from packtrain.conversion.hugging_face.tensor_names import Tensor, tensors_of
from packtrain.conversion.hugging_face.unread_keys import check_unread
from packtrain.gguf import Value
from packtrain.models.arch import architecture as arch
from packtrain.models.arch import classes
from packtrain.models.arch.architecture import BIASES, FACTORS, LONG, SHORT, Family, Keys
from packtrain.models.arch.hf_config import ORIGINAL, WINDOW, Given
from packtrain.models.arch.size_fields import Sizes
from packtrain.models.config import Config, RopeScaling
from packtrain.models.gguf_keys import ROPE_FREQ_BASE, eps_key

YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # how often a pair turns in the original context where the ramp ends
ATTN_FACTOR, MULTIPLIER = "rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier"
GROWTH = "attention_factor", "mscale", "mscale_all_dim"
CLOSE = 1e-6
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_tanh", "gelu_new", "gelu_fast")
RELU_2 = ("relu2",)
NEW_ACT = "hidden_activation"
TANH = ("falcon", "gemma")  # what they call gelu is its tanh form, in llama.cpp
ROUNDED = ("gpt-oss",)  # whose own checkpoints have a ramp that llama.cpp rounds
UNWINDOWED = ("Qwen", "SmolLM3")  # classes that have windows only if `use_sliding_window` says so
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
# names of keys that some configs have
OTHER_NAMES = {
    "layer_norm_eps": ("layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "num_experts": ("num_local_experts",),
}


@dataclass(frozen=True, slots=True)
class Description:
    """What to write: metadata of the architecture, tensors of the checkpoint, tensors computed from the config.

    family        of the checkpoint
    """

    metadata: dict[str, Value]
    tensors: list[Tensor]
    computed: dict[str, np.ndarray]
    vocab_size: int
    family: Family


def describe(checkpoint: Checkpoint) -> Description:
    """The description of a checkpoint. Raises InputError if packtrain cannot compute what its config says."""
    supported, hf_config = classes(), checkpoint.config
    if checkpoint.kind not in supported:
        raise InputError(
            f"{checkpoint.folder}: {checkpoint.kind} cannot be converted; supported are {', '.join(supported)}"
        )
    for key in LAYERS:
        count, max_layers = hf_config.get(key, 0), len(checkpoint.tensors)
        if type(count) is int and count > max_layers:
            raise hf_config.wrong(key, count, f"at most {max_layers}, the number of tensors")
    hf_config = hf_config.renamed(OTHER_NAMES)
    kind = supported[checkpoint.kind][1].other(hf_config) or checkpoint.kind
    architecture, family = supported[kind]
    hf_config = family.usual(hf_config)
    _check_activation(hf_config, architecture)
    sizes = _sizes(hf_config, family)
    config = Config(
        **asdict(sizes),
        tied=hf_config.flag("tie_word_embeddings", family.tied),
        architecture=architecture.name,
        optional=family.optional(hf_config) if family.optional else _biases(hf_config, family),
        **family.kinds(hf_config),
    )
    tensors = tensors_of(checkpoint, config, family)
    family_keys = family.keys(hf_config, sizes)
    rope, computed = _rope(hf_config, sizes, architecture, family, family_keys)
    keys = _common(hf_config, sizes, architecture, family) | rope | family_keys
    keys |= _expert_keys(sizes)
    computed |= {FACTORS: family.factors(hf_config)} if family.factors else {}
    within = check_unread(checkpoint.config, not checkpoint.kind.startswith(UNWINDOWED))
    if 0 < within < sizes.context_length:
        keys["context_length"] = within
        hf_config.notes.append(
            f"{WINDOW} is {within}, which files of a {architecture.name} do not hold: the context is {within} tokens,"
            f" not {sizes.context_length}, within which both compute the same"
        )
    metadata = {"general.architecture": Value("string", architecture.name)}
    metadata |= {f"{architecture.name}.{key}": _value(value) for key, value in keys.items()}
    return Description(metadata, tensors, computed, sizes.vocab_size, family)


def _check_activation(given: Given, architecture: arch.Architecture) -> None:
    activations = GELU if architecture.gelu else SILU if architecture.gated else RELU_2
    if given.get(NEW_ACT):
        given.one_of(NEW_ACT, None, *activations)
    # the others of that key do not read the old one
    if not given.get(NEW_ACT) or architecture.name == "gemma":
        loose = ("gelu",) if architecture.gelu and architecture.name.startswith(TANH) else ()
        given.one_of("hidden_act", activations[0], *activations, *loose)


def _value(value: int | float | bool | str | list[bool] | list[int] | list[float]) -> Value:
    if isinstance(value, list):
        return Value({bool: "bool", int: "i32", float: "f32"}[type(value[0])], value)
    kinds = {bool: "bool", int: "u32", float: "f32", str: "string"}
    return Value(kinds[type(value)], value)


def _sizes(c: Given, family: Family) -> Sizes:
    width, heads, experts = c.size("hidden_size"), c.size("num_attention_heads"), family.experts
    default = family.head_width or width // heads
    if not (family.head_width or c.get("head_dim")) and width % heads:
        raise c.wrong("num_attention_heads", heads, f"a divisor of hidden_size {width}")
    if experts and c.get(experts.count[0]) == 0:
        experts = None
    shared, dense = experts.others(c) if experts else (0, 0)
    return Sizes(
        vocab_size=c.size("vocab_size"),
        context_length=c.size("max_position_embeddings"),
        embedding_length=width,
        block_count=c.size("num_hidden_layers"),
        feed_forward_length=c.size("intermediate_size"),
        head_count=heads,
        head_count_kv=c.size("num_key_value_heads", heads),
        key_length=c.size("head_dim", default),
        expert_count=c.size(*experts.count) if experts else 0,
        expert_used_count=c.size(*experts.used) if experts else 0,
        expert_feed_forward_length=c.size(*experts.width) if experts and experts.width else None,
        expert_shared_feed_forward_length=shared,
        leading_dense_block_count=dense,
        **family.mixing(c),
    )


def _biases(c: Given, family: Family) -> tuple[str, ...]:
    """The bias tensors of a block."""
    attention = (*BIASES, "attn_output.bias") if c.flag("attention_bias") else ()
    mlp_biases = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias") if c.flag("mlp_bias") else ()
    return BIASES if family.qkv_bias else (*attention, *mlp_biases)


def _common(c: Given, sizes: Sizes, architecture: arch.Architecture, family: Family) -> Keys:
    eps = "layer_norm_eps" if architecture.layer_norms else "rms_norm_eps"
    keys: Keys = {
        "context_length": sizes.context_length,
        "embedding_length": sizes.embedding_length,
        "block_count": sizes.block_count,
        "feed_forward_length": sizes.feed_forward_length,
        "attention.head_count": sizes.head_count,
        "attention.head_count_kv": sizes.head_count_kv,
        eps_key(architecture): c.real(eps),
        "rope.freq_base": c.base(family.rope_freq_base),
    }
    width = sizes.head_width
    if width * sizes.head_count != sizes.embedding_length or c.get("head_dim"):
        keys |= {"attention.key_length": width, "attention.value_length": width}
    defaults = {
        "rope.freq_base": ROPE_FREQ_BASE,
        "attention.head_count_kv": sizes.head_count,
        "feed_forward_length": sizes.expert_feed_forward_length,
    }
    omitted = [key for key in family.left_out if keys[key] == defaults[key]]
    return {key: value for key, value in keys.items() if key not in omitted}


def _expert_keys(sizes: Sizes) -> Keys:
    if not sizes.expert_count:
        return {}
    keys: Keys = {"expert_count": sizes.expert_count, "expert_used_count": sizes.expert_used_count}
    width = sizes.expert_feed_forward_length
    return keys | ({} if width is None else {"expert_feed_forward_length": width})


# ---- rope ------------------------------------------------------------------------------------------------


def _rope(
    c: Given, sizes: Sizes, architecture: arch.Architecture, family: Family, family_keys: Keys
) -> tuple[Keys, dict[str, np.ndarray]]:
    """Keys of rope scaling, if there is any, and divisors of its frequencies as tensors."""
    rope_params, kind = c.full_rotation(), c.scaling()
    by_tensors = {"llama3": FACTORS, "longrope": LONG}
    computed = [name for name, tensor in by_tensors.items() if tensor in architecture.optional]
    if kind == "llama3" in computed:
        return {}, {FACTORS: _llama3(c, c.base(family.rope_freq_base), sizes.head_width)}
    if kind == "longrope" in computed:
        return {}, _long(c, c.turned(sizes.head_width) // 2)
    if kind in ("default", *family.scalings):
        return {}, {}
    if kind not in ("linear", "yarn"):
        right = " or ".join(("default", "linear", "yarn", *computed))
        raise c.wrong("rope_scaling.type", kind, right)
    keys: Keys = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": c.number("rope_scaling.factor", rope_params.get("factor")),
    }
    return (
        _yarn(c, sizes, architecture, family, keys, family_keys) if kind == "yarn" else (keys, {})
    )


RAMP_ENDS_ROUNDED = (
    "rope_scaling.truncate is False, which files of a gpt-oss do not hold: packtrain and llama.cpp round the ends of"
    " the ramp to whole pairs, as with all GGUF files of it"
)


def _yarn(
    c: Given,
    sizes: Sizes,
    architecture: arch.Architecture,
    family: Family,
    keys: Keys,
    family_keys: Keys,
) -> tuple[Keys, dict[str, np.ndarray]]:
    """YaRN by its keys; by divisors of frequencies where llama.cpp reads no keys for its ramp, but divisors."""
    params, factor = c.full_rotation(), c.number("factor", keys["rope.scaling.factor"])
    original = c.number(ORIGINAL, params.get(ORIGINAL, c.get(ORIGINAL, sizes.context_length)))
    turns = {k: c.number(f"rope_scaling.{k}", params.get(k) or n) for k, n in YARN.items()}
    keys |= {f"rope.scaling.yarn_{key}": n for key, n in turns.items() if params.get(key)}
    keys["rope.scaling.original_context_length"] = int(original)
    (fast, slow), latent = turns.values(), bool(family.latent)
    multiplier = float(str(family_keys.get(MULTIPLIER, 0.0)))
    scaling = RopeScaling("yarn", factor, 0, 1.0, fast, slow, multiplier)
    rotary_width = c.turned(sizes.head_width) if architecture.partial_rope else sizes.head_width
    place = sizes.rope_dims or rotary_width, c.base(family.rope_freq_base), int(original)
    blend = scaling.blend(*place, truncate=params.get("truncate") is not False)
    low, high = blend or (0.0, 1.0)
    held = {key for key in YARN if f"rope.scaling.yarn_{key}" in architecture.keys}
    wrong = {key: n for key, n in YARN.items() if turns[key] != n and key not in held}
    wrong |= {} if (low, high) == scaling.blend(*place) else {"truncate": True}
    longer = _growth(c, params, factor)
    if wrong and FACTORS in architecture.optional:
        ramp = np.clip((np.arange(place[0] // 2) - low) / (high - low), 0, 1)
        return {ATTN_FACTOR: longer}, {FACTORS: (1 / (1 - ramp + ramp / factor)).astype(np.float32)}
    if architecture.name in ROUNDED and wrong.pop("truncate", False):
        c.notes.append(RAMP_ENDS_ROUNDED)
    for key, n in wrong.items():
        right = f"{n}: files of a {architecture.name} hold no other"
        raise c.wrong(f"rope_scaling.{key}", params.get(key), right)
    extra_factor = longer / scaling.magnitude(factor, latent)
    if abs(extra_factor - 1) <= CLOSE:
        return keys, {}
    _check_extra_factor(c, params, latent, family_keys, architecture)
    return keys | {ATTN_FACTOR: extra_factor}, {}


def _check_extra_factor(
    c: Given,
    rope_params: Mapping[str, Any],
    latent: bool,
    family_keys: Keys,
    architecture: arch.Architecture,
) -> None:
    """Refuse a factor of attention that a file's key would apply in more places than the config does."""
    if latent or ("rope.freq_base_swa" in family_keys and not architecture.windows_plain):
        # it would count where heads come from narrow vectors, or in blocks with a window, too
        key = next(name for name in GROWTH if rope_params.get(name))
        raise c.wrong(f"rope_scaling.{key}", rope_params.get(key), "left out")


def _growth(c: Given, rope_params: Mapping[str, Any], factor: float) -> float:
    """What YaRN multiplies cosines and sines by."""
    longer, mscale, shared = (
        c.number(f"rope_scaling.{name}", rope_params[name]) if rope_params.get(name) else 0.0
        for name in GROWTH
    )
    mscale, shared = (mscale, shared) if mscale and shared else (1.0, 0.0)
    log = 0.1 * math.log(max(factor, 1.0))
    return longer or (1 + mscale * log) / (1 + shared * log)


def _long(c: Given, count: int) -> dict[str, np.ndarray]:
    """The divisors of longrope: for long contexts and short ones."""
    factors = {}
    for name, tensor in (("long", LONG), ("short", SHORT)):
        listed = c.full_rotation().get(f"{name}_factor")
        if not isinstance(listed, list) or len(listed) != count:
            raise c.wrong(f"rope_scaling.{name}_factor", listed, f"a list of {count} numbers")
        numbers = [c.number(f"rope_scaling.{name}_factor", n) for n in listed]
        factors[tensor] = np.array(numbers, np.float32)
    return factors


def _llama3(c: Given, base: float, width: int) -> np.ndarray:
    """Llama 3's rope scaling: long wavelengths are stretched by `factor`, short ones are kept, with a ramp between."""
    names = "factor", "low_freq_factor", "high_freq_factor"
    rope_params = c.full_rotation()
    factor, low, high = (c.number(f"rope_scaling.{name}", rope_params.get(name)) for name in names)
    original = c.number(ORIGINAL, rope_params.get(ORIGINAL, c.get("max_position_embeddings")))
    waves = 2 * math.pi * base ** (np.arange(0, width, 2, dtype=np.float64) / width)
    smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
