"""Python's search for garbage, which has nothing to find while modules load."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused(freeze: bool = False) -> Iterator[None]:
    """Inside the block no garbage is looked for: modules that load leave little, and a tenth of their time is this.

    freeze  what is there then is never searched
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
