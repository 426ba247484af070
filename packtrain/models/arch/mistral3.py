"""Ministral 3: llama with YaRN, and queries scaled by a factor of their position, which the rope table includes."""

from packtrain.models.arch import llama
from packtrain.models.arch.architecture import EXPERT_KEYS, YARN_BETAS, Architecture, Family, Keys
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes

ROPE_METADATA_KEYS = {
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier", "llama_4_scaling_beta": "attention.temperature_scale",
}  # fmt: skip


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> Keys:
    settings, metadata = hf_config.full_rotation(), Keys()
    for name, key in ROPE_METADATA_KEYS.items():
        if settings.get(name) is not None:
            metadata[key] = hf_config.number(f"rope_parameters.{name}", settings[name])
    return metadata


ARCHITECTURE = Architecture(
    "mistral3", key_defaults={**EXPERT_KEYS, **YARN_BETAS, **dict.fromkeys(ROPE_METADATA_KEYS.values(), 0.0)},
    optional_tensors=llama.ARCHITECTURE.optional_tensors,
    families=(
        Family(
            ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"), extra_metadata=extra_metadata,
            size_keys=llama.SIZE_KEYS, rope_freq_base=0.0,
        ),
    ),
)  # fmt: skip
