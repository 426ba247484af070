"""Command R7B and A: attention and feed-forward in parallel, windows, and rope only within them. arXiv 2504.00698."""

from packtrain.models.arch import architecture as arch

EVERY = 4


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    if hf_config.scaling() != "default":
        raise hf_config.wrong("rope_scaling.type", hf_config.scaling(), "default")
    hf_config.require_window_interval(EVERY, sizes.block_count)
    return {
        "logit_scale": hf_config.real("logit_scale", 0.0625),
        "attention.sliding_window": hf_config.size("sliding_window", 4096),
        "rope.dimension_count": int(hf_config.real("rotary_pct", 1.0) * sizes.head_width), "rope.scaling.type": "none",
    }  # fmt: skip


ARCHITECTURE = arch.Architecture(
    "cohere2", layer_norms=True, is_parallel=True, fixed_head_width=True, partial_rope=True, always_tied=True,
    multiplies_logits=True, rope_only_in_windows=True,
    key_defaults={"logit_scale": None, "attention.sliding_window": None, "attention.sliding_window_pattern": 4},
    ignored_keys=("rope.freq_base_swa",), optional_tensors=(*arch.BIASES, *arch.FUSED_QKV, "attn_output.bias"),
    families=(
        arch.Family(
            ("Cohere2ForCausalLM",), arch.ATTENTION | arch.FEED_FORWARD, extra_metadata=extra_metadata,
            required_values=arch.fixed(use_qk_norm=False, layer_switch=EVERY, sliding_window_pattern=EVERY),
            size_keys=("vocab_size",), tied_by_default=True, interleaved_rope=True,
        ),
    ),
)  # fmt: skip
