"""Gemma 3: five of six blocks have a sliding window and their own rope base; QK norms. arXiv 2503.19786."""

from dataclasses import replace

from packtrain.models.arch import gemma2
from packtrain.models.arch.architecture import HEAD_NORMS, HFConfig, Keys, ModelSizes, fixed

EVERY, WINDOW_ROPE_BASE = 6, 10_000.0


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> Keys:
    gemma2.check_score_scale(ARCHITECTURE, hf_config, sizes)
    hf_config.require_window_interval(EVERY, sizes.block_count)
    metadata: Keys = {
        "attention.sliding_window": hf_config.size("sliding_window", gemma2.TOKENS_BACK),
        "rope.freq_base_swa": hf_config.window_rope_base(),
    }
    if hf_config.get("final_logit_softcapping") is not None:
        metadata["final_logit_softcapping"] = hf_config.real("final_logit_softcapping")
    return metadata


ARCHITECTURE = replace(
    gemma2.ARCHITECTURE, name="gemma3", head_norms=True, always_tied=False,
    wide_score_blocks=62,  # the 27B
    key_defaults={
        "attention.sliding_window": 0, "attention.sliding_window_pattern": EVERY, "final_logit_softcapping": 0.0,
        "rope.freq_base_swa": WINDOW_ROPE_BASE,
    },
    families=(
        replace(
            gemma2.FAMILY, model_classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
            block_modules={**gemma2.FAMILY.block_modules, **HEAD_NORMS}, omitted_keys=(), extra_metadata=extra_metadata,
            required_values=fixed(
                attn_logit_softcapping=None, sliding_window_pattern=EVERY, _sliding_window_pattern=EVERY,
            ),
            rope_freq_base=1_000_000.0,
        ),
    ),
)  # fmt: skip
