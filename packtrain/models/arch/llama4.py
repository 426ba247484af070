"""Llama 4 (text): experts in every N-th block, attention in chunks, and every fourth block without rope.

Meta, Llama 4 Scout and Maverick; llama.cpp's llama4.cpp, which takes chunks of 8,192 tokens whatever the key says."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import llama
from packtrain.models.arch.hf_config import FULL, HFConfig

EVERY, CHUNK, WARMTH, UNNORMED_EXPERT_COUNT = 4, 8192, 0.1, 128
CHUNKED_ATTENTION, STEP = "chunked_attention", "interleave_moe_layer_step"
BLOCK = {
    **arch.ATTENTION, **arch.FFN_NORM, "feed_forward.router": "ffn_gate_inp",
    **arch.feed_forward("feed_forward"), **arch.feed_forward("feed_forward.shared_expert", "_shexp"),
}  # fmt: skip
STACKED = {
    "ffn_gate_exps": ("feed_forward.experts.gate_up_proj", 0, 2),
    "ffn_up_exps": ("feed_forward.experts.gate_up_proj", 1, 2),
    "ffn_down_exps": ("feed_forward.experts.down_proj", 0, 1),
}
WIDTH = "expert_width"  # our key, which configs do not have


def normalize_config(hf_config: HFConfig) -> HFConfig:
    """Return the config with widths renamed: intermediate_size is an expert's, intermediate_size_mlp dense blocks'."""
    expert_width = hf_config.size("intermediate_size", 8192)
    return hf_config.but(
        intermediate_size=hf_config.size("intermediate_size_mlp", 16384), **{WIDTH: expert_width}
    )


def extra_metadata(hf_config: HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    uses_rope = [int((i + 1) % EVERY != 0) for i in range(sizes.block_count)]
    layer_types = [CHUNKED_ATTENTION if has_rope else FULL for has_rope in uses_rope]
    step = sizes.interleave_moe_layer_step
    normed = sizes.expert_count != UNNORMED_EXPERT_COUNT
    for key, expected, *alternatives in (
        ("no_rope_layer_interval", EVERY), ("no_rope_layers", uses_rope, []),
        ("layer_types", layer_types), ("attention_chunk_size", CHUNK), ("floor_scale", CHUNK),
        ("attn_scale", WARMTH), ("attn_temperature_tuning", True, EVERY), ("use_qk_norm", normed),
        ("attention_bias", False), ("moe_layers", list(range(step - 1, sizes.block_count, step))),
    ):  # fmt: skip
        hf_config.require_one_of(key, expected, expected, *alternatives)
    return {STEP: step}


KEY_DEFAULTS = {
    "attention.sliding_window": CHUNK, "attention.sliding_window_pattern": EVERY, **arch.ONLY_EXPERTS, STEP: None,
}  # fmt: skip
ARCHITECTURE = arch.Architecture(
    "llama4", unweighted_qk_norms=True, rope_pause=EVERY, attention_chunk=CHUNK, chunk_temperature=WARMTH,
    sigmoid_routing=True, normalized_expert_weights=False, weigh_expert_inputs=True, shared_expert_alike=True,
    key_defaults=KEY_DEFAULTS, optional_tensors=(arch.FACTORS,),
    families=(
        arch.Family(
            ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"), BLOCK, extra_metadata,
            arch.ExpertLayout(
                {}, ("num_local_experts", 16), ("num_experts_per_tok", 1), (WIDTH, 8192),
                lambda hf_config: (hf_config.size(WIDTH), 0), stacked_matrices=STACKED, is_contiguous=True,
            ),
            normalize_config=normalize_config, size_keys=llama.SIZE_KEYS,
            mixer_fields=lambda hf_config: {STEP: hf_config.size(STEP, 1)}, rope_freq_base=500_000.0,
            interleaved_rope=True,
            suffix_renames={"gate_up_proj": "gate_up_proj.weight", "experts.down_proj": "experts.down_proj.weight"},
        ),
    ),
)  # fmt: skip
