"""Ministral 3: llama with YaRN, and queries scaled by a factor of their position, which the rope table includes."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import llama

ROPE_METADATA_KEYS = {
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier", "llama_4_scaling_beta": "attention.temperature_scale",
}  # fmt: skip


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    settings, metadata = hf_config.full_rotation(), arch.Keys()
    for name, key in ROPE_METADATA_KEYS.items():
        if settings.get(name) is not None:
            metadata[key] = hf_config.number(f"rope_parameters.{name}", settings[name])
    return metadata


ARCHITECTURE = arch.Architecture(
    "mistral3", key_defaults={**arch.EXPERT_KEYS, **arch.YARN_BETAS, **dict.fromkeys(ROPE_METADATA_KEYS.values(), 0.0)},
    optional_tensors=llama.ARCHITECTURE.optional_tensors,
    families=(
        arch.Family(
            ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"), extra_metadata=extra_metadata,
            size_keys=llama.SIZE_KEYS, rope_freq_base=0.0,
        ),
    ),
)  # fmt: skip
