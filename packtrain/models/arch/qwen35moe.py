"""Qwen3.5 with experts (text), and one that all tokens have, behind a gate; else as qwen35."""

from dataclasses import replace

from packtrain.models.arch.architecture import EXPERT_MATRICES, Experts, Keys
from packtrain.models.arch.gpt_oss import STACKED
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.qwen2moe import SHARED
from packtrain.models.arch.qwen3next import ENDS, EXPERT_KEYS, others, usual
from packtrain.models.arch.qwen35 import ARCHITECTURE as DENSE
from packtrain.models.arch.qwen35 import BLOCK, text_keys
from packtrain.models.arch.size_fields import Sizes

WIDTH, SHARED_WIDTH = ("moe_intermediate_size", 512), "expert_shared_feed_forward_length"
EXPERT_ENDS = {
    f"experts.{name}": f"experts.{name}.weight" for name in ("gate_up_proj", "down_proj")
}


def sized(hf_config: Given) -> Given:
    """All feed-forwards are those of experts."""
    return usual(
        hf_config.but(intermediate_size=hf_config.size("intermediate_size", hf_config.size(*WIDTH)))
    )


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    return {**text_keys(hf_config, sizes), SHARED_WIDTH: sizes.expert_shared_feed_forward_length}


ARCHITECTURE = replace(
    DENSE,
    name="qwen35moe",
    shared_gate=True,
    keys={**DENSE.keys, **EXPERT_KEYS},
    families=(
        replace(
            DENSE.families[0],
            classes=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
            block=BLOCK | {"mlp.gate": "ffn_gate_inp"} | SHARED,
            keys=keys,
            experts=Experts(
                EXPERT_MATRICES,
                ("num_experts", 256),
                ("num_experts_per_tok", 8),
                WIDTH,
                others,
                stacked=STACKED,
                together=True,
                rows=True,
            ),
            usual=sized,
            ends=ENDS | EXPERT_ENDS,
            left_out=("feed_forward_length",),
        ),
    ),
)
