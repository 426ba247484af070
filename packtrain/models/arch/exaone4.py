"""EXAONE 4: norms only after attention and feed-forward, QK norms; the 32B has windows, and rope only within them.

arXiv 2507.11407."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch import olmo2

BLOCKS = 64  # blocks of the 32B, the only one with windows in llama.cpp


def extra_metadata(hf_config: arch.HFConfig, sizes: arch.ModelSizes) -> arch.Keys:
    num_blocks, metadata = sizes.block_count, arch.Keys()
    windows = hf_config.layer_windows(sizes.block_count)
    window = hf_config.get_nullable("sliding_window", True)  # transformers' default is a window
    if window is True or (num_blocks == BLOCKS) != bool(window) or bool(window) != any(windows):
        expected = f"a number in a model of {BLOCKS} blocks, and null in others, as in llama.cpp"
        raise hf_config.wrong("sliding_window", window, expected)
    if window:
        metadata["attention.sliding_window"] = hf_config.size("sliding_window")
        metadata["attention.sliding_window_pattern"] = windows
    return metadata


ARCHITECTURE = arch.Architecture(
    "exaone4", halves=True, head_norms=True, pre_norms=False, post_norms=True, fixed_head_width=True,
    rope_only_in_windows=True, window_blocks=BLOCKS,
    key_defaults={"attention.sliding_window": 4096, "attention.sliding_window_pattern": 4},
    ignored_keys=("rope.freq_base_swa",), optional_tensors=(arch.FACTORS,),
    families=(arch.Family(("Exaone4ForCausalLM",), olmo2.MODULES, extra_metadata, size_keys=("vocab_size",)),),
)  # fmt: skip
