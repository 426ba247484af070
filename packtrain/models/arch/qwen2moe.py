"""Qwen2 and Qwen 1.5 with experts in every block and a gated shared expert. arXiv 2407.10671.

The weights of the chosen experts come from a softmax over all experts, and do not add up to 1."""

from packtrain.models.arch import architecture as arch

SHARED_GATE = {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
SHARED = arch.feed_forward("mlp.shared_expert", "_shexp") | SHARED_GATE
BLOCK = arch.ATTENTION | arch.FFN_NORM | {"mlp.gate": "ffn_gate_inp"} | SHARED


SHARED_WIDTH = "expert_shared_feed_forward_length"
# llama.cpp computes experts in all blocks only
EXPERTS_EVERYWHERE = arch.fixed(decoder_sparse_step=1, mlp_only_layers=[])
EXPERTS = arch.ExpertLayout(
    arch.EXPERT_MODULES, ("num_experts", 60), ("num_experts_per_tok", 4), ("moe_intermediate_size", 1408),
    lambda hf_config: (hf_config.size("shared_expert_intermediate_size", 5632), 0),
)  # fmt: skip
ARCHITECTURE = arch.Architecture(
    "qwen2moe", halves=True, fixed_head_width=True, always_untied=True, normalized_expert_weights=False,
    gated_shared_expert=True, key_defaults={**arch.ONLY_EXPERTS, SHARED_WIDTH: 0}, ignored_keys=arch.WINDOW_KEYS,
    families=(
        arch.Family(
            ("Qwen2MoeForCausalLM",), BLOCK, experts=EXPERTS, has_qkv_bias=True,
            required_values=EXPERTS_EVERYWHERE | arch.fixed(norm_topk_prob=False, qkv_bias=True),
            size_keys=(SHARED_WIDTH,),
        ),
    ),
)  # fmt: skip
