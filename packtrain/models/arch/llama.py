"""Llama, and models that compute like it: Mistral, and Mixtral with experts. arXiv 2302.13971, 2401.04088."""

from packtrain.models.arch import architecture as arch

SIZE_KEYS = ("vocab_size", "rope.dimension_count")
EXPERT_MODULES = arch.feed_forward("block_sparse_moe.experts.{}", "_exps", arch.NUMBERED)
ARCHITECTURE = arch.Architecture(
    "llama", key_defaults=arch.EXPERT_KEYS, ignored_keys=arch.WINDOW_KEYS,
    optional_tensors=(*arch.BIASES, *arch.MORE_BIASES, arch.FACTORS), blocks_70b=80, grouped_70b=True,
    families=(
        arch.Family(("LlamaForCausalLM", "MistralForCausalLM"), size_keys=SIZE_KEYS),
        arch.Family(
            ("MixtralForCausalLM",), arch.ATTENTION | arch.FFN_NORM | {"block_sparse_moe.gate": "ffn_gate_inp"},
            experts=arch.ExpertLayout(EXPERT_MODULES, ("num_local_experts", 8), ("num_experts_per_tok", 2)),
            size_keys=SIZE_KEYS, rope_freq_base=1_000_000.0,
        ),
    ),
)  # fmt: skip
