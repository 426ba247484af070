"""Gemma 3: five of six blocks have a sliding window and their own rope base; QK norms. arXiv 2503.19786."""

from dataclasses import replace

from packtrain.models.arch import gemma, gemma2
from packtrain.models.arch.architecture import HEAD_NORMS, Architecture, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

EVERY, BASE = 6, 10_000.0


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    gemma2.check_scale(ARCHITECTURE, hf_config, sizes)
    hf_config.one_of("attn_logit_softcapping", None, None)
    hf_config.one_of("sliding_window_pattern", EVERY, EVERY)
    hf_config.one_of("_sliding_window_pattern", EVERY, EVERY)
    hf_config.windows_every(EVERY, sizes.block_count)
    keys: Keys = {
        **gemma.keys(hf_config, sizes),
        "attention.sliding_window": hf_config.size("sliding_window", gemma2.TOKENS_BACK),
    }
    keys["rope.freq_base_swa"] = hf_config.near_base()
    if hf_config.get("final_logit_softcapping") is not None:
        keys["final_logit_softcapping"] = hf_config.real("final_logit_softcapping")
    return keys


ARCHITECTURE = Architecture(
    "gemma3",
    halves=True,
    gelu=True,
    scaled_embedding=True,
    head_norms=True,
    post_norms=True,
    wide_blocks=62,  # the 27B
    keys={
        "attention.sliding_window": 0,
        "attention.sliding_window_pattern": EVERY,
        "final_logit_softcapping": 0.0,
        "rope.freq_base_swa": BASE,
    },
    families=(
        replace(
            gemma2.FAMILY,
            classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
            block={**gemma2.FAMILY.block, **HEAD_NORMS},
            left_out=(),
            keys=keys,
            rope_freq_base=1_000_000.0,
        ),
    ),
)
