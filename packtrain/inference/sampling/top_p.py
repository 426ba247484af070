"""Top-p, or nucleus: keep the likeliest tokens that together have a probability (Holtzman et al. 2020)."""

import numpy as np

from packtrain.inference.sampling.candidates import Candidates, probabilities, ranked


def top_p(c: Candidates, p: float) -> Candidates:
    """Keep the likeliest tokens until their probabilities add up to p or more, at least one; 1 keeps all."""
    if p >= 1:
        return c
    c = ranked(c)
    return c.select(slice(int(np.searchsorted(np.cumsum(probabilities(c.logits)), p)) + 1))
