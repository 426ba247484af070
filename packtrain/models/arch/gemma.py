"""Gemma: gelu, scaled and tied embeddings, norm weights stored minus 1. arXiv 2403.08295."""

from packtrain.models.arch.architecture import Architecture, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    return {"attention.key_length": sizes.head_width, "attention.value_length": sizes.head_width}


FAMILY = Family(
    ("GemmaForCausalLM",), keys=keys, tied=True, norm_shift=1.0, head_width=256, space_prefix=False,
    left_out=("rope.freq_base",),
)  # fmt: skip
ARCHITECTURE = Architecture(
    "gemma", halves=True, gelu=True, scaled_embedding=True, always_tied=True, families=(FAMILY,)
)
