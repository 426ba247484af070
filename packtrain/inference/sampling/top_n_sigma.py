"""Top-nσ: keep logits near the largest, counted in standard deviations (Tang et al. 2024)."""

import numpy as np

from packtrain.inference.sampling.candidates import Candidates


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Keep logits ≥ max − n · std of the finite ones; n ≤ 0 keeps all.

    llama.cpp keeps dropped tokens with a logit of -inf: typical sampling then computes 0 · log 0, and dynamic
    temperature counts them.
    """
    if n <= 0 or len(c.ids) <= 1:
        return c
    finite = c.logits[np.isfinite(c.logits)]
    return c.select(c.logits >= finite.max() - n * finite.std())
