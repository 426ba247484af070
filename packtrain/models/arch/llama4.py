"""Llama 4 (text): experts in every N-th block, attention in chunks, and every fourth block without rope.

Meta, Llama 4 Scout and Maverick; llama.cpp's llama4.cpp.
"""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import ATTENTION, Architecture, Experts, Family, Keys
from packtrain.models.arch.hf_config import FULL, Given
from packtrain.models.arch.size_fields import Sizes

EVERY, CHUNK, WARMTH, UNNORMED = 4, 8192, 0.1, 128
CHUNKED, STEP = "chunked_attention", "interleave_moe_layer_step"
BLOCK = {
    **ATTENTION, **arch.FFN_NORM, "feed_forward.router": "ffn_gate_inp",
    **{
        f"feed_forward{shared}.{part}_proj": f"ffn_{part}{end}"
        for shared, end in (("", ""), (".shared_expert", "_shexp"))
        for part in ("gate", "up", "down")
    },
}  # fmt: skip
STACKED = {
    "ffn_gate_exps": ("feed_forward.experts.gate_up_proj", 0, 2),
    "ffn_up_exps": ("feed_forward.experts.gate_up_proj", 1, 2),
    "ffn_down_exps": ("feed_forward.experts.down_proj", 0, 1),
}
WIDTH = "expert_width"  # not the config's own name of it


def usual(hf_config: Given) -> Given:
    """The width of an expert is called that of a feed-forward there."""
    expert_width = hf_config.size("intermediate_size", 8192)
    return hf_config.but(
        intermediate_size=hf_config.size("intermediate_size_mlp", 16384), **{WIDTH: expert_width}
    )


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    uses_rope = [int((i + 1) % EVERY != 0) for i in range(sizes.block_count)]
    types = [CHUNKED if turn else FULL for turn in uses_rope]
    step = sizes.interleave_moe_layer_step
    normed = sizes.expert_count != UNNORMED
    for key, right, *alternatives in (
        ("no_rope_layer_interval", EVERY), ("no_rope_layers", uses_rope, []),
        ("layer_types", types), ("attention_chunk_size", CHUNK), ("floor_scale", CHUNK),
        ("attn_scale", WARMTH), ("attn_temperature_tuning", True, EVERY), ("use_qk_norm", normed),
        ("attention_bias", False), ("moe_layers", list(range(step - 1, sizes.block_count, step))),
    ):  # fmt: skip
        hf_config.one_of(key, right, right, *alternatives)
    return {"vocab_size": sizes.vocab_size, "rope.dimension_count": sizes.head_width, STEP: step}


KEYS = {
    "attention.sliding_window": CHUNK, "attention.sliding_window_pattern": EVERY, "expert_count": None,
    "expert_used_count": None, "expert_feed_forward_length": None, STEP: None,
}  # fmt: skip
ARCHITECTURE = Architecture(
    "llama4",
    plain_norms=True,
    rope_pause=EVERY,
    chunk=CHUNK,
    warmth=WARMTH,
    sigmoids=True,
    chosen_sum=False,
    weighed_first=True,
    shared_alike=True,
    keys=KEYS,
    optional=(arch.FACTORS,),
    families=(
        Family(
            ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
            BLOCK,
            keys,
            Experts(
                {},
                ("num_local_experts", 16),
                ("num_experts_per_tok", 1),
                (WIDTH, 8192),
                lambda given: (given.size(WIDTH), 0),
                stacked=STACKED,
                together=True,
            ),
            usual=usual,
            mixing=lambda given: {STEP: given.size(STEP, 1)},
            rope_freq_base=500_000.0,
            pairs=True,
            ends={
                "gate_up_proj": "gate_up_proj.weight",
                "experts.down_proj": "experts.down_proj.weight",
            },
        ),
    ),
)
