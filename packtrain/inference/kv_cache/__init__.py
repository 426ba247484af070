"""Many sequences in one KV cache: cells, windows, states, and batches of any mix of tokens."""

from packtrain.inference.kv_cache.cell_pools import ContextError
from packtrain.inference.kv_cache.context import Context
from packtrain.inference.kv_cache.decode_plans import RunSizes, place_runs
from packtrain.inference.kv_cache.kv_cells import CacheFull
from packtrain.models.cached_transformer import CacheLayout
