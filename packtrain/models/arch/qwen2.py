"""Qwen2 and Qwen2.5: llama with biases of queries, keys and values. arXiv 2407.10671."""

from packtrain.models.arch.architecture import WINDOW_KEYS, Architecture, Family

ARCHITECTURE = Architecture(
    "qwen2",
    halves=True,
    square=True,
    ignored=WINDOW_KEYS,
    blocks_70b=80,
    families=(Family(("Qwen2ForCausalLM",), qkv_bias=True),),
)
