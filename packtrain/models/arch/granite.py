"""Granite 3 and 4 (dense): llama with scaled embeddings, residuals, scores and logits.

Granite 4's have the hybrids' model class with attention in all blocks; llama.cpp writes keys of scans for them, too."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import llama

SCALE_KEYS = {
    "embedding_multiplier": "embedding_scale", "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
SHARED_WIDTH = "expert_shared_feed_forward_length"
ALL_ATTEND = "GraniteMoeHybridForCausalLM of attention alone"
StackedMatrices = dict[str, tuple[str, int, int]]


def halves(module: str, suffix: str = "") -> StackedMatrices:
    """Return {GGUF name: (module, part's number, parts in the module)}; gate and up share a module, `input_linear`."""
    matrix_sides = ("gate", "input", 0, 2), ("up", "input", 1, 2), ("down", "output", 0, 1)
    return {f"ffn_{m}{suffix}": (f"{module}.{s}_linear", i, o) for m, s, i, o in matrix_sides}


def dense(hf_config: arch.HFConfig) -> arch.HFConfig:
    """Return the config of a model without experts: the shared expert is the feed-forward."""
    width = hf_config.size("shared_intermediate_size")
    return hf_config.but(num_experts=0, intermediate_size=width)


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    return {key: hf_config.real(name, 1.0) for name, key in SCALE_KEYS.items()}


ARCHITECTURE = arch.Architecture(
    "granite",
    key_defaults={"logit_scale": None, "embedding_scale": 0.0, "residual_scale": 0.0, "attention.scale": 0.0},
    neutral={"rope.scaling.finetuned": (True,)},  # false: llama.cpp leaves rope out
    ignored_keys=(*arch.SCAN_KEYS, SHARED_WIDTH), optional_tensors=(*arch.BIASES, *arch.MORE_BIASES, arch.FACTORS),
    families=(
        arch.Family(
            ("GraniteForCausalLM",), extra_metadata=extra_metadata, size_keys=llama.SIZE_KEYS, tied_by_default=True
        ),
        arch.Family(
            (ALL_ATTEND,), arch.ATTENTION | arch.FFN_NORM,
            lambda hf_config, sizes: extra_metadata(hf_config, sizes) | {"rope.scaling.finetuned": True},
            arch.ExpertLayout(
                {}, ("num_experts", 8), ("num_experts_per_tok", 2), stacked_matrices=halves("shared_mlp"),
                is_contiguous=True, rows=True,
            ),
            normalize_config=dense, size_keys=llama.SIZE_KEYS,
        ),
    ),
)  # fmt: skip
