"""gpt-oss: sinks in attention, a window in every other block, experts with biases and a clamped activation, and YaRN.

arXiv 2508.10925. The weights of the chosen experts are a softmax of their logits. The config says that YaRN's ramp is
not rounded; GGUF has no key for that and llama.cpp rounds the ramp, so packtrain does."""

from packtrain.models.arch import architecture as arch

EVERY = 2
EXPERT_BIASES = (
    "ffn_gate_inp.bias", "ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias",
)  # fmt: skip
ALL_BIASES = (*arch.BIASES, "attn_output.bias", *EXPERT_BIASES)
BLOCK = {
    **arch.ATTENTION, "self_attn.sinks": "attn_sinks", **arch.POST_ATTENTION_NORM, "mlp.router": "ffn_gate_inp",
}  # fmt: skip
STACKED = {
    "ffn_gate_exps": ("mlp.experts.gate_up_proj", 0, 2), "ffn_up_exps": ("mlp.experts.gate_up_proj", 1, 2),
    "ffn_down_exps": ("mlp.experts.down_proj", 0, 1),
}  # fmt: skip
EXPERTS = arch.ExpertLayout(
    {}, ("num_experts", 128), ("num_experts_per_tok", 4), ("intermediate_size", 2880), stacked_matrices=STACKED
)  # fmt: skip
SUFFIX_RENAMES = {"sinks": "sinks.weight"}
for name in ("gate_up_proj", "down_proj"):
    SUFFIX_RENAMES |= {
        f"experts.{name}_bias": f"experts.{name}.bias", f"experts.{name}": f"experts.{name}.weight",
    }  # fmt: skip


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    hf_config.require_window_interval(EVERY, sizes.block_count)
    return {"attention.sliding_window": hf_config.size("sliding_window", 128)}


ARCHITECTURE = arch.Architecture(
    "gpt-oss", halves=True, ffn_norm="post_attention_norm", always_untied=True, attention_sinks=True, clamped=True,
    key_defaults={**arch.ONLY_EXPERTS, "attention.sliding_window": None, "attention.sliding_window_pattern": EVERY},
    optional_tensors=ALL_BIASES,
    families=(
        arch.Family(
            ("GptOssForCausalLM",), BLOCK, extra_metadata, EXPERTS, optional_tensors=arch.with_tensors(*ALL_BIASES),
            required_values=arch.fixed(swiglu_limit=7.0, swiglu_alpha=1.702, attention_bias=True),
            rope_freq_base=0.0, default_head_width=64, suffix_renames=SUFFIX_RENAMES,
        ),
    ),
)  # fmt: skip
