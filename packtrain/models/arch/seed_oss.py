"""Seed-OSS: llama with biases of queries, keys and values; the second norm has another name."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import ATTENTION, FEED_FORWARD, Architecture, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

NORM = "post_attention_norm"


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    hf_config.one_of("attention_bias", True, True)
    hf_config.one_of("attention_out_bias", False, False)
    hf_config.one_of("mlp_bias", False, False)
    return {}


ARCHITECTURE = Architecture(
    "seed_oss",
    halves=True,
    ffn_norm=NORM,
    keys={"attention.scale": 0.0},
    optional=(*arch.BIASES, "attn_output.bias"),
    families=(
        Family(
            ("SeedOssForCausalLM",),
            ATTENTION | {"post_attention_layernorm": NORM} | FEED_FORWARD,
            keys,
            head_width=128,
            qkv_bias=True,
        ),
    ),
)
