"""Tail-free sampling: cut where the slope of the sorted probabilities stops changing (Phénix and Egan 2019)."""

import numpy as np

from packtrain.inference.sampling.candidates import Candidates, probabilities, ranked


def tail_free(c: Candidates, z: float) -> Candidates:
    """Keep tokens until their normalized absolute second differences add up to more than z; 1 keeps all."""
    if z >= 1 or len(c.ids) <= 2:
        return c
    c = ranked(c)
    curvature = np.abs(np.diff(probabilities(c.logits), 2))
    total = curvature.sum()
    shares = curvature / total if total > 1e-6 else np.full(len(curvature), 1 / len(curvature))
    cut_indices = np.flatnonzero(np.cumsum(shares) > z)
    cut_indices = cut_indices[cut_indices > 0]
    return c.select(slice(int(cut_indices[0]))) if len(cut_indices) else c
