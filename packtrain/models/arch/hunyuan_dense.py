"""Hunyuan (dense): llama with QK norms behind rope."""

from packtrain.models.arch.architecture import BIASES, Architecture

ARCHITECTURE = Architecture(
    "hunyuan-dense", halves=True, head_norms=True, late_norms=True, optional=BIASES
)
