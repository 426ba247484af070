"""ERNIE 4.5 (dense): llama, whose checkpoints already store rope's pairs side by side."""

from packtrain.models.arch.architecture import Architecture, Family, fixed

ARCHITECTURE = Architecture(
    "ernie4_5", optional_tensors=(),
    families=(
        Family(
            ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), required_values=fixed(use_bias=False),
            tied_by_default=True, rope_freq_base=500_000.0, default_head_width=128, interleaved_rope=True,
        ),
    ),
)  # fmt: skip
