"""GPT-2: learned positions instead of rope, layer norms, biases everywhere, no gate. Radford et al. 2019."""

from packtrain.models.arch import architecture as arch

MODULES = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
KEY_ALIASES = {
    "hidden_size": ("n_embd",), "num_attention_heads": ("n_head",), "num_hidden_layers": ("n_layer",),
    "max_position_embeddings": ("n_positions", "n_ctx"), "intermediate_size": ("n_inner",),
    "hidden_act": ("activation_function",),
}  # fmt: skip


def normalize_config(hf_config: arch.HFConfig) -> arch.HFConfig:
    hf_config = hf_config.with_aliases(KEY_ALIASES)
    return hf_config.but(
        intermediate_size=hf_config.size("intermediate_size", 4 * hf_config.size("hidden_size"))
    )


ARCHITECTURE = arch.Architecture(
    "gpt2", learned_positions=True, layer_norms=True, use_gelu=True, gated=False, fused_qkv=True, fixed_head_width=True,
    optional_tensors=("attn_qkv.bias", *arch.MORE_BIASES, *arch.NORM_BIASES),
    families=(
        arch.Family(
            ("GPT2LMHeadModel",), MODULES, names=arch.CheckpointNames("transformer.", "wte", "wpe", "h", "ln_f"),
            normalize_config=normalize_config,
            optional_tensors=arch.with_tensors("attn_qkv.bias", *arch.UNGATED_BIASES, *arch.NORM_BIASES),
            required_values=arch.fixed(
                scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False,
            ),
            computed_suffixes=(".attn.bias", ".attn.masked_bias"),  # masks
            is_transposed=True, omitted_keys=("rope.freq_base", "attention.head_count_kv"), tied_by_default=True,
        ),
    ),
)  # fmt: skip
