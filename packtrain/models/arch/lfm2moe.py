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


def shared_and_dense(hf_config: HFConfig) -> tuple[int, int]:
    return 0, hf_config.get("num_dense_layers", 2)


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> arch.Keys:
    hf_config.require_one_of("norm_topk_prob", True, True)
    hf_config.require_one_of("routed_scaling_factor", 1.0, 1.0)
    return lfm2.extra_metadata(hf_config, sizes) | {
        "leading_dense_block_count": sizes.leading_dense_block_count,
        "expert_gating_func": SIGMOID_GATING,
    }


def optional_tensors(hf_config: HFConfig) -> tuple[str, ...]:
    return (arch.CHOICE,) if hf_config.flag("use_expert_bias", True) else ()


EXPERTS = arch.ExpertLayout(
    EXPERT_MODULES, ("num_experts", 32), ("num_experts_per_tok", 4), ("moe_intermediate_size", 1792), shared_and_dense
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
            optional_tensors=optional_tensors,
            suffix_renames={"expert_bias": "expert_bias.bias"},
            tied_by_default=True,
            rope_freq_base=1e6,
        ),
    ),
)
