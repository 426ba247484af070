"""Penalties on recent tokens: repeat (divides), frequency and presence (subtract)."""

from collections.abc import Sequence

import numpy as np

from packtrain.inference.sampling.candidates import Candidates


def penalties(
    c: Candidates, recent: Sequence[int], repeat: float, frequency: float, presence: float
) -> Candidates:
    """Recent tokens are less likely: logit / repeat (· repeat where negative) − count · frequency − presence."""
    if not len(recent) or (repeat, frequency, presence) == (1, 0, 0):
        return c
    seen, counts = np.unique(np.asarray(recent, np.int64), return_counts=True)
    at = np.minimum(np.searchsorted(seen, c.ids), len(seen) - 1)
    hit = seen[at] == c.ids
    old = c.logits[hit]
    logits = c.logits.copy()
    logits[hit] = (
        np.where(old > 0, old / repeat, old * repeat) - counts[at[hit]] * frequency - presence
    )
    return Candidates(c.ids, logits, False)
