"""SmolLM3: llama without rope in every fourth block."""

from packtrain.models.arch import llama
from packtrain.models.arch.architecture import Architecture, Family, Keys, fixed
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes

ROPE_INTERVAL = 4


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> Keys:
    uses_rope = [int((i + 1) % ROPE_INTERVAL != 0) for i in range(sizes.block_count)]
    hf_config.require_one_of("no_rope_layers", uses_rope, uses_rope)
    return {}


ARCHITECTURE = Architecture(
    "smollm3", rope_pause=ROPE_INTERVAL,
    families=(
        Family(
            ("SmolLM3ForCausalLM",), extra_metadata=extra_metadata,
            required_values=fixed(no_rope_layer_interval=ROPE_INTERVAL), size_keys=llama.SIZE_KEYS,
            tied_by_default=True, rope_freq_base=2e6,
        ),
    ),
)  # fmt: skip
