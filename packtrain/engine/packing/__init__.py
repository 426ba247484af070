"""Offsets for any list of (start, end, size): a packer with a lower bound.

This package knows no tensors and no plans. `pack` is quick, `packings` keeps searching.
"""

from packtrain.engine.packing.pack import (
    Packing, alive_nbytes, lower_bound, pack, packing_height, packings,
)  # fmt: skip
