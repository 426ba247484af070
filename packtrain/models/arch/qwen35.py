"""Qwen3.5 (text): most blocks have a gated delta net instead of attention, whose heads have gates. arXiv 2412.06464."""

from dataclasses import replace

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import qwen3next
from packtrain.models.arch.qwen3next import DELTA_KEYS, DELTA_MODULES

SECTIONS = "rope.dimension_sections"
SEPARATE_MODULES = {
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
}  # fmt: skip
BLOCK = (
    arch.ATTENTION | arch.HEAD_NORMS | arch.POST_ATTENTION_NORM | DELTA_MODULES | SEPARATE_MODULES
)


def row_spans(sizes: arch.ModelSizes) -> dict[str, arch.RowSpans]:
    """Return {tensor: spans (first row, end)} that reorder heads from group by group to one of every group in turn."""
    assert sizes.scan is not None
    width, heads, groups = sizes.scan[1:4]
    head_order = [g * (heads // groups) + n for n in range(heads // groups) for g in range(groups)]
    head_indices: arch.RowSpans = tuple((head, head + 1) for head in head_order)
    head_spans: arch.RowSpans = tuple((head * width, (head + 1) * width) for head in head_order)
    both = 2 * groups * width
    qkv_spans: arch.RowSpans = ((0, both), *((both + head, both + end) for head, end in head_spans))
    return {
        "attn_qkv": qkv_spans, "ssm_conv1d": qkv_spans, "attn_gate": head_spans,
        **dict.fromkeys(("ssm_beta", "ssm_alpha", "ssm_dt", "ssm_a"), head_indices),
    }  # fmt: skip


def column_spans(sizes: arch.ModelSizes) -> dict[str, arch.RowSpans]:
    return {"ssm_out": row_spans(sizes)["attn_gate"]}


def text_keys(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    """Return the metadata with rope's sections (time, height, width), which have one position in text. llama.cpp gives
    pairs beyond the sections position 0, hence the check of files that they cover all pairs."""
    sections = hf_config.full_rotation().get("mrope_section", [11, 11, 10])
    has_numbers = isinstance(sections, list) and {*map(type, sections)} == {int}
    if not has_numbers or len(sections) not in (3, 4):
        raise hf_config.wrong("mrope_section", sections, "three numbers")
    return {**qwen3next.extra_metadata(hf_config, sizes), SECTIONS: [*sections, 0][:4]}


ARCHITECTURE = replace(
    qwen3next.ARCHITECTURE, name="qwen35", gated_shared_expert=False, delta="tiled",
    key_defaults={**DELTA_KEYS, SECTIONS: None},
    families=(
        replace(
            qwen3next.ARCHITECTURE.families[0], model_classes=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
            block_modules=BLOCK | arch.FEED_FORWARD, extra_metadata=text_keys, experts=None,
            required_values=arch.fixed(attention_bias=False), size_keys=(), row_spans=row_spans,
            column_spans=column_spans, fused_modules={},
        ),
    ),
)  # fmt: skip
