"""Pause Python's garbage collector, which has nothing to find while modules load."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused(freeze: bool = False) -> Iterator[None]:
    """`with gc_paused():` collect no garbage: collection takes a tenth of the time in which modules load.

    freeze  objects that exist at the end of the block are never searched
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if was_enabled:
            gc.enable()
