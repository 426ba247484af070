"""StarCoder 2: layer norms, biases everywhere, a feed-forward with gelu and no gate. arXiv 2402.19173."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import ATTENTION, BIASES, NORM_BIASES, Architecture, Family
from packtrain.models.arch.hf_config import HFConfig

MODULES = ATTENTION | arch.FFN_NORM | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}


def optional_tensors(hf_config: HFConfig) -> tuple[str, ...]:
    hf_config.require_one_of("norm_type", "layer_norm", "layer_norm")
    biases = (*BIASES, *arch.UNGATED_BIASES) if hf_config.flag("use_bias", True) else ()
    return (*NORM_BIASES, *biases)


ARCHITECTURE = Architecture(
    "starcoder2",
    halves=True,
    layer_norms=True,
    use_gelu=True,
    gated=False,
    fixed_head_width=True,
    ignored_keys=arch.WINDOW_KEYS,
    optional_tensors=(*BIASES, *arch.FUSED_QKV, *arch.MORE_BIASES, *NORM_BIASES),
    families=(
        Family(
            ("Starcoder2ForCausalLM",),
            MODULES,
            optional_tensors=optional_tensors,
            tied_by_default=True,
        ),
    ),
)
