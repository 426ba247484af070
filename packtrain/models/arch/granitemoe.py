"""Granite 3 with experts: granite's scales, experts routed as in llama, and in some models a shared expert."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import granite, llama

CLASSES = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
HALVES = granite.halves("block_sparse_moe", "_exps") | granite.halves("shared_mlp", "_shexp")


def shared_and_dense(hf_config: arch.HFConfig) -> tuple[int, int]:
    return hf_config.optional_size("shared_intermediate_size"), 0


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    shared_width = sizes.expert_shared_feed_forward_length
    return granite.extra_metadata(hf_config, sizes) | (
        {granite.SHARED_WIDTH: shared_width} if shared_width else {}
    )


EXPERTS = arch.ExpertLayout(
    {}, ("num_local_experts", 8), ("num_experts_per_tok", 2), shared_and_dense=shared_and_dense,
    stacked_matrices=HALVES, is_contiguous=True, rows=True,
)  # fmt: skip
ARCHITECTURE = arch.Architecture(
    "granitemoe", key_defaults={**granite.ARCHITECTURE.key_defaults, **arch.EXPERT_KEYS, granite.SHARED_WIDTH: 0},
    ignored_keys=(*arch.SCAN_KEYS,), optional_tensors=granite.ARCHITECTURE.optional_tensors,
    families=(
        arch.Family(
            CLASSES, arch.ATTENTION | arch.FFN_NORM | {"block_sparse_moe.router.layer": "ffn_gate_inp"}, extra_metadata,
            EXPERTS, size_keys=llama.SIZE_KEYS, tied_by_default=True,
        ),
    ),
)  # fmt: skip
