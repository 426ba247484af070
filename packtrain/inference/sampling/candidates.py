"""Candidates, on which samplers work: ids that can come next with their logits, in f64 from the model's f32.

A sampler takes Candidates and returns Candidates; arrays are never changed in place.
"""

from typing import NamedTuple

import numpy as np


class Candidates(NamedTuple):
    """Tokens that can come next.

    ids     (N,) int64
    logits  (N,) float64; −inf: this token cannot come
    sorted  whether logits fall; of equal ones the lower id is first
    """

    ids: np.ndarray
    logits: np.ndarray
    sorted: bool = False

    def select(self, index: np.ndarray | slice) -> "Candidates":
        """Select some candidates by index, in their order."""
        return Candidates(self.ids[index], self.logits[index], self.sorted)


def ranked(c: Candidates) -> Candidates:
    """Sort candidates by falling logits; of equal logits the lowest id comes first."""
    if c.sorted:
        return c
    sorted_indices = np.lexsort((c.ids, -c.logits))
    return Candidates(c.ids[sorted_indices], c.logits[sorted_indices], True)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return softmax(logits), summed from first to last, as kernels do."""
    e: np.ndarray = np.exp(logits - logits.max())
    e /= np.cumsum(e)[-1]
    return e


def entropy(p: np.ndarray) -> float:
    """Return the entropy −Σ p log p of probabilities, in nats."""
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())
