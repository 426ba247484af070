"""OLMoE: experts in all blocks, whose weights do not add up to 1; QK norms over all heads together.

arXiv 2409.02060."""

from packtrain.models.arch import architecture as arch

ARCHITECTURE = arch.Architecture(
    "olmoe", halves=True, joint_qk_norms=True, fixed_head_width=True, always_untied=True,
    normalized_expert_weights=False, key_defaults={"expert_count": None, "expert_used_count": None},
    optional_tensors=(),
    families=(
        arch.Family(
            ("OlmoeForCausalLM",), arch.ATTENTION | arch.HEAD_NORMS | arch.FFN_NORM | {"mlp.gate": "ffn_gate_inp"},
            experts=arch.ExpertLayout(arch.EXPERT_MODULES, ("num_experts", 64), ("num_experts_per_tok", 8)),
            required_values=arch.fixed(norm_topk_prob=False, clip_qkv=None),
        ),
    ),
)  # fmt: skip
