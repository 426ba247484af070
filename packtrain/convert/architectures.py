"""What a config.json means: the architecture's metadata in a GGUF file, its tensors, and those that it computes.

Keys and tensors are those that llama.cpp's converter writes (conversion/*.py there). What no architecture here
computes is refused.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtrain.convert.checkpoint import Checkpoint
from packtrain.convert.tensors import (
    GEMMA2,
    LLAMA,
    MIXTRAL,
    PHI3,
    QK_NORMS,
    Sizes,
    Tensor,
    tensors_of,
)
from packtrain.errors import InputError
from packtrain.gguf import Value

Keys = dict[str, int | float | bool | str]
ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
LONG = ("longrope", "su")
YARN = {
    "ext_factor": "extrapolation_factor", "attn_factor": "attention_factor", "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}  # fmt: skip
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_tanh", "gelu")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family: its GGUF name, parts of a block, and how its config differs from a llama's.

    paired    rotation is of neighbours, so rows of q and k are turned
    tied      whether the embedding is the head where the config does not say
    more      metadata beyond a llama's
    """

    name: str
    block: Mapping[str, str]
    more: Callable[[Checkpoint, Sizes], Keys]
    paired: bool = False
    tied: bool = False
    norm_shift: float = 0.0
    activations: tuple[str, ...] = SILU
    rope_freq_base: float = 10_000.0
    head_width: int = 0


@dataclass(frozen=True, slots=True)
class Description:
    """What to write: metadata of the architecture, tensors of the checkpoint, tensors that the config gives."""

    metadata: dict[str, Value]
    tensors: list[Tensor]
    computed: dict[str, np.ndarray]
    vocab_size: int


def describe(checkpoint: Checkpoint) -> Description:
    """The GGUF form of a checkpoint. Raises InputError for one that cannot be computed with as its config says."""
    architecture = ARCHITECTURES.get(checkpoint.kind)
    if architecture is None:
        raise InputError(
            f"{checkpoint.folder}: {checkpoint.kind} cannot be converted; what can: {', '.join(ARCHITECTURES)}"
        )
    a = architecture
    activation = "hidden_activation" if checkpoint.config.get("hidden_activation") else "hidden_act"
    checkpoint.one_of(activation, a.activations[0], *a.activations)
    sizes = _sizes(checkpoint, a)
    tied = checkpoint.flag("tie_word_embeddings", a.tied)
    tensors = tensors_of(
        checkpoint, sizes, a.block, paired_heads=a.paired, norm_shift=a.norm_shift, tied=tied
    )
    keys = _common(checkpoint, sizes, a) | _rope(checkpoint, a) | a.more(checkpoint, sizes)
    metadata = {f"{a.name}.{key}": _value(value) for key, value in keys.items()}
    metadata = {"general.architecture": Value("string", a.name)} | metadata
    return Description(metadata, tensors, _factors(checkpoint, sizes), sizes.V)


def _value(value: int | float | bool | str) -> Value:
    kinds = {bool: "bool", int: "u32", float: "f32", str: "string"}
    return Value(kinds[type(value)], value)


def _sizes(c: Checkpoint, a: Architecture) -> Sizes:
    width, heads = c.size("hidden_size"), c.size("num_attention_heads")
    default = a.head_width or width // heads
    if not (a.head_width or c.config.get("head_dim")) and width % heads:
        raise c.wrong("num_attention_heads", heads, f"a divisor of hidden_size {width}")
    return Sizes(
        C=width,
        H=heads,
        K=c.size("num_key_value_heads", heads),
        D=c.size("head_dim", default),
        F=c.size("intermediate_size"),
        E=c.size("num_local_experts", 8) if a.block is MIXTRAL else 0,
        V=c.size("vocab_size"),
        blocks=c.size("num_hidden_layers"),
    )


def _common(c: Checkpoint, sizes: Sizes, a: Architecture) -> Keys:
    keys: Keys = {
        "context_length": c.size("max_position_embeddings"),
        "embedding_length": sizes.C,
        "block_count": sizes.blocks,
        "feed_forward_length": sizes.F,
        "attention.head_count": sizes.H,
        "attention.head_count_kv": sizes.K,
        "attention.layer_norm_rms_epsilon": c.real("rms_norm_eps", 1e-6),
        "rope.freq_base": c.number("rope_theta", _full(c).get("rope_theta", a.rope_freq_base)),
    }
    if sizes.D * sizes.H != sizes.C or c.config.get("head_dim"):
        keys |= {"attention.key_length": sizes.D, "attention.value_length": sizes.D}
    return keys


# ---- rotation ------------------------------------------------------------------------------------------------


def _parameters(c: Checkpoint) -> dict[str, Any]:
    """All that the config says of rotation, in the old place or the new one."""
    found = c.config.get("rope_parameters") or c.config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise c.wrong("rope_scaling", found, "an object")
    return found


def _full(c: Checkpoint) -> dict[str, Any]:
    """The rotation of layers without a window; the base stands here or in the config itself."""
    found = _parameters(c)
    inner = found.get("full_attention")
    found = inner if isinstance(inner, dict) else found
    theta = c.config.get("rope_theta")
    return found if theta is None else {"rope_theta": theta, **found}


def _kind(c: Checkpoint) -> str:
    return str(_full(c).get("rope_type", _full(c).get("type")) or "default")


def _rope(c: Checkpoint, a: Architecture) -> Keys:
    """Scaling of positions, where it is more than a base."""
    given, kind = _full(c), _kind(c)
    longer = kind in LONG and a.name == "phi3"
    if kind in ("default", "llama3") or longer:
        return {}
    if kind not in ("linear", "yarn"):
        raise c.wrong(
            "rope_scaling.type", kind, "default, linear, yarn, llama3 or, in Phi3, longrope"
        )
    keys: Keys = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": c.number("rope_scaling.factor", given.get("factor")),
    }
    if kind == "yarn":
        original = given.get(ORIGINAL, c.config.get(ORIGINAL))
        keys["rope.scaling.original_context_length"] = int(c.number(ORIGINAL, original))
        for key, name in YARN.items():
            if given.get(name) is not None:
                keys[f"rope.scaling.yarn_{key}"] = c.number(f"rope_scaling.{name}", given[name])
    return keys


def _factors(c: Checkpoint, sizes: Sizes) -> dict[str, np.ndarray]:
    """Divisors of the frequencies as tensors."""
    given = _full(c)
    if _kind(c) == "llama3":
        return {"rope_freqs.weight": _llama3(c, given, sizes.D)}
    if _kind(c) not in LONG:
        return {}
    made = {}
    for name in ("long", "short"):
        listed = given.get(f"{name}_factor")
        count = _turned(c, sizes) // 2
        if not isinstance(listed, list) or len(listed) != count:
            raise c.wrong(f"rope_scaling.{name}_factor", listed, f"a list of {count} numbers")
        numbers = [c.number(f"rope_scaling.{name}_factor", n) for n in listed]
        made[f"rope_factors_{name}.weight"] = np.array(numbers, np.float32)
    return made


def _llama3(c: Checkpoint, given: Mapping[str, Any], width: int) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones not at all, with a ramp between."""

    def number(name: str, default: float) -> float:
        return c.number(f"rope_scaling.{name}", given.get(name, default))

    factor, low, high = (
        number("factor", 8.0), number("low_freq_factor", 1.0), number("high_freq_factor", 4.0)
    )  # fmt: skip
    original = number(ORIGINAL, 8192)
    base = number("rope_theta", 10_000.0)
    waves = 2 * math.pi * base ** (np.arange(0, width, 2, dtype=np.float64) / width)
    smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _turned(c: Checkpoint, sizes: Sizes) -> int:
    """Dimensions of a head that are rotated."""
    share = c.number(PARTIAL, _full(c).get(PARTIAL, c.config.get(PARTIAL, 1.0)))
    return int(share * sizes.D)


# ---- families ------------------------------------------------------------------------------------------------


def _nothing(c: Checkpoint, sizes: Sizes) -> Keys:
    return {}


def _llama(c: Checkpoint, sizes: Sizes) -> Keys:
    return {"vocab_size": sizes.V, "rope.dimension_count": sizes.D}


def _mixtral(c: Checkpoint, sizes: Sizes) -> Keys:
    return _llama(c, sizes) | {
        "expert_count": sizes.E,
        "expert_used_count": c.size("num_experts_per_tok", 2),
    }


def _mistral3(c: Checkpoint, sizes: Sizes) -> Keys:
    given, keys = _full(c), _llama(c, sizes)
    if given.get("mscale_all_dim") is not None:
        name = "rope_parameters.mscale_all_dim"
        keys["rope.scaling.yarn_log_multiplier"] = c.number(name, given["mscale_all_dim"])
    if given.get("llama_4_scaling_beta") is not None:
        name = "rope_parameters.llama_4_scaling_beta"
        keys["attention.temperature_scale"] = c.number(name, given["llama_4_scaling_beta"])
    return keys


def _smollm3(c: Checkpoint, sizes: Sizes) -> Keys:
    every_fourth = [int((i + 1) % 4 != 0) for i in range(sizes.blocks)]
    c.one_of("no_rope_layer_interval", 4, 4)
    c.one_of("no_rope_layers", every_fourth, every_fourth)
    c.one_of("use_sliding_window", False, False)
    return _llama(c, sizes)


def _gemma(c: Checkpoint, sizes: Sizes) -> Keys:
    return {"attention.key_length": sizes.D, "attention.value_length": sizes.D}


def _gemma2(c: Checkpoint, sizes: Sizes) -> Keys:
    _check_scale(c, sizes, 46)
    return {
        **_gemma(c, sizes),
        "attn_logit_softcapping": c.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": c.real("final_logit_softcapping", 30.0),
        "attention.sliding_window": c.size("sliding_window", 4096),
    }


def _gemma3(c: Checkpoint, sizes: Sizes) -> Keys:
    _check_scale(c, sizes, 62)
    c.one_of("attn_logit_softcapping", None, None)
    c.one_of("sliding_window_pattern", 6, 6)
    pattern = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(sizes.blocks)]
    c.one_of("layer_types", pattern, pattern)
    keys: Keys = {**_gemma(c, sizes), "attention.sliding_window": c.size("sliding_window", 4096)}
    local = _parameters(c).get("sliding_attention")
    base = local.get("rope_theta") if isinstance(local, dict) else None
    base = c.config.get("rope_local_base_freq", 10_000.0) if base is None else base
    keys["rope.freq_base_swa"] = c.number("rope_local_base_freq", base)
    if c.config.get("final_logit_softcapping") is not None:
        keys["final_logit_softcapping"] = c.real("final_logit_softcapping")
    return keys


def _check_scale(c: Checkpoint, sizes: Sizes, large: int) -> None:
    """GGUF has no key for it: the scale of attention is that of the head width, or of C / H in the 27B."""
    width = sizes.C // sizes.H if sizes.blocks == large else sizes.D
    c.one_of("query_pre_attn_scalar", width, width)


def _phi3(c: Checkpoint, sizes: Sizes) -> Keys:
    context = c.size("max_position_embeddings")
    original = c.size(ORIGINAL, _full(c).get(ORIGINAL, context))
    keys: Keys = {
        "rope.dimension_count": _turned(c, sizes),
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": c.size("sliding_window")
        if c.config.get("sliding_window")
        else 0,
    }
    if _kind(c) in LONG:
        scale = context / original
        attention = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        keys["rope.scaling.attn_factor"] = attention
    return keys


_LLAMA = Architecture("llama", LLAMA, _llama, paired=True)
_MISTRAL3 = Architecture("mistral3", LLAMA, _mistral3, paired=True)
_GEMMA3 = Architecture(
    "gemma3", GEMMA2 | QK_NORMS, _gemma3, tied=True, norm_shift=1.0, activations=GELU,
    rope_freq_base=1_000_000.0, head_width=256,
)  # fmt: skip
ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": Architecture(
        "llama", MIXTRAL, _mixtral, paired=True, rope_freq_base=1_000_000.0
    ),
    "Mistral3ForConditionalGeneration": _MISTRAL3,
    "Ministral3ForCausalLM": _MISTRAL3,
    "Qwen2ForCausalLM": Architecture("qwen2", LLAMA, _nothing),
    "Qwen3ForCausalLM": Architecture("qwen3", LLAMA | QK_NORMS, _nothing, head_width=128),
    "GemmaForCausalLM": Architecture(
        "gemma", LLAMA, _gemma, tied=True, norm_shift=1.0, activations=GELU, head_width=256
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2", GEMMA2, _gemma2, tied=True, norm_shift=1.0, activations=GELU, head_width=256
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": Architecture("phi3", PHI3, _phi3),
    "SmolLM3ForCausalLM": Architecture("smollm3", LLAMA, _smollm3, paired=True, tied=True),
}
