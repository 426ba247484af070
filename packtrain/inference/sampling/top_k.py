"""Top-k: keep the likeliest tokens, without sorting the others."""

import numpy as np

from packtrain.inference.sampling.candidates import Candidates, ranked


def top_k(c: Candidates, count: int) -> Candidates:
    """The `count` greatest logits, greatest first, of equals the lowest ids; 0 keeps all."""
    if not count or (c.sorted and count >= len(c.ids)):
        return c
    if c.sorted:
        return c.take(slice(count))
    if count < len(c.ids):  # sort only those that can be among them
        c = c.take(c.logits >= _bound(c.logits, count))
    return ranked(c).take(slice(count))


def _bound(logits: np.ndarray, count: int) -> float:
    """A number that at least `count` logits reach, and few more: from the maxima of spans, a hundredth of a sort."""
    width = max(len(logits) // (4 * count), 1)
    spans = logits[: len(logits) // width * width].reshape(-1, width)
    return float(np.partition(spans.max(axis=1), -count)[-count])
