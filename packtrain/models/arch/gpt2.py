"""GPT-2: learned positions instead of rope, layer norms, biases everywhere, no gate. Radford et al. 2019."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import NORM_BIASES, Architecture, Family, Keys, Names
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

MODULES = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
RENAMED = {
    "hidden_size": ("n_embd",), "num_attention_heads": ("n_head",), "num_hidden_layers": ("n_layer",),
    "max_position_embeddings": ("n_positions", "n_ctx"), "intermediate_size": ("n_inner",),
    "hidden_act": ("activation_function",),
}  # fmt: skip


def usual(hf_config: Given) -> Given:
    hf_config = hf_config.renamed(RENAMED)
    return hf_config.but(
        intermediate_size=hf_config.size("intermediate_size", 4 * hf_config.size("hidden_size"))
    )


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    hf_config.one_of("scale_attn_weights", True, True)
    hf_config.one_of("scale_attn_by_inverse_layer_idx", False, False)
    hf_config.one_of("add_cross_attention", False, False)
    return {}


def optional(hf_config: Given) -> tuple[str, ...]:
    return ("attn_qkv.bias", *arch.UNGATED_BIASES, *NORM_BIASES)


ARCHITECTURE = Architecture(
    "gpt2",
    learned_positions=True,
    layer_norms=True,
    gelu=True,
    gated=False,
    fused=True,
    square=True,
    optional=("attn_qkv.bias", *arch.MORE_BIASES, *NORM_BIASES),
    families=(
        Family(
            ("GPT2LMHeadModel",),
            MODULES,
            keys,
            None,
            Names("transformer.", "wte", "wpe", "h", "ln_f"),
            usual,
            optional=optional,
            unused=(".attn.bias", ".attn.masked_bias"),  # masks
            transposed=True,
            left_out=("rope.freq_base", "attention.head_count_kv"),
            tied=True,
        ),
    ),
)
