"""Qwen2 and Qwen2.5: llama with biases of queries, keys and values. arXiv 2407.10671."""

from packtrain.models.arch.architecture import WINDOW_KEYS, Architecture, Family

ARCHITECTURE = Architecture(
    "qwen2", halves=True, fixed_head_width=True, ignored_keys=WINDOW_KEYS, blocks_70b=80,
    families=(Family(("Qwen2ForCausalLM",), has_qkv_bias=True),),
)  # fmt: skip
