"""GGUF files, whole or split: read by mapping, with every count and bound checked; written beside, synced and renamed.

Metadata and tensors go in and out by name; shapes are in NumPy order, GGUF's reversed order exists only here.
It knows no models. The format: ggml/docs/gguf.md, version 3 (version 2 is read too).
"""

from packtrain.gguf.format import QUANTIZATION_VERSION, Entry, GGUFError, Value, tensor_nbytes
from packtrain.gguf.read import GGUF
from packtrain.gguf.write import Deferred, write

__all__ = [
    "GGUF", "QUANTIZATION_VERSION", "Deferred", "Entry", "GGUFError", "Value", "tensor_nbytes", "write",
]  # fmt: skip
