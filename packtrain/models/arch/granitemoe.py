"""Granite 3 with experts: granite's scales, experts as llama's, and in some models another one that all tokens have."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import granite
from packtrain.models.arch.architecture import EXPERT_KEYS, Architecture, Experts, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

CLASSES = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
HALVES = granite.halves("block_sparse_moe", "_exps") | granite.halves("shared_mlp", "_shexp")


def others(hf_config: Given) -> tuple[int, int]:
    return (
        hf_config.size("shared_intermediate_size")
        if hf_config.get("shared_intermediate_size")
        else 0
    ), 0


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    shared_width = sizes.expert_shared_feed_forward_length
    return granite.keys(hf_config, sizes) | (
        {granite.SHARED_WIDTH: shared_width} if shared_width else {}
    )


EXPERTS = Experts(
    {}, ("num_local_experts", 8), ("num_experts_per_tok", 2), others=others, stacked=HALVES, together=True, rows=True
)  # fmt: skip
ARCHITECTURE = Architecture(
    "granitemoe",
    keys={**granite.ARCHITECTURE.keys, **EXPERT_KEYS, granite.SHARED_WIDTH: 0},
    ignored=(*arch.SCAN_KEYS,),
    optional=granite.ARCHITECTURE.optional,
    families=(
        Family(
            CLASSES,
            arch.ATTENTION | arch.FFN_NORM | {"block_sparse_moe.router.layer": "ffn_gate_inp"},
            keys,
            EXPERTS,
            tied=True,
        ),
    ),
)
