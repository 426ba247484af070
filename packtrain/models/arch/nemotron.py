"""Nemotron and Minitron: layer norms, partial rope, a feed-forward of the square of relu. arXiv 2402.16819."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import BIASES, UNGATED_BIASES, Architecture, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

MODULES = arch.ATTENTION | arch.FFN_NORM | {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    none: Keys = {"rope.scaling.type": "none"} if hf_config.scaling() == "default" else {}
    return none | {
        "vocab_size": sizes.vocab_size,
        "rope.dimension_count": hf_config.turned(sizes.head_width, 0.5),
        "attention.layer_norm_rms_epsilon": hf_config.real("norm_eps", 1e-5),  # not read
    }


def optional(hf_config: Given) -> tuple[str, ...]:
    attention = (*BIASES, UNGATED_BIASES[0]) if hf_config.flag("attention_bias") else ()
    return (
        *arch.NORM_BIASES,
        *attention,
        *(UNGATED_BIASES[1:] if hf_config.flag("mlp_bias") else ()),
    )


ARCHITECTURE = Architecture(
    "nemotron",
    halves=True,
    layer_norms=True,
    gated=False,
    square=True,
    partial_rope=True,
    always_apart=True,
    optional=(*BIASES, *arch.FUSED, *arch.MORE_BIASES, *arch.NORM_BIASES),
    families=(
        Family(("NemotronForCausalLM",), MODULES, optional=optional, keys=keys, norm_shift=1.0),
    ),
)
