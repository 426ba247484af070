"""Phi-1 and 2: attention and feed-forward in parallel, layer norms, partial rope, biases, also of the head.

arXiv 2306.11644.
"""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import FUSED_QKV, NORM_BIASES, Architecture, Family, Keys
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes

MODULES = {module: name for module, name in arch.ATTENTION.items() if name != "attn_output"}
MODULES |= {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> Keys:
    hf_config.require_one_of("qk_layernorm", False, False)
    return {"rope.dimension_count": hf_config.rotated_width(sizes.head_width, 0.5)}


def optional_tensors(hf_config: HFConfig) -> tuple[str, ...]:
    return (*arch.BIASES, *arch.UNGATED_BIASES, *NORM_BIASES, "output.bias")


ARCHITECTURE = Architecture(
    "phi2",
    halves=True,
    layer_norms=True,
    is_parallel=True,
    use_gelu=True,
    gated=False,
    fixed_head_width=True,
    partial_rope=True,
    always_untied=True,
    optional_tensors=(*arch.BIASES, *FUSED_QKV, *arch.MORE_BIASES, *NORM_BIASES, "output.bias"),
    families=(
        Family(
            ("PhiForCausalLM",),
            MODULES,
            extra_metadata,
            None,
            arch.CheckpointNames(norm="final_layernorm"),
            optional_tensors=optional_tensors,
            omitted_keys=("rope.freq_base",),
        ),
    ),
)
