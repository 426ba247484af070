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


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    return {
        "rope.dimension_count": hf_config.turned(sizes.head_width, 0.25),
        "use_parallel_residual": hf_config.flag("use_parallel_residual"),
    }


def usual(hf_config: Given) -> Given:
    return hf_config.renamed({PARTIAL: ("rope_pct",)})


def optional(hf_config: Given) -> tuple[str, ...]:
    parallel = hf_config.flag("use_parallel_residual")
    names = [name for name in NORM_BIASES if name != "ffn_norm.bias" or not parallel]
    names += [] if parallel else ["ffn_norm.weight"]
    names += BIASES if hf_config.flag("use_qkv_bias") else ()
    return (*names, *(HEADS if hf_config.flag("qk_layernorm") else ()))


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
