"""Ministral 3: llama with queries scaled by their position, and YaRN."""

from packtrain.models.arch import llama
from packtrain.models.arch.architecture import BETAS, EXPERT_KEYS, Architecture, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

RENAMED = {
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "llama_4_scaling_beta": "attention.temperature_scale",
}


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    rotation, metadata_keys = hf_config.full_rotation(), llama.keys(hf_config, sizes)
    for name, key in RENAMED.items():
        if rotation.get(name) is not None:
            metadata_keys[key] = hf_config.number(f"rope_parameters.{name}", rotation[name])
    return metadata_keys


ARCHITECTURE = Architecture(
    "mistral3",
    keys={**EXPERT_KEYS, **BETAS, **dict.fromkeys(RENAMED.values(), 0.0)},
    optional=llama.ARCHITECTURE.optional,
    families=(
        Family(
            ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"),
            keys=keys,
            rope_freq_base=0.0,
        ),
    ),
)
