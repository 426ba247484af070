"""Falcon: attention and feed-forward in parallel, layer norms, gelu without a gate; the 40B has a norm for each.

arXiv 2311.16867."""

from packtrain.models.arch import architecture as arch

SECOND_NORM = ("attn_norm_2.weight", "attn_norm_2.bias")
MODULES = {
    "input_layernorm": "attn_norm", "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
}  # fmt: skip


def normalize_config(hf_config: arch.HFConfig) -> arch.HFConfig:
    """Return the config with the usual keys; num_key_value_heads: num_kv_heads in large models, 1 in small ones."""
    hf_config = hf_config.with_aliases(
        {"num_attention_heads": ("n_head",), "num_hidden_layers": ("n_layer",)}
    )
    hidden_width, num_heads = hf_config.size("hidden_size"), hf_config.size("num_attention_heads")
    num_kv_heads = hf_config.size("num_kv_heads", hf_config.get("n_head_kv", num_heads))
    single = hf_config.flag("multi_query", True) and not hf_config.flag("new_decoder_architecture")
    return hf_config.but(
        num_key_value_heads=1 if single else num_kv_heads,
        intermediate_size=hf_config.size("ffn_hidden_size", 4 * hidden_width),
        max_position_embeddings=hf_config.size("max_position_embeddings", 2048),
        hidden_act=hf_config.get("activation", "gelu"),
    )


def row_spans(sizes: arch.ModelSizes) -> dict[str, arch.RowSpans]:
    """Return {"attn_qkv": spans (first row, end)}: from rows in groups, all queries, then all keys, all values."""
    q, k, v = arch.grouped_heads(sizes)
    return {"attn_qkv": q + k + v}


def optional_tensors(hf_config: arch.HFConfig) -> tuple[str, ...]:
    has_second_norm = (
        hf_config.flag("new_decoder_architecture")
        and hf_config.get("num_ln_in_parallel_attn", 2) == 2
    )
    return ("attn_norm.bias", "output_norm.bias", *(SECOND_NORM if has_second_norm else ()))


ARCHITECTURE = arch.Architecture(
    "falcon", halves=True, layer_norms=True, is_parallel=True, use_gelu=True, gated=False, fused_qkv=True,
    fixed_head_width=True, optional_tensors=(*arch.NORM_BIASES, *SECOND_NORM),
    families=(
        arch.Family(
            ("FalconForCausalLM",), MODULES, lambda hf_config, sizes: {"tensor_data_layout": "jploski"}, None,
            arch.CheckpointNames("transformer.", "word_embeddings", "", "h", "ln_f"), normalize_config,
            {"ln_mlp": "input_layernorm"}, optional_tensors,
            required_values=arch.fixed(alibi=False, bias=False, parallel_attn=True), row_spans=row_spans,
            omitted_keys=("rope.freq_base",), tied_by_default=True,
        ),
    ),
)  # fmt: skip
