"""InternLM 2: llama, whose checkpoints fuse queries, key and value of a group. arXiv 2403.17297."""

from packtrain.models.arch import architecture as arch

MODULES = {
    "attention_norm": "attn_norm", "attention.wo": "attn_output", "ffn_norm": "ffn_norm",
    **arch.feed_forward("feed_forward", names=arch.NUMBERED),
}  # fmt: skip
FUSED_PARTS = "attn_q", "attn_k", "attn_v"


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    """Return no metadata: the config's dynamic rope scaling acts only beyond the context, where llama.cpp has none."""
    hf_config.full_rotation().get("factor")  # without effect within the context
    return {}


def row_spans(sizes: arch.ModelSizes) -> dict[str, arch.RowSpans]:
    return dict(zip(FUSED_PARTS, arch.grouped_heads(sizes), strict=True))


ARCHITECTURE = arch.Architecture(
    "internlm2", fixed_head_width=True, always_untied=True, optional_tensors=arch.BIASES,
    families=(
        arch.Family(
            ("InternLM2ForCausalLM",), MODULES, extra_metadata, names=arch.CheckpointNames(embedding="tok_embeddings"),
            suffix_renames={"output.weight": "lm_head.weight"}, required_values=arch.fixed(bias=False),
            row_spans=row_spans, fused_modules={"attention.wqkv": FUSED_PARTS}, rope_scaling_types=("dynamic",),
            blank="[UNUSED",
            special={"eot": "<|im_end|>"},  # ends a turn
        ),
    ),
)  # fmt: skip
