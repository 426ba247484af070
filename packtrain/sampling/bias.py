"""Logit bias: what the user adds to logits of some tokens."""

from collections.abc import Mapping

import numpy as np

from packtrain.sampling.candidates import Candidates


def logit_bias(c: Candidates, biases: Mapping[int, float]) -> Candidates:
    """Add biases[id] to the logit of id."""
    if not biases:
        return c
    added = np.zeros(int(c.ids.max(initial=max(biases))) + 1)
    added[[*biases]] = [*biases.values()]
    return Candidates(c.ids, np.asarray(c.logits + added[c.ids]), False)
