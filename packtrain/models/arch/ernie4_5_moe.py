"""ERNIE 4.5 with experts after the first blocks, chosen with an offset of their own, and one that all tokens have."""

from dataclasses import replace

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import ernie4_5
from packtrain.models.arch.architecture import CHOICE, EXPERT_MATRICES, Architecture, Experts, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

ROUTER = {"mlp.gate": "ffn_gate_inp", "mlp.moe_statics.e_score_correction": "exp_probs_b"}
WIDTH, START = ("moe_intermediate_size", 1536), "moe_layer_start_index"


def others(hf_config: Given) -> tuple[int, int]:
    """llama.cpp's converter divides the feed-forward's width by the key heads, which is the same in Baidu's models."""
    shared = hf_config.get("moe_num_shared_experts", 2)
    dense = hf_config.get(START, 1)
    if type(shared) is not int or shared < 0:
        raise hf_config.wrong("moe_num_shared_experts", shared, "0 or more")
    if type(dense) is not int or dense < 0:
        raise hf_config.wrong(START, dense, "0 or more")
    return hf_config.size(*WIDTH) * shared, dense


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    ernie4_5.keys(hf_config, sizes)
    hf_config.one_of("moe_layer_interval", 1, 1)
    hf_config.one_of("moe_layer_end_index", -1, -1, sizes.block_count - 1)
    shared = sizes.expert_shared_feed_forward_length
    shared_keys: Keys = {"expert_shared_feed_forward_length": shared} if shared else {}
    return {
        **shared_keys,
        "interleave_moe_layer_step": 1,
        "leading_dense_block_count": sizes.leading_dense_block_count,
        "expert_shared_count": shared // sizes.expert_width,
    }


KEYS = {
    "expert_count": None, "expert_used_count": None, "expert_feed_forward_length": None,
    "expert_shared_feed_forward_length": 0, "leading_dense_block_count": 0, "interleave_moe_layer_step": None,
}  # fmt: skip
ARCHITECTURE = Architecture(
    "ernie4_5-moe",
    optional=(CHOICE,),
    keys=KEYS,
    ignored=("expert_shared_count",),
    neutral={"interleave_moe_layer_step": (1,)},
    families=tuple(
        replace(
            family,
            classes=("Ernie4_5_MoeForCausalLM",),
            block=arch.BLOCK | ROUTER | arch.SHARED,
            keys=keys,
            experts=Experts(EXPERT_MATRICES, ("moe_num_experts", 64), ("moe_k", 6), WIDTH, others),
            ends={"e_score_correction_bias": "e_score_correction.bias"},
            optional=lambda given: (CHOICE,),
            unused=("rotary_emb.inv_freq",),
            head_width=0,
        )
        for family in ernie4_5.ARCHITECTURE.families
    ),
)
