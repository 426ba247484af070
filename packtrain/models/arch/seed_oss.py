"""Seed-OSS: llama with biases of queries, keys and values, and another name of the second norm."""

from packtrain.models.arch import architecture as arch

ARCHITECTURE = arch.Architecture(
    "seed_oss", halves=True, ffn_norm="post_attention_norm", key_defaults={"attention.scale": 0.0},
    optional_tensors=(*arch.BIASES, "attn_output.bias"),
    families=(
        arch.Family(
            ("SeedOssForCausalLM",), arch.ATTENTION | arch.POST_ATTENTION_NORM | arch.FEED_FORWARD,
            required_values=arch.fixed(attention_bias=True, attention_out_bias=False, mlp_bias=False),
            default_head_width=128, has_qkv_bias=True,
        ),
    ),
)  # fmt: skip
