"""LFM2: most blocks have a short convolution between two gates instead of attention. arXiv 2511.23404."""

from typing import Any

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.hf_config import FULL, HFConfig

CONV_TYPE = "conv"
MODULES = {
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj", "ffn_norm": "ffn_norm",
}  # fmt: skip
FEED_FORWARD = arch.feed_forward("feed_forward", names=arch.NUMBERED)


def normalize_config(hf_config: HFConfig) -> HFConfig:
    """Return the config with `layer_types`, which older configs lack, and the feed-forward's width after adjustment."""
    blocks = range(hf_config.size("num_hidden_layers"))
    attending = hf_config.get("full_attn_idxs", [*blocks])
    kinds = hf_config.get("layer_types", [FULL if i in attending else CONV_TYPE for i in blocks])
    ffn_width = hf_config.size("block_ff_dim", hf_config.get("intermediate_size"))
    if hf_config.flag("block_auto_adjust_ff_dim", True):
        ffn_width = int(hf_config.real("block_ffn_dim_multiplier", 1.0) * (2 * ffn_width // 3))
        width_multiple = hf_config.size("block_multiple_of", 256)
        ffn_width = -(-ffn_width // width_multiple) * width_multiple
    return with_tied_embedding(hf_config).but(layer_types=kinds, intermediate_size=ffn_width)


def with_tied_embedding(hf_config: HFConfig) -> HFConfig:
    eps = hf_config.real("norm_eps", 1e-5)
    is_tied = hf_config.flag("tie_embedding", hf_config.flag("tie_word_embeddings", True))
    return hf_config.but(rms_norm_eps=eps, tie_word_embeddings=is_tied)


def mixer_fields(hf_config: HFConfig) -> dict[str, Any]:
    """Return ModelSizes fields: which blocks attend, and the width of the other blocks' convolutions."""
    kinds = hf_config.layer_types(hf_config.size("num_hidden_layers"), FULL, CONV_TYPE, every=True)
    attending_blocks = tuple(layer_type == FULL for layer_type in kinds)
    return {"attending": attending_blocks, "conv_width": hf_config.size("conv_L_cache", 3)}


def extra_metadata(hf_config: HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    kv_head_counts = [sizes.head_count_kv * sizes.attends(i) for i in range(sizes.block_count)]
    return {
        "attention.head_count_kv": kv_head_counts, "shortconv.l_cache": hf_config.size("conv_L_cache", 3),
    }  # fmt: skip


ARCHITECTURE = arch.Architecture(
    "lfm2", halves=True, head_norms=True, fixed_head_width=True, last_norm="token_embd_norm",
    key_defaults={"shortconv.l_cache": None}, optional_tensors=(),
    families=(
        arch.Family(
            ("Lfm2ForCausalLM",), MODULES | FEED_FORWARD, extra_metadata, normalize_config=normalize_config,
            names=arch.CheckpointNames(norm="embedding_norm"), mixer_fields=mixer_fields,
            required_values=arch.fixed(conv_bias=False), size_keys=("vocab_size",), tied_by_default=True,
            rope_freq_base=1e6,
        ),
    ),
)  # fmt: skip
