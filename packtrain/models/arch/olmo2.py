"""OLMo 2: norms only behind attention and feed-forward; queries and keys are normalized whole. arXiv 2501.00656."""

from packtrain.models.arch.architecture import (
    ATTENTION,
    FEED_FORWARD,
    HEAD_NORMS,
    Architecture,
    Family,
    Keys,
    Sizes,
)
from packtrain.models.arch.given import Given

MATRICES = {module: part for module, part in ATTENTION.items() if part != "attn_norm"}
NORMS_BEHIND = {
    "post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
MODULES = MATRICES | HEAD_NORMS | FEED_FORWARD | NORMS_BEHIND


def keys(given: Given, sizes: Sizes) -> Keys:
    given.one_of("clip_qkv", None, None)
    return {}


ARCHITECTURE = Architecture(
    "olmo2",
    halves=True,
    pre_norms=False,
    post_norms=True,
    whole_norms=True,
    square=True,
    always_apart=True,
    neutral={"attention.sliding_window": (0,)},  # OLMo 3
    optional=(),
    families=(
        Family(
            ("Olmo2ForCausalLM",), MODULES, keys, rope_freq_base=500_000.0,
        ),
    ),
)  # fmt: skip
