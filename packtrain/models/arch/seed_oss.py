"""Seed-OSS: llama with biases of queries, keys and values, and another name of the second norm."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import ATTENTION, FEED_FORWARD, Architecture, Family, Keys
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes

POST_ATTENTION_NORM = "post_attention_norm"


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> Keys:
    hf_config.require_one_of("attention_bias", True, True)
    hf_config.require_one_of("attention_out_bias", False, False)
    hf_config.require_one_of("mlp_bias", False, False)
    return {}


ARCHITECTURE = Architecture(
    "seed_oss",
    halves=True,
    ffn_norm=POST_ATTENTION_NORM,
    key_defaults={"attention.scale": 0.0},
    optional_tensors=(*arch.BIASES, "attn_output.bias"),
    families=(
        Family(
            ("SeedOssForCausalLM",),
            ATTENTION | {"post_attention_layernorm": POST_ATTENTION_NORM} | FEED_FORWARD,
            extra_metadata,
            default_head_width=128,
            has_qkv_bias=True,
        ),
    ),
)
