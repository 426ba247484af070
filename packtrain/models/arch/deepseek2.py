"""DeepSeek-V2 and V3: heads from narrow vectors, a shared expert, experts after the first blocks; V3's in groups.

arXiv 2405.04434, 2412.19437. Blocks after the last, which guess more tokens, are not used."""

from typing import Any

from packtrain.models.arch import architecture as arch

MULTIPLIER_FACTOR = 0.1  # files hold the multiplier times this factor
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
WIDTH = ("moe_intermediate_size", 1407)
ATTENTION = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
}  # fmt: skip


def normalize_config(hf_config: arch.HFConfig) -> arch.HFConfig:
    """Return the config with head_dim, the width of a whole head, and as many key and value heads as query heads."""
    rope_dims = hf_config.size("qk_rope_head_dim")
    width = hf_config.size("qk_nope_head_dim") + rope_dims
    for key, right in (("head_dim", rope_dims), ("qk_head_dim", width), ("rope_interleave", True)):
        hf_config.require_one_of(key, right, right)
    return hf_config.but(head_dim=width, num_key_value_heads=hf_config.size("num_attention_heads"))


def mixer_fields(hf_config: arch.HFConfig) -> dict[str, Any]:
    return {
        "value_length": hf_config.size("v_head_dim"), "rope_dims": hf_config.size("qk_rope_head_dim"),
        "q_lora_rank": hf_config.optional_size("q_lora_rank"), "kv_lora_rank": hf_config.size("kv_lora_rank"),
    }  # fmt: skip


def shared_and_dense(hf_config: arch.HFConfig) -> tuple[int, int]:
    width = hf_config.size(*WIDTH) * hf_config.size("n_shared_experts")
    return width, hf_config.optional_size("first_k_dense_replace")


def routing_metadata(hf_config: arch.HFConfig) -> arch.Keys:
    """Return the keys of routing. Refuses V2 in groups: llama.cpp judges a group by its two best experts, V2 by one."""
    is_v3 = _is_v3(hf_config)
    gating_func, method = ("sigmoid", "noaux_tc") if is_v3 else ("softmax", "greedy")
    hf_config.require_one_of("scoring_func", gating_func, gating_func)
    hf_config.require_one_of("topk_method", method, method)
    hf_config.require_one_of("moe_layer_freq", 1, 1)
    if not is_v3:
        hf_config.require_one_of("norm_topk_prob", False, False)
        hf_config.require_one_of("n_group", 1, 1)
    metadata: arch.Keys = {
        "expert_gating_func": arch.SIGMOID_GATING if is_v3 else arch.SOFTMAX_GATING,
        "expert_weights_scale": hf_config.real("routed_scaling_factor", None if is_v3 else 1.0),
    }
    if is_v3 and hf_config.flag("norm_topk_prob", True):
        metadata["expert_weights_norm"] = True
    for name, key in (("n_group", "expert_group_count"), ("topk_group", "expert_group_used_count")):
        if hf_config.get(name) is not None:
            metadata[key] = hf_config.size(name)
    return metadata


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    hf_config.note_fixed_eps("norms of narrow vectors")
    rank, rope_width, settings = sizes.kv_lora_rank, sizes.rope_dims or 0, hf_config.full_rotation()
    metadata: arch.Keys = {
        "attention.head_count_kv": 1, "attention.key_length": rank + rope_width, "attention.value_length": rank,
        "attention.key_length_mla": sizes.head_width, "attention.value_length_mla": sizes.value_width,
        "attention.kv_lora_rank": rank, "rope.dimension_count": rope_width, **routing_metadata(hf_config),
    }  # fmt: skip
    if sizes.q_lora_rank:
        metadata["attention.q_lora_rank"] = sizes.q_lora_rank
    if hf_config.scaling() not in ("default", "yarn"):
        raise hf_config.wrong("rope_scaling.type", hf_config.scaling(), "yarn, if there is any")
    if hf_config.scaling() == "yarn":
        multiplier = hf_config.number("rope_scaling.mscale_all_dim", settings.get("mscale_all_dim"))
        if settings.get("mscale") != multiplier:
            expected = f"mscale_all_dim {multiplier}"
            raise hf_config.wrong("rope_scaling.mscale", settings.get("mscale"), expected)
        metadata[LOG_MULTIPLIER] = MULTIPLIER_FACTOR * multiplier
    return metadata


def optional_tensors(hf_config: arch.HFConfig) -> tuple[str, ...]:
    return (arch.CHOICE,) if _is_v3(hf_config) else ()


def _is_v3(hf_config: arch.HFConfig) -> bool:
    return bool(hf_config.get("architectures", [""])[0] == "DeepseekV3ForCausalLM")


KEY_DEFAULTS = {
    **arch.EXPERT_KEYS, **arch.YARN_BETAS, LOG_MULTIPLIER: 0.0, "attention.q_lora_rank": 0,
    "attention.kv_lora_rank": None, "attention.key_length_mla": None, "attention.value_length_mla": None,
    "expert_feed_forward_length": None, "expert_shared_count": None, "leading_dense_block_count": 0,
    "expert_gating_func": 0, "expert_group_count": 0, "expert_group_used_count": 0, "expert_weights_scale": 0.0,
    "expert_weights_norm": False, "nextn_predict_layers": 0,
}  # fmt: skip
EXPERTS = arch.ExpertLayout(
    arch.EXPERT_MODULES, ("n_routed_experts", 64), ("num_experts_per_tok", 8), WIDTH, shared_and_dense
)  # fmt: skip
ARCHITECTURE = arch.Architecture(
    "deepseek2", sigmoid_routing=None, normalized_expert_weights=None, key_defaults=KEY_DEFAULTS,
    ignored_keys=("attention.temperature_length",), optional_tensors=("attn_kv_b.weight", arch.CHOICE),
    merge_only_weights=("attn_q", "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b", "attn_k_b", "attn_v_b"),
    families=(
        arch.Family(
            ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
            ATTENTION | arch.FFN_NORM | arch.SCORED_ROUTER | arch.FEED_FORWARD | arch.SHARED, extra_metadata, EXPERTS,
            normalize_config=normalize_config, required_values=arch.fixed(attention_bias=False),
            size_keys=("vocab_size", *arch.SHARED_AND_DENSE), optional_tensors=optional_tensors,
            suffix_renames=arch.SCORE_RENAMES, more_blocks=True, mixer_fields=mixer_fields,
            latent_module="self_attn.kv_b_proj", interleaved_rope=True,
        ),
    ),
)  # fmt: skip
