"""Phi-3: fused matrices, partial rope, other rope factors for long texts. arXiv 2404.14219."""

import math

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.hf_config import ORIGINAL, HFConfig

BLOCK = {
    "input_layernorm": "attn_norm", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    **arch.FFN_NORM, "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def extra_metadata(hf_config: HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    max_context = sizes.context_length
    default = hf_config.full_rotation().get(ORIGINAL, max_context)  # longrope must state its own
    original = hf_config.size(ORIGINAL, None if hf_config.scaling() == "longrope" else default)
    metadata: arch.Keys = {
        "rope.dimension_count": hf_config.rotated_width(sizes.head_width),
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": hf_config.json_values.get("sliding_window") or 0,
    }
    if hf_config.scaling() == "longrope":
        settings = hf_config.full_rotation()
        scale = hf_config.number("factor", settings.get("factor") or max_context / original)
        attention_factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        config_factor = settings.get("attention_factor")
        config_factor = attention_factor if config_factor is None else config_factor
        metadata["rope.scaling.attn_factor"] = hf_config.number("attention_factor", config_factor)
    return metadata


ARCHITECTURE = arch.Architecture(
    "phi3", halves=True, fused_qkv=True, fused_ffn=True, fixed_head_width=True, partial_rope=True,
    ignored_keys=arch.WINDOW_KEYS, optional_tensors=("attn_qkv.bias", arch.LONG, arch.SHORT_FACTORS),
    families=(arch.Family(("Phi3ForCausalLM",), BLOCK, extra_metadata),),
)  # fmt: skip
