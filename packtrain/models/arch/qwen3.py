"""Qwen3: llama with QK norms. arXiv 2505.09388."""

from packtrain.models.arch.architecture import BLOCK, HEAD_NORMS, WINDOW_KEYS, Architecture, Family

ARCHITECTURE = Architecture(
    "qwen3", halves=True, head_norms=True, ignored_keys=WINDOW_KEYS,
    families=(Family(("Qwen3ForCausalLM",), BLOCK | HEAD_NORMS, default_head_width=128),),
)  # fmt: skip
