"""Granite 3 and 4 (dense): llama with scaled embeddings, residuals, scores and logits.

Granite 4's are the hybrids' class with attention in all blocks; llama.cpp writes keys of scans for them, too.
"""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import llama
from packtrain.models.arch.architecture import MORE_BIASES, Architecture, Experts, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

SCALES = {
    "embedding_multiplier": "embedding_scale", "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
SHARED_WIDTH = "expert_shared_feed_forward_length"
ALL_ATTEND = "GraniteMoeHybridForCausalLM of attention alone"
Halves = dict[str, tuple[str, int, int]]


def halves(module: str, end: str = "") -> Halves:
    """Matrices of a feed-forward whose gate and up are one in checkpoints."""
    sides = ("gate", "input", 0, 2), ("up", "input", 1, 2), ("down", "output", 0, 1)
    return {
        f"ffn_{part}{end}": (f"{module}.{side}_linear", first, every)
        for part, side, first, every in sides
    }


def dense(hf_config: Given) -> Given:
    """The expert that all tokens have is the feed-forward."""
    return hf_config.but(
        num_experts=0, intermediate_size=hf_config.size("shared_intermediate_size")
    )


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    scales = {key: hf_config.real(name, 1.0) for name, key in SCALES.items()}
    return {**llama.keys(hf_config, sizes), **scales}


ARCHITECTURE = Architecture(
    "granite",
    keys={"logit_scale": None, "embedding_scale": 0.0, "residual_scale": 0.0, "attention.scale": 0.0},
    neutral={"rope.scaling.finetuned": (True,)},  # false: llama.cpp leaves rope out
    ignored=(*arch.SCAN_KEYS, SHARED_WIDTH),
    optional=(*arch.BIASES, *MORE_BIASES, arch.FACTORS),
    families=(
        Family(("GraniteForCausalLM",), keys=keys, tied=True),
        Family(
            (ALL_ATTEND,),
            arch.ATTENTION | arch.FFN_NORM,
            lambda given, sizes: keys(given, sizes) | {"rope.scaling.finetuned": True},
            Experts(
                {},
                ("num_experts", 8),
                ("num_experts_per_tok", 2),
                stacked=halves("shared_mlp"),
                together=True,
                rows=True,
            ),
            usual=dense,
        ),
    ),
)  # fmt: skip
