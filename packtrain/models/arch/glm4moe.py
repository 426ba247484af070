"""GLM-4.5: a shared expert, and experts after the first blocks, weighed by sigmoids and chosen with the help of a bias.

arXiv 2508.06471; the weights of the chosen experts add up to a factor. Merges keep the blocks after the last, which
guess more tokens; convert and full tunes leave them out: no loss reads them, so they would guess for another model."""

from packtrain.models.arch import architecture as arch

WIDTH = ("moe_intermediate_size", 1408)
SPECIAL = {
    "bos": "[gMASK]", "eot": "<|user|>", "unknown": "<|endoftext|>", "eom": "<|observation|>",
}  # fmt: skip


def shared_and_dense(hf_config: arch.HFConfig) -> tuple[int, int]:
    num_shared, num_dense = (
        hf_config.size(key, 1) for key in ("n_shared_experts", "first_k_dense_replace")
    )
    return hf_config.size(*WIDTH) * num_shared, num_dense


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    return {
        "expert_group_count": 1, "expert_group_used_count": 1, "expert_gating_func": arch.SIGMOID_GATING,
        "expert_weights_scale": hf_config.real("routed_scaling_factor", 1.0),
        "expert_weights_norm": hf_config.flag("norm_topk_prob", True),
    }  # fmt: skip


KEY_DEFAULTS = {
    **arch.ONLY_EXPERTS, "expert_shared_count": None, "leading_dense_block_count": 0, "expert_weights_scale": 0.0,
    "expert_weights_norm": False, "nextn_predict_layers": 0,
}  # fmt: skip
EXPERTS = arch.ExpertLayout(
    arch.EXPERT_MODULES, ("n_routed_experts", 128), ("num_experts_per_tok", 8), WIDTH, shared_and_dense
)  # fmt: skip
ARCHITECTURE = arch.Architecture(
    "glm4moe", halves=True, ffn_norm="post_attention_norm", partial_rope=True, sigmoid_routing=True,
    normalized_expert_weights=None, key_defaults=KEY_DEFAULTS, neutral={"expert_gating_func": (arch.SIGMOID_GATING, 0)},
    optional_tensors=(*arch.BIASES, arch.CHOICE, *arch.QK_NORMS),
    families=(
        arch.Family(
            ("Glm4MoeForCausalLM",),
            arch.ATTENTION | arch.HEAD_NORMS | arch.POST_ATTENTION_NORM | arch.SCORED_ROUTER | arch.FEED_FORWARD
            | arch.SHARED,
            extra_metadata, EXPERTS,
            optional_tensors=arch.with_tensors(arch.CHOICE, attention_bias=arch.BIASES, use_qk_norm=arch.QK_NORMS),
            required_values=arch.fixed(n_group=1, topk_group=1), size_keys=arch.SHARED_AND_DENSE, rotated_share=0.5,
            suffix_renames=arch.SCORE_RENAMES, more_blocks=True, special=SPECIAL,
        ),
    ),
)  # fmt: skip
