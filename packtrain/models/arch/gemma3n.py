"""Gemma 3n (text): several residual streams, embeddings of their own for blocks, a low-rank product beside attention.

The first blocks have sparse gates, the last the keys and values of earlier ones. Google, Gemma 3n; llama.cpp's
gemma3n.cpp, which has the numbers below in its code, and reads no keys for them.
"""

from statistics import NormalDist
from typing import Any

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import gemma2, gemma4
from packtrain.models.arch.architecture import LAYER_INPUTS, Architecture, Family, Keys, Names
from packtrain.models.arch.hf_config import FULL, SLIDING, Given
from packtrain.models.arch.size_fields import Sizes

EVERY, STREAMS, RANK, OWN, SPARSE, SHARE, OWNING = 5, 4, 64, 256, 10, 0.95, 20
CAP, CAPPED = "final_logit_softcapping", 30.0
LAYERS = {
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r", "laurel.post_laurel_norm": "laurel_post_norm",
    "altup.correction_coefs": "altup_correct_coef", "altup.correct_output_scale": "altup_correct_scale",
    "altup.prediction_coefs": "altup_predict_coef", "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
}  # fmt: skip
OUTSIDE = {
    **dict(zip(gemma4.OUTSIDE, LAYER_INPUTS, strict=True)), "altup_projections.{}": arch.STREAMS_IN,
    "altup_unembed_projections.{}": arch.STREAMS_OUT,
}  # fmt: skip
WIDTHS, SPARSITY = "intermediate_size", "activation_sparsity_pattern"


def usual(hf_config: Given) -> Given:
    """One width of the feed-forwards, which some configs list for each block."""
    widths = hf_config.get(WIDTHS)
    if not isinstance(widths, list):
        return hf_config
    if not widths or any(width != widths[0] for width in widths):
        raise hf_config.wrong(WIDTHS, widths, "the same for all blocks, as in llama.cpp")
    return hf_config.but(intermediate_size=widths[0], widths=widths)


def check(hf_config: Given, blocks: int) -> None:
    """Refuse what llama.cpp, which has these numbers in its code, would compute otherwise."""
    for key, value in (
        ("altup_num_inputs", STREAMS),
        ("altup_active_idx", 0),
        ("laurel_rank", RANK),
        ("hidden_size_per_layer_input", OWN),
        ("num_kv_shared_layers", blocks - min(blocks, OWNING)),
        (CAP, CAPPED),
    ):
        hf_config.one_of(key, None, value)
    hf_config.one_of("attention_bias", False, False)
    hf_config.one_of("altup_correct_scale", True, True)
    shares = [SHARE if i < SPARSE else 0.0 for i in range(blocks)]
    if hf_config.get(SPARSITY) != shares:
        right = f"{SHARE} for the first {SPARSE} blocks and 0.0 for others, as llama.cpp has it"
        raise hf_config.wrong(SPARSITY, hf_config.get(SPARSITY), right)


def kinds(hf_config: Given) -> dict[str, Any]:
    blocks = hf_config.size("num_hidden_layers")
    pattern = tuple(hf_config.windows(blocks, required=True))
    check(hf_config, blocks)
    num_owning = min(blocks, OWNING)
    if num_owning < blocks and (pattern[num_owning - 1] or not pattern[num_owning - 2]):
        right = f"such that the last two of the first {OWNING} blocks are {SLIDING} and {FULL}"
        raise hf_config.wrong("layer_types", hf_config.get("layer_types"), right)
    return {
        "window_pattern": pattern,
        "own_kv": num_owning if num_owning < blocks else 0,
        "embedding_length_per_layer": OWN,
    }


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    blocks, fields = sizes.block_count, kinds(hf_config)
    keys: Keys = {
        "attention.sliding_window": hf_config.size("sliding_window"),
        "attention.sliding_window_pattern": list(fields["window_pattern"]),
        "attention.shared_kv_layers": blocks - min(blocks, OWNING),
        "rope.freq_base_swa": hf_config.near_base(),
        "embedding_length_per_layer_input": OWN,
        "altup.active_idx": 0,
        "altup.num_inputs": STREAMS,
        "activation_sparsity_scale": beyond(blocks),
        CAP: CAPPED,
    }
    return keys | (
        {"feed_forward_length": hf_config.get("widths")} if hf_config.get("widths") else {}
    )


def beyond(blocks: int) -> list[float]:
    """By how many deviations gates of each block must exceed their mean."""
    return [NormalDist().inv_cdf(SHARE) if i < SPARSE else float("-inf") for i in range(blocks)]


ARCHITECTURE = Architecture(
    "gemma3n",
    halves=True,
    gelu=True,
    scaled_embedding=True,
    head_norms=True,
    post_norms=True,
    value_norms=True,
    plain_scores=True,
    streams=STREAMS,
    laurel=RANK,
    sparse_blocks=SPARSE,
    owning_blocks=OWNING,
    keys={
        "attention.sliding_window": None,
        "attention.sliding_window_pattern": EVERY,
        "embedding_length_per_layer_input": OWN,
        "rope.freq_base_swa": 10_000.0,
        CAP: CAPPED,
    },
    ignored=("attention.shared_kv_layers",),
    neutral={CAP: (CAPPED,), "embedding_length_per_layer_input": (OWN,)},
    optional=(),
    families=(
        Family(
            ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
            {**gemma2.FAMILY.block, **arch.HEAD_NORMS, **LAYERS},
            keys,
            usual=usual,
            kinds=kinds,
            optional=lambda given: (),
            names=Names(outside=OUTSIDE),
            ends={".correct_output_scale": ".correct_output_scale.weight"},
            rope_freq_base=1e6,
            head_width=256,
            tied=True,
            space_prefix=False,
        ),
    ),
)
