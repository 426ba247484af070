"""Phi-1 and 2: attention and feed-forward in parallel, layer norms, partial rope, biases, also of the head.

arXiv 2306.11644."""

from packtrain.models.arch import architecture as arch

MODULES = {module: name for module, name in arch.ATTENTION.items() if name != "attn_output"}
MODULES |= {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}


ARCHITECTURE = arch.Architecture(
    "phi2", halves=True, layer_norms=True, is_parallel=True, use_gelu=True, gated=False, fixed_head_width=True,
    partial_rope=True, always_untied=True,
    optional_tensors=(*arch.BIASES, *arch.FUSED_QKV, *arch.MORE_BIASES, *arch.NORM_BIASES, "output.bias"),
    families=(
        arch.Family(
            ("PhiForCausalLM",), MODULES, names=arch.CheckpointNames(norm="final_layernorm"),
            optional_tensors=arch.with_tensors(*arch.BIASES, *arch.UNGATED_BIASES, *arch.NORM_BIASES, "output.bias"),
            required_values=arch.fixed(qk_layernorm=False), rotated_share=0.5, omitted_keys=("rope.freq_base",),
        ),
    ),
)  # fmt: skip
