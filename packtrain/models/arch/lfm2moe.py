"""LFM2 with experts after the first blocks, weighed by sigmoids and chosen with a bias. arXiv 2511.23404."""

from dataclasses import replace

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import lfm2

EXPERT_MODULES = arch.feed_forward("feed_forward.experts.{}", "_exps", arch.NUMBERED)
ROUTER = {"feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b"}


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    return lfm2.extra_metadata(hf_config, sizes) | {"expert_gating_func": arch.SIGMOID_GATING}


EXPERTS = arch.ExpertLayout(
    EXPERT_MODULES, ("num_experts", 32), ("num_experts_per_tok", 4), ("moe_intermediate_size", 1792),
    lambda hf_config: (0, hf_config.get("num_dense_layers", 2)),
)  # fmt: skip
ARCHITECTURE = replace(
    lfm2.ARCHITECTURE, name="lfm2moe", sigmoid_routing=True,
    key_defaults={**lfm2.ARCHITECTURE.key_defaults, **arch.ONLY_EXPERTS, "leading_dense_block_count": 0},
    neutral={"expert_gating_func": (arch.SIGMOID_GATING,)}, optional_tensors=(arch.CHOICE,),
    families=(
        replace(
            lfm2.ARCHITECTURE.families[0], model_classes=("Lfm2MoeForCausalLM",),
            block_modules=lfm2.MODULES | ROUTER | lfm2.FEED_FORWARD, extra_metadata=extra_metadata, experts=EXPERTS,
            normalize_config=lfm2.with_tied_embedding,
            optional_tensors=arch.with_tensors(true_flags=("use_expert_bias",), use_expert_bias=(arch.CHOICE,)),
            required_values=arch.fixed(conv_bias=False, norm_topk_prob=True, routed_scaling_factor=1.0),
            size_keys=("vocab_size", "leading_dense_block_count"), suffix_renames={"expert_bias": "expert_bias.bias"},
        ),
    ),
)  # fmt: skip
