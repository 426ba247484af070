"""Hunyuan (dense): llama with QK norms after rope."""

from packtrain.models.arch import architecture as arch

MODULES = arch.BLOCK | {
    "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm",
}  # fmt: skip
DYNAMIC_CONTEXT = 256 * 1024  # context of its "dynamic" scaling, which no config states


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    if hf_config.scaling() != "dynamic":
        return {}
    head_width = sizes.head_width
    settings = hf_config.full_rotation()
    alpha = hf_config.number("alpha", settings.get("alpha"))
    for unused_key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        settings.get(unused_key)
    return {
        "rope.freq_base": hf_config.rope_base(10_000.0) * alpha ** (head_width / (head_width - 2)),
        "rope.scaling.type": "none", "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": DYNAMIC_CONTEXT, "context_length": DYNAMIC_CONTEXT,
    }  # fmt: skip


ARCHITECTURE = arch.Architecture(
    "hunyuan-dense", halves=True, head_norms=True, qk_norms_after_rope=True, optional_tensors=arch.BIASES,
    families=(arch.Family(("HunYuanDenseV1ForCausalLM",), MODULES, extra_metadata, rope_scaling_types=("dynamic",)),),
)  # fmt: skip
