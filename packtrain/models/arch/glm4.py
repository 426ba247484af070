"""GLM-4 (0414): norms before and behind attention and feed-forward, rope for half of each head, gate and up in one."""

from packtrain.models.arch.architecture import ATTENTION, BIASES, Architecture, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

MODULES = ATTENTION | {
    "post_self_attn_layernorm": "post_attention_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_mlp_layernorm": "post_ffw_norm",
}  # fmt: skip

# a turn ends where the user's begins
END, USER = "<|endoftext|>", "<|user|>"
SPECIAL = {"eos": END, "eot": USER, "unknown": END, "bos": END}


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    return {"rope.dimension_count": hf_config.turned(sizes.head_width, 0.5)}


def optional(hf_config: Given) -> tuple[str, ...]:
    return BIASES if hf_config.flag("attention_bias") else ()


ARCHITECTURE = Architecture(
    "glm4",
    post_norms=True,
    fused_ffn=True,
    partial_rope=True,
    optional=BIASES,
    families=(
        Family(("Glm4ForCausalLM",), MODULES, keys, optional=optional, pairs=True, special=SPECIAL),
    ),
)
