"""Many sequences in one KV cache: cells, windows, states, and running batches of any mix of tokens."""

from packtrain.inference.kv_cache.cell_pools import ContextError
from packtrain.inference.kv_cache.context import Context
from packtrain.inference.kv_cache.decode_plans import Sizes, placements
from packtrain.models.cached_transformer import Cache
from packtrain.models.kv_cell_table import CacheFull

__all__ = ["Cache", "CacheFull", "Context", "ContextError", "Sizes", "placements"]
