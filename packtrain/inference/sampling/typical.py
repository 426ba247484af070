"""Locally typical sampling: keep tokens whose surprise is nearest the expected one (Meister et al. 2022)."""

import numpy as np

from packtrain.inference.sampling.candidates import Candidates, entropy, probabilities, ranked


def typical(c: Candidates, p: float) -> Candidates:
    """Keep tokens with the least |−log p − entropy| until their probabilities add up to more than p; 1 keeps all."""
    if p >= 1:
        return c
    c = ranked(c)
    c = c.select(np.isfinite(c.logits))
    token_probs = probabilities(c.logits)
    token_probs = np.maximum(token_probs, np.finfo(float).tiny)  # so that their surprise is finite
    order = np.argsort(np.abs(-np.log(token_probs) - entropy(token_probs)), kind="stable")
    kept_indices = order[: int(np.searchsorted(np.cumsum(token_probs[order]), p, side="right")) + 1]
    return c.select(np.sort(kept_indices))
