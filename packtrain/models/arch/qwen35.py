"""Qwen3.5 (text): most blocks have a gated delta net instead of attention, whose heads have gates. arXiv 2412.06464."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import FEED_FORWARD, Architecture, Family, Keys, Spans
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.qwen3next import DELTA, DELTA_KEYS, ENDS, FFN_NORM, keys, mixing, usual
from packtrain.models.arch.size_fields import Sizes

SECTIONS = "rope.dimension_sections"
APART = {
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
}  # fmt: skip
BLOCK = arch.ATTENTION | arch.HEAD_NORMS | FFN_NORM | DELTA | APART


def spans(sizes: Sizes) -> dict[str, Spans]:
    """Heads of a group stand together; in files those of all groups in turn."""
    assert sizes.scan is not None
    width, heads, groups = sizes.scan[1:4]
    places = [g * (heads // groups) + n for n in range(heads // groups) for g in range(groups)]
    each: Spans = tuple((at, at + 1) for at in places)
    head_spans: Spans = tuple((at * width, (at + 1) * width) for at in places)
    both = 2 * groups * width
    qkv_spans: Spans = ((0, both), *((both + at, both + end) for at, end in head_spans))
    return {
        "attn_qkv": qkv_spans,
        "ssm_conv1d": qkv_spans,
        "attn_gate": head_spans,
        **dict.fromkeys(("ssm_beta", "ssm_alpha", "ssm_dt", "ssm_a"), each),
    }


def columns(sizes: Sizes) -> dict[str, Spans]:
    return {"ssm_out": spans(sizes)["attn_gate"]}


def text_keys(hf_config: Given, sizes: Sizes) -> Keys:
    """Text has one position in time, height and width, for which rope has sections."""
    sections = hf_config.full_rotation().get("mrope_section", [11, 11, 10])
    if (
        not isinstance(sections, list)
        or {*map(type, sections)} != {int}
        or len(sections) not in (3, 4)
    ):
        raise hf_config.wrong("mrope_section", sections, "three numbers")
    return {**keys(hf_config, sizes), SECTIONS: [*sections, 0][:4]}


ARCHITECTURE = Architecture(
    "qwen35",
    halves=True,
    head_norms=True,
    ffn_norm="post_attention_norm",
    partial_rope=True,
    delta="tiled",
    gated_heads=True,
    keys={**DELTA_KEYS, SECTIONS: None},
    optional=(),
    families=(
        Family(
            ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
            BLOCK | FEED_FORWARD,
            text_keys,
            usual=usual,
            mixing=mixing,
            spans=spans,
            columns=columns,
            changes=lambda given, sizes: {"ssm_a": arch.decays},
            ends=ENDS,
            norm_shift=1.0,
            head_width=256,
        ),
    ),
)
