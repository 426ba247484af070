"""Qwen3-Next: most blocks have a gated delta net, the others attention with gates; all have experts and a shared one.

arXiv 2412.06464. Blocks that guess more tokens are not used.
"""

from typing import Any

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import ATTENTION, Architecture, Experts, Family, Keys, Spans
from packtrain.models.arch.granitehybrid import scan_keys
from packtrain.models.arch.hf_config import FULL, Given
from packtrain.models.arch.qwen2moe import SHARED
from packtrain.models.arch.size_fields import Scan, Sizes

LINEAR = "linear_attention"
FFN_NORM = {"post_attention_layernorm": "post_attention_norm"}
DELTA = {
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.dt": "ssm_dt", "linear_attn.A": "ssm_a",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
ROUTED = {"linear_attn.in_proj_ba": "ssm_ba", "mlp.gate": "ffn_gate_inp"}
ENDS = {".A_log": ".A.weight", ".dt_bias": ".dt.bias"}
DELTA_KEYS = {
    **arch.SCAN_KEYS,
    "full_attention_interval": 4,
    "attention.recurrent_layers": None,
    "nextn_predict_layers": 0,
}
EXPERT_KEYS = {**arch.ONLY_EXPERTS, "expert_shared_feed_forward_length": 0}


def others(hf_config: Given) -> tuple[int, int]:
    return hf_config.size("shared_expert_intermediate_size", 512), 0


EXPERTS = Experts(
    arch.EXPERT_MATRICES, ("num_experts", 512), ("num_experts_per_tok", 10), ("moe_intermediate_size", 512), others
)  # fmt: skip


def usual(hf_config: Given) -> Given:
    """Older configs say which blocks attend by an interval."""
    blocks = hf_config.size("num_hidden_layers")
    every = hf_config.size("full_attention_interval", 4)
    kinds = [FULL if (i + 1) % every == 0 else LINEAR for i in range(blocks)]
    return hf_config.but(layer_types=hf_config.get("layer_types", kinds))


def mixing(hf_config: Given) -> dict[str, Any]:
    """Which blocks attend, and the sizes of the delta nets of the others."""
    kinds = hf_config.kinds(hf_config.size("num_hidden_layers"), FULL, LINEAR, every=True)
    groups = hf_config.size("linear_num_key_heads", 16)
    heads = hf_config.size("linear_num_value_heads", 32)
    width = hf_config.size("linear_key_head_dim", 128)
    hf_config.one_of("linear_value_head_dim", 128, width)
    if heads % groups:
        raise hf_config.wrong(
            "linear_num_value_heads", heads, f"a multiple of linear_num_key_heads {groups}"
        )
    taps = hf_config.size("linear_conv_kernel_dim", 4)
    attending = tuple(kind == FULL for kind in kinds)
    return {"attending": attending, "scan": Scan(heads * width, width, heads, groups, taps)}


def spans(sizes: Sizes) -> dict[str, Spans]:
    """Of each group together there are queries, keys, values and gates."""
    assert sizes.scan is not None
    inner, width, _, groups, _ = sizes.scan
    value_rows = inner // groups
    each = 2 * (width + value_rows)
    group_spans = (
        (0, width),
        (width, 2 * width),
        (2 * width, 2 * width + value_rows),
        (each - value_rows, each),
    )
    q, k, v, z = (
        tuple((g * each + at, g * each + end) for g in range(groups)) for at, end in group_spans
    )
    return {"attn_qkv": q + k + v, "attn_gate": z}


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    hf_config.one_of("attention_bias", False, False)
    return {
        **scan_keys(sizes),
        "attention.recurrent_layers": [not attends for attends in sizes.attending],
        "full_attention_interval": hf_config.size("full_attention_interval", 4),
        "rope.dimension_count": hf_config.turned(sizes.head_width, 0.25),
    }


def expert_keys(hf_config: Given, sizes: Sizes) -> Keys:
    """llama.cpp supports only experts in all blocks, with weights that add up to 1."""
    hf_config.one_of("norm_topk_prob", True, True)
    hf_config.one_of("decoder_sparse_step", 1, 1)
    hf_config.one_of("mlp_only_layers", [], [])
    shared = sizes.expert_shared_feed_forward_length
    return {**keys(hf_config, sizes), "expert_shared_feed_forward_length": shared}


ARCHITECTURE = Architecture(
    "qwen3next",
    halves=True,
    head_norms=True,
    ffn_norm="post_attention_norm",
    partial_rope=True,
    shared_gate=True,
    delta="grouped",
    gated_heads=True,
    keys={**EXPERT_KEYS, **DELTA_KEYS},
    optional=(),
    families=(
        Family(
            ("Qwen3NextForCausalLM",),
            ATTENTION | arch.HEAD_NORMS | FFN_NORM | DELTA | ROUTED | SHARED,
            expert_keys,
            EXPERTS,
            usual=usual,
            mixing=mixing,
            spans=spans,
            joined={"linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate")},
            changes=lambda given, sizes: {"ssm_a": arch.decays},
            ends=ENDS,
            norm_shift=1.0,
            head_width=256,
        ),
    ),
)
