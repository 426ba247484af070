"""Qwen3.5 with experts (text) and a gated shared expert; otherwise as qwen35."""

from dataclasses import replace

from packtrain.models.arch import qwen3next
from packtrain.models.arch.architecture import EXPERT_MODULES, ExpertLayout, HFConfig
from packtrain.models.arch.gpt_oss import STACKED
from packtrain.models.arch.qwen2moe import SHARED, SHARED_WIDTH
from packtrain.models.arch.qwen35 import ARCHITECTURE as DENSE
from packtrain.models.arch.qwen35 import BLOCK

WIDTH = ("moe_intermediate_size", 512)
EXPERT_SUFFIX_RENAMES = {
    f"experts.{name}": f"experts.{name}.weight" for name in ("gate_up_proj", "down_proj")
}


def normalize_expert_config(hf_config: HFConfig) -> HFConfig:
    """Return the usual config; intermediate_size, which no block uses, defaults to an expert's width."""
    return qwen3next.normalize_config(
        hf_config.but(intermediate_size=hf_config.size("intermediate_size", hf_config.size(*WIDTH)))
    )


ARCHITECTURE = replace(
    DENSE, name="qwen35moe", gated_shared_expert=True, key_defaults={**DENSE.key_defaults, **qwen3next.EXPERT_KEYS},
    families=(
        replace(
            DENSE.families[0], model_classes=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
            block_modules=BLOCK | {"mlp.gate": "ffn_gate_inp"} | SHARED, size_keys=(SHARED_WIDTH,),
            experts=ExpertLayout(
                EXPERT_MODULES, ("num_experts", 256), ("num_experts_per_tok", 8), WIDTH, qwen3next.shared_and_dense,
                stacked_matrices=STACKED, is_contiguous=True, rows=True,
            ),
            normalize_config=normalize_expert_config, suffix_renames=qwen3next.SUFFIX_RENAMES | EXPERT_SUFFIX_RENAMES,
            omitted_keys=("feed_forward_length",),
        ),
    ),
)  # fmt: skip
