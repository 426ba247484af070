"""LFM2 with experts after the first blocks, weighed by sigmoids and chosen with a bias. arXiv 2511.23404."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import lfm2
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes

SIGMOID_GATING = 2
EXPERT_MODULES = {
    "feed_forward.experts.{}.w1": "ffn_gate_exps", "feed_forward.experts.{}.w3": "ffn_up_exps",
    "feed_forward.experts.{}.w2": "ffn_down_exps",
}  # fmt: skip
ROUTER = {"feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b"}


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> arch.Keys:
    return lfm2.extra_metadata(hf_config, sizes) | {"expert_gating_func": SIGMOID_GATING}


EXPERTS = arch.ExpertLayout(
    EXPERT_MODULES, ("num_experts", 32), ("num_experts_per_tok", 4), ("moe_intermediate_size", 1792),
    lambda hf_config: (0, hf_config.get("num_dense_layers", 2)),
)  # fmt: skip
ARCHITECTURE = arch.Architecture(
    "lfm2moe",
    halves=True,
    head_norms=True,
    fixed_head_width=True,
    last_norm="token_embd_norm",
    sigmoid_routing=True,
    key_defaults={"shortconv.l_cache": None, **arch.ONLY_EXPERTS, "leading_dense_block_count": 0},
    neutral={"expert_gating_func": (SIGMOID_GATING,)},
    optional_tensors=(arch.CHOICE,),
    families=(
        arch.Family(
            ("Lfm2MoeForCausalLM",),
            lfm2.MODULES | ROUTER | lfm2.FEED_FORWARD,
            extra_metadata,
            EXPERTS,
            arch.CheckpointNames(norm="embedding_norm"),
            lfm2.with_tied_embedding,
            mixer_fields=lfm2.mixer_fields,
            optional_tensors=arch.with_tensors(
                true_flags=("use_expert_bias",), use_expert_bias=(arch.CHOICE,)
            ),
            required_values=arch.fixed(
                conv_bias=False, norm_topk_prob=True, routed_scaling_factor=1.0
            ),
            size_keys=("vocab_size", "leading_dense_block_count"),
            suffix_renames={"expert_bias": "expert_bias.bias"},
            tied_by_default=True,
            rope_freq_base=1e6,
        ),
    ),
)
