"""Gemma 2: logit soft-capping, post-norms, a sliding window in every other block. arXiv 2408.00118."""

from dataclasses import replace

from packtrain.models.arch import gemma
from packtrain.models.arch.architecture import BLOCK, Architecture, HFConfig, Keys, ModelSizes

TOKENS_BACK, SOFTCAPS = 4096, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
NORMS_BEHIND = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def check_score_scale(architecture: Architecture, hf_config: HFConfig, sizes: ModelSizes) -> None:
    """Raise InputError if the config scales attention scores unlike llama.cpp, because GGUF has no key for that."""
    hf_config.require_one_of("query_pre_attn_scalar", 256, architecture.score_width(sizes))


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> Keys:
    check_score_scale(ARCHITECTURE, hf_config, sizes)
    hf_config.require_window_interval(2, sizes.block_count)
    return {
        **{k: hf_config.number(k, hf_config.get_nullable(k, d)) for k, d in SOFTCAPS.items()},
        "attention.sliding_window": hf_config.size("sliding_window", TOKENS_BACK),
    }


FAMILY = replace(
    gemma.FAMILY, model_classes=("Gemma2ForCausalLM",), block_modules=BLOCK | NORMS_BEHIND,
    extra_metadata=extra_metadata,
)  # fmt: skip
ARCHITECTURE = replace(
    gemma.ARCHITECTURE, name="gemma2", post_norms=True,
    wide_score_blocks=46,  # the 27B
    key_defaults={"attention.sliding_window": TOKENS_BACK, "attention.sliding_window_pattern": 2, **SOFTCAPS},
    families=(FAMILY,),
)  # fmt: skip
