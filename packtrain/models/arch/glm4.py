"""GLM-4 (0414): norms before and behind attention and feed-forward, rope for half of each head, gate and up in one."""

from packtrain.models.arch.architecture import BIASES, Architecture

ARCHITECTURE = Architecture(
    "glm4", post_norms=True, fused_ffn=True, partial_rope=True, optional=BIASES
)
