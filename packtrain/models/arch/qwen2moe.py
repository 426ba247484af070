"""Qwen2 and Qwen 1.5 with experts in every block and a gated shared expert. arXiv 2407.10671.

The weights of the chosen experts come from a softmax over all experts, and do not add up to 1.
"""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import Architecture, ExpertLayout, Family, Keys
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes

SHARED = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip


BLOCK = arch.ATTENTION | arch.FFN_NORM | {"mlp.gate": "ffn_gate_inp"} | SHARED


def shared_and_dense(hf_config: HFConfig) -> tuple[int, int]:
    return hf_config.size("shared_expert_intermediate_size", 5632), 0


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> Keys:
    """Refuse configs that llama.cpp cannot compute: all blocks need experts whose weights do not add up to 1."""
    hf_config.require_one_of("norm_topk_prob", False, False)
    hf_config.require_one_of("decoder_sparse_step", 1, 1)
    hf_config.require_one_of("mlp_only_layers", [], [])
    hf_config.require_one_of("qkv_bias", True, True)
    return {"expert_shared_feed_forward_length": sizes.expert_shared_feed_forward_length}


EXPERTS = ExpertLayout(
    arch.EXPERT_MODULES, ("num_experts", 60), ("num_experts_per_tok", 4), ("moe_intermediate_size", 1408),
    shared_and_dense,
)  # fmt: skip
ARCHITECTURE = Architecture(
    "qwen2moe",
    halves=True,
    fixed_head_width=True,
    always_untied=True,
    normalized_expert_weights=False,
    gated_shared_expert=True,
    key_defaults={**arch.ONLY_EXPERTS, "expert_shared_feed_forward_length": 0},
    ignored_keys=arch.WINDOW_KEYS,
    families=(Family(("Qwen2MoeForCausalLM",), BLOCK, extra_metadata, EXPERTS, has_qkv_bias=True),),
)
