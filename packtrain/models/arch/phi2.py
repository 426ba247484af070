"""Phi-1 and 2: attention and feed-forward side by side, layer norms, partial rope, biases, also of the head.

arXiv 2306.11644.
"""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import FUSED, NORM_BIASES, Architecture, Family, Keys, Names
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

MODULES = {module: part for module, part in arch.ATTENTION.items() if part != "attn_output"}
MODULES |= {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    hf_config.one_of("qk_layernorm", False, False)
    return {"rope.dimension_count": hf_config.turned(sizes.head_width, 0.5)}


def optional(hf_config: Given) -> tuple[str, ...]:
    return (*arch.BIASES, *arch.UNGATED_BIASES, *NORM_BIASES, "output.bias")


ARCHITECTURE = Architecture(
    "phi2",
    halves=True,
    layer_norms=True,
    parallel=True,
    gelu=True,
    gated=False,
    square=True,
    partial_rope=True,
    always_apart=True,
    optional=(*arch.BIASES, *FUSED, *arch.MORE_BIASES, *NORM_BIASES, "output.bias"),
    families=(
        Family(
            ("PhiForCausalLM",),
            MODULES,
            keys,
            None,
            Names(norm="final_layernorm"),
            optional=optional,
            left_out=("rope.freq_base",),
        ),
    ),
)
