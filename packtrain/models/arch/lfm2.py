"""LFM2: most blocks have a short convolution between two gates instead of attention. arXiv 2511.23404."""

from typing import Any

from packtrain.models.arch.architecture import Architecture, Family, Keys, Names
from packtrain.models.arch.hf_config import FULL, Given
from packtrain.models.arch.size_fields import Sizes

CONV = "conv"
MODULES = {
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj", "ffn_norm": "ffn_norm",
}  # fmt: skip
FEED_FORWARD = {
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
}  # fmt: skip


def usual(hf_config: Given) -> Given:
    """Older configs list the blocks with attention; the feed-forward is a share of the width that they name."""
    blocks = range(hf_config.size("num_hidden_layers"))
    attending = hf_config.get("full_attn_idxs", [*blocks])
    kinds = hf_config.get("layer_types", [FULL if i in attending else CONV for i in blocks])
    width = hf_config.size("block_ff_dim", hf_config.get("intermediate_size"))
    if hf_config.flag("block_auto_adjust_ff_dim", True):
        width = int(hf_config.real("block_ffn_dim_multiplier", 1.0) * (2 * width // 3))
        part = hf_config.size("block_multiple_of", 256)
        width = -(-width // part) * part
    return tied(hf_config).but(layer_types=kinds, intermediate_size=width)


def tied(hf_config: Given) -> Given:
    return hf_config.but(
        rms_norm_eps=hf_config.real("norm_eps", 1e-5),
        tie_word_embeddings=hf_config.flag(
            "tie_embedding", hf_config.flag("tie_word_embeddings", True)
        ),
    )


def mixing(hf_config: Given) -> dict[str, Any]:
    """Which blocks attend, and the width of the convolutions of the others."""
    kinds = hf_config.kinds(hf_config.size("num_hidden_layers"), FULL, CONV, every=True)
    hf_config.one_of("conv_bias", False, False)
    attending = tuple(kind == FULL for kind in kinds)
    return {"attending": attending, "conv_width": hf_config.size("conv_L_cache", 3)}


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    each = [sizes.head_count_kv * sizes.attends(i) for i in range(sizes.block_count)]
    return {
        "attention.head_count_kv": each,
        "vocab_size": sizes.vocab_size,
        "shortconv.l_cache": hf_config.size("conv_L_cache", 3),
    }


ARCHITECTURE = Architecture(
    "lfm2",
    halves=True,
    head_norms=True,
    square=True,
    last_norm="token_embd_norm",
    keys={"shortconv.l_cache": None},
    optional=(),
    families=(
        Family(
            ("Lfm2ForCausalLM",),
            MODULES | FEED_FORWARD,
            keys,
            names=Names(norm="embedding_norm"),
            usual=usual,
            mixing=mixing,
            tied=True,
            rope_freq_base=1e6,
        ),
    ),
)
