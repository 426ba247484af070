"""SmolLM3: llama without rope in every fourth block."""

from packtrain.models.arch import llama
from packtrain.models.arch.architecture import Architecture, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

PAUSE = 4


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    uses_rope = [int((i + 1) % PAUSE != 0) for i in range(sizes.block_count)]
    hf_config.one_of("no_rope_layer_interval", PAUSE, PAUSE)
    hf_config.one_of("no_rope_layers", uses_rope, uses_rope)
    return llama.keys(hf_config, sizes)


ARCHITECTURE = Architecture(
    "smollm3",
    rope_pause=PAUSE,
    families=(Family(("SmolLM3ForCausalLM",), keys=keys, tied=True, rope_freq_base=2e6),),
)
