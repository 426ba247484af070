"""Granite 4 hybrids: most blocks have a Mamba-2 scan instead of attention; granite's scales, with or without experts.

There is no rope unless the file asks for it."""

from typing import Any

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import granite, granitemoe, llama
from packtrain.models.arch.size_fields import ModelSizes, Scan

MAX_CONTEXT = 1 << 20  # llama.cpp's converter writes this where nothing depends on positions
ATTENDING, SCAN_TYPES = ("attention", "full_attention"), ("mamba", "linear_attention")
CONV_BIAS, SCAN_NORM = "ssm_conv1d.bias", "ssm_norm.weight"


def normalize_config(hf_config: arch.HFConfig) -> arch.HFConfig:
    return hf_config if hf_config.get("num_local_experts", 8) else granite.dense(hf_config)


def other_class(hf_config: arch.HFConfig) -> str:
    """Return the class to convert the model as: a Granite's with rope if all blocks have attention, else ""."""
    kinds = hf_config.get("layer_types")
    if not isinstance(kinds, list) or not kinds or any(kind not in ATTENDING for kind in kinds):
        return ""
    hf_config.require_one_of("position_embedding_type", None, "rope")
    return granitemoe.CLASSES[1] if hf_config.get("num_local_experts", 8) else granite.ALL_ATTEND


def read_scan(hf_config: arch.HFConfig, inner_width: int) -> Scan:
    """Read the sizes of a Mamba-2 scan, `inner_width` numbers over all heads. Raises InputError if they do not fit."""
    hf_config.require_one_of("mamba_proj_bias", False, False)
    num_heads = hf_config.size("mamba_n_heads", 128)
    each = hf_config.get("mamba_d_head", "auto")
    if inner_width % num_heads or each not in ("auto", inner_width // num_heads):
        raise hf_config.wrong("mamba_d_head", each, f"{inner_width} / mamba_n_heads {num_heads}")
    size_keys = ("mamba_d_state", 256), ("mamba_n_groups", 1), ("mamba_d_conv", 4)
    state_width, num_groups, num_taps = (hf_config.size(*size_key) for size_key in size_keys)
    return Scan(inner_width, state_width, num_heads, num_groups, num_taps)


def mixer_fields(hf_config: arch.HFConfig) -> dict[str, Any]:
    kinds = hf_config.layer_types(hf_config.size("num_hidden_layers"), *ATTENDING, *SCAN_TYPES)
    attending_blocks = tuple(layer_type in ATTENDING for layer_type in kinds)
    if all(attending_blocks) or not any(attending_blocks):
        raise hf_config.wrong("layer_types", kinds, "attention in some blocks and mamba in others")
    inner_width = hf_config.size("mamba_expand", 2) * hf_config.size("hidden_size")
    return {"attending": attending_blocks, "scan": read_scan(hf_config, inner_width)}


def scan_metadata(sizes: ModelSizes) -> arch.Keys:
    assert sizes.scan is not None
    inner_width, state, num_heads, num_groups, num_taps = sizes.scan
    return dict(
        zip(arch.SCAN_KEYS, (num_taps, inner_width, state, num_heads, num_groups), strict=True)
    )


def extra_metadata(hf_config: arch.HFConfig, sizes: ModelSizes) -> arch.Keys:
    kv_head_counts = [sizes.head_count_kv * sizes.attends(i) for i in range(sizes.block_count)]
    metadata = granite.extra_metadata(hf_config, sizes) | scan_metadata(sizes)
    if not sizes.expert_count:
        metadata["expert_count"] = 0
        metadata["expert_used_count"] = int(hf_config.get("num_experts_per_tok", 2))
    return metadata | {
        "context_length": MAX_CONTEXT, "attention.head_count_kv": kv_head_counts,
        granite.SHARED_WIDTH: hf_config.size("shared_intermediate_size", 1024), "rope.scaling.finetuned": False,
    }  # fmt: skip


ARCHITECTURE = arch.Architecture(
    "granitehybrid",
    key_defaults={
        **granitemoe.ARCHITECTURE.key_defaults, **arch.SCAN_KEYS, "logit_scale": 0.0, "rope.scaling.finetuned": True,
    },
    optional_tensors=(*granite.ARCHITECTURE.optional_tensors, CONV_BIAS, SCAN_NORM),
    families=(
        arch.Family(
            ("GraniteMoeHybridForCausalLM",),
            arch.ATTENTION | arch.SCAN_MODULES | arch.FFN_NORM | {"block_sparse_moe.router.layer": "ffn_gate_inp"},
            extra_metadata,
            arch.ExpertLayout(
                {}, ("num_experts", 8), ("num_experts_per_tok", 2), shared_and_dense=granitemoe.shared_and_dense,
                stacked_matrices=granitemoe.HALVES | granite.halves("shared_mlp"), is_contiguous=True, rows=True,
            ),
            normalize_config=normalize_config, other_class=other_class,
            optional_tensors=arch.with_tensors(
                SCAN_NORM, true_flags=("mamba_conv_bias",), mamba_conv_bias=(CONV_BIAS,)
            ),
            required_values={"position_embedding_type": ("nope", "nope", None)}, size_keys=llama.SIZE_KEYS,
            suffix_renames=arch.SCAN_SUFFIX_RENAMES, mixer_fields=mixer_fields,
            changes=lambda hf_config, sizes: {"ssm_a": arch.decays_from_logs},
        ),
    ),
)  # fmt: skip
