"""Hunyuan (dense): llama with QK norms behind rope."""

from packtrain.models.arch.architecture import BIASES, BLOCK, Architecture, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

MODULES = BLOCK | {
    "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm",
}  # fmt: skip
LONG = 256 * 1024  # tokens that its "dynamic" scaling is for, which no config says


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    if hf_config.scaling() != "dynamic":
        return {}
    width = sizes.head_width
    rotation = hf_config.full_rotation()
    alpha = hf_config.number("alpha", rotation.get("alpha"))
    for unused_key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        rotation.get(unused_key)
    return {
        "rope.freq_base": hf_config.base(10_000.0) * alpha ** (width / (width - 2)),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": LONG,
        "context_length": LONG,
    }


ARCHITECTURE = Architecture(
    "hunyuan-dense",
    halves=True,
    head_norms=True,
    late_norms=True,
    optional=BIASES,
    families=(Family(("HunYuanDenseV1ForCausalLM",), MODULES, keys, scalings=("dynamic",)),),
)
