"""Qwen3 with experts in every block; the weights of the chosen experts add up to 1. arXiv 2505.09388."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.qwen2moe import EXPERTS_EVERYWHERE

EXPERTS = arch.ExpertLayout(
    arch.EXPERT_MODULES, ("num_experts", 128), ("num_experts_per_tok", 8), ("moe_intermediate_size", 768)
)  # fmt: skip
BLOCK = arch.ATTENTION | arch.HEAD_NORMS | arch.FFN_NORM | {"mlp.gate": "ffn_gate_inp"}
ARCHITECTURE = arch.Architecture(
    "qwen3moe", halves=True, head_norms=True, key_defaults=arch.ONLY_EXPERTS, ignored_keys=arch.WINDOW_KEYS,
    families=(
        arch.Family(
            ("Qwen3MoeForCausalLM",), BLOCK, experts=EXPERTS,
            required_values=EXPERTS_EVERYWHERE | {"norm_topk_prob": (False, True)},
        ),
    ),
)  # fmt: skip
