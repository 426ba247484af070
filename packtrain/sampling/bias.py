"""Logit bias: what the user adds to logits of some tokens."""

from collections.abc import Mapping

import numpy as np

from packtrain.sampling.candidates import Candidates


def logit_bias(c: Candidates, biases: Mapping[int, float]) -> Candidates:
    """Add biases[id] to the logit of id."""
    if not biases:
        return c
    logits = c.logits.copy()
    for id, bias in biases.items():
        logits[c.ids == id] += bias
    return Candidates(c.ids, np.asarray(logits), False)
