"""Granite 4 hybrids: most blocks have a Mamba-2 scan instead of attention, with granite's scales and experts, or none.

There is no rope, unless the model says so.
"""

from typing import Any

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import granite, granitemoe
from packtrain.models.arch.architecture import SCAN_KEYS, Architecture, Experts, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Scan, Sizes

LONGEST = 1 << 20  # what llama.cpp's converter writes where nothing depends on positions
ATTENDING, SCANNING = ("attention", "full_attention"), ("mamba", "linear_attention")
CONV_BIAS, NORM = "ssm_conv1d.bias", "ssm_norm.weight"


def usual(hf_config: Given) -> Given:
    return hf_config if hf_config.get("num_local_experts", 8) else granite.dense(hf_config)


def other(hf_config: Given) -> str:
    """Where all blocks attend, the class is only a Granite, with rope."""
    kinds = hf_config.get("layer_types")
    if not isinstance(kinds, list) or not kinds or any(kind not in ATTENDING for kind in kinds):
        return ""
    hf_config.one_of("position_embedding_type", None, "rope")
    return (
        granite.ALL_ATTEND if not hf_config.get("num_local_experts", 8) else granitemoe.CLASSES[1]
    )


def scan(hf_config: Given, inner: int) -> Scan:
    hf_config.one_of("mamba_proj_bias", False, False)
    heads = hf_config.size("mamba_n_heads", 128)
    each = hf_config.get("mamba_d_head", "auto")
    if inner % heads or each not in ("auto", inner // heads):
        raise hf_config.wrong("mamba_d_head", each, f"{inner} / mamba_n_heads {heads}")
    names = ("mamba_d_state", 256), ("mamba_n_groups", 1), ("mamba_d_conv", 4)
    state, groups, taps = (hf_config.size(*name) for name in names)
    return Scan(inner, state, heads, groups, taps)


def mixing(hf_config: Given) -> dict[str, Any]:
    kinds = hf_config.kinds(hf_config.size("num_hidden_layers"), *ATTENDING, *SCANNING)
    attending = tuple(kind in ATTENDING for kind in kinds)
    if all(attending) or not any(attending):
        raise hf_config.wrong("layer_types", kinds, "attention in some blocks and mamba in others")
    inner = hf_config.size("mamba_expand", 2) * hf_config.size("hidden_size")
    return {"attending": attending, "scan": scan(hf_config, inner)}


def optional(hf_config: Given) -> tuple[str, ...]:
    return (CONV_BIAS, NORM) if hf_config.flag("mamba_conv_bias", True) else (NORM,)


def scan_keys(sizes: Sizes) -> Keys:
    assert sizes.scan is not None
    inner, state, heads, groups, taps = sizes.scan
    return dict(zip(SCAN_KEYS, (taps, inner, state, heads, groups), strict=True))


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    hf_config.one_of("position_embedding_type", "nope", "nope", None)
    each = [sizes.head_count_kv * sizes.attends(i) for i in range(sizes.block_count)]
    metadata = granite.keys(hf_config, sizes) | scan_keys(sizes)
    if not sizes.expert_count:
        metadata |= {
            "expert_count": 0,
            "expert_used_count": int(hf_config.get("num_experts_per_tok", 2)),
        }
    return metadata | {
        "context_length": LONGEST,
        "attention.head_count_kv": each,
        granite.SHARED_WIDTH: hf_config.size("shared_intermediate_size", 1024),
        "rope.scaling.finetuned": False,
    }


ARCHITECTURE = Architecture(
    "granitehybrid",
    keys={
        **granitemoe.ARCHITECTURE.keys,
        **SCAN_KEYS,
        "logit_scale": 0.0,
        "rope.scaling.finetuned": True,
    },
    optional=(*granite.ARCHITECTURE.optional, CONV_BIAS, NORM),
    families=(
        Family(
            ("GraniteMoeHybridForCausalLM",),
            arch.ATTENTION
            | arch.SCAN_MODULES
            | arch.FFN_NORM
            | {"block_sparse_moe.router.layer": "ffn_gate_inp"},
            keys,
            Experts(
                {},
                ("num_experts", 8),
                ("num_experts_per_tok", 2),
                others=granitemoe.others,
                stacked=granitemoe.HALVES | granite.halves("shared_mlp"),
                together=True,
                rows=True,
            ),
            usual=usual,
            other=other,
            optional=optional,
            ends=arch.SCAN_ENDS,
            mixing=mixing,
            changes=lambda given, sizes: {"ssm_a": arch.decays},
        ),
    ),
)
