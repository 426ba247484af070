"""Falcon: attention and feed-forward side by side, layer norms, gelu without a gate; the 40B has a norm for each.

arXiv 2311.16867.
"""

from packtrain.models.arch.architecture import NORM_BIASES, Architecture, Family, Keys, Names, Spans
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

SECOND = ("attn_norm_2.weight", "attn_norm_2.bias")
MODULES = {
    "input_layernorm": "attn_norm", "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
}  # fmt: skip


def usual(hf_config: Given) -> Given:
    """The large ones have as many keys and values as the config says, the small ones of several queries one."""
    hf_config = hf_config.renamed(
        {"num_attention_heads": ("n_head",), "num_hidden_layers": ("n_layer",)}
    )
    width, heads = hf_config.size("hidden_size"), hf_config.size("num_attention_heads")
    kv = hf_config.size("num_kv_heads", hf_config.get("n_head_kv", heads))
    single = hf_config.flag("multi_query", True) and not hf_config.flag("new_decoder_architecture")
    return hf_config.but(
        num_key_value_heads=1 if single else kv,
        intermediate_size=hf_config.size("ffn_hidden_size", 4 * width),
        max_position_embeddings=hf_config.size("max_position_embeddings", 2048),
        hidden_act=hf_config.get("activation", "gelu"),
    )


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    hf_config.one_of("alibi", False, False)
    hf_config.one_of("bias", False, False)
    hf_config.one_of("parallel_attn", True, True)
    return {"tensor_data_layout": "jploski"}


def spans(sizes: Sizes) -> dict[str, Spans]:
    """All queries, all keys, all values, from groups of those that belong together."""
    d, groups = sizes.head_width, sizes.head_count_kv
    each = sizes.head_count // groups + 2
    parts = ((0, each - 2), (each - 2, each - 1), (each - 1, each))  # of a group, in heads
    qkv_spans = [
        ((g * each + first) * d, (g * each + last) * d)
        for first, last in parts
        for g in range(groups)
    ]
    return {"attn_qkv": tuple(qkv_spans)}


def optional(hf_config: Given) -> tuple[str, ...]:
    large = (
        hf_config.flag("new_decoder_architecture")
        and hf_config.get("num_ln_in_parallel_attn", 2) == 2
    )
    return ("attn_norm.bias", "output_norm.bias", *(SECOND if large else ()))


ARCHITECTURE = Architecture(
    "falcon",
    halves=True,
    layer_norms=True,
    parallel=True,
    gelu=True,
    gated=False,
    fused=True,
    square=True,
    optional=(*NORM_BIASES, *SECOND),
    families=(
        Family(
            ("FalconForCausalLM",),
            MODULES,
            keys,
            None,
            Names("transformer.", "word_embeddings", "", "h", "ln_f"),
            usual,
            {"ln_mlp": "input_layernorm"},
            optional,
            spans=spans,
            left_out=("rope.freq_base",),
            tied=True,
        ),
    ),
)
