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


def keys(given: Given, sizes: Sizes) -> Keys:
    context = sizes.context_length
    usual = given.full_rotation().get(ORIGINAL, context)  # longrope's is behind that of the class
    original = given.size(ORIGINAL, None if given.scaling() == "longrope" else usual)
    keys: Keys = {
        "rope.dimension_count": given.turned(sizes.head_width),
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": given.values.get("sliding_window") or 0,
    }
    if given.scaling() == "longrope":
        found = given.full_rotation()
        scale = given.number("factor", found.get("factor") or context / original)
        attention = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        longer = found.get("attention_factor") or attention
        keys["rope.scaling.attn_factor"] = given.number("attention_factor", longer)
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
