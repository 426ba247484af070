"""Nemotron and Minitron: layer norms, partial rope, a feed-forward with relu squared. arXiv 2402.16819."""

from packtrain.models.arch import architecture as arch

MODULES = arch.ATTENTION | arch.FFN_NORM | {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    none: arch.Keys = {"rope.scaling.type": "none"} if hf_config.scaling() == "default" else {}
    eps = hf_config.real("norm_eps", 1e-5)
    return none | {"attention.layer_norm_rms_epsilon": eps}  # unread


ARCHITECTURE = arch.Architecture(
    "nemotron", halves=True, layer_norms=True, gated=False, fixed_head_width=True, partial_rope=True,
    always_untied=True, optional_tensors=(*arch.BIASES, *arch.FUSED_QKV, *arch.MORE_BIASES, *arch.NORM_BIASES),
    families=(
        arch.Family(
            ("NemotronForCausalLM",), MODULES, size_keys=("vocab_size",), rotated_share=0.5,
            optional_tensors=arch.with_tensors(
                *arch.NORM_BIASES, attention_bias=(*arch.BIASES, arch.UNGATED_BIASES[0]),
                mlp_bias=arch.UNGATED_BIASES[1:],
            ),
            extra_metadata=extra_metadata, norm_shift=1.0,
        ),
    ),
)  # fmt: skip
