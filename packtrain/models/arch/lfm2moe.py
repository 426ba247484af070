"""LFM2 with experts after the first blocks: weights are sigmoids, and a bias helps to choose. arXiv 2511.23404."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import lfm2
from packtrain.models.arch.architecture import CHOICE, Architecture, Experts, Family, Keys, Names
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

SIGMOID = 2
MATRICES = {
    "feed_forward.experts.{}.w1": "ffn_gate_exps", "feed_forward.experts.{}.w3": "ffn_up_exps",
    "feed_forward.experts.{}.w2": "ffn_down_exps",
}  # fmt: skip
ROUTER = {"feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b"}


def others(hf_config: Given) -> tuple[int, int]:
    return 0, hf_config.get("num_dense_layers", 2)


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    hf_config.one_of("norm_topk_prob", True, True)
    hf_config.one_of("routed_scaling_factor", 1.0, 1.0)
    return lfm2.keys(hf_config, sizes) | {
        "leading_dense_block_count": sizes.leading_dense_block_count,
        "expert_gating_func": SIGMOID,
    }


def optional(hf_config: Given) -> tuple[str, ...]:
    return (CHOICE,) if hf_config.flag("use_expert_bias", True) else ()


EXPERTS = Experts(
    MATRICES, ("num_experts", 32), ("num_experts_per_tok", 4), ("moe_intermediate_size", 1792), others
)  # fmt: skip
ARCHITECTURE = Architecture(
    "lfm2moe",
    halves=True,
    head_norms=True,
    square=True,
    last_norm="token_embd_norm",
    sigmoids=True,
    keys={"shortconv.l_cache": None, **arch.ONLY_EXPERTS, "leading_dense_block_count": 0},
    neutral={"expert_gating_func": (SIGMOID,)},
    optional=(CHOICE,),
    families=(
        Family(
            ("Lfm2MoeForCausalLM",),
            lfm2.MODULES | ROUTER | lfm2.FEED_FORWARD,
            keys,
            EXPERTS,
            Names(norm="embedding_norm"),
            lfm2.tied,
            mixing=lfm2.mixing,
            optional=optional,
            ends={"expert_bias": "expert_bias.bias"},
            tied=True,
            rope_freq_base=1e6,
        ),
    ),
)
