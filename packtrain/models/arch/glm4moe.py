"""GLM-4.5: experts after the first blocks, weighed by sigmoids, chosen with an offset of their own; and one for all.

arXiv 2508.06471; the weights of the chosen experts add up to a factor. Blocks after the last, which guess more tokens,
are not used.
"""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import BIASES, CHOICE, Architecture, Experts, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
WIDTH, SIGMOID = ("moe_intermediate_size", 1408), 2
ROUTER = {"mlp.gate": "ffn_gate_inp", "mlp.gate.e_score_correction": "exp_probs_b"}
SPECIAL = {
    "bos": "[gMASK]", "eot": "<|user|>", "unknown": "<|endoftext|>", "eom": "<|observation|>",
}  # fmt: skip
FFN_NORM = {"post_attention_layernorm": "post_attention_norm"}


def others(hf_config: Given) -> tuple[int, int]:
    return hf_config.size(*WIDTH) * hf_config.size("n_shared_experts", 1), hf_config.size(
        "first_k_dense_replace", 1
    )


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    hf_config.one_of("n_group", 1, 1)
    hf_config.one_of("topk_group", 1, 1)
    return {
        "rope.dimension_count": hf_config.turned(sizes.head_width, 0.5),
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_shared_count": sizes.expert_shared_feed_forward_length // sizes.expert_width,
        "leading_dense_block_count": sizes.leading_dense_block_count,
        "expert_gating_func": SIGMOID,
        "expert_weights_scale": hf_config.real("routed_scaling_factor", 1.0),
        "expert_weights_norm": hf_config.flag("norm_topk_prob", True),
    }


def optional(hf_config: Given) -> tuple[str, ...]:
    biases = BIASES if hf_config.flag("attention_bias") else ()
    return (*biases, CHOICE, *(NORMS if hf_config.flag("use_qk_norm") else ()))


KEYS = {
    "expert_count": None, "expert_used_count": None, "expert_feed_forward_length": None,
    "expert_shared_count": None, "leading_dense_block_count": 0, "expert_weights_scale": 0.0,
    "expert_weights_norm": False, "nextn_predict_layers": 0,
}  # fmt: skip
EXPERTS = Experts(
    arch.EXPERT_MATRICES, ("n_routed_experts", 128), ("num_experts_per_tok", 8), WIDTH, others
)  # fmt: skip
ARCHITECTURE = Architecture(
    "glm4moe",
    halves=True,
    ffn_norm="post_attention_norm",
    partial_rope=True,
    sigmoids=True,
    chosen_sum=None,
    keys=KEYS,
    neutral={"expert_gating_func": (SIGMOID, 0)},
    optional=(*BIASES, CHOICE, *NORMS),
    families=(
        Family(
            ("Glm4MoeForCausalLM",),
            arch.ATTENTION | arch.HEAD_NORMS | FFN_NORM | ROUTER | arch.FEED_FORWARD | arch.SHARED,
            keys,
            EXPERTS,
            optional=optional,
            ends={"e_score_correction_bias": "e_score_correction.bias"},
            more_blocks=True,
            special=SPECIAL,
        ),
    ),
)
