"""EXAONE 4: norms only behind attention and feed-forward, QK norms; the 32B has windows, and rope only within them.

arXiv 2507.11407.
"""

from packtrain.models.arch import olmo2
from packtrain.models.arch.architecture import FACTORS, Architecture, Family, Keys
from packtrain.models.arch.hf_config import Given
from packtrain.models.arch.size_fields import Sizes

BLOCKS = 64  # those of the 32B, which alone has windows in llama.cpp


def keys(hf_config: Given, sizes: Sizes) -> Keys:
    blocks, keys = sizes.block_count, Keys(vocab_size=sizes.vocab_size)
    local = hf_config.windows(sizes.block_count)
    window = hf_config.stated(
        "sliding_window", True
    )  # where the key is missing transformers has one
    if window is True or (blocks == BLOCKS) != bool(window) or bool(window) != any(local):
        right = f"a number in a model of {BLOCKS} blocks, and null in others, as in llama.cpp"
        raise hf_config.wrong("sliding_window", window, right)
    if window:
        keys["attention.sliding_window"] = hf_config.size("sliding_window")
        keys["attention.sliding_window_pattern"] = local
    return keys


ARCHITECTURE = Architecture(
    "exaone4",
    halves=True,
    head_norms=True,
    pre_norms=False,
    post_norms=True,
    square=True,
    windows_turn=True,
    window_blocks=BLOCKS,
    keys={"attention.sliding_window": 4096, "attention.sliding_window_pattern": 4},
    ignored=("rope.freq_base_swa",),
    optional=(FACTORS,),
    families=(Family(("Exaone4ForCausalLM",), olmo2.MODULES, keys),),
)
