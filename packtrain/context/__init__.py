"""Many sequences in one KV cache: cells, windows, states, and running batches of any mix of tokens."""

from packtrain.context.context import Context
from packtrain.context.plans import Sizes, placements
from packtrain.context.pools import ContextError
from packtrain.models.cache import CacheFull
from packtrain.models.cached import Cache

__all__ = ["Cache", "CacheFull", "Context", "ContextError", "Sizes", "placements"]
