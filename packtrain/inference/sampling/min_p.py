"""Min-p: keep tokens that are not much less likely than the likeliest (Nguyen et al. 2024)."""

import math

from packtrain.inference.sampling.candidates import Candidates


def min_p(c: Candidates, p: float) -> Candidates:
    """Keep tokens at least p times as likely as the likeliest: logit ≥ max + log p; 0 keeps all."""
    if p <= 0:
        return c
    return c.select(c.logits >= c.logits.max() + min(math.log(p), 0.0))
