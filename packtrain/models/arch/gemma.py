"""Gemma: gelu, scaled and tied embeddings, norm weights stored minus 1. arXiv 2403.08295."""

from packtrain.models.arch.architecture import HEAD_WIDTHS, Architecture, Family

FAMILY = Family(
    ("GemmaForCausalLM",), size_keys=HEAD_WIDTHS, tied_by_default=True, norm_shift=1.0,
    default_head_width=256, space_prefix=False, omitted_keys=("rope.freq_base",),
)  # fmt: skip
ARCHITECTURE = Architecture(
    "gemma", halves=True, use_gelu=True, scaled_embedding=True, always_tied=True, families=(FAMILY,)
)
