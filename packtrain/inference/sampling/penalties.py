"""Penalties on recent tokens: repeat (divides), frequency and presence (subtract)."""

from collections.abc import Sequence

import numpy as np

from packtrain.inference.sampling.candidates import Candidates


def recent_penalties(
    c: Candidates, recent_ids: Sequence[int], repeat: float, frequency: float, presence: float
) -> Candidates:
    """Penalize recent tokens: logit / repeat (· repeat where negative) − count · frequency − presence."""
    if not len(recent_ids) or (repeat, frequency, presence) == (1, 0, 0):
        return c
    seen_ids, counts = np.unique(np.asarray(recent_ids, np.int64), return_counts=True)
    at = np.minimum(np.searchsorted(seen_ids, c.ids), len(seen_ids) - 1)
    is_seen = seen_ids[at] == c.ids
    old = c.logits[is_seen]
    logits = c.logits.copy()
    logits[is_seen] = (
        np.where(old > 0, old / repeat, old * repeat) - counts[at[is_seen]] * frequency - presence
    )
    return Candidates(c.ids, logits, False)
