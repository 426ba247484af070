"""XTC, "exclude top choices": now and then drop the likeliest tokens, but for the least likely of them."""

import numpy as np

from packtrain.inference.sampling.candidates import Candidates, probabilities, ranked


def xtc(
    c: Candidates, probability: float, threshold: float, rng: np.random.Generator
) -> Candidates:
    """With this probability, drop all but the last of the tokens whose probability reaches the threshold."""
    if probability <= 0 or threshold > 0.5 or len(c.ids) < 2 or rng.random() > probability:
        return c
    c = ranked(c)
    num_likely = int(np.count_nonzero(probabilities(c.logits) >= threshold))
    return c.select(slice(max(num_likely - 1, 0), None))
