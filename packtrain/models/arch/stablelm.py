"""StableLM 2: layer norms, partial rope; the 12B has attention and feed-forward side by side, and norms of each head.

arXiv 2402.17834.
"""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import BIASES, NORM_BIASES, Architecture, Family, Keys
from packtrain.models.arch.hf_config import PARTIAL, Given
from packtrain.models.arch.size_fields import Sizes

HEADS = ("attn_q_norm.weight", "attn_k_norm.weight")
OF_HEADS = {
    "self_attn.q_layernorm.norms.{}": "attn_q_norm", "self_attn.k_layernorm.norms.{}": "attn_k_norm",
}  # fmt: skip


def keys(given: Given, sizes: Sizes) -> Keys:
    return {
        "rope.dimension_count": given.turned(sizes.head_width, 0.25),
        "use_parallel_residual": given.flag("use_parallel_residual"),
    }


def usual(given: Given) -> Given:
    return given.renamed({PARTIAL: ("rope_pct",)})


def optional(given: Given) -> tuple[str, ...]:
    parallel = given.flag("use_parallel_residual")
    found = [name for name in NORM_BIASES if name != "ffn_norm.bias" or not parallel]
    found += [] if parallel else ["ffn_norm.weight"]
    found += BIASES if given.flag("use_qkv_bias") else ()
    return (*found, *(HEADS if given.flag("qk_layernorm") else ()))


ARCHITECTURE = Architecture(
    "stablelm",
    halves=True,
    layer_norms=True,
    parallel=True,
    square=True,
    partial_rope=True,
    always_apart=True,
    ignored=("use_parallel_residual",),
    optional=(*BIASES, *arch.FUSED, *NORM_BIASES, *HEADS, "ffn_norm.weight"),
    families=(
        Family(
            ("StableLmForCausalLM", "StableLMEpochForCausalLM"),
            arch.ATTENTION | OF_HEADS | arch.FFN_NORM | arch.FEED_FORWARD,
            optional=optional,
            left_out=("rope.freq_base",),
            keys=keys,
            usual=usual,
        ),
    ),
)
