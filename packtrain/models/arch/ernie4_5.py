"""ERNIE 4.5 (dense): llama, whose checkpoints have rope's pairs side by side already."""

from packtrain.models.arch.architecture import Architecture, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    hf_config.one_of("use_bias", False, False)
    return {}


ARCHITECTURE = Architecture(
    "ernie4_5",
    optional=(),
    families=(
        Family(
            ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
            keys=keys,
            tied=True,
            rope_freq_base=500_000.0,
            head_width=128,
            pairs=True,
        ),
    ),
)
