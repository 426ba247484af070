"""Offsets for any list of (start, end, size): a packer with a lower bound and a checker.

This package knows no tensors and no plans. `pack` is quick, `packings` keeps searching, `find_overlap` checks offsets.
"""

from packtrain.engine.packing.pack import (
    Packing, alive_nbytes, find_overlap, lower_bound, pack, packing_height, packings,
)  # fmt: skip

__all__ = [
    "Packing", "alive_nbytes", "find_overlap", "lower_bound", "pack", "packing_height", "packings",
]  # fmt: skip
