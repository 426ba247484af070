"""Granite 3 and 4 (dense): llama with scaled embeddings, residuals, scores and logits."""

from packtrain.models.arch import llama
from packtrain.models.arch.architecture import (
    BIASES,
    FACTORS,
    MORE_BIASES,
    Architecture,
    Family,
    Keys,
)
from packtrain.models.arch.given import Given
from packtrain.models.arch.sizes import Sizes

SCALES = {
    "embedding_multiplier": "embedding_scale", "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip


def keys(given: Given, sizes: Sizes) -> Keys:
    scales = {key: given.real(name, 1.0) for name, key in SCALES.items()}
    return {**llama.keys(given, sizes), **scales}


ARCHITECTURE = Architecture(
    "granite",
    keys={"logit_scale": None, "embedding_scale": 0.0, "residual_scale": 0.0, "attention.scale": 0.0},
    neutral={"rope.scaling.finetuned": (True,)},  # false: llama.cpp leaves rope out
    optional=(*BIASES, *MORE_BIASES, FACTORS),
    families=(Family(("GraniteForCausalLM",), keys=keys, tied=True),),
)  # fmt: skip
