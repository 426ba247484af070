"""ERNIE 4.5 with a shared expert, and experts after the first blocks that a bias helps to choose."""

from dataclasses import replace

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import ernie4_5

ROUTER = {"mlp.gate": "ffn_gate_inp", "mlp.moe_statics.e_score_correction": "exp_probs_b"}
WIDTH, FIRST_EXPERT_BLOCK = ("moe_intermediate_size", 1536), "moe_layer_start_index"


def shared_and_dense(hf_config: arch.HFConfig) -> tuple[int, int]:
    """Return (the shared expert's width, which equals llama.cpp's in Baidu's models; number of dense first blocks)."""
    num_shared_experts = hf_config.get("moe_num_shared_experts", 2)
    num_dense_blocks = hf_config.get(FIRST_EXPERT_BLOCK, 1)
    if type(num_shared_experts) is not int or num_shared_experts < 0:
        raise hf_config.wrong("moe_num_shared_experts", num_shared_experts, "0 or more")
    if type(num_dense_blocks) is not int or num_dense_blocks < 0:
        raise hf_config.wrong(FIRST_EXPERT_BLOCK, num_dense_blocks, "0 or more")
    return hf_config.size(*WIDTH) * num_shared_experts, num_dense_blocks


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    hf_config.require_one_of("moe_layer_end_index", -1, -1, sizes.block_count - 1)
    shared_width = sizes.expert_shared_feed_forward_length
    shared_keys: arch.Keys = (
        {"expert_shared_feed_forward_length": shared_width} if shared_width else {}
    )
    return {**shared_keys, "interleave_moe_layer_step": 1}


KEY_DEFAULTS = {
    **arch.ONLY_EXPERTS, "expert_shared_feed_forward_length": 0, "leading_dense_block_count": 0,
    "interleave_moe_layer_step": None,
}  # fmt: skip
ARCHITECTURE = arch.Architecture(
    "ernie4_5-moe", optional_tensors=(arch.CHOICE,), key_defaults=KEY_DEFAULTS, ignored_keys=("expert_shared_count",),
    neutral={"interleave_moe_layer_step": (1,)},
    families=tuple(
        replace(
            family, model_classes=("Ernie4_5_MoeForCausalLM",), block_modules=arch.BLOCK | ROUTER | arch.SHARED,
            extra_metadata=extra_metadata, required_values=arch.fixed(use_bias=False, moe_layer_interval=1),
            experts=arch.ExpertLayout(
                arch.EXPERT_MODULES, ("moe_num_experts", 64), ("moe_k", 6), WIDTH, shared_and_dense,
            ),
            size_keys=arch.SHARED_AND_DENSE, suffix_renames=arch.SCORE_RENAMES, default_head_width=0,
            optional_tensors=arch.with_tensors(arch.CHOICE), computed_suffixes=("rotary_emb.inv_freq",),
        )
        for family in ernie4_5.ARCHITECTURE.families
    ),
)  # fmt: skip
