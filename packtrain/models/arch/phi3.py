"""Phi-3: fused matrices, partial rope, other rope factors for long texts. arXiv 2404.14219."""

import math

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import FFN_NORM, WINDOW_KEYS, Architecture, Family, Keys
from packtrain.models.arch.hf_config import ORIGINAL, Given
from packtrain.models.arch.size_fields import Sizes

BLOCK = {
    "input_layernorm": "attn_norm", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    **FFN_NORM, "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    context = sizes.context_length
    default = hf_config.full_rotation().get(
        ORIGINAL, context
    )  # longrope's is behind that of the class
    original = hf_config.size(ORIGINAL, None if hf_config.scaling() == "longrope" else default)
    keys: Keys = {
        "rope.dimension_count": hf_config.turned(sizes.head_width),
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": hf_config.values.get("sliding_window") or 0,
    }
    if hf_config.scaling() == "longrope":
        rotation = hf_config.full_rotation()
        scale = hf_config.number("factor", rotation.get("factor") or context / original)
        attention = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        longer = rotation.get("attention_factor") or attention
        keys["rope.scaling.attn_factor"] = hf_config.number("attention_factor", longer)
    return keys


ARCHITECTURE = Architecture(
    "phi3",
    halves=True,
    fused=True,
    fused_ffn=True,
    square=True,
    partial_rope=True,
    ignored=WINDOW_KEYS,
    optional=("attn_qkv.bias", arch.LONG, arch.SHORT),
    families=(Family(("Phi3ForCausalLM",), BLOCK, keys),),
)
