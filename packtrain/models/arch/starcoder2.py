"""StarCoder 2: layer norms, biases everywhere, a feed-forward with gelu and no gate. arXiv 2402.19173."""

from packtrain.models.arch import architecture as arch

MODULES = arch.ATTENTION | arch.FFN_NORM | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}


ARCHITECTURE = arch.Architecture(
    "starcoder2", halves=True, layer_norms=True, use_gelu=True, gated=False, fixed_head_width=True,
    ignored_keys=arch.WINDOW_KEYS,
    optional_tensors=(*arch.BIASES, *arch.FUSED_QKV, *arch.MORE_BIASES, *arch.NORM_BIASES),
    families=(
        arch.Family(
            ("Starcoder2ForCausalLM",), MODULES,
            optional_tensors=arch.with_tensors(
                *arch.NORM_BIASES, true_flags=("use_bias",), use_bias=(*arch.BIASES, *arch.UNGATED_BIASES),
            ),
            required_values=arch.fixed(norm_type="layer_norm"), tied_by_default=True,
        ),
    ),
)  # fmt: skip
