"""Qwen3-Next: most blocks have a gated delta net, the others gated attention; all have experts and a shared expert.

arXiv 2412.06464. Blocks that guess more tokens are not used."""

from typing import Any

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.granitehybrid import scan_metadata
from packtrain.models.arch.hf_config import FULL, HFConfig
from packtrain.models.arch.qwen2moe import EXPERTS_EVERYWHERE, SHARED, SHARED_WIDTH
from packtrain.models.arch.size_fields import ModelSizes, Scan

LINEAR = "linear_attention"
DELTA_MODULES = {
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.dt": "ssm_dt", "linear_attn.A": "ssm_a",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
ROUTER_MODULES = {"linear_attn.in_proj_ba": "ssm_ba", "mlp.gate": "ffn_gate_inp"}
SUFFIX_RENAMES = {".A_log": ".A.weight", ".dt_bias": ".dt.bias"}
DELTA_KEYS = {
    **arch.SCAN_KEYS, "full_attention_interval": 4, "attention.recurrent_layers": None, "nextn_predict_layers": 0,
}  # fmt: skip
EXPERT_KEYS = {**arch.ONLY_EXPERTS, SHARED_WIDTH: 0}


def shared_and_dense(hf_config: HFConfig) -> tuple[int, int]:
    return hf_config.size("shared_expert_intermediate_size", 512), 0


EXPERTS = arch.ExpertLayout(
    arch.EXPERT_MODULES, ("num_experts", 512), ("num_experts_per_tok", 10), ("moe_intermediate_size", 512),
    shared_and_dense,
)  # fmt: skip


def normalize_config(hf_config: HFConfig) -> HFConfig:
    """Return the config with `layer_types`; older configs say which blocks attend by full_attention_interval."""
    num_blocks = hf_config.size("num_hidden_layers")
    attention_interval = hf_config.size("full_attention_interval", 4)
    layer_types = [FULL if (i + 1) % attention_interval == 0 else LINEAR for i in range(num_blocks)]
    return hf_config.but(layer_types=hf_config.get("layer_types", layer_types))


def mixer_fields(hf_config: HFConfig) -> dict[str, Any]:
    """Return ModelSizes fields: which blocks attend, and the sizes of the other blocks' delta nets."""
    kinds = hf_config.layer_types(hf_config.size("num_hidden_layers"), FULL, LINEAR, every=True)
    groups = hf_config.size("linear_num_key_heads", 16)
    num_heads = hf_config.size("linear_num_value_heads", 32)
    width = hf_config.size("linear_key_head_dim", 128)
    hf_config.require_one_of("linear_value_head_dim", 128, width)
    if num_heads % groups:
        expected = f"a multiple of linear_num_key_heads {groups}"
        raise hf_config.wrong("linear_num_value_heads", num_heads, expected)
    taps = hf_config.size("linear_conv_kernel_dim", 4)
    attending = tuple(layer_type == FULL for layer_type in kinds)
    return {"attending": attending, "scan": Scan(num_heads * width, width, num_heads, groups, taps)}


def row_spans(sizes: ModelSizes) -> dict[str, arch.RowSpans]:
    """Return {tensor: spans (first row, end)} that pick attn_qkv and attn_gate from groups of q, k, v and gates."""
    assert sizes.scan is not None
    inner_width, head_width, _, num_groups, _ = sizes.scan
    value_rows = inner_width // num_groups
    each = 2 * (head_width + value_rows)
    group_spans = (
        (0, head_width), (head_width, 2 * head_width), (2 * head_width, 2 * head_width + value_rows),
        (each - value_rows, each),
    )  # fmt: skip
    q, k, v, z = (
        tuple((g * each + at, g * each + end) for g in range(num_groups)) for at, end in group_spans
    )
    return {"attn_qkv": q + k + v, "attn_gate": z}


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> arch.Keys:
    hf_config.note_fixed_eps("the lengths of queries and keys in delta nets")
    return {
        **scan_metadata(sizes), "attention.recurrent_layers": [not attends for attends in sizes.attending],
        "full_attention_interval": hf_config.size("full_attention_interval", 4),
    }  # fmt: skip


ARCHITECTURE = arch.Architecture(
    "qwen3next", halves=True, head_norms=True, ffn_norm="post_attention_norm", partial_rope=True,
    gated_shared_expert=True, delta="grouped", gated_heads=True, key_defaults={**EXPERT_KEYS, **DELTA_KEYS},
    optional_tensors=(),
    families=(
        arch.Family(
            ("Qwen3NextForCausalLM",),
            arch.ATTENTION | arch.HEAD_NORMS | arch.POST_ATTENTION_NORM | DELTA_MODULES | ROUTER_MODULES | SHARED,
            extra_metadata, EXPERTS,
            required_values=EXPERTS_EVERYWHERE | arch.fixed(attention_bias=False, norm_topk_prob=True),
            size_keys=(SHARED_WIDTH,), rotated_share=0.25, normalize_config=normalize_config, mixer_fields=mixer_fields,
            row_spans=row_spans, fused_modules={"linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate")},
            changes=lambda hf_config, sizes: {"ssm_a": arch.decays_from_logs}, suffix_renames=SUFFIX_RENAMES,
            norm_shift=1.0, default_head_width=256,
        ),
    ),
)  # fmt: skip
