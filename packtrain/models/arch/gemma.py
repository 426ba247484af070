"""Gemma: gelu, scaled and tied embeddings, norm weights stored minus 1. arXiv 2403.08295."""

from packtrain.models.arch.architecture import Architecture, Family, Keys
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> Keys:
    return {"attention.key_length": sizes.head_width, "attention.value_length": sizes.head_width}


FAMILY = Family(
    ("GemmaForCausalLM",), extra_metadata=extra_metadata, tied_by_default=True, norm_shift=1.0,
    default_head_width=256, space_prefix=False, omitted_keys=("rope.freq_base",),
)  # fmt: skip
ARCHITECTURE = Architecture(
    "gemma", halves=True, use_gelu=True, scaled_embedding=True, always_tied=True, families=(FAMILY,)
)
