"""Gemma 4 (text): embeddings of their own for blocks, and later blocks that share the keys and values of earlier ones.

Blocks with a window have other heads than those without. Google, Gemma 4; llama.cpp's gemma4.cpp.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import gemma2
from packtrain.models.arch.architecture import FACTORS, Architecture, Experts, Family, Keys, Names
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

LAYERS = {
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
}  # fmt: skip
MIXTURE = {
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "router.proj": "ffn_gate_inp",
    **dict(zip(("router.scale", "router.per_expert_scale"), arch.EXPERT_SCALES, strict=True)),
}  # fmt: skip
STACKED = {f"ffn_{part}_exps": (f"experts.{part}_proj", 0, 1) for part in ("gate_up", "down")}
BARE = ".layer_scalar", ".scale", ".per_expert_scale", ".gate_up_proj", ".experts.down_proj"
BOTH = "ffn_gate_up_exps.weight"
OUTSIDE = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
CAP = "final_logit_softcapping"
SHARED, OWN = "num_kv_shared_layers", "hidden_size_per_layer_input"
WIDE, UNTURNED, PROPORTIONAL = 512, 1e30, "proportional"


def usual(given: Given) -> Given:
    """The sizes of a head and the number of keys' heads in blocks without a window are those of the model."""
    heads, near = given.size("num_key_value_heads"), given.size("head_dim", 256)
    own = given.get("per_layer_config", {})
    if not isinstance(own, dict) or not all(isinstance(one, dict) for one in own.values()):
        raise given.wrong("per_layer_config", own, "an object of objects")
    # transformers writes those without a window
    here: Mapping[str, Any] = next(iter(own.values()), {})
    full = {"head_dim": here.get("head_dim", given.get("global_head_dim", WIDE))}
    if given.flag("attention_k_eq_v"):
        own_heads = here.get("num_key_value_heads", given.get("num_global_key_value_heads"))
        full |= {"num_key_value_heads": own_heads or heads}
    count = given.size("num_experts") if given.flag("enable_moe_block") else 0
    return given.but(near_head_dim=near, near_heads=heads, num_experts=count, **full)


def kinds(given: Given) -> dict[str, Any]:
    blocks, wide = given.size("num_hidden_layers"), given.size("intermediate_size")
    pattern = tuple(given.windows(blocks, required=True))
    shared, layers = (given.get(key) and given.size(key) for key in (SHARED, OWN))
    if given.stated(OWN, "") == "":
        raise given.wrong(OWN, None, "a whole number, or 0")
    own = blocks - shared if shared else 0
    if shared and (own < 2 or pattern[own - 1] or not pattern[own - 2]):
        right = "0, or leave a block with a window and one without as the last with keys and values"
        raise given.wrong(SHARED, shared, right)
    twice = shared and given.flag("use_double_wide_mlp")
    width, heads = given.size("near_head_dim"), given.size("near_heads")
    return {
        "window_pattern": pattern,
        "own_kv": own,
        "embedding_length_per_layer": layers or 0,
        "keys_are_values": given.flag("attention_k_eq_v"),
        "key_length_swa": 0 if width == given.size("head_dim") else width,
        "head_count_kv_swa": 0 if heads == given.size("num_key_value_heads") else heads,
        "feed_forward_lengths": (wide,) * own + (2 * wide,) * shared if twice else (),
    }


def factors(given: Given) -> np.ndarray:
    """Divisors of frequencies: only the first pairs of a head without a window are turned."""
    width = given.size("head_dim")
    turned = given.turned(width) // 2
    return np.repeat(np.array([1.0, UNTURNED], np.float32), (turned, width // 2 - turned))


def keys(given: Given, sizes: Sizes) -> Keys:
    found = kinds(given)
    given.one_of("use_bidirectional_attention", None, None, "vision")
    given.one_of("attention_bias", False, False)
    if given.scaling() != PROPORTIONAL:
        raise given.wrong("rope_parameters.full_attention.rope_type", given.scaling(), PROPORTIONAL)
    near = given.size("near_head_dim")
    keys: Keys = {
        "attention.sliding_window": given.size("sliding_window"),
        "attention.sliding_window_pattern": list(found["window_pattern"]),
        "attention.shared_kv_layers": sizes.block_count - (found["own_kv"] or sizes.block_count),
        "embedding_length_per_layer_input": found["embedding_length_per_layer"],
        "attention.key_length_swa": near,
        "attention.value_length_swa": near,
        "rope.dimension_count": sizes.head_width,
        "rope.dimension_count_swa": near,
        "rope.freq_base_swa": given.near_base(),
    }
    if found["feed_forward_lengths"]:
        keys["feed_forward_length"] = list(found["feed_forward_lengths"])
    if found["head_count_kv_swa"]:
        each = (sizes.head_count_kv, found["head_count_kv_swa"])
        keys["attention.head_count_kv"] = [each[near] for near in found["window_pattern"]]
    # without the key llama.cpp takes a default
    return keys | {CAP: given.real(CAP) if given.get(CAP) else 0.0}


KEYS = {
    **arch.EXPERT_KEYS, "expert_feed_forward_length": None, "attention.sliding_window": None,
    "attention.sliding_window_pattern": None, "attention.shared_kv_layers": 0, "attention.key_length_swa": None,
    "attention.value_length_swa": None, "embedding_length_per_layer_input": None, CAP: 30.0,
    "rope.dimension_count_swa": None, "rope.freq_base_swa": 10_000.0,
}  # fmt: skip
ARCHITECTURE = Architecture(
    "gemma4",
    halves=True,
    gelu=True,
    scaled_embedding=True,
    head_norms=True,
    post_norms=True,
    value_norms=True,
    plain_scores=True,
    far_factors=True,
    dense_beside=True,
    keys=KEYS,
    zero=(CAP,),
    optional=(FACTORS, arch.LAYER_SCALE, BOTH),
    families=(
        Family(
            ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
            {**gemma2.FAMILY.block, **arch.HEAD_NORMS, **LAYERS, **MIXTURE},
            keys,
            Experts(
                {},
                ("num_experts", 0),
                ("top_k_experts", 0),
                ("moe_intermediate_size", 0),
                stacked=STACKED,
                rows=True,
            ),
            usual=usual,
            kinds=kinds,
            factors=factors,
            optional=lambda given: (
                FACTORS,
                arch.LAYER_SCALE,
                *([BOTH] if given.get("num_experts") else []),
            ),
            names=Names(outside=dict(zip(OUTSIDE, arch.LAYER_INPUTS, strict=True))),
            ends={name: f"{name}.weight" for name in BARE},
            scalings=(PROPORTIONAL,),
            rope_freq_base=1e6,
            tied=True,
            space_prefix=False,
            merged="gemma4",
        ),
    ),
)
