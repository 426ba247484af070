"""GLM-4 (0414): norms before and after attention and feed-forward, rope for half of each head, gate and up fused."""

from packtrain.models.arch.architecture import ATTENTION, BIASES, Architecture, Family, with_tensors

MODULES = ATTENTION | {
    "post_self_attn_layernorm": "post_attention_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_mlp_layernorm": "post_ffw_norm",
}  # fmt: skip

# a turn ends where the user's begins
END_TOKEN, USER_TOKEN = "<|endoftext|>", "<|user|>"
SPECIAL = {"eos": END_TOKEN, "eot": USER_TOKEN, "unknown": END_TOKEN, "bos": END_TOKEN}


ARCHITECTURE = Architecture(
    "glm4", post_norms=True, fused_ffn=True, partial_rope=True, optional_tensors=BIASES,
    families=(
        Family(
            ("Glm4ForCausalLM",), MODULES, rotated_share=0.5, optional_tensors=with_tensors(attention_bias=BIASES),
            interleaved_rope=True, special=SPECIAL,
        ),
    ),
)  # fmt: skip
