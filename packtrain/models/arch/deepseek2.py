"""DeepSeek-V2 and V3: heads from narrow vectors, experts after the first blocks and one for all; V3 in groups.

arXiv 2405.04434, 2412.19437. Blocks after the last, which guess more tokens, are not used.
"""

from typing import Any

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import CHOICE, FFN_NORM, Architecture, Experts, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

SOFTMAX, SIGMOID = 1, 2
TENTH = 0.1  # by which the key of the multiplier is less, in files of this architecture
MULTIPLIER = "rope.scaling.yarn_log_multiplier"
WIDTH = ("moe_intermediate_size", 1407)
ATTENTION = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
}  # fmt: skip
ROUTER = {"mlp.gate": "ffn_gate_inp", "mlp.gate.e_score_correction": "exp_probs_b"}


def usual(hf_config: Given) -> Given:
    """With the width of a whole head, and keys and values of every head."""
    rope_dims = hf_config.size("qk_rope_head_dim")
    width = hf_config.size("qk_nope_head_dim") + rope_dims
    for key, right in (("head_dim", rope_dims), ("qk_head_dim", width), ("rope_interleave", True)):
        hf_config.one_of(key, right, right)
    return hf_config.but(head_dim=width, num_key_value_heads=hf_config.size("num_attention_heads"))


def mixing(hf_config: Given) -> dict[str, Any]:
    q_rank = hf_config.size("q_lora_rank") if hf_config.get("q_lora_rank") else 0
    return {
        "value_length": hf_config.size("v_head_dim"),
        "rope_dims": hf_config.size("qk_rope_head_dim"),
        "q_lora_rank": q_rank,
        "kv_lora_rank": hf_config.size("kv_lora_rank"),
    }


def others(hf_config: Given) -> tuple[int, int]:
    dense = hf_config.size("first_k_dense_replace") if hf_config.get("first_k_dense_replace") else 0
    return hf_config.size(*WIDTH) * hf_config.size("n_shared_experts"), dense


def routing(hf_config: Given) -> Keys:
    """What chooses experts; V2 in groups is refused, because files mean V3's choice of them."""
    third = _third(hf_config)
    func, method = ("sigmoid", "noaux_tc") if third else ("softmax", "greedy")
    hf_config.one_of("scoring_func", func, func)
    hf_config.one_of("topk_method", method, method)
    hf_config.one_of("moe_layer_freq", 1, 1)
    if not third:
        hf_config.one_of("norm_topk_prob", False, False)
        hf_config.one_of("n_group", 1, 1)
    metadata: Keys = {
        "expert_gating_func": SIGMOID if third else SOFTMAX,
        "expert_weights_scale": hf_config.real("routed_scaling_factor", None if third else 1.0),
    }
    if third and hf_config.flag("norm_topk_prob", True):
        metadata["expert_weights_norm"] = True
    for name, key in (("n_group", "expert_group_count"), ("topk_group", "expert_group_used_count")):
        if hf_config.get(name) is not None:
            metadata[key] = hf_config.size(name)
    return metadata


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    hf_config.one_of("attention_bias", False, False)
    rank, dims, scaling = sizes.kv_lora_rank, sizes.rope_dims or 0, hf_config.full_rotation()
    metadata: Keys = {
        "vocab_size": sizes.vocab_size,
        "attention.head_count_kv": 1,
        "attention.key_length": rank + dims,
        "attention.value_length": rank,
        "attention.key_length_mla": sizes.head_width,
        "attention.value_length_mla": sizes.value_width,
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": dims,
        "leading_dense_block_count": sizes.leading_dense_block_count,
        "expert_shared_count": sizes.expert_shared_feed_forward_length // sizes.expert_width,
        **routing(hf_config),
    }
    if sizes.q_lora_rank:
        metadata["attention.q_lora_rank"] = sizes.q_lora_rank
    if hf_config.scaling() not in ("default", "yarn"):
        raise hf_config.wrong("rope_scaling.type", hf_config.scaling(), "yarn, if there is any")
    if hf_config.scaling() == "yarn":
        by = hf_config.number("rope_scaling.mscale_all_dim", scaling.get("mscale_all_dim"))
        if scaling.get("mscale") != by:
            raise hf_config.wrong(
                "rope_scaling.mscale", scaling.get("mscale"), f"mscale_all_dim {by}"
            )
        metadata[MULTIPLIER] = TENTH * by
    return metadata


def optional(hf_config: Given) -> tuple[str, ...]:
    return (CHOICE,) if _third(hf_config) else ()


def _third(hf_config: Given) -> bool:
    return bool(hf_config.get("architectures", [""])[0] == "DeepseekV3ForCausalLM")


KEYS = {
    **arch.EXPERT_KEYS, **arch.BETAS, MULTIPLIER: 0.0, "attention.q_lora_rank": 0,
    "attention.kv_lora_rank": None, "attention.key_length_mla": None, "attention.value_length_mla": None,
    "expert_feed_forward_length": None, "expert_shared_count": None, "leading_dense_block_count": 0,
    "expert_gating_func": 0, "expert_group_count": 0, "expert_group_used_count": 0, "expert_weights_scale": 0.0,
    "expert_weights_norm": False, "nextn_predict_layers": 0,
}  # fmt: skip
EXPERTS = Experts(
    arch.EXPERT_MATRICES, ("n_routed_experts", 64), ("num_experts_per_tok", 8), WIDTH, others
)  # fmt: skip
ARCHITECTURE = Architecture(
    "deepseek2",
    sigmoids=None,
    chosen_sum=None,
    keys=KEYS,
    ignored=("attention.temperature_length",),
    optional=("attn_kv_b.weight", CHOICE),
    merged_only=(
        "attn_q",
        "attn_q_a",
        "attn_q_b",
        "attn_kv_a_mqa",
        "attn_kv_b",
        "attn_k_b",
        "attn_v_b",
    ),
    families=(
        Family(
            ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
            ATTENTION | FFN_NORM | ROUTER | arch.FEED_FORWARD | arch.SHARED,
            keys,
            EXPERTS,
            usual=usual,
            optional=optional,
            ends={"e_score_correction_bias": "e_score_correction.bias"},
            more_blocks=True,
            mixing=mixing,
            latent="self_attn.kv_b_proj",
            pairs=True,
        ),
    ),
)
