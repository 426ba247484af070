"""InternLM 2: llama. Checkpoints keep queries that share a key, that key and its value together. arXiv 2403.17297."""

from packtrain.models.arch.architecture import BIASES, Architecture, Family, Keys, Names, Spans
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

MODULES = {
    "attention_norm": "attn_norm", "attention.wo": "attn_output", "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
}  # fmt: skip
PARTS = "attn_q", "attn_k", "attn_v"


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    """Dynamic scaling of rope begins behind the context, where llama.cpp has none."""
    hf_config.one_of("bias", False, False)
    hf_config.full_rotation().get("factor")  # without effect within the context
    return {}


def spans(sizes: Sizes) -> dict[str, Spans]:
    """All queries, all keys, all values, from groups of those that belong together."""
    d, groups = sizes.head_width, sizes.head_count_kv
    each = sizes.head_count // groups + 2
    group_spans = (0, each - 2), (each - 2, each - 1), (each - 1, each)  # of a group, in heads
    return {
        part: tuple(((g * each + first) * d, (g * each + last) * d) for g in range(groups))
        for part, (first, last) in zip(PARTS, group_spans, strict=True)
    }


ARCHITECTURE = Architecture(
    "internlm2",
    square=True,
    always_apart=True,
    optional=BIASES,
    families=(
        Family(
            ("InternLM2ForCausalLM",),
            MODULES,
            keys,
            names=Names(embedding="tok_embeddings"),
            ends={"output.weight": "lm_head.weight"},
            spans=spans,
            joined={"attention.wqkv": PARTS},
            scalings=("dynamic",),
            blank="[UNUSED",
            special={"eot": "<|im_end|>"},  # of conversations
        ),
    ),
)
