"""InternLM 2: llama."""

from packtrain.models.arch.architecture import BIASES, Architecture

ARCHITECTURE = Architecture("internlm2", square=True, always_apart=True, optional=BIASES)
