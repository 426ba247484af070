"""SmolLM3: llama without rope in every fourth block."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import llama

ROPE_INTERVAL = 4


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    uses_rope = [int((i + 1) % ROPE_INTERVAL != 0) for i in range(sizes.block_count)]
    hf_config.require_one_of("no_rope_layers", uses_rope, uses_rope)
    return {}


ARCHITECTURE = arch.Architecture(
    "smollm3", rope_pause=ROPE_INTERVAL,
    families=(
        arch.Family(
            ("SmolLM3ForCausalLM",), extra_metadata=extra_metadata,
            required_values=arch.fixed(no_rope_layer_interval=ROPE_INTERVAL), size_keys=llama.SIZE_KEYS,
            tied_by_default=True, rope_freq_base=2e6,
        ),
    ),
)  # fmt: skip
