"""InternLM 2: llama. Checkpoints keep queries that share a key, that key and its value together. arXiv 2403.17297."""

from packtrain.models.arch.architecture import (
    BIASES,
    Architecture,
    CheckpointNames,
    Family,
    Keys,
    RowSpans,
)
from packtrain.models.arch.hf_config import HFConfig
from packtrain.models.arch.size_fields import ModelSizes

MODULES = {
    "attention_norm": "attn_norm", "attention.wo": "attn_output", "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
}  # fmt: skip
FUSED_PARTS = "attn_q", "attn_k", "attn_v"


def extra_metadata(hf_config: HFConfig, sizes: ModelSizes) -> Keys:
    """Dynamic scaling of rope begins behind the context, where llama.cpp has none."""
    hf_config.require_one_of("bias", False, False)
    hf_config.full_rotation().get("factor")  # without effect within the context
    return {}


def row_spans(sizes: ModelSizes) -> dict[str, RowSpans]:
    """All queries, all keys, all values, from groups of those that belong together."""
    d, num_groups = sizes.head_width, sizes.head_count_kv
    each = sizes.head_count // num_groups + 2
    group_spans = (0, each - 2), (each - 2, each - 1), (each - 1, each)  # of a group, in heads
    return {
        name: tuple(((g * each + first) * d, (g * each + end_head) * d) for g in range(num_groups))
        for name, (first, end_head) in zip(FUSED_PARTS, group_spans, strict=True)
    }


ARCHITECTURE = Architecture(
    "internlm2",
    fixed_head_width=True,
    always_untied=True,
    optional_tensors=BIASES,
    families=(
        Family(
            ("InternLM2ForCausalLM",),
            MODULES,
            extra_metadata,
            names=CheckpointNames(embedding="tok_embeddings"),
            suffix_renames={"output.weight": "lm_head.weight"},
            row_spans=row_spans,
            fused_modules={"attention.wqkv": FUSED_PARTS},
            rope_scaling_types=("dynamic",),
            blank="[UNUSED",
            special={"eot": "<|im_end|>"},  # of conversations
        ),
    ),
)
