"""GGUF files, whole or split: memory-mapped, with every count and bound checked; written atomically.

Metadata and tensors are accessed by name; shapes are in NumPy order, GGUF's reversed order exists only here.
Knows no models. The format: ggml/docs/gguf.md, version 3 (version 2 is read too).
"""

from packtrain.gguf.gguf_format import (
    QUANTIZATION_VERSION, GGUFError, MetadataValue, TensorInfo, tensor_nbytes,
)  # fmt: skip
from packtrain.gguf.gguf_reader import GGUF
from packtrain.gguf.gguf_writer import DeferredTensor, write_gguf
