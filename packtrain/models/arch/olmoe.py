"""OLMoE: experts in all blocks, whose weights do not add up to 1; queries and keys normalized whole.

arXiv 2409.02060.
"""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import EXPERT_MATRICES, Architecture, Experts, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    hf_config.one_of("norm_topk_prob", False, False)
    hf_config.one_of("clip_qkv", None, None)
    return {}


ARCHITECTURE = Architecture(
    "olmoe",
    halves=True,
    whole_norms=True,
    square=True,
    always_apart=True,
    chosen_sum=False,
    keys={"expert_count": None, "expert_used_count": None},
    optional=(),
    families=(
        Family(
            ("OlmoeForCausalLM",),
            arch.ATTENTION | arch.HEAD_NORMS | arch.FFN_NORM | {"mlp.gate": "ffn_gate_inp"},
            keys,
            Experts(EXPERT_MATRICES, ("num_experts", 64), ("num_experts_per_tok", 8)),
        ),
    ),
)
