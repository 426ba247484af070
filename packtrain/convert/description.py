"""Translates a config.json: GGUF metadata, tensors, and tensors computed from the config.

Keys and tensors are those that llama.cpp's converter writes (its conversion/*.py). Raises InputError for what no
architecture here computes.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from packtrain.convert.checkpoint import Checkpoint
from packtrain.convert.tensors import Tensor, tensors_of
from packtrain.errors import InputError
from packtrain.gguf import Value
from packtrain.models.arch import architecture as arch
from packtrain.models.arch import classes
from packtrain.models.arch.architecture import BIASES, FACTORS, LONG, SHORT, Family, Keys
from packtrain.models.arch.given import ORIGINAL, Given
from packtrain.models.arch.sizes import Sizes
from packtrain.models.config import Config
from packtrain.models.keys import ROPE_FREQ_BASE, eps_key

YARN = {
    "ext_factor": "extrapolation_factor", "attn_factor": "attention_factor", "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}  # fmt: skip
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_tanh", "gelu_new", "gelu")
RELU_2 = ("relu2",)
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
    known, given = classes(), checkpoint.config
    if checkpoint.kind not in known:
        raise InputError(
            f"{checkpoint.folder}: {checkpoint.kind} cannot be converted; supported are {', '.join(known)}"
        )
    given = given.renamed(OTHER_NAMES)
    architecture, family = known[known[checkpoint.kind][1].other(given) or checkpoint.kind]
    given = family.usual(given)
    activations = GELU if architecture.gelu else SILU if architecture.gated else RELU_2
    activation = "hidden_activation" if given.values.get("hidden_activation") else "hidden_act"
    given.one_of(activation, activations[0], *activations)
    sizes = _sizes(given, family)
    config = Config(
        **asdict(sizes),
        tied=given.flag("tie_word_embeddings", family.tied),
        architecture=architecture.name,
        optional=family.optional(given) if family.optional else _biases(given, family),
        **family.kinds(given),
    )
    tensors = tensors_of(checkpoint, config, family)
    keys = _common(given, sizes, architecture, family) | _rope(given, architecture, family)
    keys |= family.keys(given, sizes) | _expert_keys(sizes)
    metadata = {"general.architecture": Value("string", architecture.name)}
    metadata |= {f"{architecture.name}.{key}": _value(value) for key, value in keys.items()}
    computed = _factors(given, sizes.head_width)
    computed |= {FACTORS: family.factors(given)} if family.factors else {}
    return Description(metadata, tensors, computed, sizes.vocab_size, family)


def _value(value: int | float | bool | str | list[bool] | list[int] | list[float]) -> Value:
    if isinstance(value, list):
        return Value({bool: "bool", int: "i32", float: "f32"}[type(value[0])], value)
    kinds = {bool: "bool", int: "u32", float: "f32", str: "string"}
    return Value(kinds[type(value)], value)


def _sizes(c: Given, family: Family) -> Sizes:
    width, heads, experts = c.size("hidden_size"), c.size("num_attention_heads"), family.experts
    default = family.head_width or width // heads
    if not (family.head_width or c.values.get("head_dim")) and width % heads:
        raise c.wrong("num_attention_heads", heads, f"a divisor of hidden_size {width}")
    if experts and c.values.get(experts.count[0]) == 0:
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
    more = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias") if c.flag("mlp_bias") else ()
    return BIASES if family.qkv_bias else (*attention, *more)


def _common(c: Given, sizes: Sizes, architecture: arch.Architecture, family: Family) -> Keys:
    name, default = ("layer_norm_eps", 1e-5) if architecture.layer_norms else ("rms_norm_eps", 1e-6)
    keys: Keys = {
        "context_length": sizes.context_length,
        "embedding_length": sizes.embedding_length,
        "block_count": sizes.block_count,
        "feed_forward_length": sizes.feed_forward_length,
        "attention.head_count": sizes.head_count,
        "attention.head_count_kv": sizes.head_count_kv,
        eps_key(architecture): c.real(name, default),
        "rope.freq_base": c.base(family.rope_freq_base),
    }
    width = sizes.head_width
    if width * sizes.head_count != sizes.embedding_length or c.values.get("head_dim"):
        keys |= {"attention.key_length": width, "attention.value_length": width}
    usual = {
        "rope.freq_base": ROPE_FREQ_BASE,
        "attention.head_count_kv": sizes.head_count,
        "feed_forward_length": sizes.expert_feed_forward_length,
    }
    gone = [key for key in family.left_out if keys[key] == usual[key]]
    return {key: value for key, value in keys.items() if key not in gone}


def _expert_keys(sizes: Sizes) -> Keys:
    if not sizes.expert_count:
        return {}
    keys: Keys = {"expert_count": sizes.expert_count, "expert_used_count": sizes.expert_used_count}
    width = sizes.expert_feed_forward_length
    return keys | ({} if width is None else {"expert_feed_forward_length": width})


# ---- rope ------------------------------------------------------------------------------------------------


def _rope(c: Given, architecture: arch.Architecture, family: Family) -> Keys:
    """Keys of rope scaling, if there is any."""
    found, kind = c.full_rotation(), c.scaling()
    by_tensors = (("llama3", FACTORS), ("longrope", LONG))
    computed = [name for name, tensor in by_tensors if tensor in architecture.optional]
    if kind in ("default", *computed, *family.scalings):
        return {}
    if kind not in ("linear", "yarn"):
        right = " or ".join(("default", "linear", "yarn", *computed))
        raise c.wrong("rope_scaling.type", kind, right)
    keys: Keys = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": c.number("rope_scaling.factor", found.get("factor")),
    }
    if kind == "yarn":
        original = found.get(ORIGINAL, c.values.get(ORIGINAL))
        keys["rope.scaling.original_context_length"] = int(c.number(ORIGINAL, original))
        for key, name in YARN.items():
            if found.get(name) is not None:
                keys[f"rope.scaling.yarn_{key}"] = c.number(f"rope_scaling.{name}", found[name])
    return keys


def _factors(c: Given, head_width: int) -> dict[str, np.ndarray]:
    """Divisors of the rope frequencies as tensors."""
    found, factors = c.full_rotation(), {}
    if c.scaling() == "llama3":
        return {FACTORS: _llama3(c, found, head_width)}
    for name, tensor in (("long", LONG), ("short", SHORT)) if c.scaling() == "longrope" else ():
        listed, count = found.get(f"{name}_factor"), c.turned(head_width) // 2
        if not isinstance(listed, list) or len(listed) != count:
            raise c.wrong(f"rope_scaling.{name}_factor", listed, f"a list of {count} numbers")
        numbers = [c.number(f"rope_scaling.{name}_factor", n) for n in listed]
        factors[tensor] = np.array(numbers, np.float32)
    return factors


def _llama3(c: Given, given: Mapping[str, Any], width: int) -> np.ndarray:
    """Llama 3's rope scaling: long wavelengths are stretched by `factor`, short ones are kept, with a ramp between."""

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
