"""EXAONE 4 without windows (1.2B): norms only behind attention and feed-forward, QK norms. arXiv 2507.11407."""

from packtrain.models.arch import olmo2
from packtrain.models.arch.architecture import (
    FACTORS,
    WINDOW_KEYS,
    Architecture,
    Family,
    Keys,
    Sizes,
)
from packtrain.models.arch.given import Given


def keys(given: Given, sizes: Sizes) -> Keys:
    given.one_of("sliding_window", None, None)
    return {"vocab_size": sizes.vocab_size}


ARCHITECTURE = Architecture(
    "exaone4",
    halves=True,
    head_norms=True,
    pre_norms=False,
    post_norms=True,
    square=True,
    ignored=WINDOW_KEYS,
    refused_blocks=64,  # the 32B, where llama.cpp has windows
    optional=(FACTORS,),
    families=(Family(("Exaone4ForCausalLM",), olmo2.MODULES, keys, rope_freq_base=1_000_000.0),),
)
