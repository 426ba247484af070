"""Nemotron and Minitron: layer norms, partial rope, a feed-forward with relu squared. arXiv 2402.16819."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import BIASES, UNGATED_BIASES, Architecture, Family, Keys
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes

MODULES = arch.ATTENTION | arch.FFN_NORM | {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> Keys:
    none: Keys = {"rope.scaling.type": "none"} if hf_config.scaling() == "default" else {}
    return none | {
        "vocab_size": sizes.vocab_size,
        "rope.dimension_count": hf_config.rotated_width(sizes.head_width, 0.5),
        "attention.layer_norm_rms_epsilon": hf_config.real("norm_eps", 1e-5),  # unread
    }


def optional_tensors(hf_config: HFConfig) -> tuple[str, ...]:
    attention_biases = (*BIASES, UNGATED_BIASES[0]) if hf_config.flag("attention_bias") else ()
    return (
        *arch.NORM_BIASES,
        *attention_biases,
        *(UNGATED_BIASES[1:] if hf_config.flag("mlp_bias") else ()),
    )


ARCHITECTURE = Architecture(
    "nemotron",
    halves=True,
    layer_norms=True,
    gated=False,
    fixed_head_width=True,
    partial_rope=True,
    always_untied=True,
    optional_tensors=(*BIASES, *arch.FUSED_QKV, *arch.MORE_BIASES, *arch.NORM_BIASES),
    families=(
        Family(
            ("NemotronForCausalLM",),
            MODULES,
            optional_tensors=optional_tensors,
            extra_metadata=extra_metadata,
            norm_shift=1.0,
        ),
    ),
)
