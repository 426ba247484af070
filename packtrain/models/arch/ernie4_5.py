"""ERNIE 4.5 (dense): llama, whose checkpoints already store rope's pairs side by side."""

from packtrain.models.arch.architecture import Architecture, Family, Keys
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> Keys:
    hf_config.require_one_of("use_bias", False, False)
    return {}


ARCHITECTURE = Architecture(
    "ernie4_5",
    optional_tensors=(),
    families=(
        Family(
            ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
            extra_metadata=extra_metadata,
            tied_by_default=True,
            rope_freq_base=500_000.0,
            default_head_width=128,
            interleaved_rope=True,
        ),
    ),
)
