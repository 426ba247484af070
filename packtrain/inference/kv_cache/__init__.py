"""Many sequences in one KV cache: cells, windows, states, and batches of any mix of tokens."""

from packtrain.inference.kv_cache.cell_pools import ContextError
from packtrain.inference.kv_cache.context import Context
from packtrain.inference.kv_cache.decode_plans import RunSizes, place_runs
from packtrain.models.cached_transformer import CacheLayout
from packtrain.models.kv_cell_table import CacheFull

__all__ = ["CacheFull", "CacheLayout", "Context", "ContextError", "RunSizes", "place_runs"]
