"""Gemma 4 (text): embeddings for each block, and later blocks that share the keys and values of earlier ones.

Blocks with a window have other heads than those without. Scales of blocks are buffers in transformers, and not
trained. Google, Gemma 4; llama.cpp's gemma4.cpp, which does not read matrices of sharing blocks either."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import gemma2

LAYER_MODULES = {
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
}  # fmt: skip
EXPERT_MODULES = {
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "router.proj": "ffn_gate_inp",
    **dict(zip(("router.scale", "router.per_expert_scale"), arch.EXPERT_SCALES, strict=True)),
}  # fmt: skip
STACKED = {f"ffn_{matrix}_exps": (f"experts.{matrix}_proj", 0, 1) for matrix in ("gate_up", "down")}
UNSUFFIXED_NAMES = (
    ".layer_scalar", ".scale", ".per_expert_scale", ".gate_up_proj", ".experts.down_proj",
)  # fmt: skip
GATE_AND_UP = "ffn_gate_up_exps.weight"
OUTSIDE = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
SOFTCAP_KEY = "final_logit_softcapping"
SHARED_KV_KEY, LAYER_EMBEDDING_KEY = "num_kv_shared_layers", "hidden_size_per_layer_input"
WIDE, UNTURNED, PROPORTIONAL_SCALING = 512, 1e30, "proportional"


def normalize_config(hf_config: arch.HFConfig) -> arch.HFConfig:
    """Return the config with head_dim, num_key_value_heads without a window; near_head_dim, near_heads: with one."""
    heads, window_head_dim = hf_config.size("num_key_value_heads"), hf_config.size("head_dim", 256)
    layer_configs = hf_config.get("per_layer_config", {})
    if not isinstance(layer_configs, dict) or not all(
        isinstance(layer_config, dict) for layer_config in layer_configs.values()
    ):
        raise hf_config.wrong("per_layer_config", layer_configs, "an object of objects")
    # transformers writes the config of blocks without a window
    full_layer: Mapping[str, Any] = next(iter(layer_configs.values()), {})
    full = {"head_dim": full_layer.get("head_dim", hf_config.get("global_head_dim", WIDE))}
    if hf_config.flag("attention_k_eq_v"):
        full_kv_heads = hf_config.get("num_global_key_value_heads")
        full_kv_heads = full_layer.get("num_key_value_heads", full_kv_heads)
        full |= {"num_key_value_heads": full_kv_heads or heads}
    count = hf_config.size("num_experts") if hf_config.flag("enable_moe_block") else 0
    return hf_config.but(near_head_dim=window_head_dim, near_heads=heads, num_experts=count, **full)


def per_block_fields(hf_config: arch.HFConfig) -> dict[str, Any]:
    num_blocks, ffn_width = hf_config.size("num_hidden_layers"), hf_config.size("intermediate_size")
    pattern = tuple(hf_config.layer_windows(num_blocks, is_required=True))
    num_shared, layer_width = map(hf_config.optional_size, (SHARED_KV_KEY, LAYER_EMBEDDING_KEY))
    if hf_config.get_nullable(LAYER_EMBEDDING_KEY, "") == "":
        raise hf_config.wrong(LAYER_EMBEDDING_KEY, None, "a whole number, or 0")
    num_owning = num_blocks - num_shared if num_shared else 0
    if num_shared and (num_owning < 2 or pattern[num_owning - 1] or not pattern[num_owning - 2]):
        right = "0, or leave a block with a window and one without as the last with keys and values"
        raise hf_config.wrong(SHARED_KV_KEY, num_shared, right)
    ffn_widths = (ffn_width,) * num_owning + (2 * ffn_width,) * num_shared
    is_double_wide = num_shared and hf_config.flag("use_double_wide_mlp")
    window_width, heads = hf_config.size("near_head_dim"), hf_config.size("near_heads")
    return {
        "window_pattern": pattern, "own_kv": num_owning, "embedding_length_per_layer": layer_width,
        "keys_are_values": hf_config.flag("attention_k_eq_v"),
        "key_length_swa": 0 if window_width == hf_config.size("head_dim") else window_width,
        "head_count_kv_swa": 0 if heads == hf_config.size("num_key_value_heads") else heads,
        "feed_forward_lengths": ffn_widths if is_double_wide else (),
    }  # fmt: skip


def factors(hf_config: arch.HFConfig) -> np.ndarray:
    """Return rope's frequency divisors, (D / 2,) f32: in heads without a window, only the first pairs rotate."""
    width = hf_config.size("head_dim")
    num_rotated = hf_config.rotated_width(width) // 2
    return np.repeat(np.array([1.0, UNTURNED], np.float32), (num_rotated, width // 2 - num_rotated))


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    fields = per_block_fields(hf_config)
    if hf_config.scaling() != PROPORTIONAL_SCALING:
        raise hf_config.wrong(
            "rope_parameters.full_attention.rope_type", hf_config.scaling(), PROPORTIONAL_SCALING
        )
    window_width = hf_config.size("near_head_dim")
    keys: arch.Keys = {
        "attention.sliding_window": hf_config.size("sliding_window"),
        "attention.sliding_window_pattern": list(fields["window_pattern"]),
        "attention.shared_kv_layers": sizes.block_count - (fields["own_kv"] or sizes.block_count),
        "embedding_length_per_layer_input": fields["embedding_length_per_layer"],
        "attention.key_length_swa": window_width, "attention.value_length_swa": window_width,
        "rope.dimension_count": sizes.head_width, "rope.dimension_count_swa": window_width,
        "rope.freq_base_swa": hf_config.window_rope_base(),
    }  # fmt: skip
    if fields["feed_forward_lengths"]:
        keys["feed_forward_length"] = list(fields["feed_forward_lengths"])
    if fields["head_count_kv_swa"]:
        head_counts = (sizes.head_count_kv, fields["head_count_kv_swa"])
        keys["attention.head_count_kv"] = [head_counts[swa] for swa in fields["window_pattern"]]
    # a cap of 0 is none; without the key llama.cpp takes 30
    return keys | {SOFTCAP_KEY: hf_config.real(SOFTCAP_KEY) if hf_config.get(SOFTCAP_KEY) else 0.0}


KEY_DEFAULTS = {
    **arch.EXPERT_KEYS, "expert_feed_forward_length": None, "attention.sliding_window": None,
    "attention.sliding_window_pattern": None, "attention.shared_kv_layers": 0, "attention.key_length_swa": None,
    "attention.value_length_swa": None, "embedding_length_per_layer_input": None, SOFTCAP_KEY: 30.0,
    "rope.dimension_count_swa": None, "rope.freq_base_swa": 10_000.0,
}  # fmt: skip
ARCHITECTURE = arch.Architecture(
    "gemma4", halves=True, use_gelu=True, scaled_embedding=True, head_norms=True, post_norms=True, value_norms=True,
    unscaled_scores=True, far_factors=True, parallel_dense_ffn=True, key_defaults=KEY_DEFAULTS,
    zero_keys=(SOFTCAP_KEY,), optional_tensors=(arch.FACTORS, arch.LAYER_SCALE, GATE_AND_UP),
    families=(
        arch.Family(
            ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
            {**gemma2.FAMILY.block_modules, **arch.HEAD_NORMS, **LAYER_MODULES, **EXPERT_MODULES}, extra_metadata,
            arch.ExpertLayout(
                {}, ("num_experts", 0), ("top_k_experts", 0), ("moe_intermediate_size", 0), stacked_matrices=STACKED,
                rows=True,
            ),
            normalize_config=normalize_config, per_block_fields=per_block_fields,
            required_values={"use_bidirectional_attention": (None, None, "vision"), **arch.fixed(attention_bias=False)},
            factors=factors,
            optional_tensors=lambda hf_config: (
                arch.FACTORS, arch.LAYER_SCALE, *([GATE_AND_UP] if hf_config.get("num_experts") else []),
            ),
            names=arch.CheckpointNames(outside=dict(zip(OUTSIDE, arch.LAYER_INPUTS, strict=True))),
            suffix_renames={name: f"{name}.weight" for name in UNSUFFIXED_NAMES},
            rope_scaling_types=(PROPORTIONAL_SCALING,), rope_freq_base=1e6, tied_by_default=True, space_prefix=False,
            merged="gemma4",
        ),
    ),
)  # fmt: skip
