"""GLM-4 (0414): norms before and after attention and feed-forward, rope for half of each head, gate and up fused."""

from packtrain.models.arch.architecture import ATTENTION, BIASES, Architecture, Family, Keys
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes

MODULES = ATTENTION | {
    "post_self_attn_layernorm": "post_attention_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_mlp_layernorm": "post_ffw_norm",
}  # fmt: skip

# a turn ends where the user's begins
END_TOKEN, USER_TOKEN = "<|endoftext|>", "<|user|>"
SPECIAL = {"eos": END_TOKEN, "eot": USER_TOKEN, "unknown": END_TOKEN, "bos": END_TOKEN}


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> Keys:
    return {"rope.dimension_count": hf_config.rotated_width(sizes.head_width, 0.5)}


def optional_tensors(hf_config: HFConfig) -> tuple[str, ...]:
    return BIASES if hf_config.flag("attention_bias") else ()


ARCHITECTURE = Architecture(
    "glm4",
    post_norms=True,
    fused_ffn=True,
    partial_rope=True,
    optional_tensors=BIASES,
    families=(
        Family(
            ("Glm4ForCausalLM",),
            MODULES,
            extra_metadata,
            optional_tensors=optional_tensors,
            interleaved_rope=True,
            special=SPECIAL,
        ),
    ),
)
