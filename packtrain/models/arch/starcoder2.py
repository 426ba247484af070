"""StarCoder 2: layer norms, biases everywhere, a feed-forward with gelu and no gate. arXiv 2402.19173."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import ATTENTION, BIASES, NORM_BIASES, Architecture, Family

MODULES = ATTENTION | arch.FFN_NORM | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}


ARCHITECTURE = Architecture(
    "starcoder2", halves=True, layer_norms=True, use_gelu=True, gated=False, fixed_head_width=True,
    ignored_keys=arch.WINDOW_KEYS, optional_tensors=(*BIASES, *arch.FUSED_QKV, *arch.MORE_BIASES, *NORM_BIASES),
    families=(
        Family(
            ("Starcoder2ForCausalLM",), MODULES,
            optional_tensors=arch.with_tensors(
                *NORM_BIASES, true_flags=("use_bias",), use_bias=(*BIASES, *arch.UNGATED_BIASES),
            ),
            required_values=arch.fixed(norm_type="layer_norm"), tied_by_default=True,
        ),
    ),
)  # fmt: skip
