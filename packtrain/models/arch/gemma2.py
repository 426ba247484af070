"""Gemma 2: logit soft-capping, post-norms, a sliding window in every other block. arXiv 2408.00118."""

from dataclasses import replace

from packtrain.models.arch import gemma
from packtrain.models.arch.architecture import BLOCK, Architecture, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

TOKENS_BACK, CAPS = 4096, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
NORMS_BEHIND = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def check_scale(architecture: Architecture, hf_config: Given, sizes: Sizes) -> None:
    """Check the scale of attention scores, for which GGUF has no key."""
    width = architecture.scored_width(sizes)
    hf_config.one_of("query_pre_attn_scalar", 256, width)


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    check_scale(ARCHITECTURE, hf_config, sizes)
    hf_config.windows_every(2, sizes.block_count)
    return {
        **gemma.keys(hf_config, sizes),
        **{
            key: hf_config.number(key, hf_config.stated(key, default))
            for key, default in CAPS.items()
        },
        "attention.sliding_window": hf_config.size("sliding_window", TOKENS_BACK),
    }


FAMILY = replace(
    gemma.FAMILY, classes=("Gemma2ForCausalLM",), block=BLOCK | NORMS_BEHIND, keys=keys
)
ARCHITECTURE = Architecture(
    "gemma2",
    halves=True,
    gelu=True,
    scaled_embedding=True,
    post_norms=True,
    always_tied=True,
    wide_blocks=46,  # the 27B
    keys={"attention.sliding_window": TOKENS_BACK, "attention.sliding_window_pattern": 2, **CAPS},
    families=(FAMILY,),
)
