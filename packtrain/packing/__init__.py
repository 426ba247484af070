"""Offsets for any list of (start, end, size): a packer with a lower bound, a checker, and ggml's allocator.

It knows no tensors and no plans. `pack` is quick, `packings` keeps searching, `clash` checks any offsets.
"""

from packtrain.packing.online import Allocator, NoSpace, best_fit
from packtrain.packing.pack import Packing, alive, clash, height, lower_bound, pack, packings

__all__ = [
    "Allocator", "NoSpace", "Packing", "alive", "best_fit", "clash", "height", "lower_bound", "pack", "packings",
]  # fmt: skip
