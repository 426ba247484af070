"""OLMo 2 and 3: norms only after attention and feed-forward; QK norms over all heads together.

OLMo 3 has windows, within which rope is not scaled. arXiv 2501.00656, 2512.13961."""

from packtrain.models.arch import architecture as arch

MATRICES = {module: name for module, name in arch.ATTENTION.items() if name != "attn_norm"}
BASE = 500_000.0
NORMS_BEHIND = {
    "post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
MODULES = MATRICES | arch.HEAD_NORMS | arch.FEED_FORWARD | NORMS_BEHIND


def window_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    every = [(i + 1) % 4 != 0 for i in range(sizes.block_count)]
    base = hf_config.rope_base(BASE)
    if hf_config.window_rope_base(BASE) != base:
        raise hf_config.wrong("rope_theta", base, f"{BASE} in all layers, those with a window, too")
    return {
        "attention.sliding_window": hf_config.size("sliding_window"), "rope.freq_base_swa": base,
        "attention.sliding_window_pattern": hf_config.layer_windows(sizes.block_count) or every,
    }  # fmt: skip


ARCHITECTURE = arch.Architecture(
    "olmo2", halves=True, pre_norms=False, post_norms=True, joint_qk_norms=True, fixed_head_width=True,
    always_untied=True, unscaled_window_rope=True,
    key_defaults={"attention.sliding_window": 0, "attention.sliding_window_pattern": 4},
    ignored_keys=("rope.freq_base_swa", "rope.scaling.yarn_attn_factor"), optional_tensors=(),
    families=(
        arch.Family(
            ("Olmo3ForCausalLM",), MODULES, window_metadata, rope_freq_base=BASE,
            required_values=arch.fixed(clip_qkv=None),
        ),
        arch.Family(("Olmo2ForCausalLM",), MODULES, required_values=arch.fixed(clip_qkv=None)),
    ),
)  # fmt: skip
