"""Gemma 3n (text): several residual streams, embeddings for each block, a low-rank product beside attention.

The first blocks have sparse gates, the last use the keys and values of earlier blocks. Google, Gemma 3n; llama.cpp's
gemma3n.cpp, which has the numbers below in its code, and reads no keys for them."""

from statistics import NormalDist
from typing import Any

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import gemma2, gemma4
from packtrain.models.arch.hf_config import FULL, SLIDING, HFConfig

EVERY, NUM_STREAMS, RANK, LAYER_EMBEDDING_WIDTH, SPARSE, SHARE, OWNING = 5, 4, 64, 256, 10, 0.95, 20
SOFTCAP_KEY, SOFTCAP = "final_logit_softcapping", 30.0
LAYER_MODULES = {
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r", "laurel.post_laurel_norm": "laurel_post_norm",
    "altup.correction_coefs": "altup_correct_coef", "altup.correct_output_scale": "altup_correct_scale",
    "altup.prediction_coefs": "altup_predict_coef", "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
}  # fmt: skip
OUTSIDE = {
    **dict(zip(gemma4.OUTSIDE, arch.LAYER_INPUTS, strict=True)), "altup_projections.{}": arch.STREAMS_IN,
    "altup_unembed_projections.{}": arch.STREAMS_OUT,
}  # fmt: skip
WIDTHS_KEY, SPARSITY_KEY = "intermediate_size", "activation_sparsity_pattern"


def normalize_config(hf_config: HFConfig) -> HFConfig:
    """Replace a list of feed-forward widths, one per block, by their common width."""
    widths = hf_config.get(WIDTHS_KEY)
    if not isinstance(widths, list):
        return hf_config
    if not widths or any(width != widths[0] for width in widths):
        raise hf_config.wrong(WIDTHS_KEY, widths, "the same for all blocks, as in llama.cpp")
    return hf_config.but(intermediate_size=widths[0], widths=widths)


# numbers in llama.cpp's code, which configs must state
REQUIRED_VALUES = {
    "altup_num_inputs": (None, NUM_STREAMS), "altup_active_idx": (None, 0), "laurel_rank": (None, RANK),
    "hidden_size_per_layer_input": (None, LAYER_EMBEDDING_WIDTH), SOFTCAP_KEY: (None, SOFTCAP),
    **arch.fixed(attention_bias=False, altup_correct_scale=True),
}  # fmt: skip


def per_block_fields(hf_config: HFConfig) -> dict[str, Any]:
    num_blocks = hf_config.size("num_hidden_layers")
    pattern = tuple(hf_config.layer_windows(num_blocks, is_required=True))
    num_owning = min(num_blocks, OWNING)
    # numbers in llama.cpp's code, from which config values must not differ
    hf_config.require_one_of("num_kv_shared_layers", None, num_blocks - num_owning)
    if hf_config.get(SPARSITY_KEY) != [SHARE if i < SPARSE else 0.0 for i in range(num_blocks)]:
        expected = f"{SHARE} for the first {SPARSE} blocks and 0.0 for others, as llama.cpp has it"
        raise hf_config.wrong(SPARSITY_KEY, hf_config.get(SPARSITY_KEY), expected)
    if num_owning < num_blocks and (pattern[num_owning - 1] or not pattern[num_owning - 2]):
        expected = f"such that the last two of the first {OWNING} blocks are {SLIDING} and {FULL}"
        raise hf_config.wrong("layer_types", hf_config.get("layer_types"), expected)
    return {
        "window_pattern": pattern, "own_kv": num_owning if num_owning < num_blocks else 0,
        "embedding_length_per_layer": LAYER_EMBEDDING_WIDTH,
    }  # fmt: skip


def extra_metadata(hf_config: HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    num_blocks, block_fields = sizes.block_count, per_block_fields(hf_config)
    deviation = NormalDist().inv_cdf(SHARE)  # by so many deviations gates must exceed their mean
    metadata: arch.Keys = {
        "attention.sliding_window": hf_config.size("sliding_window"),
        "attention.sliding_window_pattern": list(block_fields["window_pattern"]),
        "attention.shared_kv_layers": num_blocks - min(num_blocks, OWNING),
        "rope.freq_base_swa": hf_config.window_rope_base(), "embedding_length_per_layer_input": LAYER_EMBEDDING_WIDTH,
        "altup.active_idx": 0, "altup.num_inputs": NUM_STREAMS,
        "activation_sparsity_scale": [deviation if i < SPARSE else float("-inf") for i in range(num_blocks)],
        SOFTCAP_KEY: SOFTCAP,
    }  # fmt: skip
    widths = hf_config.get("widths")
    return metadata | ({"feed_forward_length": widths} if widths else {})


ARCHITECTURE = arch.Architecture(
    "gemma3n", halves=True, use_gelu=True, scaled_embedding=True, head_norms=True, post_norms=True, value_norms=True,
    unscaled_scores=True, num_streams=NUM_STREAMS, laurel_rank=RANK, num_sparse_blocks=SPARSE, num_kv_blocks=OWNING,
    key_defaults={
        "attention.sliding_window": None, "attention.sliding_window_pattern": EVERY,
        "embedding_length_per_layer_input": LAYER_EMBEDDING_WIDTH, "rope.freq_base_swa": 10_000.0, SOFTCAP_KEY: SOFTCAP,
    },
    ignored_keys=("attention.shared_kv_layers",),
    neutral={SOFTCAP_KEY: (SOFTCAP,), "embedding_length_per_layer_input": (LAYER_EMBEDDING_WIDTH,)},
    optional_tensors=(),
    families=(
        arch.Family(
            ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
            {**gemma2.FAMILY.block_modules, **arch.HEAD_NORMS, **LAYER_MODULES}, extra_metadata,
            normalize_config=normalize_config, per_block_fields=per_block_fields, optional_tensors=arch.with_tensors(),
            required_values=REQUIRED_VALUES, names=arch.CheckpointNames(outside=OUTSIDE),
            suffix_renames={".correct_output_scale": ".correct_output_scale.weight"}, rope_freq_base=1e6,
            default_head_width=256, tied_by_default=True, space_prefix=False,
        ),
    ),
)  # fmt: skip
