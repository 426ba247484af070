"""GLM-4.5: a shared expert, and experts after the first blocks, weighed by sigmoids and chosen with the help of a bias.

arXiv 2508.06471; the weights of the chosen experts add up to a factor. Merges keep the blocks after the last, which
guess more tokens; convert and full tunes leave them out: no loss reads them, so they would guess for another model.
"""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes

QK_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
WIDTH, SIGMOID_GATING = ("moe_intermediate_size", 1408), 2
ROUTER = {"mlp.gate": "ffn_gate_inp", "mlp.gate.e_score_correction": "exp_probs_b"}
SPECIAL = {
    "bos": "[gMASK]", "eot": "<|user|>", "unknown": "<|endoftext|>", "eom": "<|observation|>",
}  # fmt: skip
FFN_NORM = {"post_attention_layernorm": "post_attention_norm"}


def shared_and_dense(hf_config: HFConfig) -> tuple[int, int]:
    return hf_config.size(*WIDTH) * hf_config.size("n_shared_experts", 1), hf_config.size(
        "first_k_dense_replace", 1
    )


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> arch.Keys:
    hf_config.require_one_of("n_group", 1, 1)
    hf_config.require_one_of("topk_group", 1, 1)
    return {
        "rope.dimension_count": hf_config.rotated_width(sizes.head_width, 0.5),
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_shared_count": sizes.expert_shared_feed_forward_length // sizes.expert_width,
        "leading_dense_block_count": sizes.leading_dense_block_count,
        "expert_gating_func": SIGMOID_GATING,
        "expert_weights_scale": hf_config.real("routed_scaling_factor", 1.0),
        "expert_weights_norm": hf_config.flag("norm_topk_prob", True),
    }


def optional_tensors(hf_config: HFConfig) -> tuple[str, ...]:
    biases = arch.BIASES if hf_config.flag("attention_bias") else ()
    return (*biases, arch.CHOICE, *(QK_NORMS if hf_config.flag("use_qk_norm") else ()))


KEY_DEFAULTS = {
    "expert_count": None, "expert_used_count": None, "expert_feed_forward_length": None,
    "expert_shared_count": None, "leading_dense_block_count": 0, "expert_weights_scale": 0.0,
    "expert_weights_norm": False, "nextn_predict_layers": 0,
}  # fmt: skip
EXPERTS = arch.ExpertLayout(
    arch.EXPERT_MODULES, ("n_routed_experts", 128), ("num_experts_per_tok", 8), WIDTH, shared_and_dense
)  # fmt: skip
ARCHITECTURE = arch.Architecture(
    "glm4moe",
    halves=True,
    ffn_norm="post_attention_norm",
    partial_rope=True,
    sigmoid_routing=True,
    normalized_expert_weights=None,
    key_defaults=KEY_DEFAULTS,
    neutral={"expert_gating_func": (SIGMOID_GATING, 0)},
    optional_tensors=(*arch.BIASES, arch.CHOICE, *QK_NORMS),
    families=(
        arch.Family(
            ("Glm4MoeForCausalLM",),
            arch.ATTENTION | arch.HEAD_NORMS | FFN_NORM | ROUTER | arch.FEED_FORWARD | arch.SHARED,
            extra_metadata,
            EXPERTS,
            optional_tensors=optional_tensors,
            suffix_renames={"e_score_correction_bias": "e_score_correction.bias"},
            more_blocks=True,
            special=SPECIAL,
        ),
    ),
)
